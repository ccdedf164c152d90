"""Ids of rows: any JSON value, each known by 8 bytes that stand for it."""

from __future__ import annotations

import json
from hashlib import blake2b

# The code of an error line for a row whose id an earlier row has.
DUPLICATE_ID = "duplicate_id"


def id_key(id: object) -> int:
    """8 bytes that stand for an id, so that memory does not follow its length.

    Ids are equal by type and value: 1, 1.0, "1" and true are four.
    """
    text = json.dumps(id, sort_keys=True)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class SeenIds:
    """The ids of a file so far, as their keys."""

    def __init__(self) -> None:
        self._lines: dict[int, int] = {}

    def first_line(self, id: object, line: int) -> int | None:
        """The line that had this id before, or None; then `line` has it from now on."""
        earlier = self._lines.setdefault(id_key(id), line)
        return None if earlier == line else earlier
