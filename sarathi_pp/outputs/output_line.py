"""The output line of an input line that has ended, in our own form or in OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sarathi_pp.core.request import Completion
from sarathi_pp.errors import RowError
from sarathi_pp.inputs.row import Row
from sarathi_pp.outputs.answer_message import AnswerMessage, read_answer
from sarathi_pp.outputs.logprobs import openai_logprobs, own_logprobs, own_prompt_logprobs
from sarathi_pp.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OutputLines:
    """The maker of output lines.

    Args:
        tokenizer: turns output tokens into text.
        model: the model's name for output lines in OpenAI's form.
        created: unix time at which the run started, for the same lines.
    """

    tokenizer: Tokenizer
    model: str
    created: int

    def of_error(self, row: Row, error: RowError) -> bytes:
        """Return the line of an input line that has failed."""
        return _encoded(row, _error_record(row, error))

    def of_answers(self, row: Row, answers: Sequence[tuple[Completion, Mapping[str, object]]]) -> bytes:
        """Return the line of an input line that has answers.

        Args:
            answers: completion and metrics (see Sink.finish) of each choice, in order.
        """
        if row.form != "own":
            completions = [completion for completion, _ in answers]
            choices = [self._choice(row, one) for one in completions]
            return _encoded(row, _openai_record(row, completions, choices, self.model, self.created))
        first = answers[0][0]
        num_prompt, of_prompt = len(first.request.prompt_token_ids), own_prompt_logprobs(first)
        if len(answers) == 1:
            parts, counts = self._parts(row, first), {"num_prompt_tokens": num_prompt}
            return _encoded(
                row, {"id": row.id, **parts, **counts, **_numbers(first), **of_prompt, "metrics": answers[0][1]}
            )
        outputs = [{**self._parts(row, one), **_numbers(one), "metrics": metrics} for one, metrics in answers]
        return _encoded(row, {"id": row.id, "num_prompt_tokens": num_prompt, **of_prompt, "outputs": outputs})

    def _parts(self, row: Row, completion: Completion) -> dict[str, object]:
        """Return the text of an answer, its parts, its tokens and its end, in our own form."""
        message = read_answer(row, completion, self.tokenizer)
        return {
            "text": self.tokenizer.finish(completion),
            **(_message_keys(message) if message else {}),
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
        }

    def _choice(self, row: Row, completion: Completion) -> dict[str, object]:
        """Return the answer of one choice in OpenAI's form."""
        chat, text = row.form == "openai-chat", self.tokenizer.finish(completion)
        message = read_answer(row, completion, self.tokenizer)
        logprobs = openai_logprobs(completion, self.tokenizer, is_chat=chat, is_echo=row.echo is not None)
        if row.echo is not None and text is not None:
            text = row.echo + text
        parts = {"content": text} if message is None else _message_keys(message)
        calls = message is not None and message.tool_calls and completion.finish_reason == "stop"
        return {
            **({"message": {"role": "assistant", **parts}} if chat else {"text": text}),
            "logprobs": logprobs,
            # An echo shows them in its `logprobs`.
            **({} if row.echo is not None and logprobs is not None else own_prompt_logprobs(completion)),
            "finish_reason": "tool_calls" if calls else completion.finish_reason,
        }


def _encoded(row: Row, record: dict[str, object]) -> bytes:
    if row.extra:
        record["extra"] = json.loads(row.extra)
    return encode_line(record)


def encode_line(record: Mapping[str, object]) -> bytes:
    """Return one JSON line in UTF-8. If an id holds half a surrogate pair, which UTF-8 cannot encode, escape it."""
    try:
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _error_record(row: Row, error: RowError) -> dict[str, object]:
    reason: dict[str, object] = {"code": error.code, "message": error.message}
    if row.nameless:  # its id is its line number, which may be the own id of another line
        reason["line"] = row.line
    if row.form == "own":
        return {"id": row.id, "error": reason}
    return {"id": f"batch_req_{row.line}", "custom_id": row.id, "response": None, "error": reason}


def _message_keys(message: AnswerMessage) -> dict[str, object]:
    """Return the parts of a message. Reasoning and calls are left out if it has none."""
    reasoning = {} if message.reasoning is None else {"reasoning": message.reasoning}
    calls = {"tool_calls": [call.openai() for call in message.tool_calls]} if message.tool_calls else {}
    return {"content": message.content, **reasoning, **calls}


def _numbers(completion: Completion) -> dict[str, object]:
    """Return the number of output tokens, and their log probabilities."""
    logprobs = {} if completion.logprobs is None else {"logprobs": own_logprobs(completion)}
    return {"num_output_tokens": len(completion.token_ids), **logprobs}


def _openai_record(
    row: Row, completions: Sequence[Completion], choices: Sequence[dict[str, object]], model: str, created: int
) -> dict[str, object]:
    """Return an output line in OpenAI's form.

    Args:
        choices: the answers, one per completion.
        created: unix time at which the run started.
    """
    num_prompt = len(completions[0].request.prompt_token_ids)
    num_output = sum(len(completion.token_ids) for completion in completions)
    chat = row.form == "openai-chat"
    body = {
        "id": f"chatcmpl-{row.line}" if chat else f"cmpl-{row.line}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        },
    }
    response = {"status_code": 200, "request_id": f"req_{row.line}", "body": body}
    return {"id": f"batch_req_{row.line}", "custom_id": row.id, "response": response, "error": None}
