"""A `generate` that is killed, stopped and resumed, and its output afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.commands.processes import COMMAND, Files, environment
from tests.exact.references import Tokens
from tests.machine import patient

# The fields of an answer; the other fields of a line report its times.
Answers = dict[str, tuple[Tokens, str]]

_INJECT = Path(__file__).with_name("inject")


@dataclass
class Started:
    """A command that runs. family: its process and all processes that it has started so far."""

    process: subprocess.Popen[str]
    files: Files

    @property
    def family(self) -> list[psutil.Process]:
        try:
            first = psutil.Process(self.process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stage(self, rank: int) -> psutil.Process:
        """Return the process of one stage as soon as it exists."""
        deadline_s = time.monotonic() + patient(60)
        while time.monotonic() < deadline_s:
            for process in self.family:
                try:
                    if process.environ().get("RANK") == str(rank) and process.pid != self.process.pid:
                        return process
                except psutil.Error:
                    continue
            time.sleep(0.02)
        raise AssertionError(f"stage {rank} is not there within 60 s")

    def wait_for_lines(self, count: int) -> None:
        wait_for_lines(self.process, self.files, count)

    def kill_all(self) -> None:
        """Kill all processes at once, like a power failure: no process can notify another."""
        family = self.family
        for process in family:
            process.suspend()
        for process in family:
            process.kill()
        self.process.communicate()
        psutil.wait_procs(family, timeout=patient(10))

    def end(self, timeout_s: float = 100) -> str:
        """Return its output at its end."""
        return self.process.communicate(timeout=patient(timeout_s))[1]


def fault(stage: int | str, what: str, step: int = 7) -> dict[str, str]:
    """Return the environment in which one stage fails from inside; see inject/sitecustomize.py."""
    path = os.pathsep.join([str(_INJECT), environment()["PYTHONPATH"]])
    return {"PYTHONPATH": path, "SARATHI_PP_TEST_FAULT": f"stage={stage}:step={step}:{what}"}


@contextmanager
def started(files: Files, model: Path, *options: str, front: Sequence[str] = COMMAND, **more: str) -> Iterator[Started]:
    """Start a command.

    Args:
        front: the words that run the command's options.
        more: additions to its environment.
    """
    command = (*front, *files.options(model, "--quiet", *options))
    process = subprocess.Popen(
        command,
        cwd=files.folder,
        env={**environment(), **more},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    run = Started(process, files)
    family = [psutil.Process(process.pid)]
    try:
        yield run
    finally:
        family += run.family
        for member in family:
            if member.is_running():
                member.send_signal(signal.SIGKILL)
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def wait_for_lines(process: subprocess.Popen[str], files: Files, count: int) -> None:
    """Wait for that number of lines in the output that the process writes."""
    deadline_s = time.monotonic() + patient(100)
    while num_lines(files.output) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline_s, f"{num_lines(files.output)} of {count} lines within 100 s"
        time.sleep(0.01)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def answers(files: Files) -> Answers:
    """Return the answers by id; each id must have exactly one line."""
    found: Answers = {}
    for line in files.output.read_text().splitlines():
        row = json.loads(line)
        assert row["id"] not in found, f"two lines for {row['id']}"
        found[row["id"]] = (tuple(row["token_ids"]), row["finish_reason"])
    return found
