"""The sources from which the engine takes input lines. A separate thread reads a file or standard input ahead of it.

    file -> [reader thread: read, parse, tokenise, check, order] -> bounded queue -> take() -> engine

The queue has a largest size, so a file of any length takes limited memory. Tokenisation runs in the reader thread, so
the engine does not wait for it. Input lines that cannot run come through the same queue, each with its error. The lines
come in the order of the file, or a window of them at a time in the order of their prefixes (PrefixOrder).
"""

from __future__ import annotations

import io
import math
import random
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from sarathi_pp.core.prefix_order import TOKENS_OF_WINDOW, PrefixOrder
from sarathi_pp.core.request import MAX_WAITING_TOKENS
from sarathi_pp.errors import InputError, RowError
from sarathi_pp.inputs.done import Done
from sarathi_pp.inputs.input_file import check_input, open_input, parsed_lines, take_done
from sarathi_pp.inputs.input_format import InputFormat
from sarathi_pp.inputs.parse import ParsedLine
from sarathi_pp.inputs.request_maker import RequestMaker
from sarathi_pp.inputs.row import Row, shorten
from sarathi_pp.trace.clock import Clock

# Seconds for which a window of rows is read at least, if the engine lacks rows before the window is full.
_WINDOW_S = 0.25


class Source(Protocol):
    """The source of the engine's input lines. Only the engine's thread calls it."""

    @property
    def exhausted(self) -> bool:
        """Return whether no input line is left and none will come."""
        ...

    def take(self, limit: int) -> list[Row]:
        """Return up to `limit` input lines that have arrived, without waiting.

        If an error stopped the reader, the input lines before it are returned first. Then this call raises the error.
        """
        ...

    def wait(self, timeout_s: float | None) -> None:
        """Wait until `take` would return an input line, or until the source is exhausted.

        Args:
            timeout_s: most seconds to wait; None for no limit.
        """
        ...

    def close(self) -> None:
        """Stop the source, because no more input lines are needed."""
        ...


