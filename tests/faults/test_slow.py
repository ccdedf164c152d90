"""Slow is not dead: a run waits for slow stages that make progress and detects stages that make none."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.commands.processes import COMMAND, Files, environment
from tests.faults.jobs import fault
from tests.machine import patient

pytestmark = pytest.mark.timeout(200)

PEER_TIMEOUT_S = 1.0


def emulated(folder: Path, *, layers: int, microbatch_s: float, rows: int = 2) -> tuple[Files, tuple[str, ...]]:
    """Make a pipeline of two stages; each takes `microbatch_s` per microbatch, in equal steps for its layers."""
    profile = {
        "schema": "sarathi-pp/profile/1",
        "model": "slow",
        "device": "cpu",
        "dtype": "bfloat16",
        "hidden_size": 64,
        "num_layers": 2 * layers,
        "tile": 1,
        "stages": [
            {"layers": [stage * layers, (stage + 1) * layers]}
            | {"a0": microbatch_s, "a1": 0.0, "a2": 0.0, "a3": 0.0, "a4": 0.0}
            for stage in range(2)
        ],
        "link": {"latency_s": 0.0, "bytes_per_s": 1e10},
        "jitter_cv": 0.0,
        "pages": 2000,
        "max_num_seqs": 64,
    }
    (folder / "profile.json").write_text(json.dumps(profile))
    files = Files(folder)
    files.write_prompts([(3, 4, 5)] * rows, max_new_tokens=1)
    where = ("--input", str(files.input), "--output", str(files.output), "--stages", "2", "--quiet")
    timeout = ("--peer-timeout", str(PEER_TIMEOUT_S))
    return files, (*COMMAND, "generate", "--emulate", str(folder / "profile.json"), *where, *timeout)


def run(files: Files, command: tuple[str, ...], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=files.folder, env={**environment(), **more}, capture_output=True, text=True, timeout=patient(150)
    )


def test_a_microbatch_of_three_timeouts_in_small_steps_runs_to_its_end(tmp_path):
    files, command = emulated(tmp_path, layers=12, microbatch_s=3 * PEER_TIMEOUT_S)
    done = run(files, command)
    assert done.returncode == 0, done.stderr
    assert len(files.rows()) == 2


def test_a_layer_longer_than_the_timeout_is_no_reason_to_start_again_and_again(tmp_path):
    """The first time it may be a stage that hangs (75). The second time it is the timeout (2), so no third start."""
    files, command = emulated(tmp_path, layers=1, microbatch_s=60.0)
    began_s = time.monotonic()
    done = run(files, (*command, "--max-restarts", "5"))
    took_s = time.monotonic() - began_s
    assert done.returncode == 2 == files.exit_code(), done.stderr
    assert done.stderr.count("a stage was lost: restart") == 1
    assert "in one layer of its microbatch 0 for more than 1 s" in done.stderr
    assert "The previous start ended in the same way" in done.stderr and "larger --peer-timeout" in done.stderr
    assert took_s < 3 * 2 * (10 + PEER_TIMEOUT_S), "two starts, and a timeout each"


def test_a_timeout_shorter_than_a_second_has_its_heartbeats_in_time(tmp_path):
    files, command = emulated(tmp_path, layers=1, microbatch_s=0.05)
    done = run(files, (*command, "--peer-timeout", "0.9", "--request-rate", "0.3"))
    assert done.returncode == 0 and len(files.rows()) == 2, done.stderr


@pytest.mark.parametrize("extra_ms", [1200, pytest.param(3000, marks=pytest.mark.full)])
def test_each_phase_of_set_up_may_take_longer_than_a_rank_may_be_silent(extra_ms, tmp_path):
    """The ranks take turns: in each phase one computes for that time, and the other one waits for 1 s of silence."""
    files, command = emulated(tmp_path, layers=1, microbatch_s=0.05)
    done = run(files, command, **fault("*", "slow", extra_ms))
    assert done.returncode == 0 and len(files.rows()) == 2, done.stderr


# Phases by number, in the order in which a run passes through them.
PHASES = {0: "checking the input and the weights", 7: "loading its layers", 12: "compiling kernels and warming up"}


@pytest.mark.parametrize("number", [0, pytest.param(7, marks=pytest.mark.full), 12])
def test_a_rank_that_is_stopped_in_set_up_is_lost_in_time_and_its_phase_named(number, tmp_path):
    files, command = emulated(tmp_path, layers=1, microbatch_s=0.05)
    began_s = time.monotonic()
    done = run(files, command, **fault("*", "stop", number))
    assert done.returncode == 75, done.stderr
    assert time.monotonic() - began_s < patient(60)
    assert f"has been silent for more than 1 s while it was {PHASES[number]}: it is stopped" in done.stderr
    assert "stage 1 (rank 1" in done.stderr and not files.output.exists()
