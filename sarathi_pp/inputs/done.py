"""The input lines that earlier starts of a run have already answered. `--resume` skips them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from sarathi_pp.inputs.ids import DUPLICATE_ID, KeyMap, id_key


@dataclass(slots=True)
class Done:
    """The input lines that have an output line of an earlier start.

    `add` counts the lines of the output file. Then the same input is read again, and `take` removes each line.

    Attributes:
        answered: maps the key of an id (`id_key`) to 1 if the first input line with this id has an output line. It may
            be an error line.
        duplicates: maps the key of an id to the number of error lines of later input lines with the same id.
        nameless: maps the key of a line number to 1 if this input line has an error line without an id, because its id
            could not be read.
        num_rows: number of output lines.
        num_errors: number of error lines among them.
        num_duplicates: number of error lines that report an id for a second time.
    """

    answered: KeyMap = field(default_factory=KeyMap)
    duplicates: KeyMap = field(default_factory=KeyMap)
    nameless: KeyMap = field(default_factory=KeyMap)
    num_rows: int = 0
    num_errors: int = 0
    num_duplicates: int = 0

    def add(self, line: DoneLine) -> None:
        """Count one output line.

        Raises:
            ValueError: an earlier output line answers the same input line.
        """
        self.num_rows += 1
        self.num_errors += line.code is not None
        if line.nameless is not None:
            key = id_key(line.nameless)
            if self.nameless.get(key):
                raise ValueError(f"line {line.nameless} of the input already has an answer")
            self.nameless.put(key, 1)
        elif line.code == DUPLICATE_ID:
            self.num_duplicates += 1
            self.duplicates.put(line.key, self.duplicates.get(line.key) + 1)
        elif self.answered.get(line.key):
            raise ValueError("an earlier line answers the same id")
        else:
            self.answered.put(line.key, 1)

    def take(self, id: object, *, first: bool) -> bool:
        """Return whether an input line has an output line, and remove that output line from the counts.

        Args:
            id: id of the input line.
            first: True if no earlier input line has this id.
        """
        return _take(self.answered if first else self.duplicates, id)

    def take_nameless(self, line: int) -> bool:
        """Do the same as `take` for an input line whose id could not be read.

        Args:
            line: number of the input line, from 1.
        """
        return _take(self.nameless, line)


def _take(counts: KeyMap, id: object) -> bool:
    """Lower the count of an id in this map by one. Return False if the id has no count."""
    if not len(counts):
        return False
    key = id_key(id)
    if count := counts.get(key):
        counts.put(key, count - 1)
    return count > 0


@dataclass(frozen=True, slots=True)
class DoneLine:
    """One line of the output file, without the answer's text.

    Attributes:
        key: key of the line's id (`id_key`).
        code: code of the error; None if the line is an answer.
        nameless: number of the input line, from 1, if its id could not be read; otherwise None.
    """

    key: int
    code: str | None
    nameless: int | None

    @classmethod
    def parse(cls, data: bytes) -> DoneLine:
        """Return the output line that these bytes hold.

        Raises:
            ValueError: the bytes are not an output line.
        """
        record = json.loads(data)
        if not isinstance(record, dict) or "id" not in record:
            raise ValueError("it is not a JSON object with an id")
        error = record.get("error")
        code, nameless = (error.get("code"), error.get("line")) if isinstance(error, dict) else (None, None)
        key = id_key(record["custom_id"] if "custom_id" in record else record["id"])
        return cls(key, code, nameless if isinstance(nameless, int) else None)
