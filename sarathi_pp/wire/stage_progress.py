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
    """The count of the microbatches that a stage has finished.

    It is made before the edges and before the stage runner. The runner counts, and the threads of the edges send the
    counts as heartbeats. So the other end can distinguish a slow stage from one that hangs.

    Args:
        stage: gives the number of layers computed so far.
    """

    def __init__(self, stage: CountsLayers) -> None:
        self._stage = stage
        self.num_done = 0
        self.busy = False  # it computes a microbatch now

    def heartbeat(self) -> Heartbeat:
        """Return a heartbeat with the present counts."""
        return Heartbeat(self.num_done, self.busy, self._stage.steps)
