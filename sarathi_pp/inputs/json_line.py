"""The JSON that an input line may hold: of limited size and depth, without repeated keys, NaN or infinity."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import NoReturn

# Most levels of lists and objects in an id.
DEEPEST_ID = 32
# Most levels in a line. Python reads each level with a nested call, so this is far below Python's limit of such calls.
DEEPEST_LINE = 128
# Most strings, lists and objects in a line. Each takes at least 100 bytes in memory, even if it is one byte in the
# line.
MOST_PARTS = 2**18
# A shorter line is not counted.
_FEW_PARTS_BYTES = 2**20
# The start of a list or object, or a whole string. The pattern never goes back, so any line takes one pass.
_PART = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]', re.DOTALL)


def has_too_many_parts(data: bytes) -> bool:
    """Return whether a line would take too much memory as JSON values. Call it before `read_json`.

    In memory, strings, lists and objects may take 27 times their bytes in the line. Numbers, such as token ids, take
    far less.
    """
    return len(data) > _FEW_PARTS_BYTES and any(True for _ in islice(_PART.finditer(data), MOST_PARTS, None))


def read_json(text: str) -> object:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not legal JSON, repeats a key in an object, or holds NaN or Infinity.
        RecursionError: its lists and objects nest too deep.
    """
    return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)


def read_damaged_json(data: bytes) -> object:
    """Return the value of a JSON text in which some bytes are not UTF-8. Each such byte becomes a lone surrogate.

    Raises:
        ValueError: the text is not legal JSON.
        RecursionError: its lists and objects nest too deep.
    """
    return json.loads(data.decode("utf-8", "surrogateescape"), parse_constant=_refuse_constant)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) != len(pairs):
        # The key is left out: it may be a prompt, and the message is logged.
        raise ValueError("a key occurs twice in one object")
    return record


def is_finite(value: object) -> bool:
    """Return whether every number in a JSON value is finite. JSON's 1e999 is read as infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def nests_deep(value: object, most: int = DEEPEST_ID) -> bool:
    """Return whether the lists and objects of a JSON value nest deeper than `most` levels.

    The default is the limit of an id. It is lower than that of a line, because an id is also written and read again.
    There, more nested calls of Python may be in use already.
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
    """Return whether all strings in a JSON value are Unicode text.

    A string is not if it holds a lone surrogate, which `read_damaged_json` puts in place of a byte that is not UTF-8.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def kind_of(value: object) -> str:
    """Return the kind of a JSON value for an error message, such as "a list"."""
    if value is None:
        return "missing or null"
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return kinds.get(type(value), "a number")


def show_value(value: object) -> str:
    """Return a value as JSON of at most 60 characters, for an error message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
