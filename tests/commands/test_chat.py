"""Tools, reasoning and settings of the chat template, through the command line and the Python API."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sarathi_pp import LLM, RowError, SamplingParams
from tests.commands.chain_model import write_chain_model
from tests.commands.processes import COMMAND, Files, environment
from tests.machine import patient
from tests.text.chat_templates import ADD, CALLED, QWEN, QWEN_RESPONSE

pytestmark = pytest.mark.timeout(240)
CALL = '\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n'
BROKEN = '<tool_call>{"name": "add", "arg'
# After the opening of an answer the model thinks and calls. Without thoughts it says the sum.
SAYS = [
    ["\n", "<think>", "Let me add.", "</think>", "<tool_call>", CALL, "</tool_call>"],
    ["</think>\n\n", "The sum is 3."],
    ["I say: ", BROKEN],
]
ASKED = [{"role": "user", "content": "What is 1+2?"}]
BROKEN_CHAT = [*ASKED, {"role": "assistant", "content": "I say: "}]
OPEN = {"add_generation_prompt": False, "continue_final_message": True}
UNTHINKING = {"chat_template_kwargs": {"enable_thinking": False}}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
TEXT = f"<think>Let me add.</think><tool_call>{CALL}</tool_call>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chain") / "model"
    return write_chain_model(folder, SAYS, chat_template=QWEN, response_template=QWEN_RESPONSE)


def openai(name: str, messages: list[dict[str, Any]], **keys: object) -> dict[str, object]:
    return {"custom_id": name, "url": "/v1/chat/completions", "body": {"messages": messages, **keys}}


LINES: list[dict[str, object]] = [
    openai("calls", ASKED, tools=[ADD]),
    openai("again", CALLED, tools=[ADD]),
    {"id": "own", "messages": ASKED, "tools": [ADD]},
    openai("says", ASKED, **UNTHINKING),
    {"id": "own says", "messages": ASKED, **UNTHINKING},
    openai("not offered", ASKED),
    openai("broken", BROKEN_CHAT, tools=[ADD], **OPEN),
    openai("cut", ASKED, tools=[ADD], max_tokens=2),
    openai("calls and is cut", ASKED, tools=[ADD], max_tokens=6),
    openai("as asked", ASKED, **THINKING),
    {"id": "prompt", "prompt": "</think>\n\n"},
    openai("forced", ASKED, tools=[ADD], tool_choice="required"),
    openai("unknown", ASKED, chat_template_kwargs={"thinking": False}),
    {"id": "no messages", "prompt": "x", "tools": [ADD]},
]
ERRORS = {"forced", "unknown", "no messages"}


def answers(files: Files) -> dict[str, dict[str, Any]]:
    """Return the output lines by id, without the parts that differ between runs."""
    found = {}
    for line in map(json.loads, files.output.read_text().splitlines()):
        line.pop("metrics", None)
        body = (line.get("response") or {}).get("body", {})
        body.pop("created", None)
        body.get("usage", {}).pop("prompt_tokens_details", None)
        found[line.get("custom_id") or line["id"]] = line
    return found


def generate(files: Files, model: Path, *options: str) -> dict[str, dict[str, Any]]:
    files.input.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    command = (*COMMAND, *files.options(model, "--max-new-tokens", "20", "--quiet", *options))
    done = subprocess.run(
        command, cwd=files.folder, env=environment(), capture_output=True, text=True, timeout=patient(90), check=False
    )
    assert done.returncode == 3, done.stderr
    return answers(files)


def choice(line: dict[str, Any]) -> dict[str, Any]:
    (only,) = line["response"]["body"]["choices"]
    return dict(only)


def test_answers_are_split_over_two_stages_and_the_same_after_a_resume_and_over_replicas(model, tmp_path):
    files = Files(tmp_path)
    found = generate(files, model, "--stages", "2")
    assert {name for name, line in found.items() if line.get("error")} == ERRORS
    calls = choice(found["calls"])
    (call,) = calls["message"]["tool_calls"]
    assert call == {"id": call["id"], "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    assert len(call["id"]) == 9 and call["id"].isalnum()
    assert calls["message"] == {"role": "assistant", "content": None, "reasoning": "Let me add.", "tool_calls": [call]}
    assert calls["finish_reason"] == "tool_calls"
    assert choice(found["again"])["message"]["tool_calls"][0]["id"] != call["id"]
    own = found["own"]
    assert (own["text"], own["content"], own["reasoning"], own["finish_reason"]) == (TEXT, None, "Let me add.", "stop")
    assert own["tool_calls"][0]["function"] == call["function"]
    assert choice(found["says"])["message"] == {"role": "assistant", "content": "The sum is 3."}
    assert (found["own says"]["text"], found["own says"]["content"]) == ("The sum is 3.", "The sum is 3.")
    assert not {"reasoning", "tool_calls"} & found["own says"].keys()
    assert found["prompt"]["text"] == "The sum is 3." and "content" not in found["prompt"]
    # What cannot be read, or was not offered, is the plain text.
    assert choice(found["not offered"])["message"] == {"role": "assistant", "content": TEXT}
    assert choice(found["broken"])["message"] == {"role": "assistant", "content": BROKEN}
    assert {choice(found[name])["finish_reason"] for name in ("not offered", "broken", "says")} == {"stop"}
    cut = choice(found["cut"])
    assert cut["message"] == {"role": "assistant", "content": None, "reasoning": "Let me add."}
    assert cut["finish_reason"] == "length"
    # A call may be whole although the output is cut. The reason says that the output is not.
    whole = choice(found["calls and is cut"])
    assert whole["finish_reason"] == "length" and len(whole["message"]["tool_calls"]) == 1
    # Cut off after a few answers, the run is resumed.
    lines = files.output.read_bytes().splitlines(keepends=True)
    files.output.write_bytes(b"".join(lines[:5]))
    assert generate(files, model, "--stages", "1", "--resume") == found
    (tmp_path / "replicas").mkdir()
    assert generate(Files(tmp_path / "replicas"), model, "--replicas", "2") == found


def test_a_program_gets_the_parts(model):
    with LLM(model, stages=2, kv_cache_memory="16MiB") as llm:
        params = SamplingParams(max_new_tokens=20)
        first, second = llm.chat([ASKED, CALLED], params, tools=[ADD])
        output = first.outputs[0]
        assert (output.text, output.content, output.reasoning) == (TEXT, None, "Let me add.")
        (call,) = output.tool_calls
        assert (call.name, call.arguments) == ("add", '{"a": 1, "b": 2}')
        assert second.outputs[0].tool_calls[0].id != call.id
        (says,) = llm.chat(ASKED, params, chat_template_kwargs={"enable_thinking": False})
        assert says.outputs[0].content == "The sum is 3." and says.outputs[0].tool_calls == ()
        (broken,) = llm.chat(BROKEN_CHAT, params, add_generation_prompt=False, continue_final_message=True)
        assert (broken.outputs[0].text, broken.outputs[0].content) == (BROKEN, None)
        with pytest.raises(RowError, match="are not compatible"):
            llm.chat(ASKED, params, continue_final_message=True)
        (refused,) = llm.chat(ASKED, params, chat_template_kwargs={"thinking": False})
        assert refused.error is not None and refused.error.code == "unsupported_parameter"
        (wrong,) = llm.chat([{"role": "assistant", "tool_calls": 3}], params)
        assert wrong.error is not None and "tool_calls is a number" in wrong.error.message
        plain = llm.generate("</think>\n\n", params)[0].outputs[0]
        assert (plain.text, plain.content, plain.tool_calls) == ("The sum is 3.", None, ())


def test_without_a_response_template_tools_are_refused_and_answers_are_plain(tmp_path):
    model, files = write_chain_model(tmp_path / "model", SAYS, chat_template=QWEN), Files(tmp_path)
    found = generate(files, model)
    assert found["calls"]["error"]["code"] == "unsupported_parameter"
    assert "tools need a response_template" in found["calls"]["error"]["message"]
    assert choice(found["not offered"])["message"] == {"role": "assistant", "content": TEXT}
    assert "content" not in found["own says"] and found["own says"]["text"] == "The sum is 3."


def test_variables_of_the_command_hold_for_lines_that_set_none(model, tmp_path):
    files, option = Files(tmp_path), ("--default-chat-template-kwargs", '{"enable_thinking": false}')
    found = generate(files, model, *option)
    assert choice(found["not offered"])["message"] == {"role": "assistant", "content": "The sum is 3."}
    assert choice(found["as asked"])["message"] == {"role": "assistant", "content": TEXT}
    refused = subprocess.run(
        (*COMMAND, *files.options(model, "--max-new-tokens", "20", "--resume")),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=patient(90),
        check=False,
    )
    assert refused.returncode == 2 and "default_chat_template_kwargs was " in refused.stderr
    with LLM(model, default_chat_template_kwargs={"enable_thinking": False}) as llm:
        assert llm.chat(ASKED, SamplingParams(max_new_tokens=20))[0].outputs[0].text == "The sum is 3."
