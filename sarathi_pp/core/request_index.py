"""The index of a request, and its name in schedules: `3` for input line 4, `3/1` for the second choice of that line."""

from __future__ import annotations

# The index grows by this with each choice of an input line.
NEXT_CHOICE = 1 << 32
# A sequence in the text of a schedule: its line, and its choice unless that is the first one.
SEQUENCE_PATTERN = r"s(\d+)(?:/(\d+))?"


def index_name(index: int) -> str:
    """Return the name of a request."""
    if index < NEXT_CHOICE:
        return str(index)
    choice, line = divmod(index, NEXT_CHOICE)
    return f"{line}/{choice}"


def index_of(line: str, choice: str | None) -> int:
    """Return the index of a request from the two parts of its name, the groups of SEQUENCE_PATTERN."""
    return int(line) + int(choice or 0) * NEXT_CHOICE
