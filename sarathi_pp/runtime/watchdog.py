"""Ends the process in bounded time once a peer is lost, wherever the main thread happens to be.

The thread that notices reports here. The main thread usually meets the same error at its next receive and
ends in order; if it does not within the grace (a long computation, a send that nobody takes), the watchdog
leaves the exit code and the message behind and ends the process itself.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable

from sarathi_pp.errors import PeerLostError, SarathiError

GRACE_S = 2.0
_PARENT_CHECK_S = 1.0


class Watchdog:
    """leave: writes what must be left behind (message, exit_code file) and must not block.

    None: the process is not ours to end (a Python program that uses us); the main thread's next receive or
    send raises the error, and that is all.
    """

    def __init__(self, leave: Callable[[SarathiError], None] | None) -> None:
        self._leave = leave
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._dismissed = False
        self._ended = threading.Event()

    def report(self, error: SarathiError) -> None:
        """A peer is lost. The first report counts; the others are its echo."""
        with self._lock:
            if self._leave is None or self._timer is not None or self._dismissed:
                return
            self._timer = threading.Timer(GRACE_S, self._end, (error,))
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

    def heed_sigterm(self, stage: int) -> None:
        """Leave the exit code behind also when torchrun's agent, or a batch system, stops this process.

        The agent sends SIGTERM to the survivors of a lost stage, mostly before they have noticed the loss themselves.
        The main thread may be inside a library then, where no handler of Python's runs; the wake-up descriptor
        is written to at once.
        """
        woken, wake = socket.socketpair()
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)

        def watch() -> None:
            with wake:
                while signal.SIGTERM not in woken.recv(1):
                    pass
                self.report(PeerLostError(f"stage {stage} (rank {stage}) was stopped by SIGTERM"))
                self._ended.wait()

        threading.Thread(target=watch, name="heed SIGTERM", daemon=True).start()

    def dismiss(self) -> None:
        """The run is over in order, or the main thread has the error in hand."""
        with self._lock:
            self._dismissed = True
            self._ended.set()
            if self._timer is not None:
                self._timer.cancel()

    def _end(self, error: SarathiError) -> None:
        try:
            if self._leave is not None:
                self._leave(error)
        finally:
            os._exit(error.exit_code)
