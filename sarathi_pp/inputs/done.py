"""The input lines that already have an output line of an earlier start."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from sarathi_pp.inputs.ids import DUPLICATE_ID, KeyMap, id_key


@dataclass(slots=True)
class Done:
    """The input lines that have an output line of an earlier start.

    They are taken out while the same input is read again, in order.

    Attributes:
        answered: by key of the id, 1 if its first input line is done, even with an error.
        duplicates: by key of the id, the number of error lines of its later input lines.
        nameless: by key of the line number, 1 if the error line of this input line has no id of its own.
        num_rows: number of output lines.
        num_errors: number of error lines.
        num_duplicates: number of error lines of an id's later input lines.
    """

    answered: KeyMap = field(default_factory=KeyMap)
    duplicates: KeyMap = field(default_factory=KeyMap)
    nameless: KeyMap = field(default_factory=KeyMap)
    num_rows: int = 0
    num_errors: int = 0
    num_duplicates: int = 0

    def add(self, line: DoneLine) -> None:
        self.num_rows += 1
        self.num_errors += line.code is not None
        if line.nameless is not None:
            key = id_key(line.nameless)
            if self.nameless.get(key):
                raise ValueError(f"it is the second line for line {line.nameless} of the input")
            self.nameless.put(key, 1)
        elif line.code == DUPLICATE_ID:
            self.num_duplicates += 1
            self.duplicates.put(line.key, self.duplicates.get(line.key) + 1)
        elif self.answered.get(line.key):
            raise ValueError("it is the second line for its id")
        else:
            self.answered.put(line.key, 1)

    def take(self, id: object, *, first: bool) -> bool:
        """Return whether an input line has its output line, and take that out.

        Args:
            first: True if no earlier input line has this id.
        """
        return _take(self.answered if first else self.duplicates, id)

    def take_nameless(self, line: int) -> bool:
        """Return the same for an input line whose id is unknown, by its number."""
        return _take(self.nameless, line)


def _take(counts: KeyMap, id: object) -> bool:
    """Lower the count of an id by one. Return False if it has none."""
    if not len(counts):
        return False
    key = id_key(id)
    if count := counts.get(key):
        counts.put(key, count - 1)
    return count > 0


@dataclass(frozen=True, slots=True)
class DoneLine:
    """An output line.

    Attributes:
        key: key of its id.
        code: code of its error; None for an answer.
        nameless: number of the input line if its id is unknown, otherwise None. See Done.
    """

    key: int
    code: str | None
    nameless: int | None

    @classmethod
    def parse(cls, data: bytes) -> DoneLine:
        """Return the output line in these bytes.

        Raises:
            ValueError: they are not an output line.
        """
        record = json.loads(data)
        if not isinstance(record, dict) or "id" not in record:
            raise ValueError("it is not a JSON object with an id")
        error = record.get("error")
        code, nameless = (error.get("code"), error.get("line")) if isinstance(error, dict) else (None, None)
        key = id_key(record["custom_id"] if "custom_id" in record else record["id"])
        return cls(key, code, nameless if isinstance(nameless, int) else None)
