"""The interface through which a run shows text to its user, and the notice after the first signal.

The notice appears at once. If nothing appeared after Ctrl-C, the user would press it again, and lose the running
requests.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from signal import Signals as Signal
from typing import TYPE_CHECKING, Any, Protocol

from sarathi_pp.engine.progress import Progress, RunListener
from sarathi_pp.process.activity import Activity
from sarathi_pp.process.signals import DRAIN_S, Asked

if TYPE_CHECKING:
    from sarathi_pp.run.finished_run import FinishedRun


class Display(Protocol):
    """A view of a run for its user. Only rank 0 and the first rank of each other host show more than errors.

    Attributes:
        activity: the current phase of this process. It is shown while nothing else is shown.
    """

    @property
    def activity(self) -> Activity: ...
    def warn(self, text: str) -> None: ...
    def note(self, text: str) -> None:
        """Show a line, even with --quiet."""
        ...

    def say(self, text: str) -> None:
        """Show a line, unless the user asked for --quiet."""
        ...

    def error(self, text: str) -> None: ...
    def progress(
        self, num_stages: int, total: int | None = None, done_before: int = 0
    ) -> AbstractContextManager[RunListener]:
        """Show the progress of a run inside the block. Yield the listener that gets this progress.

        Args:
            num_stages: number of stages of all replicas.
            total: number of requests of the whole input; None if it is not known.
            done_before: number of these requests that earlier starts have finished.
        """
        ...

    def show(self, report: dict[str, Any]) -> None: ...


class BatchDisplay(Display, Protocol):
    """A view of a batch for its user."""

    def fold(self, finished: FinishedRun) -> dict[str, Any]:
        """Make the report of the run from its traces, write it to the run directory, and return it."""
        ...

    def nothing_left(self, num_rows: int, num_errors: int) -> None:
        """Show that the output already has a line for every input line: num_rows lines, num_errors of them errors."""
        ...


class StopNotice:
    """A listener that passes reports on to another one, and remembers the number of running requests.

    A stopped run still finishes these requests, so the notice gives their number.
    """

    def __init__(self, listener: RunListener, display: Display) -> None:
        self._listener = listener
        self._display = display
        self._num_running: int | None = None

    def report_progress(self, progress: Progress) -> None:
        self._num_running = progress.running
        self._listener.report_progress(progress)

    def warn(self, text: str) -> None:
        self._listener.warn(text)

    def say(self, asked: Asked) -> None:
        """Inform the user that the run stops, and how. Any thread may call this."""
        self._display.note(stop_text(asked, self._num_running))


def stop_text(asked: Asked, num_running: int | None) -> str:
    """Return the notice for a signal.

    Args:
        num_running: number of requests that are finished first; None if it is not known yet.
    """
    counted = "running requests are" if num_running is None else f"{num_running} running requests are"
    counted = "1 running request is" if num_running == 1 else counted
    if asked.until_s == math.inf:
        return f"stopping: {counted} finished first; Ctrl-C again ends at once"
    name = Signal(asked.number).name
    return f"stopping ({name}): {counted} finished first, for up to {DRAIN_S:g} s; another signal ends at once"