class FileSource:
    """A source that reads a file, or standard input for `-`.

    Reading starts in the constructor, so make the source when the run starts. If the input cannot be opened, or is
    neither JSON Lines nor text, `take` raises the error.

    Args:
        maker: turns each parsed line into a request.
        clock: gives the arrival times.
        capacity: most requests that wait for the engine. Reading also stops at MAX_WAITING_TOKENS of their prompts.
        request_rate: input lines per second. They arrive as a Poisson process drawn from the run's seed. If the rate is
            infinite, a line arrives when it is read, or with an order when it may wait for the engine.
        done: input lines that an earlier start has answered. They are left out.
        asked: the format that the user named with --input-format.
        order: the order in which lines arrive; None for that of the file. With it, the request rate must be infinite,
            and two windows of its rows are held besides the requests that wait.

    Raises:
        MissingError: see `check_input`.
        InputError: see `check_input`.
    """

    def __init__(
        self,
        path: str,
        maker: RequestMaker,
        *,
        clock: Clock,
        capacity: int,
        request_rate: float = math.inf,
        done: Done | None = None,
        asked: InputFormat = "auto",
        order: PrefixOrder | None = None,
    ) -> None:
        assert order is None or request_rate == math.inf, "drawn arrivals are in the order of the file"
        check_input(path)
        self._path = path
        self._asked = asked
        self._maker = maker
        self._clock = clock
        self._capacity = capacity
        self._done = done or Done()
        self._order = order
        self._arrivals = _drawn_arrivals(maker.seed, request_rate, clock.now())
        self._changed = threading.Condition()
        self._rows: deque[Row] = deque()
        self._num_tokens = 0  # tokens in self._rows
        # Ordered rows that have not arrived yet: those of one window, while the next one is read.
        self._ahead: deque[Row] = deque()
        self._num_tokens_ahead = 0
        self._opened_s = clock.now()  # when the first row of the open window was read
        self._failure: BaseException | None = None
        self._ended = False
        self._closed = False
        self._awaited = False  # the engine lacks lines
        # The thread is a daemon, because a read of standard input that never returns must not keep the process alive.
        # The thread also opens the path. Opening a named pipe waits for its writer. If the main thread waited, it could
        # not handle signals.
        self._thread = threading.Thread(target=self._read, name="input", daemon=True)
        self._thread.start()

    @property
    def exhausted(self) -> bool:
        with self._changed:
            return self._closed or (self._ended and not self._rows and self._failure is None)

    def take(self, limit: int) -> list[Row]:
        with self._changed:
            now_s = self._clock.now()
            rows: list[Row] = []
            while self._rows and len(rows) < limit and self._rows[0].arrival_s <= now_s:
                rows.append(self._rows.popleft())
            self._num_tokens -= sum(row.held_tokens for row in rows)
            self._advance()
            self._awaited = len(rows) < limit and not self._rows
            if rows:
                self._changed.notify_all()
            elif self._failure is not None and not self._rows and limit > 0:
                raise self._failure
            return rows

    def wait(self, timeout_s: float | None) -> None:
        end_s = math.inf if timeout_s is None else self._clock.now() + timeout_s
        with self._changed:
            self._awaited = not self._rows
            while not (self._ended and not self._rows):
                now_s = self._clock.now()
                # If no line is read yet, only the reader can end the wait, and it notifies.
                ready_s = self._rows[0].arrival_s if self._rows else math.inf
                if now_s >= min(end_s, ready_s):
                    return
                left_s = min(end_s, ready_s) - now_s
                self._changed.wait(None if left_s == math.inf else left_s)

    def close(self) -> None:
        """Stop reading. Further calls do nothing.

        The reader thread ends at its next line. A thread that is blocked in a read is abandoned.
        """
        with self._changed:
            self._closed = True
            self._ended = True
            self._rows.clear()
            self._ahead.clear()
            self._num_tokens = self._num_tokens_ahead = 0
            self._changed.notify_all()

    def _read(self) -> None:
        try:
            with open_input(self._path) as stream:
                for row in self._file_rows(stream):
                    if not self._put(row):
                        return
        except OSError as error:
            self._failure = InputError(f"--input {self._path} cannot be read further: {error}")
        except BaseException as error:  # `take` raises it, in the thread that can handle it
            self._failure = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, row: Row) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._has_room() or self._closed)
            if not self._closed:
                self._ahead.append(row)
                self._num_tokens_ahead += row.held_tokens
                self._advance()
                self._awaited = False
                self._changed.notify_all()
            return not self._closed

    def _has_room(self) -> bool:
        """Return whether a row can be put. If rows are ordered, a window of them may wait for room in the queue."""
        if self._order is None:
            return self._queue_has_room()
        return len(self._ahead) < self._order.most_rows and self._num_tokens_ahead < TOKENS_OF_WINDOW

    def _queue_has_room(self) -> bool:
        return len(self._rows) < self._capacity and self._num_tokens < MAX_WAITING_TOKENS

    def _advance(self) -> None:
        """Move rows into the queue while it has room. With an order, a row arrives then."""
        while self._ahead and self._queue_has_room():
            row = self._ahead.popleft()
            self._num_tokens_ahead -= row.held_tokens
            self._num_tokens += row.held_tokens
            self._rows.append(row if self._order is None else row.arriving(self._clock.now()))

    def _file_rows(self, stream: io.BufferedReader) -> Iterator[Row]:
        """Yield each row that is left to answer, in the order in which the rows arrive."""
        rows = self._rows_as_read(stream)
        if self._order is None:
            for row in rows:
                if row is not None:
                    yield from row.choices()
            return
        for row in self._order.arranged(self._until_needed(rows)):
            yield from row.choices()
            if row.request is not None:
                self._opened_s = self._clock.now()

    def _until_needed(self, rows: Iterator[Row | None]) -> Iterator[Row | None]:
        """Yield the rows, and None when the engine lacks rows. Without it, a window is read to its end first.

        Tokenising a window may take seconds.

        Args:
            rows: None among them is a line that has its answer already.
        """
        for row in rows:
            if self._awaited and self._clock.now() - self._opened_s >= _WINDOW_S:
                yield None
                self._opened_s = self._clock.now()
            if row is not None:
                yield row

    def _rows_as_read(self, stream: io.BufferedReader) -> Iterator[Row | None]:
        """Yield a row for each line, and None for a line that has its answer already."""
        for parsed in parsed_lines(self._path, stream, self._asked):
            if self._closed:
                return
            if take_done(self._done, parsed):
                yield None
            else:
                drawn_s = next(self._arrivals, None)
                yield self._row(parsed, self._clock.now() if drawn_s is None else drawn_s)

    def _row(self, parsed: ParsedLine, arrival_s: float) -> Row:
        """Return the row of a parsed line.

        The index of its request is the line's number minus 1. So it does not change if earlier lines are left out.
        """
        line, request, error, tools = parsed.line, None, parsed.error, None
        if error is None:
            try:
                request = self._maker.make(parsed, line - 1, arrival_s)
                tools = self._maker.offered_tools(parsed)
            except RowError as problem:
                error = problem
        if error is not None:
            error = RowError(error.code, f"line {line}: {shorten(error.message)}")
        echo = self._maker.echo(parsed, request) if request is not None and parsed.echo else None
        name, own = (line, parsed.id, parsed.form), (parsed.nameless, parsed.extra)
        return Row(*name, request, error, arrival_s, *own, tools=tools, echo=echo)


class MemorySource:
    """A source whose input lines have all arrived at the start, for the Python API and the tests."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = deque(rows)

    @property
    def exhausted(self) -> bool:
        return not self._rows

    def take(self, limit: int) -> list[Row]:
        return [self._rows.popleft() for _ in range(min(limit, len(self._rows)))]

    def wait(self, timeout_s: float | None) -> None:
        """Return at once, because there is nothing to wait for."""

    def close(self) -> None:
        self._rows.clear()


def _drawn_arrivals(seed: int, request_rate: float, start_s: float) -> Iterator[float]:
    """Yield arrival times without end: a Poisson process from start_s on, drawn from the seed.

    If the rate is infinite, yield nothing: then input lines arrive when they are read.
    """
    random_numbers = random.Random(f"arrivals {seed}")
    arrival_s = start_s
    while request_rate < math.inf:
        arrival_s += random_numbers.expovariate(request_rate)
        yield arrival_s
