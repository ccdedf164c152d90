"""Who shows a run to its user."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from sarathi_pp.engine.progress import Progress

if TYPE_CHECKING:
    from sarathi_pp.run.rank import FinishedRun


class Display(Protocol):
    """Only rank 0 talks, but for errors.

    report: folds the run's traces, keeps the report and shows it. show: shows one that is finished.
    """

    def warn(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...
    def progress(self, num_stages: int) -> AbstractContextManager[Callable[[Progress], None]]: ...
    def report(self, finished: FinishedRun) -> dict[str, Any]: ...
    def show(self, report: dict[str, Any]) -> None: ...
    def nothing_left(self, num_rows: int, num_errors: int) -> None: ...
    def error(self, text: str) -> None: ...
