"""The step from the grammar that a request names to the one that the stages which draw compile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from importlib.util import find_spec

from sarathi_pp.core.draw_rules import MOST_BYTES
from sarathi_pp.drawing.grammar import deep_executor, parser_limits
from sarathi_pp.errors import RowError
from sarathi_pp.structured_outputs import StructuredOutputs

# From a key of an input line to the key of `structured_outputs` that it means.
_ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_MOST_MESSAGE = 300


def structured_outputs(key: str, value: object) -> object:
    """Return the value of `structured_outputs` that another key with a grammar means.

    Raises:
        RowError: the value of response_format has another form.
    """
    if key in _ALIASES:
        return {_ALIASES[key]: value}
    if key != "response_format":
        return value
    match value:
        case {"type": "json_object", **others} if not others:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}, **others} if not others:
            return {"json": schema}
    wanted = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}'
    raise RowError("invalid_parameter", f"response_format is {json.dumps(value):.100}; it must be {wanted}")


def grammar_text(asked: StructuredOutputs) -> str:
    """Return a grammar in the form of llguidance, after a check.

    Raises:
        RowError: `unsupported_parameter` without the library, `invalid_grammar` with its message.
    """
    if len(asked.text.encode()) > MOST_BYTES:
        what = f"structured_outputs.{asked.kind} has {len(asked.text.encode())} bytes"
        raise RowError("invalid_parameter", f"{what}; the limit is {MOST_BYTES}. Give a shorter one")
    if find_spec("llguidance") is None:
        what = "structured_outputs is given, and the package llguidance is missing"
        raise RowError("unsupported_parameter", f"{what}; run pip install 'sarathi-pp[guided]'")
    grammar, problem = _executor().submit(_checked, asked).result()
    if problem:
        shown = f"{problem:.{_MOST_MESSAGE}}".strip()
        raise RowError("invalid_grammar", f"structured_outputs.{asked.kind} cannot be used as a grammar: {shown}")
    return grammar


@cache
def _executor() -> ThreadPoolExecutor:
    return deep_executor("check grammars")


@lru_cache(64)  # many requests have the same grammar
def _checked(asked: StructuredOutputs) -> tuple[str, str]:
    """Return a grammar in the form of llguidance, and what is wrong with it, if anything."""
    from llguidance import LLMatcher  # llguidance is optional

    try:
        if asked.kind == "json":
            grammar = LLMatcher.grammar_from_json_schema(asked.text)
        elif asked.kind == "regex":
            grammar = LLMatcher.grammar_from_regex(asked.text)
        else:
            lark = _choices(asked.text) if asked.kind == "choice" else asked.text
            grammar = LLMatcher.grammar_from_lark(lark)
        return grammar, LLMatcher.validate_grammar(grammar, limits=parser_limits())
    except ValueError as error:
        return "", str(error)


def _choices(text: str) -> str:
    """Return the Lark grammar of a JSON list of strings."""
    written = (json.dumps(one, ensure_ascii=False).replace("\x7f", "\\u007f") for one in json.loads(text))
    return "start: " + " | ".join(written)
