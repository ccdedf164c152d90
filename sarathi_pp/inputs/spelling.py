"""A search for the known key that a user may have meant by an unknown key."""

from __future__ import annotations

import re
from functools import lru_cache

# Suffixes with which people mark their own columns: `seed1` and `prompt_b` are not misspelt `seed` and `prompt`.
_NUMBERED = re.compile(r"_?[0-9]+|_[a-z]")


@lru_cache(maxsize=1024)  # the lines of a file have the same keys
def nearest_key(key: str, known: tuple[str, ...]) -> str | None:
    """Return the known key from which `key` differs by one typing mistake, or by upper case; None if there is none."""
    lower = key.lower()
    for meant in known:
        if len(meant) < 4 or (lower.startswith(meant) and _NUMBERED.fullmatch(lower[len(meant) :])):
            continue
        if lower == meant or _is_one_mistake(lower, meant):
            return meant
    return None


def _is_one_mistake(written: str, meant: str) -> bool:
    """Return whether `written` differs from `meant` by one mistake.

    One mistake is a character that is missing, added or wrong, or two neighbours that are swapped. Many ordinary words
    are near to a short key: `step` and `top` to `stop`, `need` and `speed` to `seed`. So for keys of less than six
    characters, only a swap, a doubled character, a missing underscore and a plural count as a mistake.
    """
    shorter = min(len(written), len(meant))
    same = next((at for at in range(shorter) if written[at] != meant[at]), shorter)
    left, right = written[same:], meant[same:]
    swapped = len(left) >= 2 and left[:2] == right[1::-1] and left[2:] == right[2:]
    added, missing = left[1:] == right, left == right[1:]
    if len(meant) >= 6:
        return swapped or added or missing or left[1:] == right[1:]
    doubled = added and (written[same - 1 : same] == left[:1] or (left == "s" and not right))
    return swapped or doubled or (missing and right.startswith("_"))
