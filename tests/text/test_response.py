"""Outputs are read as transformers' `parse_response` reads them, and no output or template can stop a run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sarathi_pp.core.request import Completion, Request
from sarathi_pp.errors import RowError
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.text.chat_options import ChatOptions
from sarathi_pp.text.response import FunctionCall, Message, ResponseReader, find_response_template
from sarathi_pp.text.template_process import TemplateError
from sarathi_pp.text.template_process import _check as check_template
from sarathi_pp.text.tokenizer import Tokenizer
from tests.text.chat_templates import ADD, CHANNELS_RESPONSE, QWEN_RESPONSE, chat_backend
from tests.text.test_tokenizer import tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ADD_1_2 = FunctionCall("add", '{"a": 1, "b": 2}')
PROMPT = "<|im_start|>user\nWhat is 1+2?<|im_end|>\n<|im_start|>assistant\n"
QWEN_OUTPUTS = {
    "3<|im_end|>": Message("3", None, ()),
    "<think>\nEasy.\n</think>\n\nIt is 3.<|im_end|>": Message("It is 3.", "Easy.", ()),
    f"<think>Call.</think>I call.\n{CALL}\n{CALL}<|im_end|>": Message("I call.", "Call.", (ADD_1_2, ADD_1_2)),
    f"{CALL}<|im_end|>": Message(None, None, (ADD_1_2,)),
    "<think>\nEasy, I th": Message(None, "Easy, I th", ()),
    '<tool_call>{"name": "say", "arguments": {"w": "gr\u00fc\u00dfe \\n"}}</tool_call>': Message(
        None, None, (FunctionCall("say", '{"w": "gr\u00fc\u00dfe \\n"}'),)
    ),
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>': Message(None, None, (FunctionCall("add", "{}"),)),
}
# The schema of a function gives its arguments their types.
INLINE: dict[str, Any] = {
    "start_anchor": "A:",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<f=(?P<name>\w+)>",
            "close": "</f>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<p=(?P<key>\w+)>(?P<value>.*?)</p>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}
MALFORMED = (
    '<tool_call>{"name": "add", "argu',
    "<tool_call>add(1, 2)</tool_call>",
    '<tool_call>{"name": "add"}</tool_call>',
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>["add", {}]</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": ' + '{"a": ' * 2000 + "1" + "}" * 2001 + "</tool_call>",
    "",
    "<|im_end|>",
)


@pytest.fixture(scope="module")
def qwen() -> ResponseReader:
    return ResponseReader(QWEN_RESPONSE)


@pytest.mark.parametrize("text", QWEN_OUTPUTS)
def test_an_output_becomes_its_message(text, qwen):
    message = qwen.read(text, PROMPT, [ADD])
    assert message == QWEN_OUTPUTS[text]
    theirs = chat_backend("qwen").parse_response(text, prefix=PROMPT, tools=[ADD])
    assert message.content == theirs.get("content") and message.reasoning == theirs.get("reasoning_content")
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in theirs.get("tool_calls", [])]
    assert [(one.name, json.loads(one.arguments)) for one in message.calls] == calls


@pytest.mark.parametrize("text", MALFORMED)
def test_an_output_that_breaks_the_template_has_no_message(text, qwen):
    assert qwen.read(text, PROMPT, [ADD]) is None
    assert qwen.read("3", PROMPT, []) == Message("3", None, ()), "and the next one has"


def test_channels():
    reader = ResponseReader(CHANNELS_RESPONSE)
    prompt = "<|start|>user<|message|>1+2?<|end|><|start|>assistant"
    thought = "<|channel|>analysis<|message|>Easy.<|end|>"
    found = reader.read(f"{thought}<|start|>assistant<|channel|>final<|message|>3<|return|>", prompt, [])
    assert found == Message("3", "Easy.", ())
    call = '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>'
    assert reader.read(thought + call, prompt, [ADD]) == Message(None, "Easy.", (ADD_1_2,))


@pytest.mark.parametrize(
    ("begun", "text", "message"),
    [
        ("<think>\n", "Easy.\n</think>\n\n3<|im_end|>", Message("3", "Easy.", ())),
        ("<think>\n\n</think>\n\n", "3<|im_end|>", Message("3", None, ())),
        ("It is ", "3<|im_end|>", Message(" 3", None, ())),
        ("<think>\nEasy", "!</think>3", Message("3", "!", ())),
        (CALL, f"{CALL}<|im_end|>", Message(None, None, (ADD_1_2,))),
    ],
)
def test_what_the_prompt_has_begun_is_understood_and_not_repeated(begun, text, message, qwen):
    assert qwen.read(text, PROMPT + begun, []) == message


def test_a_prompt_without_the_start_of_an_answer_is_no_part_of_it(qwen):
    for prompt in ("What is 1+2?", "Begin with <think>", "Begin with <tool_call>"):
        assert qwen.read("3<|im_end|>", prompt, []) == Message("3", None, ())


def test_schemas_give_arguments_their_types():
    reader, text = ResponseReader(INLINE), "<f=add><p=a>1</p><p=b>2</p></f>"
    assert reader.read(text, "A:", [ADD]) == Message(None, None, (ADD_1_2,))
    assert reader.read(text, "A:", []) == Message(None, None, (FunctionCall("add", '{"a": "1", "b": "2"}'),))


def test_a_pattern_that_never_ends_is_stopped_and_a_wrong_template_reads_nothing(monkeypatch):
    monkeypatch.setattr("sarathi_pp.text.response._MAX_PARSE_S", 0.3)
    endless = {"start_anchor": "A:", "fields": {"content": {"close_pattern": r"(a|aa|a+)+$b|END"}}}
    reader = ResponseReader(endless)
    with pytest.raises(TemplateError, match=r"it ran for more than 0\.3 s"):
        reader._process.ask({"parse": {"template": endless, "text": "a" * 60 + "!", "prefix": "", "tools": []}})
    assert reader.read("fine END", "A:", []) == Message("fine", None, ()), "a new process reads the next one"
    wrong = {"start_anchor": "A:", "fields": {"content": {"close_pattern": "("}}}
    assert ResponseReader(wrong).read("fine", "A:", []) is None


def template(content: str = "text", **field: Any) -> dict[str, Any]:
    return {"start_anchor": "A:", "fields": {"content": {"content": content, **field}}}


BROKEN: dict[str, Any] = {
    "must be a dict, got str": "A:",
    "fields must be a non-empty dict": {},
    "must define 'start_anchor'": {"fields": {"content": {}}},
    r"Field 'content': invalid close_pattern regex": template(close_pattern="("),
    r"Field 'content': unknown keys \['clos'\]": template(clos="x"),
    "Field 'content': unknown content parser 'yaml'": template(content="yaml"),
    "Field 'content': .*'tag_pattern' content_arg is required": template(content="xml-inline"),
    "Field 'content': missing \\)": template(content="xml-inline", content_args={"tag_pattern": "("}),
    "Field 'content': 'str' object has no": template(content_args="strip"),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_broken_template_is_found_before_the_first_output(reason):
    with pytest.raises(ValueError, match=reason):
        check_template(BROKEN[reason])


@pytest.mark.parametrize("usable", [QWEN_RESPONSE, CHANNELS_RESPONSE, INLINE, *map(template, ("int", "json", "bool"))])
def test_a_usable_template_is_not_refused(usable):
    check_template(usable)


def test_a_broken_template_is_one_warning_and_the_reason_why_there_are_no_tools(monkeypatch, caplog):
    backend = chat_backend("qwen")
    monkeypatch.setattr(backend, "response_template", "A:")
    broken, asked = tokenizer(backend), [{"role": "user", "content": "1+2?"}]
    for _ in range(2):
        with pytest.raises(RowError) as refused:
            broken.encode_chat(asked, ChatOptions(tools=(ADD,)))
        assert refused.value.code == "unsupported_parameter" and not broken.reads_responses
        reason = "cannot be used: response_template must be a dict, got str. Correct it, or remove tools"
        assert refused.value.message.endswith(reason)
    (warning,) = caplog.messages
    assert warning.startswith("the response_template in tokenizer_config.json cannot be used, so answers have neither")
    assert warning.endswith("correct it: response_template must be a dict, got str")
    assert broken.encode_chat(asked).token_ids, "other conversations are answered"


@pytest.mark.parametrize("field", [{"content": "int"}, {"content": "json"}])
def test_parts_of_another_type_are_no_message(field):
    reader = ResponseReader({"start_anchor": "A:", "fields": {"content": field}})
    assert reader.read("7", "A:", []) is None


@pytest.fixture(scope="module")
def one() -> Tokenizer:
    return tokenizer(chat_backend("qwen"))


def read(one: Tokenizer, text: str, *, tools: tuple[Any, ...] = (), **sampling: Any) -> Message | None:
    prompt, ids = (one.encode_prompt(each, add_special_tokens=False).token_ids for each in (PROMPT, text))
    return one.read_response(Completion(Request(0, prompt, SamplingParams(**sampling)), ids, "stop"), tools)


def test_a_finished_request_is_read_from_its_tokens(one):
    assert read(one, f"I call.{CALL}<|im_end|>", tools=(ADD,)) == Message("I call.", None, (ADD_1_2,))
    # A call of a tool that was not offered stays part of the text.
    assert read(one, f"I call.{CALL}<|im_end|>") is None
    assert read(one, "It is 3. Really.", stop="Really") == Message("It is 3.", None, ())
    ends = one.encode_prompt("x", add_special_tokens=False).token_ids
    assert read(one, "3x", stop_token_ids=ends) == Message("3", None, ())
    assert read(one, "3x", stop_token_ids=ends, include_stop_str_in_output=True) == Message("3x", None, ())
    assert read(one, "It is 3.", stop="3", include_stop_str_in_output=True) == Message("It is 3", None, ())


def test_without_a_response_template_nothing_is_read(monkeypatch):
    plain = tokenizer(chat_backend("qwen", responses=False))
    assert not plain.reads_responses
    assert plain.read_response(Completion(Request(0, (5,), SamplingParams()), (6,), "stop"), ()) is None
    backend = chat_backend("qwen")
    assert find_response_template(backend) == QWEN_RESPONSE
    # Older releases of transformers have no parser.
    monkeypatch.setattr("sarathi_pp.text.response.find_spec", lambda name: None)
    assert find_response_template(backend) is None
