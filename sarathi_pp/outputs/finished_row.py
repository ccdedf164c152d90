"""A collector of the requests of an input line, which end one by one and share an output line."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sarathi_pp.core.request import Completion
from sarathi_pp.errors import RowError
from sarathi_pp.inputs.row import Row


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended, with its completion or its error. Or an input line that cannot run, with its error.

    Attributes:
        metrics: see `Sink.finish`.
    """

    row: Row
    completion: Completion | None = None
    metrics: Mapping[str, object] | None = None
    error: RowError | None = None

    @property
    def answer(self) -> Completion:
        assert self.completion is not None, "this request has an error"
        return self.completion


class RowCollector:
    """A collector of ended requests until all choices of an input line have ended. Any thread may call it."""

    def __init__(self) -> None:
        self._ended: dict[int, list[EndedRequest]] = {}  # by number of the input line
        self._lock = threading.Lock()

    def add(self, ended: EndedRequest) -> list[EndedRequest]:
        """Return all choices of an input line, in order, if this one was the last to end. Otherwise return none."""
        row = ended.row
        if row.num_choices == 1:
            return [ended]
        with self._lock:
            choices = self._ended.setdefault(row.line, [])
            choices.append(ended)
            if len(choices) < row.num_choices:
                return []
            del self._ended[row.line]
        return sorted(choices, key=lambda one: one.row.choice)


def row_error(choices: Sequence[EndedRequest]) -> RowError | None:
    """Return the error of an input line, which is that of its first choice with an error; None if there is none."""
    if len(choices) == 1:
        return choices[0].error
    for place, one in enumerate(choices):
        if one.error is not None:
            return RowError(one.error.code, f"choice {place} of {len(choices)}: {one.error.message}")
    return None
