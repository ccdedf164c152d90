"""launch/slurm.sbatch, with commands that replace Slurm's and run a step's tasks on this machine.

These parts are real: the batch script, torchrun on two nodes with a c10d rendezvous, the run, its signal, its second
turn.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.commands.processes import ROOT, free_port
from tests.launch.nodes import ADDER, EMULATED, PROMPTS, SMALL, Node, started, write_token_ids
from tests.machine import patient

pytestmark = pytest.mark.timeout(290)

SCRIPT = ROOT / "launch" / "slurm.sbatch"
# One task per node, with the variables that slurmd sets; exits with the highest of their codes, as srun does.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    SLURM_NODEID=$node SLURM_PROCID=$node SLURMD_NODENAME=127.0.0.1 "$@" &
    tasks+=($!)
done
worst=0
for task in "${tasks[@]}"; do
    code=0
    wait "$task" || code=$?
    ((code <= worst)) || worst=$code
done
exit "$worst"
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    "show hostnames") [ "$3" = "two-nodes" ] && printf '127.0.0.1\\n127.0.0.1\\n' ;;
    "requeue "*) [ -e "$(dirname "$REQUEUED")/queue" ] && echo "$2" >>"$REQUEUED" ;;
    *) exit 1 ;;
esac
"""


@dataclass
class Slurm:
    """A cluster of two nodes and one job on it. turns: number of starts of the job."""

    folder: Path
    turns: int = 0

    def __post_init__(self) -> None:
        tools = self.folder / "slurm"
        tools.mkdir()
        (self.folder / "queue").touch()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        self._port = str(free_port())

    @contextmanager
    def job(self, *options: str) -> Iterator[Node]:
        """Run one turn as sbatch starts it: with its own copy of the script, in the directory of submission."""
        spooled = self.folder / "slurm" / "slurm_script"
        spooled.write_text(SCRIPT.read_text())
        facts = {
            "PATH": f"{self.folder / 'slurm'}:{os.environ['PATH']}",
            "REQUEUED": str(self.folder / "requeued"),
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "two-nodes",
            "SLURM_JOB_NUM_NODES": "2",
            "RUN": str(self.folder / "run"),
            "MASTER_PORT": self._port,
        }
        if self.turns:
            facts["SLURM_RESTART_COUNT"] = str(self.turns)
        with started(("bash", str(spooled), "--output", str(self.output), *options), self.folder, **facts) as node:
            yield node

    @property
    def output(self) -> Path:
        return self.folder / "answers.jsonl"

    def num_answers(self) -> int:
        return len(self.output.read_bytes().splitlines()) if self.output.exists() else 0

    def requeued(self) -> list[str]:
        path = self.folder / "requeued"
        return path.read_text().split() if path.exists() else []


def test_the_port_is_none_that_the_kernel_gives_to_connections() -> None:
    """Linux uses ports from 32768 on by default, and Kubernetes uses ports from 30000."""
    (span,) = re.findall(r"MASTER_PORT:-\$\(\((\d+) \+ SLURM_JOB_ID % (\d+)\)\)", SCRIPT.read_text())
    first, count = map(int, span)
    assert 1024 < first and first + count <= 30000


def tell_step(job: Node, number: int) -> None:
    """Signal every process of the step, as slurmstepd does, but neither the batch script nor srun."""
    (srun,) = psutil.Process(job.process.pid).children()
    for process in srun.children(recursive=True):
        process.send_signal(number)


def test_a_job_that_is_told_to_stop_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path)
    write_token_ids(tmp_path / "prompts.jsonl", 24)
    asked = ("--input", str(tmp_path / "prompts.jsonl"), *EMULATED)
    with slurm.job(*asked, "--request-rate", "2") as job:
        deadline_s = time.monotonic() + patient(120)
        while slurm.num_answers() < 3:
            assert job.process.poll() is None, job.end()[1]
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        tell_step(job, signal.SIGUSR1)
        code, said = job.end()
    assert code == 75, said
    assert slurm.requeued() == ["4711"]
    answered = slurm.num_answers()
    assert 3 <= answered < 24
    slurm.turns = 1
    with slurm.job(*asked) as job:
        code, said = job.end()
    assert code == 0, said
    rows = [json.loads(line) for line in slurm.output.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows) == 24
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["resumed"]["rows"] == answered
    assert slurm.requeued() == ["4711"]

    # The same once more, by a new job: refused, and it does not return the exit code of the earlier run.
    slurm.turns = 0
    with slurm.job(*asked) as job:
        code, said = job.end()
    assert code == 2, said
    assert (tmp_path / "run" / "exit_code").read_text() == "0\n"
    assert slurm.requeued() == ["4711"]


def test_a_job_that_may_not_be_queued_again_says_so_and_keeps_its_code(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path)
    (tmp_path / "queue").unlink()
    with slurm.job("--model", str(ADDER), "--input", str(PROMPTS), *SMALL, "--request-rate", "2") as job:
        deadline_s = time.monotonic() + patient(120)
        while not slurm.num_answers():
            assert job.process.poll() is None, job.end()[1]
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        tell_step(job, signal.SIGUSR1)
        code, said = job.end()
    assert (code, slurm.requeued()) == (75, []), said
    assert "cannot queue the job again; submit it with --resume" in said


def test_a_job_that_would_end_the_same_way_again_is_not_queued_again(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path)
    with slurm.job("--model", str(tmp_path / "nothing"), "--input", str(PROMPTS)) as job:
        code, said = job.end()
    assert (code, (tmp_path / "run" / "exit_code").read_text()) == (66, "66\n"), said
    assert not slurm.requeued()


def test_the_directives_are_sbatchs_own() -> None:
    """The directives come before the first command, because sbatch reads them only there."""
    lines = SCRIPT.read_text().splitlines()
    first = next(at for at, line in enumerate(lines) if line and not line.startswith("#"))
    found = dict(re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line).groups() for line in lines if "#SBATCH" in line)
    assert all("#SBATCH" not in line for line in lines[first:])
    assert found["signal"] == "USR1@60" and found["open-mode"] == "append" and "requeue" in found
    assert found["ntasks-per-node"] == "1"
    # Ranks share the cores of their node's one task, which without these two options is a single core.
    assert "exclusive" in found and any(line.startswith("srun ") and "--cpu-bind=none" in line for line in lines)
