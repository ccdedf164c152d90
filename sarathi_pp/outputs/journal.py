"""The output file as the journal of a batch: whole lines, appended and synced; a row is done once its line is.

    first start       {"id": ...}\\n  {"id": ...}\\n  {"id": ..          <- killed in the middle of a write
    with `resume`     `--- answered, skipped ---'  `-- torn, removed --'  `-- rows without a line are run

Which rows have a line is found by reading it again, so there is no second file that could disagree with it. An id
has as many lines as the input has rows of that name: one that answers the first of them, and an error line
(`duplicate_id`) for each of the others. A row of which nobody can tell the id has an error line that tells its line.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import BinaryIO, Literal, Protocol

from sarathi_pp.errors import ConfigError, InputError, OutputError
from sarathi_pp.inputs.done import Done, DoneLine
from sarathi_pp.inputs.ids import DUPLICATE_ID
from sarathi_pp.outputs.atomic_file import sync
from sarathi_pp.outputs.output_fence import Fence
from sarathi_pp.trace.clock import SystemClock

# "new" refuses a file that is there, "replace" empties it, "resume" goes on behind its last whole line.
Start = Literal["new", "replace", "resume"]

_PARTIAL_BYTES = 8
_LINE_BEGINS = b'{"id":'


def read_done(path: str) -> Done | None:
    """Return the rows that have a line in an output, without changing it; None if a run must repair or refuse it."""
    done = Done()
    try:
        with open(path, "rb") as stream:
            for data, line in _parsed(stream):
                if not data.endswith(b"\n"):
                    return None
                done.add(line)
    except (OSError, ValueError, RecursionError):
        return None
    return done


def holds_anything(path: str) -> bool:
    """Whether it is a file with bytes in it."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size > 0


class Journal:
    """A file, pipe or device that lines are appended to; a file is locked against other runs, a new one has mode 0600.

    done: what it already answers; nothing unless it was opened to resume. fence: checked before each append.
    """

    def __init__(self, path: str, fd: int, done: Done, fence: Fence | None = None) -> None:
        self.path = path
        self._fd = fd
        self._fence = fence
        self._regular = path != "-" and stat.S_ISREG(os.fstat(fd).st_mode)
        self.done = done

    @classmethod
    def open(
        cls,
        path: str,
        start: Start = "new",
        *,
        retry_errors: bool = False,
        wait: Callable[[], None] = lambda: SystemClock().sleep(0.1),
        patience_s: float = 0.0,
    ) -> Journal:
        """`-` is standard output. retry_errors: drop what resuming finds of error lines, so that those rows run again.

        wait: called again and again until the reader of a named pipe is there, or a lock is free; may raise.
        patience_s: how long to wait for the lock, which a host that was lost may hold until its lease ends.
        Raises ConfigError where the file is there and `start` is "new", or belongs to a running run; InputError where
        it is to be resumed and holds what no run wrote; OutputError where it cannot be written.
        """
        if path == "-":
            return cls(path, _standard_output(), Done())
        fd = _open(path, start, wait)
        fence = Fence(path)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return cls(path, fd, Done())
            _wait_for_lock(fd, path, wait, patience_s)
            if not os.path.samestat(os.fstat(fd), os.stat(path)):  # another run has just put another file in its place
                raise ConfigError(f"--output {path} is being written by another run; name another file")
            done, fenced = Done(), fence.take()
            if start != "new":
                _remove_partial(path)
            if start == "resume":
                done = _repair(path, fd)
                if retry_errors and done.num_errors > done.num_duplicates:
                    fd, done = _without_errors(path, fd)
            else:
                os.ftruncate(fd, 0)
            _sync_folder(path)
        except BaseException as error:
            os.close(fd)
            fence.drop()
            if isinstance(error, OSError) and not isinstance(error, OutputError):
                raise OutputError(f"--output {path} cannot be gone on with: {error}") from error
            raise
        return cls(path, fd, done, fence if fenced else None)

    def append(self, data: bytes) -> None:
        """Writes whole lines; where the disk is full, takes the torn last one back.

        Raises OSError, or PeerLostError if a later start has taken the file over.
        """
        self._check_fence()
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            self._check_fence()
            if self._regular:
                whole = data.rfind(b"\n", 0, written) + 1
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - (written - whole))
            raise

    def sync(self) -> None:
        """Raises OSError. Pipes, terminals and devices have nothing to sync."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
                raise

    def close(self) -> None:
        os.close(self._fd)
        if self._fence is not None:
            self._fence.drop()

    def _check_fence(self) -> None:
        if self._fence is not None:
            self._fence.check()


class Opener(Protocol):
    """Who opens the journal when it is time."""

    def open(self) -> Journal: ...


class LateJournal:
    """A journal that is opened for its first line: whether a stream has rows shows when it is read.

    Use as a Journal.
    """

    def __init__(self, path: str, opener: Opener) -> None:
        self.path = path
        self.done = Done()
        self._opener = opener
        self._journal: Journal | None = None
        self._failure: Exception | None = None
        self._lock = threading.Lock()  # its first line and the end of the run may meet

    def open(self) -> Journal:
        """Open it if it is not yet: a run that ends in order has an output, if only an empty one.

        It is tried once, since another run may have the file the next time. Raises what the opener raised.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._journal is None:
                try:
                    self._journal = self._opener.open()
                except Exception as error:
                    self._failure = error
                    raise
            return self._journal

    def append(self, data: bytes) -> None:
        if data:
            self.open().append(data)

    def sync(self) -> None:
        if self._journal is not None:
            self._journal.sync()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()


