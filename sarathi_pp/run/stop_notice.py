"""What a run says at the first signal: a user who sees nothing presses Ctrl-C again, and loses what runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from signal import Signals as Signal

from sarathi_pp.engine.progress import Progress
from sarathi_pp.process.signals import DRAIN_S, Asked


class StopNotice:
    """Passes snapshots on, and knows from the last one how many requests a stopped run still finishes."""

    def __init__(self, observe: Callable[[Progress], None], note: Callable[[str], None]) -> None:
        self._observe = observe
        self._note = note
        self._num_running: int | None = None

    def observe(self, snapshot: Progress) -> None:
        self._num_running = snapshot.running
        self._observe(snapshot)

    def say(self, asked: Asked) -> None:
        """Say what the run does now. Any thread may call it."""
        self._note(stop_text(asked, self._num_running))


def stop_text(asked: Asked, num_running: int | None) -> str:
    """num_running: None if it is not known yet."""
    counted = "running requests are" if num_running is None else f"{num_running} running requests are"
    counted = "1 running request is" if num_running == 1 else counted
    if asked.until_s == math.inf:
        return f"stopping: {counted} finished first; Ctrl-C again ends at once"
    name = Signal(asked.number).name
    return f"stopping ({name}): {counted} finished first, for up to {DRAIN_S:g} s; another signal ends at once"
