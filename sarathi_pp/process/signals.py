"""Signals that ask a run to end. After the first one, it finishes its running requests. The second one ends it at once.

    SIGINT                               no new request starts, running ones are finished; exit 130
    SIGTERM, SIGUSR1, SIGHUP, SIGQUIT    the same within DRAIN_S, because batch systems give 30 s; exit 75
    any of them a second time, or while there is nothing to finish yet: the process ends

A separate thread notices signals, because the main thread may be inside a library, in which no Python handler runs. The
interpreter writes the number of each signal to a socket at once (signal.set_wakeup_fd), and the thread reads it. Only
rank 0 drains the run, which means that it finishes the running requests. The other ranks keep serving it, and end when
it ends.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Literal, Protocol

from sarathi_pp.errors import StoppedError
from sarathi_pp.process.watchdog import Watchdog
from sarathi_pp.trace.clock import SystemClock

# Most seconds for which a run finishes its running requests after a signal.
DRAIN_S = 20.0
# Most seconds from the first signal to the end of the process: to drain, and to write down how the run ended.
_AT_MOST_S = DRAIN_S + 5.0
# Seconds for the main thread to end on its own. If another rank has died, this process notices that in this time, and
# its message names the rank. This says more than the name of the signal, which the launcher sends after such a loss.
_GRACE_S = 2.0
# A batch system signals every process of a job. The launcher is one of them, and signals rank 0 once more. So the same
# signal within this number of seconds counts once, except Ctrl-C.
_ECHO_S = 0.3
# Seconds for which `pause` waits.
_PAUSE_S = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class Asked:
    """A signal that asked the run to end. Times are seconds of the monotonic clock.

    Attributes:
        number: number of the signal.
        at_s: time at which it came.
        until_s: time until which running requests may be finished; infinite without a limit.
    """

    number: int
    at_s: float
    until_s: float


class StopRequests(Protocol):
    """The state that shows whether a run was asked to stop."""

    def asked(self) -> Asked | None:
        """Return the signal that asked the run to stop; None if none has come."""
        ...


class _NeverAsked:
    """The state of a run that no signal can stop."""

    def asked(self) -> None: ...


NEVER_ASKED = _NeverAsked()


class Announcer(Protocol):
    """A listener that informs the user of a signal."""

    def say(self, asked: Asked) -> None:
        """Show that this signal stops the run."""
        ...


@contextmanager
def stoppable(what: str) -> Iterator[None]:
    """Raise StoppedError inside the block for signals that would kill the process.

    Use it while there is nothing to finish yet.

    Signals that the program already handles or ignores stay as they are. So does SIGINT, for which Python raises
    KeyboardInterrupt. After the block, the process only has to exit. Signals are then ignored, because they come too
    late to change its exit code.

    Args:
        what: the part of the program that ends, such as "the run". It begins the message of the error.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if not _put_off(number, frame):
            raise StoppedError.by(number, what)

    taken = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    finally:
        ignore_signals()


def ignore_signals() -> None:
    """Ignore signals from here on. Call it when the exit code of the process is decided.

    Signal handlers in Python would not do. The interpreter removes them before it has ended, and then a signal would
    kill the process and change its exit code. Outside the main thread, this function does nothing, because Python
    changes the handling of signals only in the main thread.
    """
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)


