"""Settings of a conversation reach the chat template as in transformers' `apply_chat_template`."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from sarathi_pp.errors import RowError
from sarathi_pp.inputs.chat.messages import read_messages
from sarathi_pp.inputs.chat.options import read_chat_options
from sarathi_pp.text.chat_options import ChatOptions
from sarathi_pp.text.tokenizer import Tokenizer
from tests.text.chat_templates import ADD, CALLED, QWEN, chat_backend
from tests.text.test_tokenizer import tokenizer

ASKED = [{"role": "user", "content": "What is 1+2?"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "It is "}]


@cache
def known(style: str) -> tuple[Any, Tokenizer]:
    """Return the library's tokenizer of a style, and ours with one process for all tests."""
    backend = chat_backend(style)
    return backend, tokenizer(backend)


def rendered(style: str, messages: list[dict[str, Any]], keys: dict[str, object]) -> str:
    """Return the text of the tokens that a line with these keys gets."""
    backend, ours = known(style)
    encoded = ours.encode_chat(read_messages(messages), read_chat_options(keys))
    return str(backend.decode(encoded.token_ids))


@pytest.mark.parametrize(
    ("style", "messages", "keys", "arguments"),
    [
        ("qwen", ASKED, {}, {"add_generation_prompt": True}),
        ("qwen", ASKED, {"add_generation_prompt": False}, {}),
        (
            "qwen",
            ASKED,
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"add_generation_prompt": True, "enable_thinking": False},
        ),
        (
            "qwen",
            BEGUN,
            {"add_generation_prompt": False, "continue_final_message": True},
            {"continue_final_message": True},
        ),
        ("qwen", ASKED, {"tools": [ADD, ADD]}, {"add_generation_prompt": True, "tools": [ADD, ADD]}),
        ("qwen", ASKED, {"tools": [ADD], "tool_choice": "none"}, {"add_generation_prompt": True}),
        (
            "qwen",
            CALLED,
            {"tools": [ADD], "tool_choice": "auto", "parallel_tool_calls": True},
            {"add_generation_prompt": True, "tools": [ADD]},
        ),
        (
            "channels",
            ASKED,
            {"reasoning_effort": "high"},
            {"add_generation_prompt": True, "reasoning_effort": "high"},
        ),
        ("channels", CALLED, {"tools": [ADD]}, {"add_generation_prompt": True, "tools": [ADD]}),
        (
            "channels",
            [*ASKED, {"role": "assistant", "reasoning": "Easy.", "content": "3"}],
            {},
            {"add_generation_prompt": True},
        ),
    ],
)
def test_a_line_gets_the_prompt_of_transformers(style, messages, keys, arguments):
    theirs = known(style)[0].apply_chat_template(messages, tokenize=False, **arguments)
    assert rendered(style, messages, keys) == theirs


def test_each_setting_changes_the_prompt():
    keys = (
        {},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"tools": [ADD]},
    )
    assert len({rendered("qwen", BEGUN, one) for one in keys}) == len(keys)
    assert rendered("qwen", BEGUN, keys[3]).endswith("<|im_start|>assistant\nIt is ")


