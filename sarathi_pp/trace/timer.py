"""Points in a device's work. A GPU runs behind the program that feeds it: when it came to one is told later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sarathi_pp.trace.clock import Clock


class Mark(Protocol):
    """A point in the device's work."""

    def at_s(self) -> float | None:
        """When the device came to it, on this rank's clock; None while it has not. Never waits."""
        ...

    def wait(self) -> None:
        """Until the device has come to it."""
        ...


class Timer(Protocol):
    def mark(self) -> Mark:
        """The point behind all work that was given to the device so far."""
        ...


@dataclass(frozen=True, slots=True)
class HostTimer:
    """Where the program itself computes, work is done when it has been called."""

    clock: Clock

    def mark(self) -> Mark:
        return Instant(self.clock.now())


@dataclass(frozen=True, slots=True)
class Instant:
    """A point in the work of the host, which is over."""

    seconds: float

    def at_s(self) -> float:
        return self.seconds

    def wait(self) -> None:
        """It is over already."""
