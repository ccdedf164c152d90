"""Failures inside a stage: the message names stage and cause, all end in time, and the code fits the cause.

Faults come from inject/sitecustomize.py, because a layer cannot be made to fail from outside its process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.commands.processes import COMMAND, Files, environment, free_port, full_pipe
from tests.faults.jobs import answers, fault, started
from tests.machine import patient
from tests.model.families import write_checkpoint

pytestmark = pytest.mark.timeout(200)

STAGES = 3
OPTIONS = ("--max-new-tokens", "8", "--ignore-eos", "--chunk-size", "32")
PROMPTS = [tuple(range(3, 4 + row % 40)) for row in range(200)]
# Three times the sum of the chosen timeout and the time until all ranks end.
HANG_END_S = 3 * (2 * 2.0 + 5.0)


@pytest.fixture
def files(tmp_path):
    files = Files(tmp_path)
    files.write_prompts(PROMPTS)
    return files


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory):
    files = Files(tmp_path_factory.mktemp("undisturbed"))
    files.write_prompts(PROMPTS)
    with started(files, model, *OPTIONS) as run:
        assert run.end() == "" and run.process.returncode == 0
    return answers(files)


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1)), 2])
def test_an_exception_in_a_layer_is_shown_as_it_was(stage, files, model):
    with started(files, model, *OPTIONS, "--stages", str(STAGES), **fault(stage, "raise")) as run:
        run.stage(2)
        family = run.family
        said = run.end()
        assert run.process.returncode == 70, said
        assert not psutil.wait_procs(family, timeout=patient(2))[1]
    assert f"stage {stage} (rank {stage}) failed:\nTraceback" in said
    assert said.count("RuntimeError: injected into a layer") == 1 and said.count("Traceback") == 1
    assert files.exit_code() == 70
    if files.output.exists():
        assert len(answers(files)) < len(PROMPTS)


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 2)), 0])
def test_a_stage_that_hangs_is_named_and_shows_its_stacks(stage, files, model):
    options = (*OPTIONS, "--stages", str(STAGES), "--peer-timeout", "2")
    with started(files, model, *options, **fault(stage, "hang")) as run:
        run.stage(2)
        family = run.family
        while not list(files.run.glob("attempt-0000/trace-*")):
            time.sleep(0.05)
        began_s = time.monotonic()
        said = run.end()
        assert time.monotonic() - began_s < HANG_END_S
        assert run.process.returncode == 75, said
        assert not psutil.wait_procs(family, timeout=patient(2))[1]
    assert f"stage {stage} (rank {stage}" in said and "it hangs, or one layer takes longer than --peer-timeout" in said
    # The stacks of its own threads, down to the line that does not return.
    assert "most recent call first" in said and "sitecustomize.py" in said


def test_a_stage_that_hangs_ends_though_nobody_reads_what_it_says(files, model):
    """Neither the message nor the stacks have a reader, but the exit code is right."""
    reader, writer = full_pipe()
    process = subprocess.Popen(
        (*COMMAND, *files.options(model, "--quiet", *OPTIONS)),
        cwd=files.folder,
        env={**environment(), **fault(0, "hang")},
        stderr=writer,
    )
    os.close(writer)
    try:
        deadline_s = time.monotonic() + patient(60)
        while not list(files.run.glob("attempt-0000/trace-*")):
            assert time.monotonic() < deadline_s and process.poll() is None
            time.sleep(0.05)
        time.sleep(2)
        process.terminate()
        time.sleep(0.5)
        process.terminate()
        assert process.wait(patient(3 * 5.0)) == 75
        assert files.exit_code() == 75
    finally:
        process.kill()
        process.wait()
        os.close(reader)


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1)), 2])
def test_a_stage_that_never_ends_loading_is_named(stage, files, model):
    options = (*OPTIONS, "--stages", str(STAGES), "--join-timeout", "12", "--peer-timeout", "12")
    with started(files, model, *options, **fault(stage, "stall")) as run:
        run.stage(2)
        family = run.family
        said = run.end()
        assert run.process.returncode == 75, said
        assert not psutil.wait_procs(family, timeout=patient(2))[1]
    assert f"stage {stage} (rank {stage}" in said
    assert "has neither computed nor read anything for more than 12 s while it was loading its layers" in said
    assert not files.output.exists()


def test_a_rank_0_that_is_stopped_in_set_up_holds_nobody(files, model):
    """The ranks are started manually.

    The store belongs to rank 0, and a stopped rank 0 cannot report which ranks came.
    """
    options = files.options(model, "--quiet", *OPTIONS, "--join-timeout", "12", "--peer-timeout", "12")
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            (*COMMAND, *options), cwd=files.folder, stderr=subprocess.PIPE, text=True,
            env={**environment(), **fault(0, "stall"), **place, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    try:
        deadline_s = time.monotonic() + patient(60)
        while not (files.folder / "stalled").exists():
            assert time.monotonic() < deadline_s, "rank 0 loads nothing"
            time.sleep(0.05)
        ranks[0].send_signal(signal.SIGSTOP)
        said = ranks[1].communicate(timeout=patient(60))[1]
        assert ranks[1].returncode == 75, said
        # The store holds what rank 0 was doing, and no rank can read it.
        assert "has been silent for more than 12 s" in said and "it is stopped, or its host or network is gone" in said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1)), 2])
def test_no_memory_once_costs_no_answer(stage, files, model, undisturbed):
    with started(files, model, *OPTIONS, "--stages", str(STAGES), **fault(stage, "memory")) as run:
        said = run.end()
        assert run.process.returncode == 0, said
    assert "a stage had no memory for microbatch 7 at first; from here on chunks of 16 tokens" in said
    assert answers(files) == undisturbed


def two_ranks(
    files: Files, models: tuple[Path, Path], options: tuple[tuple[str, ...], ...], code: int = 2, **more: str
) -> list[str]:
    """Start two ranks without a launcher and return their output; each has its own model directory and options.

    Args:
        code: exit code with which both must end.
    """
    (files.folder / "rendezvous").mkdir(mode=0o700)
    store = str(files.folder / "rendezvous" / "store")
    processes = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        processes.append(
            subprocess.Popen(
                (*COMMAND, *files.options(models[rank], "--quiet", *options[rank])),
                cwd=files.folder,
                env={**environment(), **more, **place, "SARATHI_PP_STORE": store},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=patient(60))[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [code, code], said
    assert files.output.exists() == (code == 0)
    return said


def test_ranks_of_another_release_do_not_mix(files, model):
    said = two_ranks(files, (model, model), ((), ()), **fault(1, "versions"))[0]
    assert "rank 1 has sarathi_pp 9.9.9, rank 0 0.1.0: install one version on all" in said


def test_ranks_with_other_options_do_not_mix(files, model):
    said = two_ranks(files, (model, model), ((), ("--chunk-size", "8")))[0]
    assert "option chunk_size differs: rank 0 has None, rank 1 has 8" in said


def test_ranks_with_other_weights_do_not_mix(files, model, tmp_path):
    """The shapes and sizes are equal, so only the values differ."""
    other = tmp_path / "other"
    other.mkdir()
    write_checkpoint("llama", other, seed=1)
    said = two_ranks(files, (model, other), ((), ()))[0]
    assert "model differs: rank 0 has " in said


def test_ranks_may_have_the_model_in_different_places(files, model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    two_ranks(files, (model, other), (OPTIONS, OPTIONS), code=0)
    assert len(answers(files)) == len(PROMPTS)
