"""Options that all edges of one rank share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sarathi_pp.errors import SarathiError
from sarathi_pp.wire.channel import Clock
from sarathi_pp.wire.stage_progress import StageProgress

_HEARTBEAT_S = 1.0
# Per time for which a peer may be silent, so that one late heartbeat is no loss.
_NUM_HEARTBEATS = 3


class LossListener(Protocol):
    def report_loss(self, error: SarathiError) -> None:
        """Handle the end of an edge. The thread that noticed the error calls it."""
        ...


class IgnoreLosses:
    """Does nothing. Losing one of several replicas ends no process: the next read or write on that edge raises."""

    def report_loss(self, error: SarathiError) -> None: ...


@dataclass(frozen=True, slots=True)
class EdgeOptions:
    """Everything that edges need to know besides what they carry."""

    clock: Clock
    progress: StageProgress  # heartbeats report it
    losses: LossListener
    peer_timeout_s: float  # how long the other end may be silent, or compute one layer

    @property
    def heartbeat_s(self) -> float:
        """A sender that has sent nothing for this long sends a heartbeat."""
        return heartbeat_s(self.peer_timeout_s)


def heartbeat_s(peer_timeout_s: float) -> float:
    """Return how often a rank sends heartbeats if its peers may be silent for `peer_timeout_s`."""
    return min(_HEARTBEAT_S, peer_timeout_s / _NUM_HEARTBEATS)
