"""Where rows come from: a file or standard input, read ahead of the engine by a thread of its own.

    file -> [reader thread: read, parse, tokenise, check] -> bounded queue -> take() -> engine

The queue bounds memory whatever the length of the file, and keeps tokenisation off the engine's thread. Rows
that cannot run come through the same queue, in order, as rows with an error.
"""

from __future__ import annotations

import io
import math
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from sarathi_pp.config import SamplingParams
from sarathi_pp.core.request import MAX_WAITING_TOKENS, Request
from sarathi_pp.errors import InputError, MissingError, RowError
from sarathi_pp.inputs.done import Done
from sarathi_pp.inputs.generation_config import GenerationDefaults
from sarathi_pp.inputs.ids import DUPLICATE_ID, SeenIds, id_key
from sarathi_pp.inputs.input_format import HEAD_BYTES, InputFormat, choose_format, read_head
from sarathi_pp.inputs.lines import read_lines
from sarathi_pp.inputs.parse import ParsedLine, parse_line
from sarathi_pp.inputs.row import Row
from sarathi_pp.text.tokenizer import Encoded, Tokenizer
from sarathi_pp.trace.clock import Clock

# Of an input's problems, so many are told of before the run.
_SHOWN_PROBLEMS = 5
# Codes of problems whose messages quote what the line holds.
_QUOTING = ("invalid_parameter", "unknown_parameter", "unsupported_parameter")


class Source(Protocol):
    """What the engine draws rows from. Only the engine's thread calls it.

    take: up to `limit` rows that have arrived, without waiting; raises what stopped the reader, once the rows
    before it are taken. exhausted: there is no row left and none will come. wait: returns when take would
    give something, when exhausted, or after timeout_s (None: no limit). close: no more rows are wanted.
    """

    @property
    def exhausted(self) -> bool: ...
    def take(self, limit: int) -> list[Row]: ...
    def wait(self, timeout_s: float | None) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What a prompt must fit: the model's length, and the smallest stage's KV pool (num_pages x page_size)."""

    max_model_len: int
    num_pages: int
    page_size: int
    vocab_size: int

    def check_prompt(self, num_tokens: int) -> None:
        """Check that a prompt can be computed. A prompt of max_model_len is legal: it gets no output.

        Raises RowError: `context_length_exceeded` or `kv_cache_exhausted`.
        """
        if num_tokens > self.max_model_len:
            raise RowError(
                "context_length_exceeded",
                f"the prompt has {num_tokens} tokens and max_model_len is {self.max_model_len}",
            )
        if num_tokens > self.num_pages * self.page_size:
            raise kv_cache_exhausted(f"the prompt has {num_tokens} tokens", self.num_pages, self.page_size)

    def small_kv_cache(self) -> str | None:
        """Return a warning if a request of max_model_len tokens does not fit into the KV cache."""
        held = self.num_pages * self.page_size
        if held >= self.max_model_len:
            return None
        return (
            f"the KV cache holds {held} tokens and max_model_len is {self.max_model_len}: a request that needs more "
            f"ends with the error kv_cache_exhausted. Raise --kv-cache-memory, or lower --max-model-len to {held}"
        )

    def clamp(self, sampling: SamplingParams) -> SamplingParams:
        """The same request in numbers of ordinary size: what exceeds a limit means no limit."""
        top_k = 0 if sampling.top_k >= self.vocab_size else sampling.top_k
        return replace(sampling, top_k=top_k, max_new_tokens=min(sampling.max_new_tokens, self.max_model_len))


def kv_cache_exhausted(needed: str, num_pages: int, page_size: int) -> RowError:
    """Return the error of a request that the whole KV cache cannot hold.

    Args:
        needed: what the request needs, a clause for the message.
    """
    return RowError(
        "kv_cache_exhausted",
        f"{needed}, and the KV cache holds {num_pages * page_size} ({num_pages} pages of {page_size}). Raise "
        f"--kv-cache-memory, and run again with --resume --retry-errors",
    )


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Turns a parsed line into a request: tokenised, checked, its sampling complete.

    Args:
        paragraphs: whether the policy wants to know where the paragraphs of a text end.
    """

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    limits: Limits
    seed: int
    paragraphs: bool = False

    def make(self, parsed: ParsedLine, index: int, arrival_s: float) -> Request:
        """Return the request of a line that has no error. Raises RowError."""
        sampling = self.defaults.params(parsed.overrides, parsed.switched_off)
        if sampling.stop and not self.tokenizer.has_text:
            raise RowError("no_tokenizer", "stop strings need the model's tokenizer files, which are not there")
        if sampling.seed is None:
            sampling = replace(sampling, seed=row_seed(self.seed, parsed.id))
        prompt = self._encode(parsed)
        self.limits.check_prompt(len(prompt.token_ids))
        sampling = self.defaults.bounded(sampling, parsed.overrides, len(prompt.token_ids))
        return Request(index, prompt.token_ids, self.limits.clamp(sampling), arrival_s, prompt.paragraph_ends)

    def _encode(self, parsed: ParsedLine) -> Encoded:
        if parsed.prompt_token_ids is not None:
            if not parsed.prompt_token_ids:
                raise RowError("empty_prompt", "the prompt is empty; it needs at least one token id")
            return Encoded(self.tokenizer.check_token_ids(parsed.prompt_token_ids))
        most = self.limits.max_model_len
        if parsed.messages is not None:
            return self.tokenizer.encode_chat(parsed.messages, paragraphs=self.paragraphs, most_tokens=most)
        assert parsed.prompt is not None, "a parsed line has a prompt"
        return self.tokenizer.encode_prompt(
            parsed.prompt,
            add_special_tokens=parsed.add_special_tokens,
            paragraphs=self.paragraphs,
            most_tokens=most,
        )


