"""The run directory: the files of a run that are next to its output.

RUN/run.json                                      resolved configuration, versions, model, hosts
RUN/attempt-0000/trace-00000-of-00002.jsonl       one trace per stage, one directory per start; if there are several
                                                  replicas, each has a directory replica-0000 in it
RUN/attempt-0000/failed-at-start                  no stage got beyond its first microbatch; the next start reads this
RUN/report.json                                   the figures of the last attempt
RUN/exit_code                                     the run's own code: torchrun itself returns 1 for any failure
RUN/job                                           launches that started and resumed it, so that a restart knows its own
RUN/unfinished                                    run.json is that of a lost run, and a later start, which may be
                                                  refused, has not taken over yet
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
        replaces: True if the attempts before this one are another run's. `begin` removes them.
        most_trace_bytes: size at which each rank cuts its trace.
    """

    path: Path
    attempt: int = 0
    replaces: bool = False
    most_trace_bytes: int = MOST_BYTES

    @classmethod
    def unnamed(cls, path: Path) -> RunDirectory:
        """Return a run directory below the system's directory for temporary files, which may be in memory."""
        return cls(path, most_trace_bytes=MOST_BYTES // 4)

    @classmethod
    def default_path(cls, output: str) -> Path:
        """Return the path of the directory next to an output file."""
        return Path(output + ".run")

    @classmethod
    def check(cls, path: Path, *, overwrite: bool, resume: bool = False) -> None:
        """Refuse a directory that would lose an earlier run or files of the user.

        If an earlier start was refused before it ran anything, the user may correct the option and start again.

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

        Its mode is 0700, because traces show lengths and times of prompts. An earlier run's attempts stay, and this
        start adds its own. The record of how that run ended is removed, and nothing else before `begin`. So a start
        that is refused until then has removed nothing more.

        Args:
            overwrite: the directory may be an earlier run's, which this start replaces.
            resume: the directory may be an earlier run's, which this start continues.
            launch_id: id of this launch; empty if nothing would restart it. With `resume` it is added to earlier ones.
            patience_s: seconds to wait for a run that has the directory. That run may be on a lost host.

        Raises:
            ConfigError: see `check`, or another run has the directory.
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
        """Let the output belong to this run from here on, and write its run.json.

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
        """Remove the files of this attempt, because it is refused before `begin`. A later start then finds none."""
        with suppress(OSError):
            _remove(self.attempt_path.iterdir())

    def drop_replaced(self) -> None:
        """Remove the attempts of the run that this one replaces.

        Raises:
            OutputError: they cannot be removed.
        """
        if not self.replaces:
            return
        own = _attempt_name(self.attempt)
        try:
            _remove(entry for entry in self.path.glob("attempt-*") if entry.name != own)
        except OSError as error:
            raise OutputError(f"cannot remove the earlier run of {self.path}: {error.strerror}") from error

    def joining(self, leader: Path, attempt: int, *, own: bool, replaces: bool = False) -> RunDirectory:
        """Return the directory that a rank uses.

        Args:
            leader: path of the directory that rank 0 uses.
            own: True if the user named a directory for this rank, which it then uses instead.
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
        """Return the path of a rank's trace.

        Reports use the trace of a stage's first shard. Those of its other shards are next to it.
        """
        name = trace_name(coordinate.stage, mesh.stages)
        folder = self.attempt_path / replica_name(coordinate.replica) if mesh.replicas > 1 else self.attempt_path
        return folder / (f"shard-{coordinate.shard:04d}-{name}" if coordinate.shard else name)

    def forget(self, replica: int) -> None:
        """Keep the traces of a lost replica out of the report, and keep them for the user under another name."""
        path = self.attempt_path / replica_name(replica)
        with suppress(OSError):
            path.rename(path.with_name(f"lost-{path.name}"))

    def fails_again(self) -> bool:
        """Record that this attempt failed before its first microbatch was done.

        Returns:
            True if the attempt before it failed in the same way.
        """
        with suppress(OSError):
            (self.attempt_path / _FAILED_AT_START).touch()
        return (self.path / _attempt_name(self.attempt - 1) / _FAILED_AT_START).exists()

    def identity(self) -> str:
        """Return an id that is equal on two ranks exactly if both write into the same directory."""
        status = self.attempt_path.stat()
        return f"{host_id()}:{status.st_dev}:{status.st_ino}"

    def launches(self) -> list[str]:
        """Return the launches that have claimed the directory: the last one, after those whose run it resumes."""
        try:
            return (self.path / "job").read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return []

    def read_exit_code(self) -> int | None:
        """Return the exit code; None if there is none."""
        try:
            return int((self.path / "exit_code").read_text())
        except (OSError, ValueError):
            return None

    def end_mark(self) -> tuple[int, int] | None:
        """Return a mark that changes when an exit code is written, even the same one; None if there is none."""
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
        """Return whether the run in this directory was lost, even if later starts were refused before `begin`."""
        code = self.read_exit_code()
        refused = code not in (EXIT_OK, EXIT_ROWS_FAILED) and (self.path / _UNFINISHED).exists()
        return code in (None, PeerLostError.exit_code) or refused

    def _note_unfinished(self) -> None:
        """Record that the run was lost, before the exit code of another start replaces its own.

        Raises:
            OSError: this cannot be recorded.
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
        """Write the exit code. The cause wins over its echo: a lost peer's 75 never replaces an existing code.

        If it cannot be written, for example on a full disk, the process still ends with it. It waits for no disk.
        """
        with suppress(OutputError):
            self._write("exit_code", f"{code}\n", replace=code != PeerLostError.exit_code, synced=False)

    def write_end(self, code: int) -> None:
        """Write the exit code of a run whose processes have all ended, unless another run has this directory by now."""
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
    """Return the words of a command of ours; None for another program, whose arguments may hold prompts.

    Args:
        words: of a process, its program first.
    """
    program = Path(words[0]) if words else Path()
    if program.name != "sarathi-pp" and program.parts[-2:] != ("sarathi_pp", "__main__.py"):
        return None
    return ["sarathi-pp", *words[1:]]


def replica_name(replica: int) -> str:
    return f"replica-{replica:04d}"


def _remove(entries: Iterable[Path]) -> None:
    """Remove files and folders.

    Ranks of one host may share a directory that is not rank 0's. Each of them removes the earlier entries.
    """
    for entry in list(entries):
        while os.path.lexists(entry):
            with suppress(FileNotFoundError):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _attempt_name(number: int) -> str:
    return f"attempt-{number:04d}"


def _is_of_a_run(entry: Path) -> bool:
    """Return whether a run wrote an entry, judged by its name, because a run may have been killed at any moment."""
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

    Not every file system has locks. Without locks, no other run is kept out: a run matters more than its guard.

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

    These are its exit code, maybe one that another rank is writing at this moment, and empty folders for traces.
    Without the exit code, another start may be setting up there.
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
