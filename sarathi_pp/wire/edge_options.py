"""Options that all edges of one rank share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sarathi_pp.errors import SarathiError
from sarathi_pp.wire.channel import Clock
from sarathi_pp.wire.stage_progress import StageProgress

# Most seconds between heartbeats.
_HEARTBEAT_S = 1.0
# Least number of heartbeats per --peer-timeout. With only one, a late heartbeat would make a rank seem lost.
_NUM_HEARTBEATS = 3


class LossListener(Protocol):
    def report_loss(self, error: SarathiError) -> None:
        """Handle an error that ended an edge. The thread that noticed the error calls this."""
        ...


class IgnoreLosses:
    """A listener that does nothing. Losing one of several replicas does not end the process.

    The next read or write on that edge raises.
    """

    def report_loss(self, error: SarathiError) -> None: ...


@dataclass(frozen=True, slots=True)
class EdgeOptions:
    """The settings that are the same for all edges of a rank."""

    clock: Clock
    progress: StageProgress  # heartbeats report it
    losses: LossListener
    peer_timeout_s: float  # most seconds for which the other end may be silent, or compute one layer

    @property
    def heartbeat_s(self) -> float:
        """Seconds without a message after which a sender sends a heartbeat."""
        return heartbeat_s(self.peer_timeout_s)


def heartbeat_s(peer_timeout_s: float) -> float:
    """Return the seconds between heartbeats of a rank that may be silent for `peer_timeout_s` seconds."""
    return min(_HEARTBEAT_S, peer_timeout_s / _NUM_HEARTBEATS)
