"""Write one output line for each finished input line, and sync it, so that it is on disk before it counts as done.

    engine -> finish() / fail() -> bounded queue -> [writer thread: text, JSON, append, sync] -> journal

One sync serves a group of output lines.
"""

from __future__ import annotations

import contextlib
import os
import queue
import stat
import sys
import threading
from collections.abc import Mapping
from typing import Protocol

from sarathi_pp.core.request import Completion
from sarathi_pp.errors import ConfigError, OutputError, PeerLostError, RowError
from sarathi_pp.inputs.row import Row
from sarathi_pp.outputs.finished_row import EndedRequest, RowCollector, row_error
from sarathi_pp.outputs.journal import Journal, LateJournal, Start
from sarathi_pp.outputs.output_line import OutputLines
from sarathi_pp.text.tokenizer import Tokenizer
from sarathi_pp.trace.clock import Clock

# A sync is due after this many lines, or this many seconds after the first line that is not synced.
GROUP_ROWS = 256
GROUP_S = 0.2
_QUEUE_ROWS = 4 * GROUP_ROWS


class OutputClosedError(OutputError):
    """An output whose reader has left, as `| head` does. The run ends without a message."""


class Sink(Protocol):
    """The receiver of input lines that have ended in the engine.

    `finish` and `fail` may wait for a slow disk. They may raise OutputError for an earlier input line.
    """

    def finish(self, row: Row, completion: Completion, metrics: Mapping[str, object]) -> None:
        """Accept an input line with its completion.

        Args:
            metrics: seconds and counts of this request, finite or None, for its output line.
        """
        ...

    def fail(self, row: Row, error: RowError) -> None:
        """Accept an input line with its error."""
        ...

    def close(self) -> None:
        """Sync all output lines, and return when this is done."""
        ...


def check_output(path: str, input_path: str, start: Start) -> None:
    """Raise if the output cannot be written, before anything is loaded. Change no file.

    Raises:
        ConfigError: the output is a directory or the input itself, it exists already, or it cannot be resumed.
        OutputError: the output cannot be written.
    """
    if path == "-":
        if start == "resume":
            raise ConfigError("--resume needs an --output file: what was printed cannot be read again")
        return
    if os.path.isdir(path):
        raise ConfigError(f"--output {path} is a directory; name a file")
    there = _stat(path)
    read = _stat(sys.stdin.fileno() if _stdin_open() and input_path == "-" else input_path)
    if there and read and os.path.samestat(there, read):
        raise ConfigError(f"--output {path} is the same file as --input {input_path}; name another")
    if there and stat.S_ISREG(there.st_mode) and start == "new":
        raise ConfigError(
            f"--output {path} exists; name another file, continue it with --resume, or replace it with --overwrite"
        )
    if there and not stat.S_ISREG(there.st_mode) and start == "resume":
        raise ConfigError(f"--resume: --output {path} is not a file, and its earlier lines cannot be read again")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise OutputError(f"--output {path}: the directory {folder} does not exist; make it first")
    if not os.access(path if there else folder, os.W_OK):
        raise OutputError(f"--output {path} cannot be written: no permission, or a read-only file system")


