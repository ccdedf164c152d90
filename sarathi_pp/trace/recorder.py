"""Write a trace without slowing down the run, and read it back.

`record` appends to a deque: no lock, no I/O, no encoding. If an event takes time to make, a function that makes it can
be given instead. Twice per second a daemon thread makes, encodes and writes the collected events, in whole lines. If a
process is killed, the last half second is lost and the last line of the file may be torn. `read_trace` skips that line.

Disk and memory use have limits, however long the run is. If a file reaches its largest size, or the writer falls too
far behind, the trace is cut. It gets the event Cut, and after it only the sums over the whole run and its end.

    TraceStart  events of the first part  Cut  .......................  Totals  TraceEnd
                                               no event of the later parts
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

# Each write releases the interpreter lock. With few lines between writes, the computing thread waits well under a
# millisecond for it. From a thread that only encodes, Python would take the lock after 5 ms.
_LINES_PER_WRITE = 64
# An event takes up to 0.1 ms to make, above all a printed schedule. The lock is released after each. If many events
# wait, it is released less often, because the computing thread may keep it for 5 ms each time.
_BREATH_S = 1e-4
_EVENTS_PER_BREATH = 1 / 64  # share of the waiting events
# Numbers of events that wait in memory, each maybe with its microbatch. From _MANY_WAITING on, `record` wakes the
# writer. At MOST_WAITING, `record` waits for the writer.
_MANY_WAITING = 4_096
MOST_WAITING = 16_384
# Most seconds that `record` waits for the writer. Only a disk that does not respond takes that long.
_PATIENCE_S = 1.0
# Most bytes of a trace. On rank 0 this is enough for about 16 million decoded tokens. Their report takes half a minute.
MOST_BYTES = 256 * 2**20
# These events are written even after a cut.
_ALWAYS = (Totals, TraceEnd)


def trace_name(stage: int, num_stages: int) -> str:
    """Return the file name of one stage's trace in an attempt's directory."""
    return f"trace-{stage:05d}-of-{num_stages:05d}.jsonl"


class Recorder:
    """One trace file that is being written. It is thread-safe. Use it as a context manager or call `close`.

    The file must not exist, since a trace belongs to one process. If writing fails later (a full disk), events are
    dropped and the run continues. `close` then raises OutputError.

    Args:
        most_bytes: size of the file after which the trace is cut.

    Raises:
        OutputError: the file cannot be created.
    """

    def __init__(self, path: Path, *, flush_interval_s: float = 0.5, most_bytes: int = MOST_BYTES) -> None:
        self._path = path
        self._flush_interval_s = flush_interval_s
        self._events: deque[Event | Callable[[], Event]] = deque()
        self._left_bytes = most_bytes
        self._full = False  # no more events are accepted
        self._cut = False  # no more events are written
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._roomy = threading.Event()
        self._unbreathed = 0  # events made since the interpreter lock was released
        self._failure: Exception | None = None
        try:
            self._file = path.open("xb", buffering=0)
        except OSError as error:
            raise OutputError(f"cannot create the trace {path}: {error.strerror}") from error
        self._writer = threading.Thread(target=self._write_until_closed, name="trace-writer", daemon=True)
        self._writer.start()

    def record(self, event: Event | Callable[[], Event]) -> None:
        """Record an event, or a function that makes it.

        The thread that writes the file calls the function, once. So it must use only values that no longer change.
        """
        if self._full or len(self._events) >= _MANY_WAITING:
            if not self._has_room(event):
                return
        self._events.append(event)

    def _has_room(self, event: Event | Callable[[], Event]) -> bool:
        """Wake the writer, and wait for it if too many events wait. If that does not help, cut the trace.

        Return whether the event may be added.
        """
        self._wake.set()
        if not self._full and len(self._events) >= MOST_WAITING:
            self._roomy.clear()
            if len(self._events) >= MOST_WAITING and not self._roomy.wait(_PATIENCE_S):
                self._full = True
                self._events.append(Cut("queue"))
        return not self._full or isinstance(event, _ALWAYS)

    def close(self) -> None:
        """Write the remaining events and end the thread. A second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake.set()
        self._writer.join()
        self._file.close()
        if self._failure is not None:
            raise OutputError(
                f"the trace {self._path} is incomplete: {self._failure}; the figures are affected, the answers are not"
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
        # Count them first. Events that are recorded meanwhile wait for the next call, so this loop always ends.
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
                except Exception as error:  # after any error the queue must not grow without end
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
    """Yield the events of one trace file. It may still be growing.

    A last line without its newline comes from a killed process, and is skipped.

    Raises:
        MissingError: there is no such file.
        InputError: a line is not an event. The message gives the line's number.
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
