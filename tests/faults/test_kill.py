"""A killed stage ends the run: soon, with the stage's name and exit code 75, and without leftover processes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import pytest

from sarathi_pp.errors import PeerLostError
from sarathi_pp.trace.events import Compute
from sarathi_pp.trace.recorder import read_trace
from tests.commands.processes import COMMAND, Files, console_script, environment, run, torchrun
from tests.machine import patient

# Far more work than any of these tests lets finish.
PROMPTS = [tuple(range(3, 3 + length % 50 + 1)) for length in range(4000)]
STAGES = 3
# The promise is 5 s; a machine that is busy with other things gets three times as long.
MOST_S = 15

pytestmark = pytest.mark.timeout(120)


def answering(files: Files) -> bool:
    return files.output.exists() and files.output.stat().st_size > 0


def traced(files: Files) -> bool:
    """Wait until the run answers and every stage has written a trace of concurrent work, so a report has a window.

    A stage writes its trace every half second, so a fast machine answers before it has written anything.
    """
    if not answering(files):
        return False
    computed = [
        {event.microbatch for event in read_trace(path) if isinstance(event, Compute)} for path in files.traces()
    ]
    return len(computed) == STAGES and len(set.intersection(*computed)) > STAGES


def setting_up(files: Files) -> bool:
    """Wait until the ranks have joined and load their slices."""
    return (files.run / "attempt-0000").exists()


@dataclass
class Running:
    """A run in progress. stages: the pid of each stage. family: all processes that the command has started."""

    process: subprocess.Popen[str]
    files: Files
    stages: list[int]
    family: list[psutil.Process]
    said: str = ""

    def kill(self, stage: int) -> float:
        """Kill that stage with SIGKILL and wait for the run's end; return the seconds that it took."""
        started_s = time.monotonic()
        psutil.Process(self.stages[stage]).send_signal(signal.SIGKILL)
        self.said = self.process.communicate(timeout=patient(60))[1]
        return time.monotonic() - started_s

    def expect_nobody_left(self) -> None:
        _, alive = psutil.wait_procs(self.family, timeout=patient(1))
        assert not alive

    def expect_readable_traces(self) -> None:
        """Check that the earlier trace gives a report of every stage."""
        report = run((*COMMAND, "report", str(self.files.run), "--json"), self.files.run).stdout
        figures = json.loads(report)
        assert figures["microbatches"] > 0
        assert all(stage["compute_s"] > 0 for stage in figures["per_stage"])
        assert figures["closing_error"] <= 0.01
        assert any("the run goes on or was killed" in note for note in figures["notes"])

    def expect_whole_answers(self) -> None:
        """Check that the output so far is whole lines, with each request once."""
        lines = self.files.output.read_bytes().splitlines(keepends=True)
        assert lines[-1].endswith(b"\n")
        ids = [json.loads(line)["id"] for line in lines]
        assert len(ids) == len(set(ids)) > 0


