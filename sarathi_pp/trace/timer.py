"""Points in a device's work, and the times at which the device reaches them.

A GPU does its work later than the program launches it. So the time of a point may be known only later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sarathi_pp.trace.clock import Clock


class Mark(Protocol):
    """A point in the device's work."""

    def at_s(self) -> float | None:
        """Return the time when the device reached this point, on this rank's clock; None before that. Never wait."""
        ...

    def wait(self) -> None:
        """Wait until the device has reached this point."""
        ...


class Timer(Protocol):
    def mark(self) -> Mark:
        """Return the point after all work that the device was given so far."""
        ...


@dataclass(frozen=True, slots=True)
class HostTimer:
    """A timer for stages that compute on the CPU: their work is done when its call returns."""

    clock: Clock

    def mark(self) -> Mark:
        return Instant(self.clock.now())


@dataclass(frozen=True, slots=True)
class Instant:
    """A point in the past, whose time is known."""

    seconds: float

    def at_s(self) -> float:
        return self.seconds

    def wait(self) -> None:
        """Return at once, since the point is past."""
