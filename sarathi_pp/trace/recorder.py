"""Writing a trace without slowing down what it traces, and reading it back.

`record` appends to a deque: no lock, no I/O, no encoding; an event that takes time to make may be given as a call that
makes it. A daemon thread makes, encodes and writes what has gathered, twice a second, in whole lines. A process that is
killed loses the last half second and leaves a file whose last line may be torn; `read_trace` skips that line.

Disk and memory are bounded, however long the run: when a file has its largest size, or the writer falls too far behind,
the trace ends with a Cut. What follows it are the sums and the end of the run.

    TraceStart  events of the first part  Cut  .......................  Totals  TraceEnd
                                               no event of the others
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from sarathi_pp.errors import InputError, MissingError, OutputError
from sarathi_pp.trace.events import Cut, Event, Totals, TraceEnd, decode, encode

# Each write gives up the interpreter lock. So few lines apart, the computing thread waits well under a
# millisecond for it, not the 5 ms after which Python would take it from a thread that only encodes.
_LINES_PER_WRITE = 64
# Making an event, a printed schedule above all, takes up to 0.1 ms. The lock is given up after each, unless many wait:
# the computing thread may keep it for 5 ms each time.
_BREATH_S = 1e-4
_EVENTS_PER_BREATH = 1 / 64  # of those that wait
# Events that wait in memory, each maybe with its microbatch. From the smaller number on the writer does not sleep.
_MANY_WAITING = 4_096
MOST_WAITING = 16_384
# For the writer to make room; only a disk that stands still takes that long.
_PATIENCE_S = 1.0
# Bytes of a trace. On rank 0 these are some 16 million decoded tokens, of which a report takes half a minute.
MOST_BYTES = 256 * 2**20
# These are written in any case.
_ALWAYS = (Totals, TraceEnd)


def trace_name(stage: int, num_stages: int) -> str:
    """File name of one stage's trace in an attempt's directory."""
    return f"trace-{stage:05d}-of-{num_stages:05d}.jsonl"


class Recorder:
    """One trace file being written. Thread-safe; use as a context manager or call `close`.

    The file must not exist: a trace belongs to one process. Raises OutputError if it cannot be created.
    A later failure to write (a full disk) drops events, never the run; `close` raises OutputError for it.

    Args:
        most_bytes: size of the file after which the trace is cut.
    """

    def __init__(self, path: Path, *, flush_interval_s: float = 0.5, most_bytes: int = MOST_BYTES) -> None:
        self._path = path
        self._flush_interval_s = flush_interval_s
        self._events: deque[Event | Callable[[], Event]] = deque()
        self._left_bytes = most_bytes
        self._full = False  # nothing more is taken in
        self._cut = False  # nothing more is written
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._roomy = threading.Event()
        self._unbreathed = 0  # events since the lock was given up
        self._failure: Exception | None = None
        try:
            self._file = path.open("xb", buffering=0)
        except OSError as error:
            raise OutputError(f"cannot create the trace {path}: {error.strerror}") from error
        self._writer = threading.Thread(target=self._write_until_closed, name="trace-writer", daemon=True)
        self._writer.start()

    def record(self, event: Event | Callable[[], Event]) -> None:
        """An event, or what makes it, of values that no longer change; called on another thread, once."""
        if self._full or len(self._events) >= _MANY_WAITING:
            if not self._has_room(event):
                return
        self._events.append(event)

    def _has_room(self, event: Event | Callable[[], Event]) -> bool:
        """Hurry the writer, wait for it if too many events wait, and cut the trace if that does not help."""
        self._wake.set()
        if not self._full and len(self._events) >= MOST_WAITING:
            self._roomy.clear()
            if len(self._events) >= MOST_WAITING and not self._roomy.wait(_PATIENCE_S):
                self._full = True
                self._events.append(Cut("queue"))
        return not self._full or isinstance(event, _ALWAYS)

    def close(self) -> None:
        """Writes what is left and ends the thread. A second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake.set()
        self._writer.join()
        self._file.close()
        if self._failure is not None:
            raise OutputError(
                f"the trace {self._path} is incomplete: {self._failure}; the answers are not affected, the figures are"
            ) from self._failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_until_closed(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(self._flush_interval_s)
            self._wake.clear()
            self._write_gathered()
        self._write_gathered()

    def _write_gathered(self) -> None:
        # Counted first: events recorded meanwhile wait for the next round, so a busy run cannot hold us here.
        remaining = len(self._events)
        while remaining:
            count = min(remaining, _LINES_PER_WRITE)
            remaining -= count
            if len(self._events) < MOST_WAITING:
                self._roomy.set()
            gathered = [self._events.popleft() for _ in range(count)]
            if self._failure is None:
                try:
                    self._write(self._lines(gathered))
                except Exception as error:  # whatever it is, the queue must not grow without end
                    self._failure = error

    def _lines(self, events: Iterable[Event | Callable[[], Event]]) -> Iterator[str]:
        for event in events:
            if self._cut and not isinstance(event, _ALWAYS):
                continue
            line = encode(self._made(event) if callable(event) else event) + "\n"
            self._left_bytes -= len(line)
            if self._left_bytes < 0 and not self._cut and not isinstance(event, (Cut, *_ALWAYS)):
                event = Cut("size")
                line = encode(event) + "\n"
            if isinstance(event, Cut):
                self._full = self._cut = True
            yield line

    def _made(self, make: Callable[[], Event]) -> Event:
        event = make()
        self._unbreathed += 1
        if self._unbreathed >= len(self._events) * _EVENTS_PER_BREATH:
            self._unbreathed = 0
            self._closing.wait(_BREATH_S)
        return event

    def _write(self, lines: Iterable[str]) -> None:
        data = memoryview("".join(lines).encode("ascii"))
        while data:
            data = data[self._file.write(data) :]


def read_trace(path: Path) -> Iterator[Event]:
    """The events of one file, also while it is being written.

    Raises MissingError if there is no such file, InputError naming the line that is no event. A last line
    without its newline is what a killed process leaves, and is skipped.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise MissingError(f"no trace at {path}") from None
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decode(line)
            except InputError as error:
                raise InputError(f"{path}, line {number}: {error}") from None
