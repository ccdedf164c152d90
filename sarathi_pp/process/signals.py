"""Signals that ask a run to end: the first one to finish what runs, the second one to end at once.

    SIGINT                               nothing more is begun, what runs is finished; exit 130
    SIGTERM, SIGUSR1, SIGHUP, SIGQUIT    the same within DRAIN_S, as batch systems give 30 s; exit 75
    any of them a second time, or while there is nothing to finish yet: the end

A thread of its own notices them, since the main thread may be inside a library, where no handler of Python's runs:
the wake-up descriptor is written to at once. The coordinator's rank alone drains. Others go on serving it, and end
with it.
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

DRAIN_S = 20.0
# With the time for writing down how the run ended.
_AT_MOST_S = DRAIN_S + 5.0
# For the main thread to end by itself; also what a lost peer takes to be noticed, whose name says more than the signal
# that its launcher then sends.
_GRACE_S = 2.0
# A batch system tells every process of a job, and the launcher that is among them tells rank 0 once more.
_ECHO_S = 0.3
_PAUSE_S = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class Asked:
    """A signal's number, when it came, and until when what runs may be finished; seconds of the monotonic clock."""

    number: int
    at_s: float
    until_s: float


class StopRequests(Protocol):
    """Says whether a run was asked to stop."""

    def asked(self) -> Asked | None: ...


class _NeverAsked:
    def asked(self) -> None: ...


NEVER_ASKED = _NeverAsked()


class Announcer(Protocol):
    """Tells the user that a signal was noticed."""

    def say(self, asked: Asked) -> None: ...


@contextmanager
def stoppable(what: str) -> Iterator[None]:
    """While inside, where there is nothing to finish yet, the signals that would kill raise StoppedError instead.

    Not those of which the program has decided already, nor SIGINT, which Python raises. what: ends, for the message.
    Afterwards the process only has to exit, and signals are ignored: they come too late to change its exit code.
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
    """Ignore signals from here on, once it is decided with which code the process ends.

    Handlers of Python's would not do: the interpreter removes them before it has ended, and the signal then kills the
    process. Outside of the main thread handlers cannot be set, and nothing changes.
    """
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)


class Signals:
    """Those of this process while inside; where this is not the main thread they do what they did.

    where: what ends, for messages. launched: by our own launcher and not as the first, so that it says when to end, by
    SIGKILL. hurried: by an agent that waits 30 s whatever the signal. watchdog: ends this process in time.
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
        """The first signal, None while there was none."""
        return self._asked

    @property
    def has_run(self) -> bool:
        """Whether there has been anything to finish."""
        return self._phase != "starting"

    def announce(self, announcer: Announcer) -> None:
        """Call the announcer at the first signal, on a thread of its own: standard error may take nothing."""
        self._announcer = announcer
        if self._asked is not None:
            announcer.say(self._asked)

    def pause(self) -> None:
        """For whoever waits for somebody else: a moment, or StoppedError where there was a signal."""
        self._clock.sleep(_PAUSE_S)
        if self._asked is not None:
            raise StoppedError.by(self._asked.number, self._where)

    @contextmanager
    def heeded(self) -> Iterator[None]:
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
        """In the main thread, once it is back from wherever it is."""
        if self._launched or self._phase == "running" or (self._phase == "ending" and number != signal.SIGINT):
            return
        if _put_off(number, frame):
            return
        raise KeyboardInterrupt if number == signal.SIGINT else StoppedError.by(number, self._where)

    @contextmanager
    def draining(self) -> Iterator[None]:
        """While inside, whoever asks `asked` finishes what runs, or the rank that this one serves does."""
        self._phase = "running"
        try:
            yield
        finally:
            self._phase = "ending"

    def _watch(self, woken: socket.socket) -> None:
        with suppress(OSError):
            while numbers := woken.recv(64):
                for number in numbers:
                    if number in _SIGNALS and not self._launched:
                        self._heed(number)

    def _heed(self, number: int) -> None:
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
    """Whether what is raised now would be lost, since an object is being finalised; the signal then comes once more.

    Python shows and forgets whatever a finaliser raises, and libraries have many while they are imported.
    """
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    if frame is None:
        return False
    again = threading.Timer(_ECHO_S / 3, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()
    return True