class FileSink:
    """A sink that appends an output line per input line to a journal, and closes the journal at the end.

    Args:
        tokenizer: turns output tokens into text.
        model: the model's name for output lines in OpenAI's form.

    Attributes:
        num_finished: number of completions for synced lines.
        num_failed: number of errors for synced lines. A line with one of each counts in both.
        num_lines: number of synced lines.
        num_error_lines: number of error lines among them.
    """

    def __init__(self, journal: Journal | LateJournal, *, tokenizer: Tokenizer, clock: Clock, model: str) -> None:
        self._journal = journal
        self._clock = clock
        self._lines = OutputLines(tokenizer, model, created=int(clock.wall()))
        self._queue: queue.Queue[EndedRequest | None] = queue.Queue(_QUEUE_ROWS)
        self._failure: BaseException | None = None
        self._raised = False
        self._closed = False
        self._drained = False
        self._collector = RowCollector()
        self._unsynced = [0, 0, 0, 0]  # completions, errors, lines and error lines that are appended
        self.num_finished = self.num_failed = self.num_lines = self.num_error_lines = 0
        self._thread = threading.Thread(target=self._write_all, name="output", daemon=True)
        self._thread.start()

    def finish(self, row: Row, completion: Completion, metrics: Mapping[str, object]) -> None:
        self._hand_over(EndedRequest(row, completion, metrics=metrics))

    def fail(self, row: Row, error: RowError) -> None:
        self._hand_over(EndedRequest(row, error=error))

    def close(self) -> None:
        """Write and sync the remaining lines, and close the file.

        Raises:
            OutputError: a line could not be written, and no call has raised this yet.
        """
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()
            self._journal.close()
        if not self._raised:
            self._raise_failure()

    def _hand_over(self, ended: EndedRequest) -> None:
        assert not self._closed, "the sink is closed"
        self._raise_failure()
        self._queue.put(ended)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._raised = True
            raise self._failure

    def _write_all(self) -> None:
        """Run the writer thread. After a failure, keep emptying the queue, so that no caller waits for room."""
        try:
            self._write_groups()
        except BrokenPipeError:
            self._failure = OutputClosedError(f"--output {self._journal.path} was closed by its reader")
        except PeerLostError as error:  # a later start writes the file now
            self._failure = error
        except OSError as error:
            with contextlib.suppress(OSError):
                self._sync()
            self._failure = OutputError(
                f"--output {self._journal.path} cannot be written: {error}; the lines already there are whole"
            )
        except BaseException as error:  # the next call raises it, in the thread that can handle it
            self._failure = error
        while not self._drained:
            self._drained = self._queue.get() is None

    def _write_groups(self) -> None:
        sync_s = self._clock.now()
        while not self._drained:
            group = self._next_group(sync_s)
            whole = [choices for ended in group if (choices := self._collector.add(ended))]
            if whole and not self._num_unsynced:
                sync_s = self._clock.now() + GROUP_S
            self._journal.append(b"".join(map(self._line, whole)))
            for choices in whole:
                self._count(choices)
            due = self._num_unsynced and (self._num_unsynced >= GROUP_ROWS or self._clock.now() >= sync_s)
            if due or self._drained:
                self._sync()

    def _next_group(self, sync_s: float) -> list[EndedRequest]:
        """Return the ended requests in the queue, after waiting for at least one.

        Return none if a sync is due before one comes, or if the sink is closed.

        Args:
            sync_s: time at which the next sync is due, if lines are not synced.
        """
        left_s = max(0.0, sync_s - self._clock.now()) if self._num_unsynced else None
        group: list[EndedRequest] = []
        try:
            ended = self._queue.get(timeout=left_s)
            while ended is not None and len(group) < GROUP_ROWS - 1:
                group.append(ended)
                ended = self._queue.get_nowait()
        except queue.Empty:
            return group
        if ended is not None:
            group.append(ended)
        self._drained = ended is None
        return group

    def _sync(self) -> None:
        self._journal.sync()
        completed, failed, lines, error_lines = self._unsynced
        self.num_finished += completed
        self.num_failed += failed
        self.num_lines += lines
        self.num_error_lines += error_lines
        self._unsynced = [0, 0, 0, 0]

    @property
    def _num_unsynced(self) -> int:
        return self._unsynced[2]

    def _count(self, choices: list[EndedRequest]) -> None:
        failed = sum(one.error is not None for one in choices)
        added = (len(choices) - failed, failed, 1, int(failed > 0))
        self._unsynced = [before + number for before, number in zip(self._unsynced, added, strict=True)]

    def _line(self, choices: list[EndedRequest]) -> bytes:
        row, error = choices[0].row, row_error(choices)
        if error is not None:
            return self._lines.of_error(row, error)
        return self._lines.of_answers(choices)


def _stat(path: str | int) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _stdin_open() -> bool:
    try:
        return sys.stdin is not None and sys.stdin.fileno() >= 0
    except (OSError, ValueError):
        return False
