"""Points in a CUDA stream's work, told from its events without ever waiting for the device.

Two events tell the device's own seconds between them, nothing else. What they are on the host's clock follows from an
anchor, an event whose time is known, and from two facts: the device comes to an event after the host has recorded it
and before the host has seen it done. Where the two clocks drift apart, these bounds move the anchor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from sarathi_pp.trace.clock import Clock

# elapsed_time is a 32-bit float of milliseconds: near an anchor it resolves a microsecond.
_ANCHOR_FOR_S = 1.0


class CudaEvent(Protocol):
    """What is used of torch.cuda.Event with enable_timing."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


def _new_event() -> CudaEvent:
    event: CudaEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


class CudaTimer:
    """Marks on the current stream of the current device. Waits for the device once, when it is made.

    Marks must be asked in the order in which they were made.
    """

    def __init__(self, clock: Clock, new_event: Callable[[], CudaEvent] = _new_event) -> None:
        self.clock = clock
        self._new_event = new_event
        self._anchor = new_event()
        self._anchor.record()
        self._anchor.synchronize()
        self._anchor_s = clock.now()

    def mark(self) -> CudaMark:
        event = self._new_event()
        recorded_s = self.clock.now()
        event.record()
        return CudaMark(self, event, recorded_s)

    def locate(self, event: CudaEvent, recorded_s: float) -> float:
        """The host's time of an event that the device has passed."""
        elapsed_s = 1e-3 * self._anchor.elapsed_time(event)
        at_s = min(max(self._anchor_s + elapsed_s, recorded_s), self.clock.now())
        drifted = at_s != self._anchor_s + elapsed_s
        if drifted or elapsed_s > _ANCHOR_FOR_S:
            self._anchor, self._anchor_s = event, at_s
        return at_s


class CudaMark:
    """See Mark."""

    def __init__(self, timer: CudaTimer, event: CudaEvent, recorded_s: float) -> None:
        self._timer = timer
        self._event = event
        self._recorded_s = recorded_s
        self._at_s: float | None = None

    def at_s(self) -> float | None:
        if self._at_s is None and self._event.query():
            self._at_s = self._timer.locate(self._event, self._recorded_s)
        return self._at_s
