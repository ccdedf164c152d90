"""Keys of a conversation: each value reaches the chat template, or is an error that names it."""

from __future__ import annotations

from typing import Any

import pytest

from sarathi_pp.errors import RowError
from sarathi_pp.inputs.chat.options import CHAT_KEYS, read_chat_options, refuse_chat_options
from sarathi_pp.inputs.parse import ParsedLine, parse_line
from sarathi_pp.text.chat_options import ChatOptions
from tests.inputs.test_parse import chat_line, parse, refused
from tests.text.chat_templates import ADD

SAID = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({}, ChatOptions()),
        (dict.fromkeys(CHAT_KEYS), ChatOptions()),
        ({"add_generation_prompt": False}, ChatOptions(add_generation_prompt=False)),
        ({"add_generation_prompt": False, "continue_final_message": True}, ChatOptions(False, True)),
        ({"chat_template_kwargs": {"a": [1]}}, ChatOptions(variables={"a": [1]})),
        ({"reasoning_effort": "low"}, ChatOptions(variables={"reasoning_effort": "low"})),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}},
            ChatOptions(variables={"reasoning_effort": "low"}),
        ),
        ({"tools": []}, ChatOptions()),
        ({"tool_choice": "none", "parallel_tool_calls": False}, ChatOptions()),
        ({"tools": [ADD], "tool_choice": "auto"}, ChatOptions(tools=(ADD,))),
        ({"tools": [ADD], "tool_choice": "none", "parallel_tool_calls": False}, ChatOptions()),
        ({"tools": [{**ADD, "function": {"name": "f", "parameters": None, "strict": True}}]}, ...),
    ],
)
def test_own_lines_and_openai_lines_have_the_same_keys(keys, options):
    expected = ChatOptions(tools=tuple(keys["tools"])) if options is ... else options
    for line in ({"messages": SAID, **keys}, chat_line(**keys)):
        assert parse(line).chat == expected


@pytest.mark.parametrize(
    ("keys", "code", "text"),
    [
        ({"add_generation_prompt": "no"}, "invalid_parameter", "add_generation_prompt is a string; it must be true or"),
        ({"continue_final_message": 1}, "invalid_parameter", "continue_final_message is a number"),
        ({"continue_final_message": True}, "invalid_parameter", "are not compatible. To continue the final message"),
        ({"chat_template_kwargs": [1]}, "invalid_parameter", "chat_template_kwargs is a list; it must be an object"),
        ({"chat_template_kwargs": {"tools": []}}, "invalid_parameter", "chat_template_kwargs has tools"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "invalid_parameter", "has chat_template"),
        ({"chat_template_kwargs": {"": 1}}, "invalid_parameter", 'has the name ""; use an identifier, such as'),
        ({"chat_template_kwargs": {"a.b(": 1}}, "invalid_parameter", 'has the name "a.b("; use an identifier'),
        ({"reasoning_effort": 3}, "invalid_parameter", "reasoning_effort is a number"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "invalid_parameter",
            "given twice",
        ),
        ({"tools": {"a": 1}}, "invalid_parameter", "tools is an object; it must be a list"),
        ({"tools": False}, "invalid_parameter", "tools is a boolean; it must be a list"),
        ({"tools": [3]}, "invalid_parameter", "tools[0] is a number"),
        ({"tools": [ADD, {"type": "custom"}]}, "unsupported_parameter", 'tools[1].type is "custom"'),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "invalid_parameter", "tools[0].function must be"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "invalid_parameter",
            "tools[0].function.parameters is a list",
        ),
        ({"tool_choice": "auto"}, "invalid_parameter", 'tool_choice is "auto"; it needs tools'),
        ({"tools": [ADD], "tool_choice": "required"}, "unsupported_parameter", 'tool_choice is "required"; it must be'),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}},
            "unsupported_parameter",
            "calls are not forced",
        ),
        ({"tools": [ADD], "parallel_tool_calls": False}, "unsupported_parameter", "parallel_tool_calls is false"),
        ({"parallel_tool_calls": 1}, "invalid_parameter", "parallel_tool_calls is a number"),
        ({"chat_template": "{{ messages }}"}, "unsupported_parameter", "chat_template"),
        ({"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
        ({"function_call": "auto"}, "unsupported_parameter", "function_call"),
    ],
)
def test_a_wrong_value_is_named(keys, code, text):
    for line in ({"messages": SAID, **keys}, chat_line(**keys)):
        error = refused(line)
        assert error.code == code and text in error.message


CHANGES: dict[str, Any] = {
    "chat_template_kwargs": {"a": 1},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "reasoning_effort": "low",
    "tools": [ADD],
    "tool_choice": "auto",
    "parallel_tool_calls": 1,
}


@pytest.mark.parametrize("key", CHAT_KEYS)
def test_without_messages_a_key_may_only_change_nothing(key):
    refuse_chat_options({key: None})
    for value in CHAT_KEYS[key]:
        assert parse({"prompt": "x", key: value}) == ParsedLine(7, "7", "own", prompt="x")
    completion = {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "x", key: CHANGES[key]}}
    for line in ({"prompt": "x", key: CHANGES[key]}, {"prompt_token_ids": [5], key: CHANGES[key]}, completion):
        error = refused(line)
        assert error.code == "unsupported_parameter"
        assert error.message.startswith(f"{key} = ") and error.message.endswith(
            f"a chat template renders; remove {key}"
        )


def test_a_typing_mistake_in_a_key_is_found():
    record = b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwarg": {}}'
    error = parse_line(7, record, plain_text=False).error
    assert error is not None and "did you mean chat_template_kwargs?" in error.message


def test_names_of_variables_from_a_program_are_texts():
    with pytest.raises(RowError, match="chat_template_kwargs is an object; it must be"):
        read_chat_options({"chat_template_kwargs": {1: 2}})
