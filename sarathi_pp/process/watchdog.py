"""A watchdog that ends the process in bounded time after the loss of another rank or a signal.

The thread that notices the loss reports it here. The main thread usually gets the same error at its next receive and
ends in order. It may not do so within the grace time, because of a long computation or a send that no rank receives.
Then the watchdog writes the exit code, the message and the stacks of all threads, as far as this is possible. After
that it ends the process itself, whatever the main thread does.
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

# Seconds for the main thread to end on its own after the loss of another rank.
GRACE_S = 2.0
# Most seconds for the exit code, the message and the stacks, before the process ends without them.
_TELL_S = 2.0
# Seconds between two checks for the launcher's process.
_PARENT_CHECK_S = 1.0
# File descriptor of standard error.
_STDERR = 2


class Leaver(Protocol):
    """A recorder and reporter of the reason why the watchdog is about to end the process."""

    def leave(self, error: SarathiError) -> None:
        """Write the exit code of the error, and then its message."""
        ...


class Watchdog:
    """Timers that end the process, unless it ends in order before.

    Args:
        leaver: writes the exit_code file, and then the message, which may block. None if a watchdog must not end this
            process, because it is the user's Python program. Then only the main thread's next receive or send raises
            the error.
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
        """End the process after GRACE_S, because another rank was lost.

        Only the first report counts. The ranks that are lost after it usually end because of that first loss.
        """
        with self._lock:
            if self._leaver is None or self._peer is not None or self._dismissed:
                return
            self._peer = self._started(GRACE_S, error)

    def end_within(self, grace_s: float, error: SarathiError) -> None:
        """End the process after grace_s because of a signal. A later call can only make the end earlier."""
        with self._lock:
            end_s = self._clock.now() + grace_s
            if self._leaver is None or end_s >= self._signal_end_s:
                return
            if self._signal is not None:
                self._signal.cancel()
            self._signal, self._signal_end_s = self._started(grace_s, error), end_s

    def _started(self, grace_s: float, error: SarathiError) -> threading.Timer:
        """Start a timer that ends the process after grace_s, and return it."""
        timer = threading.Timer(grace_s, self._end, (error, grace_s > 0))
        timer.daemon = True
        timer.start()
        return timer

    def follow_parent(self, parent: int, scratch: Path | None = None) -> None:
        """End this process when its launcher has ended, even if the launcher was killed and could send no signal.

        Args:
            parent: the launcher's pid.
            scratch: the launcher's temporary directory. This process removes it, because the launcher no longer can.
        """

        def watch() -> None:
            while not self._ended.wait(_PARENT_CHECK_S):
                if os.getppid() != parent:
                    self._end(PeerLostError(f"the launcher (pid {parent}) is gone"), scratch=scratch)

        threading.Thread(target=watch, name="follow parent", daemon=True).start()

    def dismiss(self) -> None:
        """Ignore the loss of other ranks and of the launcher from now on. Timers of signals stay.

        Call it when the run is over in order, or when the main thread handles the error itself.
        """
        with self._lock:
            self._dismissed = True
            self._ended.set()
            if self._peer is not None:
                self._peer.cancel()

    def close(self) -> None:
        """Cancel all timers, because this process continues with other work."""
        self.dismiss()
        with self._lock:
            if self._signal is not None:
                self._signal.cancel()

    def _end(self, error: SarathiError, stuck: bool = False, scratch: Path | None = None) -> None:
        """Record and show an error, and end the process with its exit code.

        Args:
            stuck: show the stacks of all threads too, because the main thread has not ended on its own.
            scratch: temporary directory to remove.
        """

        def tell() -> None:
            if self._leaver is not None:
                self._leaver.leave(error)
            if stuck:
                _show_stacks()

        try:
            # In a separate thread: standard error may be a pipe without a reader, or a terminal that is stopped.
            telling = threading.Thread(target=tell, name="tell", daemon=True)
            telling.start()
            telling.join(_TELL_S)
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)
        finally:
            os._exit(error.exit_code)


def _show_stacks() -> None:
    """Write the stacks of all threads to standard error, by way of a file in memory.

    faulthandler holds the interpreter's lock while it writes. If it wrote to a pipe without a reader, it would stop
    every other thread.
    """
    with open(os.memfd_create("stacks"), "w+b") as stacks, suppress(OSError):
        faulthandler.dump_traceback(stacks, all_threads=True)
        stacks.seek(0)
        left = memoryview(stacks.read())
        while left:
            left = left[os.write(_STDERR, left) :]
