"""The JSON that an input line may hold: bounded, without repeated keys, NaN or infinity."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import NoReturn

DEEPEST_ID = 32
# Far below Python's limit of nested calls, because messages and reading need some of them.
DEEPEST_LINE = 128
# A string, list or object takes at least 100 bytes in memory, and may take one byte in the line.
MOST_PARTS = 2**18
_FEW_PARTS_BYTES = 2**20
# Possessive, and with an optional closing quote, so that any line takes one pass.
_PART = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]', re.DOTALL)


def has_too_many_parts(data: bytes) -> bool:
    """Return whether a line would take too much memory as JSON values. Check it before the line is read.

    Strings, lists and objects may take 27 times their bytes. Numbers, such as token ids, take far less.
    """
    return len(data) > _FEW_PARTS_BYTES and any(True for _ in islice(_PART.finditer(data), MOST_PARTS, None))


def read_json(text: str) -> object:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not legal JSON.
        RecursionError: it nests too deep.
    """
    return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)


def read_damaged_json(data: bytes) -> object:
    """Return the value of JSON with bytes that are not UTF-8.

    Raises:
        ValueError: it is not legal JSON.
        RecursionError: it nests too deep.
    """
    return json.loads(data.decode("utf-8", "surrogateescape"), parse_constant=_refuse_constant)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) != len(pairs):
        # The key is left out: it may be a prompt, and the message is logged.
        raise ValueError("a key occurs twice in one object")
    return record


def is_finite(value: object) -> bool:
    """Return whether every number is finite: 1e999 is read as infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def nests_deep(value: object, most: int = DEEPEST_ID) -> bool:
    """Return whether a value nests deeper than `most` levels.

    An id is written and read again, possibly with less stack left, so its limit is lower than that of a line.
    """
    level = [value]
    for _ in range(most):
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        level = inner
        if not level:
            return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def is_text(value: object) -> bool:
    """Return whether no string holds a lone surrogate, which represents a byte that was not UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def kind_of(value: object) -> str:
    """Return the kind of a JSON value, for an error message."""
    if value is None:
        return "missing or null"
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return kinds.get(type(value), "a number")


def show_value(value: object) -> str:
    """Return a value as JSON, shortened for an error message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