def row_seed(run_seed: int, id: object) -> int:
    """The seed of a row that names none: a 63-bit hash, wherever the row stands and whatever runs beside it."""
    digest = blake2b(f"{run_seed}/{id_key(id)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def check_input(path: str) -> None:
    """Refuses an input that cannot be read, without opening it (a pipe can be opened only once).

    Raises MissingError or InputError.
    """
    if path == "-":
        if sys.stdin is None:
            raise InputError("--input - is standard input, which is closed; redirect a file or a pipe to it")
        return
    if not os.path.exists(path):
        if path.startswith(("/dev/fd/", "/proc/self/fd/")):
            raise MissingError(
                f"--input {path} is a stream of another process, which this one was not given; name a file, or a pipe "
                f"that mkfifo has made"
            )
        raise MissingError(f"--input {path} does not exist")
    if os.path.isdir(path):
        raise InputError(f"--input {path} is a directory; give a file of JSON Lines or of one prompt a line")
    if not os.access(path, os.R_OK):
        raise InputError(f"--input {path} cannot be read: permission denied")


def is_regular(path: str) -> bool:
    """Whether it is a file that can be read again, and not standard input, a pipe or a device."""
    return path != "-" and os.path.isfile(path)


def is_stream(path: str) -> bool:
    """Whether it is there, or is a standard stream, and is neither file nor directory."""
    return path == "-" or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


@dataclass(frozen=True, slots=True)
class InputScan:
    """What is wrong with the lines of a file. problems: the first few, for people."""

    num_rows: int
    num_problems: int
    problems: tuple[str, ...]


def scan_input(
    path: str, defaults: GenerationDefaults, *, asked: InputFormat = "auto", has_text: bool = True
) -> InputScan:
    """Looks at every line without tokenising it: UTF-8, JSON, keys, sampling values, and ids that occur twice.

    What needs the model (lengths, token ids) shows when the line is run.

    Args:
        asked: the format that the user named.
        has_text: the model has a tokenizer; otherwise only token ids can run.

    Raises:
        InputError: the file cannot be read, or is of no format that has rows.
    """
    num_rows, num_problems = 0, 0
    problems: list[str] = []
    with _open(path) as stream:
        try:
            for parsed in _parsed_lines(path, stream, asked):
                num_rows += 1
                error = _find_error(parsed, defaults, has_text=has_text)
                if error is not None:
                    num_problems += 1
                    if len(problems) < _SHOWN_PROBLEMS:
                        problems.append(f"line {parsed.line}: {parsed.summary or _without_values(error)}")
        except OSError as error:
            raise InputError(f"--input {path} cannot be read on: {error}") from error
    return InputScan(num_rows, num_problems, tuple(problems))


def _find_error(parsed: ParsedLine, defaults: GenerationDefaults, *, has_text: bool) -> RowError | None:
    """Return the error of a line, as far as it is known without its tokens."""
    if parsed.error is not None:
        return parsed.error
    if not has_text and parsed.prompt_token_ids is None:
        return RowError("no_tokenizer", "text needs the model's tokenizer files, which are not there")
    if parsed.overrides or defaults.unsupported:  # the defaults alone were checked before
        try:
            defaults.params(parsed.overrides, parsed.switched_off)
        except RowError as error:
            return error
    return None


def count_rows(path: str) -> int:
    """Return the number of input lines that are not blank. Raises InputError."""
    with _open(path) as stream:
        try:
            return sum(1 for _ in read_lines(stream))
        except OSError as error:
            raise InputError(f"--input {path} cannot be read on: {error}") from error


def check_redirected(asked: InputFormat) -> None:
    """Refuse a standard input that a file was redirected to and that has no rows, before anything is loaded.

    Looks at the file without moving the place from which it is read next; a pipe's format is found when it is read.
    Raises InputError.
    """
    try:
        descriptor = sys.stdin.fileno()
        head = os.pread(descriptor, HEAD_BYTES, os.lseek(descriptor, 0, os.SEEK_CUR))
    except (OSError, ValueError, AttributeError):  # no file, or closed
        return
    choose_format("-", head, asked, stream=True)


def has_every_row(path: str, done: Done, asked: InputFormat = "auto") -> bool:
    """Return whether each row of an input has its line, which is taken from `done`. Raises InputError."""
    with _open(path) as stream:
        try:
            return all(_take(done, parsed) for parsed in _parsed_lines(path, stream, asked))
        except OSError as error:
            raise InputError(f"--input {path} cannot be read on: {error}") from error


def _take(done: Done, parsed: ParsedLine) -> bool:
    if parsed.nameless:
        return done.take_nameless(parsed.line)
    return done.take(parsed.id, first=parsed.error is None or parsed.error.code != DUPLICATE_ID)


def _parsed_lines(path: str, stream: io.BufferedReader, asked: InputFormat) -> Iterator[ParsedLine]:
    """Yield each line; an id that an earlier line has is an error.

    Raises InputError for an input that has no rows.
    """
    unnamed = not is_regular(path)
    head, whole = read_head(stream, stream=unnamed)
    plain_text = choose_format(path, head, asked, stream=unnamed) == "text"
    # Default ids are line numbers and cannot collide with one another.
    seen = None if plain_text else SeenIds()
    for number, data in read_lines(whole):
        parsed = parse_line(number, data, plain_text=plain_text)
        if seen is not None and not parsed.nameless:
            first_line = seen.first_line(parsed.id, number)
            if first_line is not None:
                duplicate = RowError(DUPLICATE_ID, f"id {parsed.id!r} is already that of line {first_line}")
                parsed = ParsedLine(number, parsed.id, parsed.form, extra=parsed.extra, error=duplicate)
        yield parsed


class FileSource:
    """Rows of a file, or of standard input for `-`. Reading starts at once, so make it when the run starts.

    capacity: most rows read ahead; reading also stops at MAX_WAITING_TOKENS of their prompts.
    request_rate: rows a second, arriving as a Poisson process drawn from the run's seed; infinite: a row arrives when
    its line is read. done: rows that an earlier start has answered, which are left out. asked: the format that the user
    named. Raises what `check_input` raises; `take` raises for what cannot be opened all the same, or has no rows.
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
    ) -> None:
        check_input(path)
        self._path = path
        self._asked = asked
        self._maker = maker
        self._clock = clock
        self._capacity = capacity
        self._done = done or Done()
        self._arrivals = _drawn_arrivals(maker.seed, request_rate, clock.now())
        self._changed = threading.Condition()
        self._rows: deque[Row] = deque()
        self._num_tokens = 0  # that self._rows hold
        self._failure: BaseException | None = None
        self._ended = False
        self._closed = False
        # A daemon: a read of standard input that nobody will ever answer must not keep the process alive. It opens the
        # path too, since that waits for whoever writes a named pipe, and would keep the main thread from any signal.
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
            self._num_tokens -= sum(map(_held_tokens, rows))
            if rows:
                self._changed.notify_all()
            elif self._failure is not None and not self._rows and limit > 0:
                raise self._failure
            return rows

    def wait(self, timeout_s: float | None) -> None:
        end_s = math.inf if timeout_s is None else self._clock.now() + timeout_s
        with self._changed:
            while not (self._ended and not self._rows):
                now_s = self._clock.now()
                # With nothing read yet only the reader can end the wait, and it notifies.
                ready_s = self._rows[0].arrival_s if self._rows else math.inf
                if now_s >= min(end_s, ready_s):
                    return
                left_s = min(end_s, ready_s) - now_s
                self._changed.wait(None if left_s == math.inf else left_s)

    def close(self) -> None:
        """Idempotent. The reader ends at its next row; one that is blocked in a read is left behind."""
        with self._changed:
            self._closed = True
            self._ended = True
            self._rows.clear()
            self._num_tokens = 0
            self._changed.notify_all()

    def _read(self) -> None:
        try:
            with _open(self._path) as stream:
                for row in self._file_rows(stream):
                    if not self._put(row):
                        return
        except OSError as error:
            self._failure = InputError(f"--input {self._path} cannot be read on: {error}")
        except BaseException as error:  # raised by take, in the thread that can do something about it
            self._failure = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, row: Row) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._has_room() or self._closed)
            if not self._closed:
                self._rows.append(row)
                self._num_tokens += _held_tokens(row)
                self._changed.notify_all()
            return not self._closed

    def _has_room(self) -> bool:
        return len(self._rows) < self._capacity and self._num_tokens < MAX_WAITING_TOKENS

    def _file_rows(self, stream: io.BufferedReader) -> Iterator[Row]:
        for parsed in _parsed_lines(self._path, stream, self._asked):
            if _take(self._done, parsed):
                continue
            drawn_s = next(self._arrivals, None)
            yield self._row(parsed, self._clock.now() if drawn_s is None else drawn_s)

    def _row(self, parsed: ParsedLine, arrival_s: float) -> Row:
        """A request is numbered by its line: the same whichever of the lines before it are run."""
        line, request, error = parsed.line, None, parsed.error
        if error is None:
            try:
                request = self._maker.make(parsed, line - 1, arrival_s)
            except RowError as problem:
                error = problem
        if error is not None:
            error = RowError(error.code, f"line {line}: {_short(error.message)}")
        return Row(line, parsed.id, parsed.form, request, error, arrival_s, parsed.nameless, parsed.extra)


class MemorySource:
    """Rows that are there already, all arrived: the Python API's source, and the tests'."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = deque(rows)

    @property
    def exhausted(self) -> bool:
        return not self._rows

    def take(self, limit: int) -> list[Row]:
        return [self._rows.popleft() for _ in range(min(limit, len(self._rows)))]

    def wait(self, timeout_s: float | None) -> None:
        """Returns at once: there is nothing to wait for."""

    def close(self) -> None:
        self._rows.clear()


def _held_tokens(row: Row) -> int:
    """Return how many tokens take as much memory as the row: its prompt's, of 4 bytes each, and its extra keys."""
    return row.num_prompt_tokens + len(row.extra) // 4


def _without_values(problem: RowError) -> str:
    """Return a problem's text for a log, which must hold no prompt. The row's line in the output has the values."""
    if problem.code in _QUOTING:
        return problem.code
    return _short(problem.message)


def _short(message: str) -> str:
    """A message may quote a value, and a value may be as long as a line."""
    return message if len(message) <= 1000 else f"{message[:500]} ... {message[-200:]}"


def _drawn_arrivals(seed: int, request_rate: float, start_s: float) -> Iterator[float]:
    """The times of a Poisson process, endless; nothing at all where rows arrive as they are read."""
    random_numbers = random.Random(f"arrivals {seed}")
    arrival_s = start_s
    while request_rate < math.inf:
        arrival_s += random_numbers.expovariate(request_rate)
        yield arrival_s


def _open(path: str) -> io.BufferedReader:
    try:
        if path == "-":
            # A reader of its own on the descriptor: the interpreter takes the lock of sys.stdin when it ends,
            # and dies of it where a thread is blocked in a read.
            return open(sys.stdin.fileno(), "rb", closefd=False)
        return Path(path).open("rb")
    except (OSError, ValueError, AttributeError) as error:  # sys.stdin is None where descriptor 0 is closed
        raise InputError(f"--input {path} cannot be read: {error}") from error
