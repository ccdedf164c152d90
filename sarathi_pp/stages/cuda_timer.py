"""Points in the work of a CUDA stream, with their times on the host's clock, found without waiting for the device.

Two CUDA events give only the seconds between them, on the device's clock. Times on the host's clock are counted from an
anchor: the latest event whose host time is known. Two facts bound the result. The device reaches an event after the
host has recorded it, and before the host has seen that it is done. If the clocks drift apart, these bounds correct it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from sarathi_pp.trace.clock import Clock


class CudaEvent(Protocol):
    """The methods of torch.cuda.Event(enable_timing=True) that this module uses."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


def _new_event() -> CudaEvent:
    event: CudaEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


class CudaTimer:
    """A timer that marks points on the current stream of the current device. See the interface Timer.

    Only the constructor waits for the device. Ask the marks for their times in the order in which they were made,
    because each one becomes the anchor of the next.
    """

    def __init__(self, clock: Clock, new_event: Callable[[], CudaEvent] = _new_event) -> None:
        self.clock = clock
        self._new_event = new_event
        for _ in range(2):
            # The second time, the device has no work left, so it reaches the event as soon as the host records it.
            self._anchor, self._anchor_s = new_event(), clock.now()
            self._anchor.record()
            self._anchor.synchronize()

    def mark(self) -> CudaMark:
        event = self._new_event()
        recorded_s = self.clock.now()
        event.record()
        return CudaMark(self, event, recorded_s)

    def locate(self, event: CudaEvent, recorded_s: float) -> float:
        """Return the time of an event that the device has passed, on the host's clock.

        Args:
            recorded_s: time just before the host recorded the event.
        """
        at_s = self._anchor_s + 1e-3 * self._anchor.elapsed_time(event)
        at_s = min(max(at_s, recorded_s), self.clock.now())
        # elapsed_time is a 32-bit float of milliseconds, so the anchor must not be far in the past.
        self._anchor, self._anchor_s = event, at_s
        return at_s


class CudaMark:
    """A point in a stream's work, marked by a CUDA event. See the interface Mark."""

    def __init__(self, timer: CudaTimer, event: CudaEvent, recorded_s: float) -> None:
        self._timer = timer
        self._event = event
        self._recorded_s = recorded_s
        self._at_s: float | None = None

    def at_s(self) -> float | None:
        if self._at_s is None and self._event.query():
            self._at_s = self._timer.locate(self._event, self._recorded_s)
        return self._at_s

    def wait(self) -> None:
        self._event.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Make later work on a stream wait for this point."""
        stream.wait_event(self._event)  # type: ignore[arg-type]
