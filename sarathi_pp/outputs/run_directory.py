"""The run directory: the files of a run that are next to its output.

RUN/run.json                                      resolved configuration, versions, model, hosts
RUN/attempt-0000/trace-00000-of-00002.jsonl       one trace per stage, one directory per start; if there are several
                                                  replicas, each has a directory replica-0000 in it
RUN/attempt-0000/failed-at-start                  no stage got beyond its first microbatch; the next start reads this
RUN/report.json                                   the figures of the last attempt
RUN/exit_code                                     the run's own exit code: torchrun itself returns 1 for any failure
RUN/job                                           ids of the launches that started and resumed the run: a restart looks
                                                  for its own id
RUN/unfinished                                    marks that run.json is that of a run that was lost, and that no later
                                                  start has replaced it yet
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sarathi_pp.errors import EXIT_OK, EXIT_ROWS_FAILED, ConfigError, OutputError, PeerLostError
from sarathi_pp.outputs.atomic_file import atomic_write
from sarathi_pp.process.host import host_id
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.trace.recorder import MOST_BYTES, trace_name
from sarathi_pp.wire.mesh import Coordinate, Mesh

_LOCK_CHECK_S = 0.1
_FAILED_AT_START = "failed-at-start"
_UNFINISHED = "unfinished"
_ENTRY = re.compile(r"run\.json|report\.json|exit_code|job|unfinished|\..*\.part|attempt-\d{4,}")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A run directory, as one attempt uses it.

    Attributes:
        attempt: index of this attempt, from 0.
        replaces: True if the earlier attempts belong to another run. `begin` removes them.
        most_trace_bytes: size at which each rank cuts its trace.
    """

    path: Path
    attempt: int = 0
    replaces: bool = False
    most_trace_bytes: int = MOST_BYTES

    @classmethod
    def unnamed(cls, path: Path) -> RunDirectory:
        """Return a run directory for traces that the user does not keep.

        It is below the system's directory for temporary files, which may be in memory. So its traces are smaller.
        """
        return cls(path, most_trace_bytes=MOST_BYTES // 4)

    @classmethod
    def default_path(cls, output: str) -> Path:
        """Return the path of the directory next to an output file."""
        return Path(output + ".run")

    @classmethod
    def check(cls, path: Path, *, overwrite: bool, resume: bool = False) -> None:
        """Raise if using a directory would destroy an earlier run or files of the user.

        A directory that holds only a start which was refused before it ran anything may be used again.

        Raises:
            ConfigError: an earlier run's directory would be overwritten, or it holds files that no run wrote.
            OutputError: the directory cannot be read, or no directory can have this name.
        """
        try:
            cls._check(path, overwrite=overwrite, resume=resume)
        except ConfigError:
            raise
        except OSError as error:
            raise OutputError(
                f"the run directory {path} cannot be used: {error.strerror}; name another --run-dir"
            ) from error

    @classmethod
    def _check(cls, path: Path, *, overwrite: bool, resume: bool) -> None:
        if path.exists() and not (overwrite or resume) and not (path.is_dir() and _holds_no_run(path)):
            raise ConfigError(f"the run directory {path} exists; use --overwrite, or --run-dir with another one")
        if path.exists():
            foreign = [path] if not path.is_dir() else [entry for entry in path.iterdir() if not _is_of_a_run(entry)]
            if foreign:
                raise ConfigError(
                    f"{min(foreign)} was not written by sarathi-pp. --overwrite deletes only files of earlier runs; "
                    f"choose another --run-dir than {path}"
                    if overwrite
                    else f"{min(foreign)} was not written by sarathi-pp; choose another --run-dir than {path}"
                )

    @classmethod
    @contextmanager
    def claim(
        cls, path: Path, *, overwrite: bool, resume: bool = False, launch_id: str = "", patience_s: float = 0.0
    ) -> Iterator[RunDirectory]:
        """Claim the directory of a run. No other run may claim it inside the block.

        The directory gets the mode 0700, because traces show lengths and times of prompts. The attempts of an earlier
        run stay, and this start adds its own. Of the earlier run, only the exit code is removed before `begin`. So a
        start that is refused until then has removed nothing more.

        Args:
            overwrite: the directory may be an earlier run's, which this start replaces.
            resume: the directory may be an earlier run's, which this start continues.
            launch_id: id of this launch; empty if nothing restarts it after a failure. With `resume` it is added to
                the ids of earlier launches.
            patience_s: seconds to wait if another run still uses the directory. It may be on a lost host.

        Raises:
            ConfigError: see `check`, or another run uses the directory.
            OutputError: the directory cannot be made.
        """
        cls.check(path, overwrite=overwrite, resume=resume)
        with ExitStack() as held:
            try:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                held.callback(os.close, _wait_for_lock(path, patience_s))
                kept = overwrite or resume
                if kept:
                    cls(path)._note_unfinished()
                attempts = [int(entry.name[8:]) for entry in path.glob("attempt-*")] if kept else []
                names = ["run.json", "report.json", _UNFINISHED, *map(_attempt_name, attempts)] if kept else []
                if launch_id and resume:
                    names.append("job")  # until the next one is written: a start that is killed here resumes by it
                before = [one for one in cls(path).launches() if one != launch_id] if resume else []
                _remove(entry for entry in path.iterdir() if entry.name not in names)
                path.chmod(0o700)
            except OSError as error:
                raise OutputError(f"cannot make the run directory {path}: {error.strerror}") from error
            claimed = cls(path, max(attempts, default=-1) + 1, replaces=bool(attempts) and not resume)
            if launch_id:
                claimed._write("job", "".join(f"{one}\n" for one in (*before, launch_id)))
            yield claimed

    def begin(self, facts: dict[str, Any]) -> None:
        """Write the run.json of this run, and remove the report and the replaced attempts of an earlier run.

        From here on, the output and the directory belong to this run.

        Args:
            facts: contents of run.json.

        Raises:
            OutputError: run.json cannot be written.
        """
        with suppress(FileNotFoundError):
            (self.path / "report.json").unlink()
        self.drop_replaced()
        self.write_run(facts)
        with suppress(OSError):
            (self.path / _UNFINISHED).unlink()

    def withdraw(self) -> None:
        """Remove the files of this attempt, which is refused before `begin`. So a later start finds nothing of it."""
        with suppress(OSError):
            _remove(self.attempt_path.iterdir())

    def drop_replaced(self) -> None:
        """Remove the attempts of the run that this one replaces.

        Raises:
            OutputError: the attempts cannot be removed.
        """
        if not self.replaces:
            return
        own = _attempt_name(self.attempt)
        try:
            _remove(entry for entry in self.path.glob("attempt-*") if entry.name != own)
        except OSError as error:
            raise OutputError(f"cannot remove the earlier run of {self.path}: {error.strerror}") from error

    def joining(self, leader: Path, attempt: int, *, own: bool, replaces: bool = False) -> RunDirectory:
        """Return the run directory that this rank uses, and make its folder for the attempt.

        Args:
            leader: path of the run directory of rank 0.
            attempt: index of the attempt, from 0.
            own: True if the user named another directory for this rank, which it then uses instead.
            replaces: see RunDirectory.
        """
        joined = replace(self, path=self.path if own else leader, attempt=attempt, replaces=replaces)
        joined.make(joined.attempt_path)
        return joined

    def make(self, folder: Path) -> None:
        """Make a folder in this directory if it does not exist.

        Raises:
            OutputError: the folder cannot be made.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot make {folder}: {error.strerror}") from error

    @property
    def attempt_path(self) -> Path:
        return self.path / _attempt_name(self.attempt)

    def trace_path(self, mesh: Mesh, coordinate: Coordinate) -> Path:
        """Return the path of a rank's trace file.

        With tensor parallelism, reports use only the trace of a stage's first shard. The other shards have files next
        to it.
        """
        name = trace_name(coordinate.stage, mesh.stages)
        folder = self.attempt_path / replica_name(coordinate.replica) if mesh.replicas > 1 else self.attempt_path
        return folder / (f"shard-{coordinate.shard:04d}-{name}" if coordinate.shard else name)

    def forget(self, replica: int) -> None:
        """Rename the folder with the traces of a lost replica, so that reports leave them out. The user still has them.

        Args:
            replica: index of the replica.
        """
        path = self.attempt_path / replica_name(replica)
        with suppress(OSError):
            path.rename(path.with_name(f"lost-{path.name}"))

    def fails_again(self) -> bool:
        """Record that this attempt failed before its first microbatch was done.

        Returns:
            True if the previous attempt failed so early too.
        """
        with suppress(OSError):
            (self.attempt_path / _FAILED_AT_START).touch()
        return (self.path / _attempt_name(self.attempt - 1) / _FAILED_AT_START).exists()

    def identity(self) -> str:
        """Return an id that is equal on two ranks exactly if both write into the same directory."""
        status = self.attempt_path.stat()
        return f"{host_id()}:{status.st_dev}:{status.st_ino}"

    def launches(self) -> list[str]:
        """Return the ids of the launches that have claimed the directory, the latest last.

        The earlier ones belong to the run that the latest launch resumes.
        """
        try:
            return (self.path / "job").read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return []

    def read_exit_code(self) -> int | None:
        """Return the exit code in the directory; None if there is none."""
        try:
            return int((self.path / "exit_code").read_text())
        except (OSError, ValueError):
            return None

    def end_mark(self) -> tuple[int, int] | None:
        """Return a mark that changes when an exit code is written, even an equal one; None if there is no exit code."""
        try:
            status = (self.path / "exit_code").stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def read_run(self) -> dict[str, Any] | None:
        """Return the facts that `write_run` wrote; None if there are none, or if they cannot be read."""
        try:
            facts = json.loads((self.path / "run.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return facts if isinstance(facts, dict) else None

    def is_unfinished(self) -> bool:
        """Return whether the run in this directory was lost and no later start has replaced it.

        A start that was refused before `begin` does not replace it.
        """
        code = self.read_exit_code()
        refused = code not in (EXIT_OK, EXIT_ROWS_FAILED) and (self.path / _UNFINISHED).exists()
        return code in (None, PeerLostError.exit_code) or refused

    def _note_unfinished(self) -> None:
        """Record in the file `unfinished` that the run was lost. Call it before its exit code is removed or replaced.

        Raises:
            OSError: the file cannot be written or removed.
        """
        if not self.is_unfinished():
            (self.path / _UNFINISHED).unlink(missing_ok=True)
        elif (self.path / "run.json").exists():
            (self.path / _UNFINISHED).touch(mode=0o600)

    def write_run(self, facts: dict[str, Any]) -> None:
        """Write run.json: the facts, and the command that started the run. Raises OutputError."""
        command = own_command(sys.argv)
        known = facts if command is None else {**facts, "command": command}
        self._write("run.json", json.dumps(known, indent=2, default=str) + "\n")

    def write_report(self, report: dict[str, Any]) -> None:
        self._write("report.json", json.dumps(report, indent=2) + "\n")

    def write_exit_code(self, code: int) -> None:
        """Write the exit code. Code 75, for a lost rank, never replaces a code, because that is closer to the cause.

        If the file cannot be written, for example on a full disk, nothing is raised, and the process still ends with
        this code. The file is not synced, so this does not wait for a disk.
        """
        with suppress(OutputError):
            self._write("exit_code", f"{code}\n", replace=code != PeerLostError.exit_code, synced=False)

    def write_end(self, code: int) -> None:
        """Write the exit code of a run whose processes have all ended, unless another run uses this directory now."""
        with suppress(OSError, ConfigError), ExitStack() as held:
            if self.path.exists():
                held.callback(os.close, _locked(self.path))
            self.write_exit_code(code)

    def write_refusal(self, code: int, *, overwrite: bool, launch_id: str = "") -> None:
        """Write the exit code of a rank that was refused before the run has started.

        If a run uses the directory, the code is written only if that run is this rank's own: rank 0 has claimed the
        directory for `launch_id`. Without `overwrite`, the code of an earlier run stays. Parent folders are not made.
        """
        with suppress(OSError, ConfigError, OutputError), ExitStack() as held:
            if self.path.exists():
                try:
                    held.callback(os.close, _locked(self.path))
                except ConfigError:
                    if not launch_id or self.launches()[-1:] != [launch_id]:
                        raise
                else:
                    entries = list(self.path.iterdir())
                    if not (_holds_no_run(self.path) or (overwrite and all(map(_is_of_a_run, entries)))):
                        return
                    self._note_unfinished()
            elif not self.path.parent.is_dir():
                return
            self._write("exit_code", f"{code}\n")

    def _write(self, name: str, text: str, *, replace: bool = True, synced: bool = True) -> None:
        """Write a file of this directory completely or not at all.

        Raises:
            OutputError: the file cannot be written.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot make the run directory {self.path}: {error.strerror}") from error
        atomic_write(self.path / name, text, replace=replace, synced=synced)


def own_command(words: Sequence[str]) -> list[str] | None:
    """Return the command line of a `sarathi-pp` process; None for another program, whose arguments may hold prompts.

    Args:
        words: the words of the process's command line, its program first.
    """
    program = Path(words[0]) if words else Path()
    if program.name != "sarathi-pp" and program.parts[-2:] != ("sarathi_pp", "__main__.py"):
        return None
    return ["sarathi-pp", *words[1:]]


def replica_name(replica: int) -> str:
    return f"replica-{replica:04d}"


def _remove(entries: Iterable[Path]) -> None:
    """Remove files and folders, even if other ranks remove them at the same time.

    Ranks of one host may share a directory that is not rank 0's. Each of them removes the earlier entries.
    """
    for entry in list(entries):
        while os.path.lexists(entry):
            with suppress(FileNotFoundError):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _attempt_name(number: int) -> str:
    return f"attempt-{number:04d}"


def _is_of_a_run(entry: Path) -> bool:
    """Return whether a run wrote an entry of a run directory. Only its name counts.

    The contents do not, since a run may have been killed at any moment.
    """
    return bool(_ENTRY.fullmatch(entry.name)) and entry.is_dir() == entry.name.startswith("attempt-")


def _wait_for_lock(path: Path, patience_s: float) -> int:
    clock = SystemClock()
    deadline_s = clock.now() + patience_s
    while True:
        try:
            return _locked(path)
        except ConfigError:
            if clock.now() >= deadline_s:
                raise
        clock.sleep(_LOCK_CHECK_S)


def _locked(path: Path) -> int:
    """Lock a directory, and return the descriptor that holds the lock.

    Not every file system has locks. Without locks, nothing keeps another run away. This is better than no run at all.

    Raises:
        ConfigError: another run holds the lock.
    """
    descriptor = os.open(path, os.O_RDONLY)
    with suppress(OSError):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(
                f"another run is using the run directory {path}; name another output, or --run-dir"
            ) from None
    return descriptor


def _holds_no_run(path: Path) -> bool:
    """Return whether a directory is empty, or holds only the files of a refused start.

    These files are its exit code, the file `job`, partly written files, and empty folders for traces. If there is no
    exit code, another start may be preparing its run there, so the result is False.
    """
    entries = {entry.name: entry for entry in path.iterdir()}
    if not entries:
        return True
    ended = any(name == "exit_code" or name.startswith(".exit_code.") for name in entries)
    entries.pop("exit_code", None)
    return ended and all(
        name == "job"
        or name.endswith(".part")
        or (name.startswith("attempt-") and entry.is_dir() and not any(entry.iterdir()))
        for name, entry in entries.items()
    )
