"""What a run shows its user, and what it says at the first signal.

A user who sees nothing after Ctrl-C presses it again, and loses what runs.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from signal import Signals as Signal
from typing import TYPE_CHECKING, Any, Protocol

from sarathi_pp.engine.progress import Progress, RunListener
from sarathi_pp.process.signals import DRAIN_S, Asked

if TYPE_CHECKING:
    from sarathi_pp.run.finished_run import FinishedRun


class Display(Protocol):
    """What a run shows while it runs. Only rank 0 talks, but for errors."""

    def warn(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...
    def error(self, text: str) -> None: ...
    def progress(self, num_stages: int) -> AbstractContextManager[RunListener]: ...
    def show(self, report: dict[str, Any]) -> None: ...


class BatchDisplay(Display, Protocol):
    """What a batch shows besides. fold: folds the run's traces into its report, which the run directory keeps."""

    def fold(self, finished: FinishedRun) -> dict[str, Any]: ...
    def nothing_left(self, num_rows: int, num_errors: int) -> None: ...


class StopNotice:
    """Passes reports on, and knows from the last progress how many requests a stopped run still finishes."""

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
        """Say what the run does now. Any thread may call it."""
        self._display.note(stop_text(asked, self._num_running))


def stop_text(asked: Asked, num_running: int | None) -> str:
    """num_running: None if it is not known yet."""
    counted = "running requests are" if num_running is None else f"{num_running} running requests are"
    counted = "1 running request is" if num_running == 1 else counted
    if asked.until_s == math.inf:
        return f"stopping: {counted} finished first; Ctrl-C again ends at once"
    name = Signal(asked.number).name
    return f"stopping ({name}): {counted} finished first, for up to {DRAIN_S:g} s; another signal ends at once"