class Signals:
    """A handler of this process's signals. Its phase decides what a signal does: starting, running or ending.

    Args:
        where: name of this process, which begins the messages.
        watchdog: ends this process if it does not end on its own in time.
        launched: True if our own launcher started this process and it is not rank 0. It then ignores all signals,
            because the launcher ends it by SIGKILL.
        hurried: True under torchrun, whose agent kills its ranks 30 s after any signal. Then draining has a deadline
            after Ctrl-C too.
    """

    def __init__(
        self,
        where: str,
        watchdog: Watchdog,
        *,
        launched: bool = False,
        hurried: bool = False,
    ) -> None:
        self._where = where
        self._launched = launched
        self._hurried = hurried
        self._watchdog = watchdog
        self._clock = SystemClock()
        self._asked: Asked | None = None
        self._announcer: Announcer | None = None
        self._phase: Literal["starting", "running", "ending"] = "starting"

    def asked(self) -> Asked | None:
        """Return the first signal; None if there was none."""
        return self._asked

    @property
    def has_run(self) -> bool:
        """Return whether the run has started, so that there were requests to finish."""
        return self._phase != "starting"

    def announce(self, announcer: Announcer) -> None:
        """Call the announcer at the first signal, in a separate thread, because standard error may block."""
        self._announcer = announcer
        if self._asked is not None:
            announcer.say(self._asked)

    def pause(self) -> None:
        """Wait a moment, in a loop that waits for another process. Raise StoppedError if a signal has come."""
        self._clock.sleep(_PAUSE_S)
        if self._asked is not None:
            raise StoppedError.by(self._asked.number, self._where)

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Handle signals inside the block. Outside the main thread, they keep their earlier effect."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ignored = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
        noticed = [number for number in _SIGNALS if number not in ignored]
        woken, wake = socket.socketpair()
        wake.setblocking(False)
        with woken, wake:
            descriptor = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
            thread = threading.Thread(target=self._watch, args=(woken,), name="heed signals", daemon=True)
            thread.start()
            before = {number: signal.signal(number, self._interrupt) or signal.SIG_DFL for number in noticed}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
                signal.set_wakeup_fd(descriptor)
                wake.shutdown(socket.SHUT_RDWR)
                thread.join()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt or StoppedError in the main thread, unless there is something to finish first.

        Python calls this as soon as the main thread runs Python code again.
        """
        if self._launched or self._phase == "running" or (self._phase == "ending" and number != signal.SIGINT):
            return
        if _put_off(number, frame):
            return
        raise KeyboardInterrupt if number == signal.SIGINT else StoppedError.by(number, self._where)

    @contextmanager
    def draining(self) -> Iterator[None]:
        """Set the phase to "running" inside the block, because there are requests to finish. After it, set "ending".

        On rank 0, the engine calls `asked`, and finishes the requests after a signal. Another rank serves until then.
        """
        self._phase = "running"
        try:
            yield
        finally:
            self._phase = "ending"

    def _watch(self, woken: socket.socket) -> None:
        """Handle each signal whose number comes through the socket, until the other end is shut down."""
        with suppress(OSError):
            while numbers := woken.recv(64):
                for number in numbers:
                    if number in _SIGNALS and not self._launched:
                        self._heed(number)

    def _heed(self, number: int) -> None:
        """Record a signal, announce the first one, and set the time at which the watchdog ends the process."""
        error, now_s, first = StoppedError.by(number, self._where), self._clock.now(), self._asked is None
        patient = number == signal.SIGINT and not self._hurried
        if self._asked is not None and number == self._asked.number != signal.SIGINT:
            if now_s < self._asked.at_s + _ECHO_S:
                return
        if self._asked is None:
            self._asked = Asked(number, now_s, math.inf if patient else now_s + DRAIN_S)
            if self._announcer is not None:
                threading.Thread(target=self._announcer.say, args=(self._asked,), name="announce", daemon=True).start()
        else:
            self._asked = replace(self._asked, until_s=min(self._asked.until_s, now_s))
        if self._phase == "running":
            if not (first and patient):
                self._watchdog.end_within(_AT_MOST_S if first else _GRACE_S, error)
        elif self._phase == "ending" and first:
            self._watchdog.end_within(_GRACE_S if patient else _AT_MOST_S, error)
        else:
            self._watchdog.end_within(_GRACE_S if first else 0.0, error)


def _put_off(number: int, frame: FrameType | None) -> bool:
    """Return whether a `__del__` method is running. If so, send the signal again a little later.

    An exception that is raised now would be lost, because Python only prints exceptions of `__del__` methods. Many of
    them run while libraries are imported.
    """
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    if frame is None:
        return False
    again = threading.Timer(_ECHO_S / 3, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()
    return True
