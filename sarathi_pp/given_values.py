"""Values that a Python program gives: their kinds, and the names that it may have meant."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str], listed_by: str) -> str:
    """Return the end of an error message about an unknown name: "; did you mean stop? ... lists all".

    Args:
        known: names that exist. The nearest one is suggested if it is near enough.
        listed_by: a command or call that lists all names.
    """
    nearest = get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {nearest[0]}? {listed_by} lists all" if nearest else f"; {listed_by} lists all"


def plain(value: object) -> object:
    """Return Python's own value for a number of numpy, a dtype or device of torch, or a path. Keep other values."""
    kind = type(value)
    if kind.__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()  # type: ignore[attr-defined]
    if kind.__module__ == "torch":
        return str(value).removeprefix("torch.")
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can write a text. It cannot write half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
