"""Messages of a conversation: every form that OpenAI's clients send reaches the chat template, or is an error."""

from __future__ import annotations

from typing import Any

import pytest

from sarathi_pp.errors import RowError
from sarathi_pp.inputs.chat.messages import read_messages


def called(arguments: object) -> list[dict[str, Any]]:
    call = {"id": "abc", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x"}],
        [{"role": "assistant", "content": None}],
        [{"role": "assistant"}],
        [{"role": "assistant", "content": None, "tool_calls": None, "name": "helper"}],
        [{"role": "assistant", "content": "", "tool_calls": []}],
        [{"role": "tool", "tool_call_id": "abc", "name": "add", "content": "3"}],
        [{"role": "assistant", "reasoning": "Easy.", "content": "3", "own": {"key": [1]}}],
        called({"a": 1}),
    ],
)
def test_a_message_reaches_the_template_as_it_is(messages):
    assert read_messages(messages) == messages


@pytest.mark.parametrize(
    ("text", "arguments"), [('{"a": [1, "x"]}', {"a": [1, "x"]}), ("{}", {}), ("", {}), (None, {}), ({}, {})]
)
def test_arguments_become_an_object(text, arguments):
    given = called(text)
    (message,) = read_messages(given)
    assert message["tool_calls"] == called(arguments)[0]["tool_calls"]
    assert given == called(text), "the caller's own messages stay"


def test_text_parts_of_a_tool_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_messages([{"role": "tool", "content": parts}]) == [{"role": "tool", "content": "a\nb"}]


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ("x", "messages must be a list"),
        ([], "messages must be a list"),
        ([{"role": "user"}, {"role": 3}], r"messages\[1\] must be an object with a role"),
        ([{"role": "user", "content": {"a": 1}}], r"messages\[0\].content is an object"),
        ([{"role": "assistant", "tool_calls": {}}], r"messages\[0\].tool_calls is an object; it must be a list"),
        ([{"role": "assistant", "tool_calls": ["add"]}], r"tool_calls\[0\] must be an object with a function"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], r"tool_calls\[0\] must be an object with a funct"),
        (called("add(1)"), r"tool_calls\[0\].function.arguments must be an object, or the JSON text of one"),
        (called("[1]"), "function.arguments must be"),
        (called([1]), "function.arguments must be"),
        (called(0), "function.arguments must be"),
        (called(7), "function.arguments must be"),
        (called('{"a": NaN}'), "function.arguments must be"),
        (called('{"a": ' * 100_000), "function.arguments must be"),
    ],
)
def test_a_wrong_message_is_named(messages, where):
    with pytest.raises(RowError, match=where) as refused:
        read_messages(messages)
    assert refused.value.code == "invalid_parameter"


def test_images_are_not_supported():
    with pytest.raises(RowError, match=r"messages\[0\].content holds image_url; only text parts") as refused:
        read_messages([{"role": "user", "content": [{"type": "image_url"}]}])
    assert refused.value.code == "unsupported_parameter"
