"""A thread that runs the calls of a long-lived object, such as the Python API's LLM, one after the other.

    caller         submit ---- wait ------- KeyboardInterrupt: cancel, wait a little, raise
    this thread          `- work ..................................`- ends itself, tidies up

Python runs signal handlers in the main thread, between any two of its bytecodes. So work in the main thread could stop
halfway. Work in another thread ends only by its own exceptions, so it can keep its state in order.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from sarathi_pp.trace.clock import SystemClock

# Seconds between two checks of a waiting caller for the end of the work.
_LOOK_S = 0.2

T = TypeVar("T")


class CancelledError(Exception):
    """The end of work whose caller no longer waits for it."""


class Call(Generic[T]):
    """A function that a CallThread runs, with its result or its exception.

    Args:
        work: the function. It gets this Call, and should call its `check` regularly.

    Attributes:
        submitted: True after the call was given to a thread.
    """

    def __init__(self, work: Callable[[Call[T]], T]) -> None:
        self.submitted = False
        self._work = work
        self._cancelled = False
        # A lock written in C. The lock of an Event stays locked if a signal handler raises at the wrong bytecode.
        self._running = threading.Lock()
        self._running.acquire()
        self._over = False
        self._returned: list[T] = []
        self._raised: BaseException | None = None

    def cancel(self) -> None:
        """Let the work end at its next `check`, because the caller no longer waits for it."""
        self._cancelled = True

    def check(self) -> None:
        """Raise CancelledError if the caller no longer waits for the work."""
        if self._cancelled:
            raise CancelledError

    def run(self) -> None:
        """Run the work in this thread, and keep its result or exception for `result`."""
        try:
            self.check()
            self._returned.append(self._work(self))
        except BaseException as error:  # `result` raises it in the waiting thread
            self._raised = error
        self._over = True
        self._running.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the work has ended, or timeout_s has passed. Return whether it has ended.

        Args:
            timeout_s: most seconds to wait; None for no limit.
        """
        end_s = math.inf if timeout_s is None else SystemClock().now() + timeout_s
        while not self._over and (left_s := end_s - SystemClock().now()) > 0:
            # Wait in short steps: a caller that was interrupted here may hold the lock and never release it.
            if self._running.acquire(timeout=min(left_s, _LOOK_S)):
                self._running.release()
        return self._over

    def result(self) -> T:
        """Return the result of work that has ended, or raise its exception."""
        error, self._raised = self._raised, None
        if error is None:
            return self._returned[0]
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame, and so keeps all objects here alive


class CallThread:
    """A thread that runs calls in the order in which they were submitted. It does not keep the interpreter alive."""

    def __init__(self, name: str) -> None:
        # A SimpleQueue stays usable if a signal handler raises while the main thread puts a call into it.
        self._calls: SimpleQueue[Call[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Call[T]) -> None:
        """Give a call to the thread. Return at once."""
        self._calls.put(call)
        call.submitted = True

    def call(self, work: Callable[[], T]) -> T:
        """Run the work and return its result. The work continues if the caller is interrupted."""
        call = Call[T](lambda call: work())
        self.submit(call)
        call.wait()
        return call.result()

    def close(self) -> None:
        """End the thread after all submitted calls."""
        self._calls.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            del call  # otherwise the objects of this call would stay in memory until the next call comes