@pytest.fixture
def start(emulated, tmp_path):
    """Start a command; processes of it that still run at the end of the test are killed."""
    started: list[psutil.Process] = []

    def start_run(front: Sequence[str], *options: str, until: Callable[[Files], bool] = answering) -> Running:
        files = Files(tmp_path)
        files.write_prompts(PROMPTS)
        process = subprocess.Popen(
            (
                *front,
                *files.options(emulated, "--max-new-tokens", "40", "--ignore-eos", "--chunk-size", "32", *options),
            ),
            cwd=tmp_path,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(psutil.Process(process.pid))
        wait(process, lambda: until(files))
        started.extend(family := started[0].children(recursive=True))
        return Running(process, files, stage_pids(family), family)

    yield start_run
    for process in started:
        if process.is_running():
            process.kill()


def wait(process: subprocess.Popen[str], met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patient(60)
    while not met():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "not there within 60 s"
        time.sleep(0.05)


def stage_pids(family: list[psutil.Process]) -> list[int]:
    """Return the pid of each stage, first stage first."""
    ranks = {int(process.environ()["RANK"]): process.pid for process in family if "RANK" in process.environ()}
    return [ranks[rank] for rank in range(len(ranks))]


@pytest.mark.parametrize(
    "stage", [0, *(pytest.param(stage, marks=pytest.mark.full) for stage in range(1, STAGES - 1)), STAGES - 1]
)
def test_a_killed_stage_ends_the_run_with_75(stage, start):
    running = start(COMMAND, "--stages", str(STAGES), "--quiet", until=traced)
    assert len(running.stages) == STAGES
    took_s = running.kill(stage)
    assert running.process.returncode == PeerLostError.exit_code, running.said
    assert took_s < MOST_S
    assert f"stage {stage} (rank {stage}) was killed by SIGKILL" in running.said
    # Each rank that had a connection to it reports it too, because the launcher sees only this machine.
    assert re.search(rf"PeerLostError: stage {stage} \(rank {stage}\b.* closed its connection", running.said)
    assert "Traceback" not in running.said
    assert running.files.exit_code() == PeerLostError.exit_code
    running.expect_nobody_left()
    running.expect_whole_answers()
    running.expect_readable_traces()


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.full)])
def test_under_torchrun_the_code_is_in_the_run_directory(stage, start, tmp_path):
    running = start(torchrun(2, console_script(tmp_path)), "--quiet")
    took_s = running.kill(stage)
    assert running.process.returncode == 1
    assert took_s < MOST_S
    assert f"stage {stage} (rank {stage}" in running.said or f"rank      : {stage} (local_rank" in running.said
    assert running.files.exit_code() == PeerLostError.exit_code
    running.expect_nobody_left()
    running.expect_whole_answers()


@pytest.mark.parametrize("stage", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_stage_killed_during_set_up_leaves_the_code_too(stage, start, tmp_path):
    """torchrun stops the other ranks before they notice; they still leave the right code."""
    running = start(torchrun(2, console_script(tmp_path)), "--quiet", until=setting_up)
    took_s = running.kill(stage)
    assert running.process.returncode == 1
    assert took_s < MOST_S
    assert running.files.exit_code() == PeerLostError.exit_code
    running.expect_nobody_left()


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_run_that_is_told_to_stop_ends_with_75(stages, start):
    running = start(COMMAND, "--stages", str(stages), "--quiet")
    started_s = time.monotonic()
    running.process.terminate()
    said = running.process.communicate(timeout=patient(60))[1]
    assert time.monotonic() - started_s < MOST_S
    assert running.process.returncode == PeerLostError.exit_code, said
    assert "Traceback" not in said
    assert running.files.exit_code() == PeerLostError.exit_code
    running.expect_nobody_left()
    running.expect_whole_answers()


def test_workers_end_with_a_launcher_that_is_killed_as_soon_as_they_are_there(start):
    """The workers are still importing at that moment, and check their parent too late."""
    running = start(COMMAND, "--stages", "2", "--quiet", until=lambda files: True)
    launcher = psutil.Process(running.process.pid)
    wait(running.process, lambda: len(launcher.children()) == 2)
    workers = launcher.children()
    running.process.kill()
    assert not psutil.wait_procs(workers, timeout=MOST_S)[1]
    running.process.communicate()


def test_workers_end_with_a_launcher_that_is_killed(start):
    running = start(COMMAND, "--stages", "2", "--quiet")
    running.process.kill()
    _, alive = psutil.wait_procs(running.family, timeout=MOST_S)
    assert not alive
    running.process.communicate()
    running.expect_whole_answers()


@pytest.mark.parametrize("until", [setting_up, answering], ids=["setting up", "answering"])
def test_workers_end_with_an_agent_that_is_killed(until, start, tmp_path):
    """For example, the kernel kills it for its memory.

    Then it cannot stop its children, and they would hold the output.
    """
    running = start(torchrun(2, console_script(tmp_path)), "--quiet", until=until)
    running.process.kill()
    _, alive = psutil.wait_procs(running.family, timeout=MOST_S)
    assert not alive
    running.process.communicate()
    assert running.files.exit_code() == PeerLostError.exit_code
