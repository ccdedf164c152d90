"""Writing a trace without slowing down what it traces, and reading it back.

`record` appends to a deque: no lock, no I/O, no encoding; an event that takes time to make may be given as a call that
makes it. A daemon thread makes, encodes and writes what has gathered, twice a second, in whole lines; memory is bounded
by what happens in that time. A process that is killed loses the last half second and leaves a file whose last line may
be torn; `read_trace` skips that line.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from sarathi_pp.errors import InputError, MissingError, OutputError
from sarathi_pp.trace.events import Event, decode, encode

# Each write gives up the interpreter lock. So few lines apart, the computing thread waits well under a
# millisecond for it, not the 5 ms after which Python would take it from a thread that only encodes.
_LINES_PER_WRITE = 64
# Making an event, a printed schedule above all, takes up to 0.1 ms; the lock is given up after each.
_BREATH_S = 1e-4


def trace_name(stage: int, num_stages: int) -> str:
    """File name of one stage's trace in an attempt's directory."""
    return f"trace-{stage:05d}-of-{num_stages:05d}.jsonl"


class Recorder:
    """One trace file being written. Thread-safe; use as a context manager or call `close`.

    The file must not exist: a trace belongs to one process. Raises OutputError if it cannot be created.
    A later failure to write (a full disk) drops events, never the run; `close` raises OutputError for it.
    """

    def __init__(self, path: Path, *, flush_interval_s: float = 0.5) -> None:
        self._path = path
        self._flush_interval_s = flush_interval_s
        self._events: deque[Event | Callable[[], Event]] = deque()
        self._closing = threading.Event()
        self._failure: Exception | None = None
        try:
            self._file = path.open("xb", buffering=0)
        except OSError as error:
            raise OutputError(f"cannot create the trace {path}: {error.strerror}") from error
        self._writer = threading.Thread(target=self._write_until_closed, name="trace-writer", daemon=True)
        self._writer.start()

    def record(self, event: Event | Callable[[], Event]) -> None:
        """An event, or what makes it, of values that no longer change; called on another thread, once."""
        self._events.append(event)

    def close(self) -> None:
        """Writes what is left and ends the thread. A second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
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
        while not self._closing.wait(self._flush_interval_s):
            self._write_gathered()
        self._write_gathered()

    def _write_gathered(self) -> None:
        # Counted first: events recorded meanwhile wait for the next round, so a busy run cannot hold us here.
        remaining = len(self._events)
        while remaining:
            count = min(remaining, _LINES_PER_WRITE)
            remaining -= count
            gathered = [self._events.popleft() for _ in range(count)]
            if self._failure is None:
                try:
                    self._write([self._made(event) if callable(event) else event for event in gathered])
                except Exception as error:  # whatever it is, the queue must not grow without end
                    self._failure = error

    def _made(self, make: Callable[[], Event]) -> Event:
        event = make()
        self._closing.wait(_BREATH_S)
        return event

    def _write(self, events: list[Event]) -> None:
        lines = memoryview("".join(encode(event) + "\n" for event in events).encode("ascii"))
        while lines:
            lines = lines[self._file.write(lines) :]


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
