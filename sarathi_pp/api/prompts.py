"""The prompts that a Python program gives: text, token ids, or a dictionary with one of them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn, NotRequired, TypedDict, cast

from sarathi_pp.errors import ConfigError
from sarathi_pp.inputs.chat.options import read_chat_options
from sarathi_pp.inputs.line_keys import MOST_SALT
from sarathi_pp.inputs.parse import ParsedLine, is_salt
from sarathi_pp.sampling_params import SamplingParams


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
Messages = list[dict[str, object]]

_KEYS = ("prompt", "prompt_token_ids")
# Keys of other engines' prompts, and the reason why they are refused.
_OTHERS = {
    "multi_modal_data": "models read text only",
    "mm_processor_kwargs": "models read text only",
    "multi_modal_uuids": "models read text only",
    "prompt_embeds": "a prompt is text or token ids",
}


def prompt_lines(prompts: Prompt | Sequence[Prompt]) -> list[ParsedLine]:
    """Return one parsed line per prompt. The form is that of input lines, so both are handled in the same way.

    Raises:
        ConfigError: the argument is neither a prompt nor a list of prompts.
    """
    if isinstance(prompts, (str, Mapping)):
        return [_prompt_line(prompts)]
    if not isinstance(prompts, Sequence):
        raise ConfigError(f"prompts is {prompts!r:.60}. Give a string, token ids, or a list of them")
    if prompts and isinstance(prompts[0], int):
        return [_prompt_line(prompts)]
    return [_prompt_line(prompt) for prompt in prompts]


def chat_lines(messages: Messages | Sequence[Messages], options: Mapping[str, object]) -> list[ParsedLine]:
    """Return one parsed line per conversation. The messages are not checked.

    Args:
        options: settings of the chat template for all conversations, by the keys of an input line.

    Raises:
        RowError: a setting is not legal, or not supported.
    """
    chat = read_chat_options(options)
    if messages and isinstance(messages[0], dict):
        return [ParsedLine(0, None, "own", messages=cast(Messages, messages), chat=chat)]
    return [ParsedLine(0, None, "own", messages=one, chat=chat) for one in cast(Sequence[Messages], messages)]


def params_of_each(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams | None]:
    """Return the sampling parameters of each of `count` prompts; None for a prompt that gets the model's defaults.

    Raises:
        ConfigError: the argument has a wrong type, or the number of parameters is not `count`.
    """
    if given is None or isinstance(given, SamplingParams):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(params, SamplingParams) for params in given):
        raise ConfigError(f"sampling_params is {given!r:.60}. Give SamplingParams(...), or a list of them")
    if len(given) != count:
        raise ConfigError(
            f"{len(given)} sampling_params were given for {count} prompts. Give one for all, or one per prompt"
        )
    return given


def _prompt_line(prompt: object) -> ParsedLine:
    if isinstance(prompt, Mapping):
        return replace(_prompt_line(_content(prompt)), cache_salt=_salt(prompt.get("cache_salt")))
    if isinstance(prompt, str):
        return ParsedLine(0, None, "own", prompt=prompt)
    try:
        return ParsedLine(0, None, "own", prompt_token_ids=tuple(map(operator.index, prompt)))  # type: ignore[call-overload]
    except TypeError:
        _refuse(prompt)


def _content(prompt: Mapping[str, object]) -> object:
    """Return the text or the token ids that the dictionary of a prompt holds."""
    given = {key: value for key, value in prompt.items() if value is not None and key != "cache_salt"}
    for key in given:
        if key in _OTHERS:
            raise ConfigError(f"a prompt has {key!r}, which is not supported: {_OTHERS[key]}. Remove it")
        if key not in _KEYS:
            raise ConfigError(f"a prompt has the unknown key {key!r}. Its keys are prompt or prompt_token_ids")
    if len(given) != 1:
        held = " and ".join(given) or "neither prompt nor prompt_token_ids"
        raise ConfigError(f"a prompt has {held}. Give one of prompt and prompt_token_ids")
    (content,) = given.values()
    if isinstance(content, str) != ("prompt" in given) or isinstance(content, Mapping):
        _refuse(prompt)
    return content


def _salt(value: object) -> str:
    if value is None:
        return ""
    if not is_salt(value):
        raise ConfigError(f"a prompt has the cache_salt {value!r:.60}. Give a text of 1 to {MOST_SALT} characters")
    return str(value)


def _refuse(prompt: object) -> NoReturn:
    raise ConfigError(
        f"prompts holds {prompt!r:.60}. Each prompt must be a string, a list of token ids, or a dictionary with prompt "
        f"or prompt_token_ids"
    ) from None
