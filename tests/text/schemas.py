"""JSON schemas drawn at random, whose instances are short."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

_NAMES = ("a", "key", "\u00fc", 'q"', "x y", "$ref")
_CONSTANTS = (None, True, 0, -3, 2.5, "", "yes", "line\nbreak", [1, "b"], {"k": None})


def random_schema(seed: int) -> Schema:
    """Return the schema of a seed. It allows no white space between tokens."""
    draw = random.Random(seed)
    schema = _schema(draw, 2)
    if draw.random() < 0.3:
        definitions = {"one": _schema(draw, 1), "two": {"type": ["boolean", "null"]}}
        members = {"first": {"$ref": "#/$defs/one"}, "second": {"$ref": "#/$defs/two"}, "third": schema}
        schema = _closed(members, list(members)) | {"$defs": definitions}
    return schema | {"x-guidance": {"whitespace_flexible": False}}


def _schema(draw: random.Random, depth: int) -> Schema:
    makers = [_enum, _const, _integer, _number, _string, _pattern, _format, _simple]
    if depth:
        makers += [_object, _object, _array, _any_of, _map, _tuple]
    return draw.choice(makers)(draw, depth)


def _enum(draw: random.Random, _: int) -> Schema:
    return {"enum": draw.sample(_CONSTANTS, draw.randint(1, 4))}


def _const(draw: random.Random, _: int) -> Schema:
    return {"const": draw.choice(_CONSTANTS)}


def _integer(draw: random.Random, _: int) -> Schema:
    low = draw.randint(-200, 200)
    return {"type": "integer", _low(draw): low, _high(draw): low + draw.randint(2, 500)}


def _number(draw: random.Random, _: int) -> Schema:
    low = round(draw.uniform(-50, 50), 2)
    return {"type": "number", _low(draw): low, _high(draw): low + draw.randint(1, 30)}


def _low(draw: random.Random) -> str:
    return draw.choice(["minimum", "exclusiveMinimum"])


def _high(draw: random.Random) -> str:
    return draw.choice(["maximum", "exclusiveMaximum"])


def _string(draw: random.Random, _: int) -> Schema:
    low = draw.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 5)}


def _pattern(draw: random.Random, _: int) -> Schema:
    return {"type": "string", "pattern": draw.choice(["^[a-f]{1,4}$", r"^\d{2}-\d{2}$", "^(ab|c)?d$", r"^\w{3}$"])}


def _format(draw: random.Random, _: int) -> Schema:
    return {"type": "string", "format": draw.choice(["ipv4", "uuid"])}


def _simple(draw: random.Random, _: int) -> Schema:
    return {"type": draw.choice(["boolean", "null", ["boolean", "null"], ["null", "boolean"]])}


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(_NAMES, draw.randint(1, 3))
    required = [name for name in names if draw.random() < 0.6]
    return _closed({name: _schema(draw, depth - 1) for name in names}, required)


def _closed(properties: dict[str, Schema], required: list[str]) -> Schema:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _map(draw: random.Random, _: int) -> Schema:
    """Return a schema of any keys with values of one kind. The number of keys is bounded."""
    return {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": draw.randint(1, 2)}


def _array(draw: random.Random, depth: int) -> Schema:
    low = draw.randint(0, 1)
    return {
        "type": "array", "items": _schema(draw, depth - 1), "minItems": low, "maxItems": low + draw.randint(0, 2)
    }  # fmt: skip


def _tuple(draw: random.Random, depth: int) -> Schema:
    items = [_schema(draw, depth - 1) for _ in range(2)]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": 2, "maxItems": 2}


def _any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(draw, depth - 1) for _ in range(draw.randint(2, 3))]}
