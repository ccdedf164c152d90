"""The run directory: what a run leaves behind beside its output.

RUN/run.json                                      resolved configuration, versions, model, hosts
RUN/attempt-0000/trace-00000-of-00002.jsonl       one trace a stage, one directory a start; of several replicas each
                                                  has a directory replica-0000 in it
RUN/attempt-0000/failed-at-start                  no stage got beyond its first microbatch; by it the next start knows
RUN/report.json                                   the figures of the last attempt
RUN/exit_code                                     how it ended: torchrun itself returns 1 for any failure
RUN/job                                           who started it and went on with it, so that a restart knows its own
RUN/unfinished                                    run.json is that of a run that was lost, while a later start, which
                                                  may be refused, has not begun
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
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
    """replaces: the attempts before this one are another run's, and go once this one begins.

    most_trace_bytes: size at which each rank cuts its trace.
    """

    path: Path
    attempt: int = 0
    replaces: bool = False
    most_trace_bytes: int = MOST_BYTES

    @classmethod
    def unnamed(cls, path: Path) -> RunDirectory:
        """Return one below the system's directory for temporary files, which may be in memory."""
        return cls(path, most_trace_bytes=MOST_BYTES // 4)

    @classmethod
    def default_path(cls, output: str) -> Path:
        """Return the directory next to an output file."""
        return Path(output + ".run")

    @classmethod
    def check(cls, path: Path, *, overwrite: bool, resume: bool = False) -> None:
        """Raises ConfigError where an earlier run's directory would be written over, or anything that is no run's.

        Not where a start was refused before it ran anything: whoever corrects the option may start again.
        Raises OutputError where nobody can look, or no directory could have that name.
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
                    f"the run directory {path} would be removed, and {min(foreign)} is no run's: --overwrite removes "
                    f"what runs wrote and nothing else; use --run-dir with another one"
                    if overwrite
                    else f"{min(foreign)} is no run's; use --run-dir with another directory"
                )

    @classmethod
    @contextmanager
    def claim(
        cls, path: Path, *, overwrite: bool, resume: bool = False, launch_id: str = "", patience_s: float = 0.0
    ) -> Iterator[RunDirectory]:
        """The directory of a run, 0700: traces tell of prompts' lengths and times. No other run may claim it meanwhile.

        overwrite, resume: it may be an earlier run's, to whose attempts this start adds its own; how that one ended is
        removed, and nothing else before `begin`: a start that is refused until then has taken nothing away.
        patience_s: how long to wait for a run that has it, which may be on a host that was lost.
        launch_id: who starts it; empty if nothing would restart it. With `resume` it is added to those before it.
        Raises ConfigError, also where another run has it, or OutputError.
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
                    names.append("job")  # until the next one stands there: by it a start goes on that is killed here
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
        """The output is this run's from here on: so is run.json, which these facts make. Raises OutputError."""
        with suppress(FileNotFoundError):
            (self.path / "report.json").unlink()
        self.drop_replaced()
        self.write_run(facts)
        with suppress(OSError):
            (self.path / _UNFINISHED).unlink()

    def withdraw(self) -> None:
        """Remove what this attempt has written, which is refused before `begin`: a later start finds nothing here."""
        with suppress(OSError):
            _remove(self.attempt_path.iterdir())

    def drop_replaced(self) -> None:
        """Raises OutputError."""
        if not self.replaces:
            return
        own = _attempt_name(self.attempt)
        try:
            _remove(entry for entry in self.path.glob("attempt-*") if entry.name != own)
        except OSError as error:
            raise OutputError(f"cannot remove the earlier run of {self.path}: {error.strerror}") from error

    def joining(self, leader: Path, attempt: int, *, own: bool, replaces: bool = False) -> RunDirectory:
        """The directory a rank uses: its own where the user named one for it, else the one rank 0 uses."""
        joined = replace(self, path=self.path if own else leader, attempt=attempt, replaces=replaces)
        joined.make(joined.attempt_path)
        return joined

    def make(self, folder: Path) -> None:
        """One of this directory's own, where it is not there. Raises OutputError."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot make {folder}: {error.strerror}") from error

    @property
    def attempt_path(self) -> Path:
        return self.path / _attempt_name(self.attempt)

    def trace_path(self, mesh: Mesh, coordinate: Coordinate) -> Path:
        """Of the first shard of a stage the trace that reports are made of, of the others one beside it."""
        name = trace_name(coordinate.stage, mesh.stages)
        folder = self.attempt_path / replica_name(coordinate.replica) if mesh.replicas > 1 else self.attempt_path
        return folder / (f"shard-{coordinate.shard:04d}-{name}" if coordinate.shard else name)

    def forget(self, replica: int) -> None:
        """What a lost replica has traced is no part of the report, and stays for whoever wants to know."""
        path = self.attempt_path / replica_name(replica)
        with suppress(OSError):
            path.rename(path.with_name(f"lost-{path.name}"))

    def fails_again(self) -> bool:
        """Write down that this attempt failed before its first microbatch was done; return whether the last one did."""
        with suppress(OSError):
            (self.attempt_path / _FAILED_AT_START).touch()
        return (self.path / _attempt_name(self.attempt - 1) / _FAILED_AT_START).exists()

    def identity(self) -> str:
        """Equal on two ranks exactly where both write into the same directory."""
        status = self.attempt_path.stat()
        return f"{host_id()}:{status.st_dev}:{status.st_ino}"

    def launches(self) -> list[str]:
        """Who has claimed it: the last one, behind those whose run it goes on with."""
        try:
            return (self.path / "job").read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return []

    def read_exit_code(self) -> int | None:
        """None where none is there."""
        try:
            return int((self.path / "exit_code").read_text())
        except (OSError, ValueError):
            return None

    def end_mark(self) -> tuple[int, int] | None:
        """Another one once a code has been written, if only the same code again; None while none is there."""
        try:
            status = (self.path / "exit_code").stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def read_run(self) -> dict[str, Any] | None:
        """What `write_run` wrote; None where nothing, or nothing that can be read, is there."""
        try:
            facts = json.loads((self.path / "run.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return facts if isinstance(facts, dict) else None

    def is_unfinished(self) -> bool:
        """Return whether the run that is here was lost, also if later starts were refused before they began."""
        code = self.read_exit_code()
        refused = code not in (EXIT_OK, EXIT_ROWS_FAILED) and (self.path / _UNFINISHED).exists()
        return code in (None, PeerLostError.exit_code) or refused

    def _note_unfinished(self) -> None:
        """Keep in mind that the run was lost before another start's code replaces its own. Raises OSError."""
        if not self.is_unfinished():
            (self.path / _UNFINISHED).unlink(missing_ok=True)
        elif (self.path / "run.json").exists():
            (self.path / _UNFINISHED).touch(mode=0o600)

    def write_run(self, facts: dict[str, Any]) -> None:
        self._write("run.json", json.dumps(facts, indent=2, default=str) + "\n")

    def write_report(self, report: dict[str, Any]) -> None:
        self._write("report.json", json.dumps(report, indent=2) + "\n")

    def write_exit_code(self, code: int) -> None:
        """The cause wins over its echo: a lost peer's 75 never replaces a code that is there.

        Where it cannot be written, on a full disk say, the process still ends with it; it waits for no disk.
        """
        with suppress(OutputError):
            self._write("exit_code", f"{code}\n", replace=code != PeerLostError.exit_code, synced=False)

    def write_end(self, code: int) -> None:
        """The code of a run whose processes have all ended, unless another run has this directory by now."""
        with suppress(OSError, ConfigError), ExitStack() as held:
            if self.path.exists():
                held.callback(os.close, _locked(self.path))
            self.write_exit_code(code)

    def write_refusal(self, code: int, *, overwrite: bool, launch_id: str = "") -> None:
        """The code of a start that was refused before it claimed this directory.

        Not where a run is using it, but for `launch_id`, for which rank 0 on the same host has claimed it; nor over an
        earlier run's code without `overwrite`; no other folder is made for it.
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
        """Whole or not at all. Raises OutputError."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot make the run directory {self.path}: {error.strerror}") from error
        atomic_write(self.path / name, text, replace=replace, synced=synced)


def replica_name(replica: int) -> str:
    return f"replica-{replica:04d}"


def _remove(entries: Iterable[Path]) -> None:
    """Ranks of one host may share a directory that is not rank 0's, and each of them removes what was there."""
    for entry in list(entries):
        while os.path.lexists(entry):
            with suppress(FileNotFoundError):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _attempt_name(number: int) -> str:
    return f"attempt-{number:04d}"


def _is_of_a_run(entry: Path) -> bool:
    """By its name: a run may have been killed at any moment."""
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
    """The descriptor that holds it. Raises ConfigError where another one does.

    Not every file system has locks. Where there are none nobody is kept out: a run matters more than its guard.
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
    """Empty, or what a refused start leaves: its code, maybe half of one, and a directory for traces that never began.

    Without the code somebody else may be setting up there.
    """
    entries = {entry.name: entry for entry in path.iterdir()}
    if not entries:
        return True
    ended = entries.pop("exit_code", None) is not None
    return ended and all(
        name == "job"
        or name.endswith(".part")
        or (name.startswith("attempt-") and entry.is_dir() and not any(entry.iterdir()))
        for name, entry in entries.items()
    )
