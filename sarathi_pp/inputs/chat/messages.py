"""The messages of a conversation, checked, and in the form that chat templates expect."""

from __future__ import annotations

from typing import NoReturn

from sarathi_pp.errors import RowError
from sarathi_pp.inputs.json_line import kind_of, read_json


def read_messages(value: object) -> list[dict[str, object]]:
    """Return the messages of a conversation.

    Text parts are joined by line ends, because most chat templates expect one string. Arguments of tool calls become
    objects, as in vLLM. OpenAI writes them as JSON texts, which templates would quote again.

    Raises:
        RowError: `invalid_parameter` or `unsupported_parameter`, with the place in the messages.
    """
    if not isinstance(value, list) or not value:
        _refuse("messages must be a list of at least one message")
    for position, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            _refuse(f"messages[{position}] must be an object with a role")
    return [_message(f"messages[{position}]", message) for position, message in enumerate(value)]


def _message(where: str, message: dict[str, object]) -> dict[str, object]:
    changed: dict[str, object] = {}
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        changed["content"] = _joined(f"{where}.content", content)
    elif content is not None and not isinstance(content, str):
        _refuse(f"{where}.content is {kind_of(content)}; it must be a string")
    if isinstance(calls, list):
        changed["tool_calls"] = [_call(f"{where}.tool_calls[{place}]", call) for place, call in enumerate(calls)]
    elif calls is not None:
        _refuse(f"{where}.tool_calls is {kind_of(calls)}; it must be a list")
    return {**message, **changed} if changed else message


def _joined(where: str, parts: list[object]) -> str:
    texts: list[str] = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else kind_of(part)
            raise RowError("unsupported_parameter", f"{where} holds {kind}; only text parts are supported")
        if not isinstance(part.get("text"), str):
            _refuse(f"{where} has a text part without a string in text; add it")
        texts.append(part["text"])
    return "\n".join(texts)


def _call(where: str, call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        _refuse(f"{where} must be an object with a function, which has a name")
    return {**call, "function": {**function, "arguments": _arguments(where, function.get("arguments"))}}


def _arguments(where: str, value: object) -> object:
    try:
        arguments = {} if value in (None, "") else read_json(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        _refuse(f"{where}.function.arguments must be an object, or the JSON text of one")
    return arguments


def _refuse(message: str) -> NoReturn:
    raise RowError("invalid_parameter", message)