def test_arguments_of_a_call_may_be_the_text_that_openai_writes():
    text = [dict(one) for one in CALLED]
    text[1]["tool_calls"] = [{"id": "abc", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]
    assert '"arguments": {"a": 1, "b": 2}}' in rendered("qwen", text, {})
    assert rendered("qwen", text, {}) == rendered("qwen", CALLED, {})


def test_a_variable_may_replace_a_special_token_as_in_transformers(monkeypatch):
    monkeypatch.setattr(known("qwen")[0], "chat_template", "{{ bos_token }}{{ messages[0].content }}")
    assert rendered("qwen", ASKED, {"chat_template_kwargs": {"bos_token": "B"}}) == "BWhat is 1+2?"


def test_a_template_for_tools_is_used_with_tools(monkeypatch):
    templates = {"default": "none {{ messages[0].content }}", "tool_use": "some {{ tools|length }}"}
    monkeypatch.setattr(known("qwen")[0], "chat_template", templates)
    assert rendered("qwen", ASKED, {"tools": [ADD]}) == "some 1"
    assert rendered("qwen", ASKED, {}) == "none What is 1+2?"


@pytest.mark.parametrize("name", ["enable_thinkin", "reasoning_effort", "content", "call", "think", "range"])
def test_a_variable_that_the_template_would_ignore_is_refused(name):
    reason = f"the model's chat template does not use {name}; it uses enable_thinking; remove {name}"
    with pytest.raises(RowError, match=reason) as refused:
        rendered("qwen", ASKED, {"chat_template_kwargs": {name: False}})
    assert refused.value.code == "unsupported_parameter"


# Each template uses exactly the variables `used` and `also`. It mentions `word` without use.
@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].word }}{{ 'word' }}word{# word #}{% raw %}{{ word }}{% endraw %}{{ used }}{{ also }}",
        "{% set word = used %}{{ word }}{% if also %}{% set used = 1 %}{% endif %}{{ used }}",
        "{% macro word(word, other=also) %}{{ word }}{{ used }}{% endmacro %}{{ word(1) }}",
        "{% macro m(word) %}{{ caller(word) }}{% endmacro %}{% call(word) m(also) %}{{ word ~ used }}{% endcall %}",
        "{% generation %}{{ used }}{% endgeneration %}{% for word in also %}{{ word }}{% break %}{% endfor %}",
        "{% set word = namespace(word=used) %}{% set word.word = also %}{{ word.word ~ dict() }}",
        "{% if used is not defined %}{% set used = true %}{% endif %}{{ used and also | tojson }}{{ {}.get('word') }}",
        "{% filter upper %}{{ used }}{% endfilter %}{% with word = also %}{{ word }}{% endwith %}",
    ],
)
def test_the_template_decides_which_names_are_its_variables(template, monkeypatch):
    monkeypatch.setattr(known("qwen")[0], "chat_template", template)
    rendered("qwen", ASKED, {"chat_template_kwargs": {"used": "1", "also": "2"}})
    with pytest.raises(RowError, match="does not use word; it uses also, used; remove word"):
        rendered("qwen", ASKED, {"chat_template_kwargs": {"also": 1, "word": 2}})


def test_a_variable_must_be_used_by_the_template_that_renders(monkeypatch):
    templates = {"default": "{{ messages[0].content ~ plain }}", "tool_use": "{{ tools|length ~ helped }}"}
    monkeypatch.setattr(known("qwen")[0], "chat_template", templates)
    plain, helped = ({"chat_template_kwargs": {name: "!"}} for name in ("plain", "helped"))
    assert rendered("qwen", ASKED, plain) == "What is 1+2?!"
    assert rendered("qwen", ASKED, {**helped, "tools": [ADD]}) == "1!"
    with pytest.raises(RowError, match="does not use helped; it uses plain; remove helped"):
        rendered("qwen", ASKED, helped)
    with pytest.raises(RowError, match="does not use plain; it uses helped; remove plain"):
        rendered("qwen", ASKED, {**plain, "tools": [ADD]})


@pytest.mark.parametrize(
    ("template", "listed"),
    [("{{ messages }}", "no variable"), ("{{ a%d }}" * 22 % tuple(range(22)), "a0, a1, .*, a7 and 2 more")],
)
def test_a_refused_variable_lists_those_of_the_template(template, listed, monkeypatch):
    monkeypatch.setattr(known("qwen")[0], "chat_template", template)
    with pytest.raises(RowError, match=f"does not use word; it uses {listed}; remove word"):
        rendered("qwen", ASKED, {"chat_template_kwargs": {"word": 1}})


def test_variables_of_a_broken_template_are_an_error_of_the_template(monkeypatch):
    monkeypatch.setattr(known("qwen")[0], "chat_template", "{{ word")
    with pytest.raises(RowError, match="the chat template failed: unexpected end of template") as failed:
        rendered("qwen", ASKED, {"chat_template_kwargs": {"word": 1}})
    assert failed.value.code == "chat_template_error"


def test_tools_need_both_templates(monkeypatch):
    plain = chat_backend("qwen", responses=False)
    with pytest.raises(RowError, match=r"tools need a response_template .* has none\. Add one, or remove") as refused:
        tokenizer(plain).encode_chat(ASKED, ChatOptions(tools=(ADD,)))
    assert refused.value.code == "unsupported_parameter"
    backend, ours = known("qwen")
    monkeypatch.setattr(backend, "chat_template", QWEN.replace("tools", "messages"))
    with pytest.raises(RowError, match="does not use tools"):
        ours.encode_chat(ASKED, ChatOptions(tools=(ADD,)))


def test_a_message_that_the_template_drops_cannot_be_continued(monkeypatch):
    monkeypatch.setattr(known("qwen")[0], "chat_template", "{{ messages[0].content }}")
    with pytest.raises(RowError, match="continue_final_message is set but the final message does not appear") as failed:
        rendered("qwen", BEGUN, {"add_generation_prompt": False, "continue_final_message": True})
    assert failed.value.code == "chat_template_error"
