"""Ends the process in bounded time once a peer is lost or a signal came, wherever the main thread happens to be.

The thread that notices reports here. The main thread usually meets the same error at its next receive and
ends in order; if it does not within the grace (a long computation, a send that nobody takes), the watchdog
leaves the exit code, the message and the stacks of all threads behind and ends the process itself.
"""

from __future__ import annotations

import faulthandler
import math
import os
import threading
from collections.abc import Callable

from sarathi_pp.errors import PeerLostError, SarathiError
from sarathi_pp.trace.clock import SystemClock

GRACE_S = 2.0
_PARENT_CHECK_S = 1.0
_STDERR = 2


class Watchdog:
    """leave: writes what must be left behind (message, exit_code file) and must not block.

    None: the process is not ours to end (a Python program that uses us); the main thread's next receive or
    send raises the error, and that is all.
    """

    def __init__(self, leave: Callable[[SarathiError], None] | None) -> None:
        self._leave = leave
        self._lock = threading.Lock()
        self._clock = SystemClock()
        self._timer: threading.Timer | None = None
        self._end_s = math.inf
        self._dismissed = False
        self._ended = threading.Event()

    def report(self, error: SarathiError) -> None:
        """A peer is lost. The first report counts; the others are its echo."""
        if not self._dismissed:
            self.end_within(GRACE_S, error)

    def end_within(self, grace_s: float, error: SarathiError) -> None:
        """End for that reason, unless another one is due before."""
        with self._lock:
            end_s = self._clock.now() + grace_s
            if self._leave is None or end_s >= self._end_s:
                return
            self._cancel()
            self._end_s = end_s
            self._timer = threading.Timer(grace_s, self._end, (error, grace_s > 0))
            self._timer.daemon = True
            self._timer.start()

    def follow_parent(self) -> None:
        """End with the launcher that started this process, even if it was killed and could tell nobody."""
        parent = os.getppid()

        def watch() -> None:
            while not self._ended.wait(_PARENT_CHECK_S):
                if os.getppid() != parent:
                    self._end(PeerLostError(f"the launcher (pid {parent}) is gone"))

        threading.Thread(target=watch, name="follow parent", daemon=True).start()

    def dismiss(self) -> None:
        """The run is over in order, or the main thread has the error in hand."""
        with self._lock:
            self._dismissed = True
            self._ended.set()
            self._cancel()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._end_s = None, math.inf

    def _end(self, error: SarathiError, stuck: bool = False) -> None:
        try:
            if self._leave is not None:
                self._leave(error)
            if stuck:
                faulthandler.dump_traceback(_STDERR, all_threads=True)
        finally:
            os._exit(error.exit_code)
