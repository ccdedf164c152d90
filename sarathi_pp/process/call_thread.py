"""A thread that runs the calls of a long-lived object, one after the other.

    caller         submit ---- wait ------- KeyboardInterrupt: cancel, wait a little, raise
    this thread          `- work ..................................`- ends itself, tidies up

Python delivers signals to the main thread, between any two of its bytecodes. Work in another thread ends by its own
exceptions alone, so it can keep its state in order.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from sarathi_pp.trace.clock import SystemClock

# How often a caller that waits looks whether the work has ended.
_LOOK_S = 0.2

T = TypeVar("T")


class CancelledError(Exception):
    """Raised by work whose caller no longer waits for it."""


class Call(Generic[T]):
    """Some work and what it returned or raised."""

    def __init__(self, work: Callable[[Call[T]], T]) -> None:
        self.submitted = False
        self._work = work
        self._cancelled = False
        # Of C alone: an Event's own lock stays locked if a signal's handler raises at the wrong bytecode.
        self._running = threading.Lock()
        self._running.acquire()
        self._over = False
        self._returned: list[T] = []
        self._raised: BaseException | None = None

    def cancel(self) -> None:
        self._cancelled = True

    def check(self) -> None:
        """Raise CancelledError if nobody waits for the work any more."""
        if self._cancelled:
            raise CancelledError

    def run(self) -> None:
        try:
            self.check()
            self._returned.append(self._work(self))
        except BaseException as error:  # raised by `result`, in the thread that waits
            self._raised = error
        self._over = True
        self._running.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether the work has ended within that time."""
        end_s = math.inf if timeout_s is None else SystemClock().now() + timeout_s
        while not self._over and (left_s := end_s - SystemClock().now()) > 0:
            # In turns: an interrupted caller may have kept the lock.
            if self._running.acquire(timeout=min(left_s, _LOOK_S)):
                self._running.release()
        return self._over

    def result(self) -> T:
        """Return what the work returned, or raise what it raised, once it has ended."""
        error, self._raised = self._raised, None
        if error is None:
            return self._returned[0]
        try:
            raise error
        finally:
            del error  # its traceback holds this frame


class CallThread:
    """Runs calls in the order in which they were submitted. It does not keep the interpreter from ending."""

    def __init__(self, name: str) -> None:
        # No other queue: a signal's handler may raise while the main thread puts something into it.
        self._calls: SimpleQueue[Call[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Call[T]) -> None:
        self._calls.put(call)
        call.submitted = True

    def call(self, work: Callable[[], T]) -> T:
        """Run the work and return what it returns. It goes on if the caller is interrupted meanwhile."""
        call = Call[T](lambda call: work())
        self.submit(call)
        call.wait()
        return call.result()

    def close(self) -> None:
        """End after the calls that were submitted."""
        self._calls.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            del call  # what it holds must not live until the next one comes
