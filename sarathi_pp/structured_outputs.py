"""The grammar that an output must match, as the user gives it: a JSON schema, a regex, choices or a Lark grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from sarathi_pp.errors import RowError
from sarathi_pp.given_values import is_unicode

_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_MOST_CHOICES = 1024
_WANTED = f"an object with exactly one of {', '.join(_KINDS)}, and optionally start_after"


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The grammar of one request. The names are those of vLLM's StructuredOutputsParams.

    Args:
        kind: json, regex, choice or grammar.
        text: the JSON schema as JSON, the regex, the choices as a JSON list, or the Lark grammar.
        start_after: token after which the grammar begins, such as "</think>". The output before it is free. None: the
            grammar begins at the first token of the output.
    """

    kind: str
    text: str
    start_after: str | None = None

    @classmethod
    def read(cls, value: object) -> StructuredOutputs:
        """Return the grammar of an object such as {"regex": "[0-9]+"}. Raise RowError if it is not legal."""
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping) and value.keys() == {"kind", "text", "start_after"}:  # from dataclasses.asdict
            value = cls(**value).to_object()
        given = {key: one for key, one in value.items() if one is not None} if isinstance(value, Mapping) else {}
        start_after = given.pop("start_after", None)
        _require(len(given) == 1 and next(iter(given)) in _KINDS, "structured_outputs", value, _WANTED)
        kind, content = next(iter(given.items()))
        legal = start_after is None or (isinstance(start_after, str) and start_after != "")
        _require(legal, "structured_outputs.start_after", start_after, "the text of a token")
        kind, text = _text(kind, content)
        _require(is_unicode(text), f"structured_outputs.{kind}", text, "text that UTF-8 can write")
        return cls(kind, text, start_after)

    def to_object(self) -> dict[str, object]:
        """Return the object that `read` takes."""
        text = json.loads(self.text) if self.kind == "choice" else self.text
        return {self.kind: text} | ({} if self.start_after is None else {"start_after": self.start_after})


def _text(kind: str, content: object) -> tuple[str, str]:
    """Return the kind and the text of a grammar. json_object is the schema of any object."""
    name = f"structured_outputs.{kind}"
    if kind == "json_object":
        _require(content is True, name, content, "true")
        return "json", '{"type":"object"}'
    if kind == "json":
        return kind, _schema(name, content)
    if kind == "choice":
        legal = isinstance(content, (list, tuple)) and 0 < len(content) <= _MOST_CHOICES
        legal = legal and all(isinstance(one, str) and one and is_unicode(one) for one in content)  # type: ignore[attr-defined]
        _require(legal, name, content, f"a list of 1 to {_MOST_CHOICES} non-empty strings")
        return kind, json.dumps(content, ensure_ascii=False)
    _require(isinstance(content, str) and content != "", name, content, "a non-empty string")
    return kind, content  # type: ignore[return-value]


def _schema(name: str, content: object) -> str:
    wanted = "a JSON schema, an object or its text"
    try:
        schema = json.loads(content) if isinstance(content, str) else content
        _require(isinstance(schema, (Mapping, bool)), name, content, wanted)
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        shown = f"{content!r:.100}"
        raise RowError("invalid_parameter", f"{name} is {shown}; it must be {wanted}") from error


def _require(legal: bool, name: str, value: object, wanted: str) -> None:
    if not legal:
        raise RowError("invalid_parameter", f"{name} is {value!r:.200}; it must be {wanted}")
