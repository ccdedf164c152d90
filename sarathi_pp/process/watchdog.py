"""Ends the process in bounded time once a peer is lost or a signal came, wherever the main thread happens to be.

The thread that notices reports here. The main thread usually meets the same error at its next receive and
ends in order; if it does not within the grace (a long computation, a send that nobody takes), the watchdog
leaves the exit code, the message and the stacks of all threads behind, as far as somebody takes them, and ends the
process itself.
"""

from __future__ import annotations

import faulthandler
import math
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from sarathi_pp.errors import PeerLostError, SarathiError
from sarathi_pp.trace.clock import SystemClock

GRACE_S = 2.0
_TELL_S = 2.0
_PARENT_CHECK_S = 1.0
_STDERR = 2


class Leaver(Protocol):
    """Who notes and says why a process ends that its watchdog is about to end."""

    def leave(self, error: SarathiError) -> None: ...


class Watchdog:
    """leaver: writes what must be left behind: the exit_code file, and then the message, which may block.

    None: the process is not ours to end (a Python program that uses us); the main thread's next receive or
    send raises the error, and that is all.
    """

    def __init__(self, leaver: Leaver | None) -> None:
        self._leaver = leaver
        self._lock = threading.Lock()
        self._peer: threading.Timer | None = None
        self._signal: threading.Timer | None = None
        self._signal_end_s = math.inf
        self._clock = SystemClock()
        self._dismissed = False
        self._ended = threading.Event()

    def report_loss(self, error: SarathiError) -> None:
        """A peer is lost. The first report counts; the others are its echo."""
        with self._lock:
            if self._leaver is None or self._peer is not None or self._dismissed:
                return
            self._peer = self._started(GRACE_S, error)

    def end_within(self, grace_s: float, error: SarathiError) -> None:
        """End the process after grace_s because of a signal. A later call can only bring the end nearer."""
        with self._lock:
            end_s = self._clock.now() + grace_s
            if self._leaver is None or end_s >= self._signal_end_s:
                return
            if self._signal is not None:
                self._signal.cancel()
            self._signal, self._signal_end_s = self._started(grace_s, error), end_s

    def _started(self, grace_s: float, error: SarathiError) -> threading.Timer:
        timer = threading.Timer(grace_s, self._end, (error, grace_s > 0))
        timer.daemon = True
        timer.start()
        return timer

    def follow_parent(self, parent: int, scratch: Path | None = None) -> None:
        """End this process when its launcher has gone, even if that was killed and could not say so.

        Args:
            parent: the launcher's pid.
            scratch: the launcher's temporary directory, which only its workers can remove then.
        """

        def watch() -> None:
            while not self._ended.wait(_PARENT_CHECK_S):
                if os.getppid() != parent:
                    self._end(PeerLostError(f"the launcher (pid {parent}) is gone"), scratch=scratch)

        threading.Thread(target=watch, name="follow parent", daemon=True).start()

    def dismiss(self) -> None:
        """The run is over in order, or the main thread has the error in hand: peers may leave."""
        with self._lock:
            self._dismissed = True
            self._ended.set()
            if self._peer is not None:
                self._peer.cancel()

    def close(self) -> None:
        """This process goes on with something else."""
        self.dismiss()
        with self._lock:
            if self._signal is not None:
                self._signal.cancel()

    def _end(self, error: SarathiError, stuck: bool = False, scratch: Path | None = None) -> None:
        def tell() -> None:
            if self._leaver is not None:
                self._leaver.leave(error)
            if stuck:
                _show_stacks()

        try:
            # A thread of its own: standard error may be a pipe that nobody reads, or a terminal that is stopped.
            telling = threading.Thread(target=tell, name="tell", daemon=True)
            telling.start()
            telling.join(_TELL_S)
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)
        finally:
            os._exit(error.exit_code)


def _show_stacks() -> None:
    """Through memory: while it writes, faulthandler holds the interpreter's lock, and with it every other thread."""
    with open(os.memfd_create("stacks"), "w+b") as stacks, suppress(OSError):
        faulthandler.dump_traceback(stacks, all_threads=True)
        stacks.seek(0)
        left = memoryview(stacks.read())
        while left:
            left = left[os.write(_STDERR, left) :]
