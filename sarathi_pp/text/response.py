"""The message that an output means to its model: content, reasoning and tool calls.

transformers' response parser reads it by the tokenizer's response template. The regular expressions in it are by the
model's author, so they run in a separate process, like chat templates.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from sarathi_pp.text.template_process import TemplateError, TemplateProcess

_log = logging.getLogger(__name__)

# Limits of one output: seconds of CPU time, bytes of memory, bytes of text.
_MAX_PARSE_S = 2.0
_MAX_PARSE_MEMORY_BYTES = 512 * 2**20
_MAX_PARSED_BYTES = 16 * 2**20

# Names that response templates give to the reasoning. The first one that a message has counts.
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a function.

    Args:
        arguments: a JSON text, normally an object. If the model writes a string instead, it is any text.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """The parts of an output.

    Args:
        content: the answer for the user. None if the output has none.
        reasoning: the thoughts before it. None if the output has none.
    """

    content: str | None
    reasoning: str | None
    calls: tuple[FunctionCall, ...]


class ResponseReader:
    """A reader of outputs by one response template, one at a time.

    Args:
        template: the `response_template` of a tokenizer. It may be broken, see `fault`.
    """

    def __init__(self, template: object) -> None:
        self._template = template
        self._process = TemplateProcess(_MAX_PARSE_S, _MAX_PARSE_MEMORY_BYTES, _MAX_PARSED_BYTES)

    @cached_property
    def fault(self) -> str | None:
        """The reason why the template cannot read any output; None if it can. Finding the reason logs a warning.

        Get it before the first call of `read`.
        """
        try:
            self._process.ask({"check": self._template})
        except TemplateError as error:
            _log.warning(
                "the response_template in tokenizer_config.json cannot be used, so answers have neither reasoning nor "
                "tool calls; correct it: %s",
                error,
            )
            return str(error)
        return None

    def read(self, text: str, prompt: str, tools: Sequence[Mapping[str, object]]) -> Message | None:
        """Return the message of an output; None if the template reads nothing in it, or exceeds its limits.

        The prompt may hold the start of the message. The result has only the parts that the output adds to it.

        Args:
            text: the output, with its special tokens.
            prompt: the prompt, with its special tokens.
            tools: functions that the model may call. Their schemas give arguments their types.
        """
        asked = {"template": self._template, "text": text, "prefix": prompt, "tools": list(tools)}
        try:
            whole, before = self._process.ask({"parse": asked})
            message = _message(whole, before)
        except (TemplateError, TypeError, KeyError, ValueError, RecursionError):
            return None
        return message if message.content or message.reasoning or message.calls else None


def find_response_template(backend: Any) -> object | None:
    """Return the response template of a transformers tokenizer; None if it has none, or transformers has no parser."""
    template: object | None = getattr(backend, "response_template", None)
    return template if find_spec("transformers.utils.chat_parsing") is not None else None


def _message(whole: Mapping[str, Any], before: Mapping[str, Any]) -> Message:
    """Return the message that a parsed one adds to that of the prompt alone.

    Raises:
        TypeError, KeyError, ValueError: a part has a wrong form.
    """
    reasoning = next((name for name in _REASONING if whole.get(name) is not None), _REASONING[0])
    calls = whole.get("tool_calls") or []
    if not isinstance(calls, list):
        raise TypeError("tool_calls is no list")
    num_before = len(before.get("tool_calls") or [])
    return Message(
        _added_text(whole, before, "content"),
        _added_text(whole, before, reasoning),
        tuple(_call(one) for one in calls[num_before:]),
    )


def _added_text(whole: Mapping[str, Any], before: Mapping[str, Any], name: str) -> str | None:
    """Return the text that the output adds to one part of the message; None if it adds none."""
    text = whole.get(name)
    if text is None:
        return None
    if not isinstance(text, str):
        raise TypeError(f"{name} is no text")
    return text.removeprefix(before.get(name) or "") or None


def _call(found: Mapping[str, Any]) -> FunctionCall:
    function = found["function"]
    name, arguments = function["name"], function["arguments"]
    if not isinstance(name, str) or not name:
        raise TypeError("a call has no name")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return FunctionCall(name, arguments)
