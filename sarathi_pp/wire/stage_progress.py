"""The progress of a rank's stage, which its heartbeats report."""

from __future__ import annotations

from typing import Protocol

from sarathi_pp.wire.codec import Heartbeat


class CountsLayers(Protocol):
    @property
    def steps(self) -> int:
        """Layers computed so far. Other threads read it while a microbatch is computed."""
        ...


class StageProgress:
    """Counts the microbatches that a stage has finished.

    It is made before the edges and before the stage runner: the runner counts, and senders report it on their own
    threads, so that the other end can tell a slow stage from one that hangs.

    Args:
        stage: counts its layers itself.
    """

    def __init__(self, stage: CountsLayers) -> None:
        self._stage = stage
        self.num_done = 0
        self.busy = False  # it computes a microbatch now

    def heartbeat(self) -> Heartbeat:
        """Return what a heartbeat says now."""
        return Heartbeat(self.num_done, self.busy, self._stage.steps)