def _repair(path: str, fd: int) -> Done:
    """What the file answers; bytes behind its last whole line, which nobody was told are there, are cut off."""
    done, end = Done(), 0
    with open(path, "rb") as stream:
        for number, data in enumerate(stream, 1):
            if _is_torn(data):
                break
            try:
                done.add(DoneLine.parse(data))
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"--output {path} cannot be resumed: line {number} is no line of a run: {error}; name another file"
                ) from None
            end += len(data)
        if stream.read(1):
            raise InputError(f"--output {path} cannot be resumed: behind line {number} it goes on after a torn one")
    if end < os.fstat(fd).st_size:
        os.ftruncate(fd, end)
        os.fsync(fd)
    return done


def _is_torn(data: bytes) -> bool:
    """The beginning of a line without its end, or the zeros that some file systems leave after a crash."""
    if not data.strip(b"\0\n"):
        return True
    return not data.endswith(b"\n") and _LINE_BEGINS.startswith(data[: len(_LINE_BEGINS)])


def _without_errors(path: str, fd: int) -> tuple[int, Done]:
    """The journal replaced, in one step, by one without errors of rows that may run again; the old one is closed."""
    done = Done()
    path = os.path.realpath(path)  # where it is a link, that stays one
    partial = f"{path}.{secrets.token_hex(_PARTIAL_BYTES)}.part"
    new = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(new, stat.S_IMODE(os.fstat(fd).st_mode))
        _lock(new, path)
        with open(path, "rb") as stream, open(new, "wb", closefd=False) as copy:
            for data, line in _parsed(stream):
                if line.code is None or line.code == DUPLICATE_ID:
                    copy.write(data)
                    done.add(line)
        os.fsync(new)
        os.replace(partial, path)
    except OSError as error:
        os.close(new)
        with suppress(OSError):
            os.unlink(partial)
        raise OutputError(f"--output {path} cannot be written without its errors: {error}") from error
    os.close(fd)
    return new, done


def _remove_partial(path: str) -> None:
    """What a start that was killed meanwhile has left of that; whoever has the journal's lock is alone in it."""
    folder, name = os.path.split(os.path.realpath(path))
    own = re.compile(rf"{re.escape(name)}\.[0-9a-f]{{{2 * _PARTIAL_BYTES}}}\.part")
    for entry in filter(own.fullmatch, os.listdir(folder)):
        os.unlink(os.path.join(folder, entry))


def _parsed(stream: BinaryIO) -> Iterator[tuple[bytes, DoneLine]]:
    for data in stream:
        yield data, DoneLine.parse(data)


def _standard_output() -> int:
    try:
        return os.dup(sys.stdout.fileno())
    except (OSError, ValueError, AttributeError) as error:  # sys.stdout is None where descriptor 1 is closed
        raise OutputError(f"--output - cannot be written: {error}") from error


def _open(path: str, start: Start, wait: Callable[[], None]) -> int:
    # A file is only ever made here, replaced on request or gone on with; a pipe or device is written as it is.
    special = _is_special(path)
    how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    how |= os.O_NONBLOCK if special else os.O_EXCL if start == "new" else 0
    try:
        while (fd := _open_if_read(path, how)) is None:
            wait()  # not in the system, where no signal would be seen
        os.set_blocking(fd, True)
        return fd
    except FileExistsError as error:
        raise ConfigError(
            f"--output {path} exists; name another file, go on with it by --resume, or replace it with --overwrite"
        ) from error
    except (OSError, ValueError) as error:
        raise OutputError(f"--output {path} cannot be written: {error}") from error


def _open_if_read(path: str, how: int) -> int | None:
    """None for a pipe that nobody reads yet."""
    try:
        return os.open(path, how, 0o600)
    except OSError as error:
        if error.errno == errno.ENXIO and stat.S_ISFIFO(os.stat(path).st_mode):
            return None
        raise


def _is_special(path: str) -> bool:
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def _wait_for_lock(fd: int, path: str, wait: Callable[[], None], patience_s: float) -> None:
    clock = SystemClock()
    deadline_s = clock.now() + patience_s
    while True:
        try:
            return _lock(fd, path)
        except ConfigError:
            if clock.now() >= deadline_s:
                raise
        wait()


def _lock(fd: int, path: str) -> None:
    """Held until the descriptor is closed, by the process's death too. File systems without locks go without."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"--output {path} is being written by another run; name another file") from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL):
            raise OutputError(f"--output {path} cannot be locked: {error}") from error


def _sync_folder(path: str) -> None:
    """Makes the file's name survive a crash, as fsync makes its contents."""
    try:
        sync(os.path.dirname(os.path.abspath(path)))
    except OSError as error:
        raise OutputError(f"--output {path} cannot be synced: {error}") from error
