"""The journal of a run, which is its output file: whole lines are appended and synced.

An input line is done when its output line is on disk.

    first start       {"id": ...}\\n  {"id": ...}\\n  {"id": ..          <- killed in the middle of a write
    with `resume`     `--- answered, skipped ---'  `-- torn, removed --'  `-- lines without an answer are run

A resumed run reads the output again to find the done input lines, so no second file can disagree with it. Several
input lines may have one id. Then the first of them has the answer. Each of the others has an error line
(`duplicate_id`). If the id of an input line is unknown, its error line has the line number.
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

# "new" refuses an existing file, "replace" empties it, "resume" continues after its last whole line.
Start = Literal["new", "replace", "resume"]

_PARTIAL_BYTES = 8
_LINE_BEGINS = b'{"id":'


def read_done(path: str) -> Done | None:
    """Return the input lines that an output answers. Change no file.

    Return None if the output cannot be read, has a line that no run wrote, or ends in the middle of a line. A run that
    resumes it must then repair or refuse it.
    """
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
    """Return whether a path is a file that is not empty."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size > 0


class Journal:
    """A file, pipe or device to which lines are appended.

    A file is locked against other runs. A new file has mode 0600.

    Args:
        done: input lines that the file already answers. It is empty unless the file was opened to resume.
        fence: keeps this start from writing after a later one has taken the file over. None if it cannot be used.
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
        """Open a journal.

        Args:
            path: path of the output. `-` is standard output.
            retry_errors: when resuming, drop error lines, so that their input lines run again.
            wait: called repeatedly until a named pipe has a reader, or until a lock is free. It may raise.
            patience_s: seconds to wait for the lock. On a network file system, a lost host may hold it until its lease
                ends.

        Raises:
            ConfigError: the file exists and `start` is "new", or another run is writing the file.
            InputError: `start` is "resume", and the file has a line that no run wrote.
            OutputError: the file cannot be written.
        """
        if path == "-":
            return cls(path, _standard_output(), Done())
        fd = _open(path, start, wait)
        fence = Fence(path)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return cls(path, fd, Done())
            _wait_for_lock(fd, path, wait, patience_s)
            if not os.path.samestat(os.fstat(fd), os.stat(path)):  # another run has just replaced the file
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
                raise OutputError(f"--output {path} cannot be opened: {error}") from error
            raise
        return cls(path, fd, done, fence if fenced else None)

    def append(self, data: bytes) -> None:
        """Append whole lines. If the disk is full, remove the last line, of which only a part was written.

        Raises:
            OSError: the lines cannot be written.
            PeerLostError: a later start of this run has taken the file over.
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
        """Write all lines to disk. Pipes, terminals and devices have nothing to sync.

        Raises:
            OSError: the lines cannot be written to disk.
        """
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
    """An object that opens the journal at the time when it is needed."""

    def open(self) -> Journal: ...


class LateJournal:
    """A journal that is opened only for its first line. It has the methods of a Journal.

    It is for input from a stream: until the stream is read, the run does not know whether there are input lines.
    """

    def __init__(self, path: str, opener: Opener) -> None:
        self.path = path
        self.done = Done()
        self._opener = opener
        self._journal: Journal | None = None
        self._failure: Exception | None = None
        self._lock = threading.Lock()  # the first line and the end of the run may come at the same time

    def open(self) -> Journal:
        """Open the journal if it is not open. A run without output lines calls this too, to make an empty output.

        Opening is tried only once. After a failure, each call raises the same error, because another run might write
        the file by then.
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
    """Return the input lines that the file answers. Cut off a torn last line: the end of an unfinished write.

    Raises:
        InputError: a line was not written by a run, or lines follow a torn one.
    """
    done, end = Done(), 0
    with open(path, "rb") as stream:
        for number, data in enumerate(stream, 1):
            if _is_torn(data):
                break
            try:
                done.add(DoneLine.parse(data))
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"--output {path} cannot be resumed: line {number} was not written by a run: {error}; name another "
                    f"file"
                ) from None
            end += len(data)
        if stream.read(1):
            raise InputError(
                f"--output {path} cannot be resumed: line {number} is incomplete, and other lines follow; name "
                f"another file"
            )
    if end < os.fstat(fd).st_size:
        os.ftruncate(fd, end)
        os.fsync(fd)
    return done


def _is_torn(data: bytes) -> bool:
    """Return whether a line is an unfinished write: an output line without its end, or only zeros.

    Some file systems leave zeros after a crash.
    """
    if not data.strip(b"\0\n"):
        return True
    return not data.endswith(b"\n") and _LINE_BEGINS.startswith(data[: len(_LINE_BEGINS)])


def _without_errors(path: str, fd: int) -> tuple[int, Done]:
    """Replace the journal in one step by one without the error lines whose input lines may run again.

    Close the old descriptor `fd`. Return the new descriptor and the input lines that are still answered.
    """
    done = Done()
    path = os.path.realpath(path)  # if it is a link, the link stays
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
        raise OutputError(f"--output {path}: its error lines cannot be removed: {error}") from error
    os.close(fd)
    return new, done


def _remove_partial(path: str) -> None:
    """Remove the partial files that a killed `_without_errors` has left.

    Only the process that holds the journal's lock makes such files, so none of them is in use.
    """
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
    except (OSError, ValueError, AttributeError) as error:  # sys.stdout is None if descriptor 1 is closed
        raise OutputError(f"--output - cannot be written: {error}") from error


def _open(path: str, start: Start, wait: Callable[[], None]) -> int:
    # This makes a file, or opens an existing one to replace or resume it. A pipe or device is opened as it is.
    special = _is_special(path)
    how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    how |= os.O_NONBLOCK if special else os.O_EXCL if start == "new" else 0
    try:
        while (fd := _open_if_read(path, how)) is None:
            wait()  # not inside a system call, where no signal would be noticed
        os.set_blocking(fd, True)
        return fd
    except FileExistsError as error:
        raise ConfigError(
            f"--output {path} exists; name another file, continue it with --resume, or replace it with --overwrite"
        ) from error
    except (OSError, ValueError) as error:
        raise OutputError(f"--output {path} cannot be written: {error}") from error


def _open_if_read(path: str, how: int) -> int | None:
    """Open a path and return its descriptor; None for a pipe that has no reader yet."""
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
    """Lock a file until its descriptor is closed or the process ends. Do nothing on file systems without locks.

    Raises:
        ConfigError: another run holds the lock.
        OutputError: locking failed.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"--output {path} is being written by another run; name another file") from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL):
            raise OutputError(f"--output {path} cannot be locked: {error}") from error


def _sync_folder(path: str) -> None:
    """Write the name of a new file to disk, so that it survives a crash. fsync on the file writes only its contents."""
    try:
        sync(os.path.dirname(os.path.abspath(path)))
    except OSError as error:
        raise OutputError(f"--output {path} cannot be synced: {error}") from error
