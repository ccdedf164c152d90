"""Which rows of an input already have a line in the output of an earlier start."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from sarathi_pp.inputs.ids import DUPLICATE_ID, KeyMap, id_key


@dataclass(slots=True)
class Done:
    """The rows that have a line from an earlier start. Taken out as the input is read: the same rows, in order.

    answered: 1 for each id whose first row is done, with an error too. duplicates: number of error lines of an id's
    later rows. nameless: 1 for each line of the input whose error line has no id of its own. All three by key.
    num_rows: output lines. num_errors: error lines. num_duplicates: error lines of an id's later rows.
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
                raise ValueError(f"it is the second one for line {line.nameless} of the input")
            self.nameless.put(key, 1)
        elif line.code == DUPLICATE_ID:
            self.num_duplicates += 1
            self.duplicates.put(line.key, self.duplicates.get(line.key) + 1)
        elif self.answered.get(line.key):
            raise ValueError("it is the second one for its id")
        else:
            self.answered.put(line.key, 1)

    def take(self, id: object, *, first: bool) -> bool:
        """Whether this row has its line. first: no earlier row of the input has that id."""
        return _take(self.answered if first else self.duplicates, id)

    def take_nameless(self, line: int) -> bool:
        """The same of a row whose id nobody can tell: that of this line."""
        return _take(self.nameless, line)


def _take(counts: KeyMap, id: object) -> bool:
    """Lower the count of an id by one; False if it has none."""
    if not len(counts):
        return False
    key = id_key(id)
    if count := counts.get(key):
        counts.put(key, count - 1)
    return count > 0


@dataclass(frozen=True, slots=True)
class DoneLine:
    """An output line: the key of its id, and the code of its error, None for an answer. nameless: see Done."""

    key: int
    code: str | None
    nameless: int | None

    @classmethod
    def parse(cls, data: bytes) -> DoneLine:
        """Raises ValueError."""
        record = json.loads(data)
        if not isinstance(record, dict) or "id" not in record:
            raise ValueError("it is no JSON object with an id")
        error = record.get("error")
        code, nameless = (error.get("code"), error.get("line")) if isinstance(error, dict) else (None, None)
        key = id_key(record["custom_id"] if "custom_id" in record else record["id"])
        return cls(key, code, nameless if isinstance(nameless, int) else None)
