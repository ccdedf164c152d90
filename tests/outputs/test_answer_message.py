"""Tool calls in output lines: their ids, and the two forms of a line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sarathi_pp.core.request import Completion, Request
from sarathi_pp.inputs.row import Row
from sarathi_pp.outputs.answer_message import read_answer
from sarathi_pp.outputs.finished_row import EndedRequest
from sarathi_pp.outputs.output_line import OutputLines
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.text.response import FunctionCall, Message

CALLS = (FunctionCall("add", "{}"), FunctionCall("add", "{}"))


class Reading:
    """A tokenizer that reads the same message in each output, and keeps the tools that it was given."""

    def __init__(self, message: Message | None) -> None:
        self.message = message
        self.tools: list[Any] = []

    def read_response(self, completion: Completion, tools: Sequence[Mapping[str, object]]) -> Message | None:
        self.tools += tools
        return self.message

    def finish(self, completion: Completion) -> str:
        return "text"


def ids(id: object = "a", prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = (2,)) -> list[str]:
    request = Request(0, prompt, SamplingParams())
    found = read_answer(
        Row(1, id, "own", request, tools=b"[]"),
        Completion(request, output, "stop"),
        Reading(Message(None, None, CALLS)),  # type: ignore[arg-type]
    )
    assert found is not None
    return [call.id for call in found.tool_calls]


def test_ids_are_repeated_by_the_same_run_and_by_no_other_answer():
    assert ids() == ids()
    found = [*ids(), *ids("b"), *ids(1), *ids("1"), *ids(prompt=(1, 2)), *ids(output=(3,))]
    assert len(set(found)) == len(found)
    assert all(len(one) == 9 and one.isalnum() for one in found)


def test_only_a_conversation_is_read_and_with_its_tools():
    request = Request(0, (1,), SamplingParams())
    tokenizer, completion = Reading(Message("hi", None, ())), Completion(request, (2,), "stop")
    lines = OutputLines(tokenizer, "m", 0)  # type: ignore[arg-type]
    plain = json.loads(lines.of_answers([EndedRequest(Row(1, "a", "own", request), completion)]))
    assert "content" not in plain and tokenizer.tools == []
    read = json.loads(
        lines.of_answers([EndedRequest(Row(1, "a", "own", request, tools=b'[{"type":"function"}]'), completion)])
    )
    assert read == {**plain, "content": "hi"} and tokenizer.tools == [{"type": "function"}]
    tokenizer.message = None
    assert json.loads(lines.of_answers([EndedRequest(Row(1, "a", "own", request, tools=b"[]"), completion)])) == plain


def test_choices_with_equal_tokens_have_ids_of_their_own():
    request = Request(0, (1,), SamplingParams(temperature=1.0, seed=0, n=2))
    rows = [*Row(1, "a", "own", request, tools=b"[]").choices()]
    ended = [EndedRequest(row, Completion(row.request, (2,), "stop")) for row in rows if row.request]
    reading = Reading(Message(None, None, CALLS))
    outputs = json.loads(OutputLines(reading, "m", 0).of_answers(ended))["outputs"]  # type: ignore[arg-type]
    assert len({call["id"] for output in outputs for call in output["tool_calls"]}) == 2 * len(CALLS)
