"""The keys of a line that change how the chat template renders its messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from sarathi_pp.errors import RowError
from sarathi_pp.inputs.json_line import kind_of, show_value
from sarathi_pp.text.chat_options import ChatOptions, check_variables

# Each key with the values that change nothing. A line without messages may have these.
CHAT_KEYS: dict[str, tuple[object, ...]] = {
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "reasoning_effort": (),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
}


def read_chat_options(record: Mapping[str, object]) -> ChatOptions:
    """Return the settings of a conversation. `record` has the keys of CHAT_KEYS that are given; None counts as absent.

    Raises:
        RowError: `invalid_parameter` or `unsupported_parameter`.
    """
    add_generation_prompt = _flag(record, "add_generation_prompt", default=True)
    continues = _flag(record, "continue_final_message", default=False)
    if continues and add_generation_prompt:
        _refuse(
            "continue_final_message and add_generation_prompt are not compatible. To continue the final message, set "
            "add_generation_prompt to false; to start a new message, remove continue_final_message"
        )
    return ChatOptions(add_generation_prompt, continues, _tools(record), _variables(record))


def refuse_chat_options(record: Mapping[str, object]) -> None:
    """Raise RowError (`unsupported_parameter`) if a line without messages has a key that would change them."""
    for key, neutral in CHAT_KEYS.items():
        value = record.get(key)
        if value is not None and not any(type(value) is type(off) and value == off for off in neutral):
            what = f"{key} = {show_value(value)} needs messages, which a chat template renders"
            raise RowError("unsupported_parameter", f"{what}; remove {key}")


def _flag(record: Mapping[str, object], key: str, *, default: bool) -> bool:
    value = record.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        _refuse(f"{key} is {kind_of(value)}; it must be true or false")
    return value


def _variables(record: Mapping[str, object]) -> dict[str, object]:
    value = record.get("chat_template_kwargs")
    if value is not None and not (isinstance(value, dict) and all(isinstance(name, str) for name in value)):
        _refuse(f"chat_template_kwargs is {kind_of(value)}; it must be an object with names as its keys")
    variables = dict(value or {})
    check_variables(variables)
    effort = record.get("reasoning_effort")
    if effort is None:
        return variables
    if not isinstance(effort, str):
        _refuse(f"reasoning_effort is {kind_of(effort)}; it must be a string, such as low")
    if variables.setdefault("reasoning_effort", effort) != effort:
        _refuse("reasoning_effort is given twice, also in chat_template_kwargs; keep one")
    return variables


def _tools(record: Mapping[str, object]) -> tuple[Mapping[str, object], ...]:
    """Return the functions that the model may call; none if `tool_choice` is "none"."""
    tools, choice = record.get("tools"), record.get("tool_choice")
    if tools is None:
        tools = []
    if not isinstance(tools, list):
        _refuse(f"tools is {kind_of(tools)}; it must be a list")
    for position, tool in enumerate(tools):
        _check_tool(f"tools[{position}]", tool)
    parallel = _flag(record, "parallel_tool_calls", default=True)
    if choice == "none":
        return ()
    if choice is not None and choice != "auto":
        _refuse_forced("tool_choice", choice, '"auto" or "none"')
    if choice is not None and not tools:
        _refuse('tool_choice is "auto"; it needs tools')
    if tools and not parallel:
        _refuse_forced("parallel_tool_calls", parallel, "true")
    return tuple(tools)


def _check_tool(where: str, tool: object) -> None:
    if not isinstance(tool, dict):
        _refuse(f"{where} is {kind_of(tool)}; it must be an object")
    if tool.get("type") != "function":
        kind = show_value(tool.get("type"))
        raise RowError("unsupported_parameter", f'{where}.type is {kind}; it must be "function"')
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        _refuse(f"{where}.function must be an object with a name")
    parameters = function.get("parameters")
    if not (parameters is None or isinstance(parameters, dict)):
        _refuse(f"{where}.function.parameters is {kind_of(parameters)}; it must be an object")


def _refuse_forced(key: str, value: object, wanted: str) -> NoReturn:
    shown = show_value(value)
    reason = f"{key} is {shown}; it must be {wanted}, because calls are not forced or limited during generation"
    raise RowError("unsupported_parameter", reason)


def _refuse(message: str) -> NoReturn:
    raise RowError("invalid_parameter", message)
