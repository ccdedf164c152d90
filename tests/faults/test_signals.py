"""A run that is asked to stop finishes its running requests, writes them and says by its code that it can resume."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import time

import psutil
import pytest

from tests.commands.processes import Files, console_script, free_port, torchrun
from tests.faults.jobs import Started, answers, fault, started
from tests.machine import patient

pytestmark = pytest.mark.timeout(200)

# Far more rows than a test lets finish.
PROMPTS = [tuple(range(3, 4 + row % 40)) for row in range(6000)]
NUM_TOKENS = 24
OPTIONS = (
    *("--max-new-tokens", str(NUM_TOKENS), "--ignore-eos", "--max-num-seqs", "16", "--chunk-size", "32"),
    *("--order", "input"),  # then the rows that were started are the first ones
)
# Three times the promise, because a busy machine takes longer.
PROMPT_END_S, SILENT_END_S, HEEDED_S = 3 * 5.0, 3 * 7.0, 3 * 1.0


@pytest.fixture
def files(tmp_path):
    files = Files(tmp_path)
    files.write_prompts(PROMPTS)
    return files


def expect_drained(run: Started, number: int, code: int) -> None:
    """Check that started requests are answered, the others remain for another start, and no process is left."""
    found = answers(run.files)
    report = run.files.report()
    assert report["stopped_by"] == signal.Signals(number).name
    assert report["completed"] == len(found) < len(PROMPTS)
    assert all(len(tokens) == NUM_TOKENS for tokens, _ in found.values())
    # No request had received a microbatch and was then given up.
    last = sorted(int(id) for id in found)
    assert last == list(range(1, len(last) + 1))
    assert run.files.exit_code() == code


def expect_said(said: str, files: Files, number: int) -> None:
    """Check the notice of the first signal, printed once, and at the end the command for resuming, to paste into a
    shell.
    """
    (notice,) = re.findall("^stopping.*$", said, re.MULTILINE)
    assert re.search(r": \d+ running requests? (is|are) finished first", notice)
    if number == signal.SIGINT:
        assert notice.endswith("; Ctrl-C again ends at once")
    else:
        assert signal.Signals(number).name in notice and notice.endswith("up to 20 s; another signal ends at once")
    assert "PeerLostError" not in said, "another rank has spoken"
    command = shlex.split(said.rstrip().splitlines()[-1])
    assert "generate" in command[1:4] and command[-1] == "--resume" and str(files.output) in command


def last_begun_s(files: Files) -> float:
    """Return the Unix time at which a request got its first microbatch, for the last request that did."""
    events = [json.loads(line) for line in files.traces()[0].read_text().splitlines()]
    zero_s = events[0]["unix_s"] - events[0]["t"]
    return zero_s + max(event["t"] for event in events if event["e"] == "issued" and re.search(r"s\d+:0\+", event["x"]))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)]
)
@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_what_runs_is_finished(number, code, stages, files, emulated):
    with started(files, emulated, *OPTIONS, "--stages", stages) as run:
        run.wait_for_lines(30)
        family = run.family
        run.process.send_signal(number)
        sent_s, began_s = time.time(), time.monotonic()
        said = run.end()
        assert time.monotonic() - began_s < PROMPT_END_S
        assert last_begun_s(files) < sent_s + HEEDED_S
        assert run.process.returncode == code, said
        left = r": [\d,]+ of 6,000 answered, [\d,]+ left; to resume:\n"
        assert re.search(f"stopped by {signal.Signals(number).name}{left}", said) and "Traceback" not in said
        expect_said(said, run.files, number)
        assert not psutil.wait_procs(family, timeout=patient(1))[1]
    expect_drained(run, number, code)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGUSR1])
def test_under_torchrun_too(number, files, emulated, tmp_path):
    """torchrun itself does not handle SIGUSR1 and is ended by it at once."""
    agent = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--signals-to-handle", "SIGTERM,SIGUSR1")
    with started(files, emulated, *OPTIONS, front=torchrun(2, console_script(tmp_path), *agent)) as run:
        run.wait_for_lines(30)
        family = run.family
        run.process.send_signal(number)
        run.end()
        assert not psutil.wait_procs(family, timeout=patient(1))[1]
    expect_drained(run, number, 75)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.full)])
@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_signal_to_every_process_is_one_signal(first, number, files, emulated):
    """A batch system signals all processes of a job. first: with the launcher among them, or only the stages."""
    with started(files, emulated, *OPTIONS, "--stages", "2", "--max-restarts", "1") as run:
        run.wait_for_lines(30)
        for process in run.family[first:]:
            process.send_signal(number)
        said = run.end()
        assert run.process.returncode == 75, said
    expect_drained(run, number, 75)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_the_second_signal_ends_it_at_once(number, stages, files, emulated):
    """The outputs are too long to wait for. The output written by then is whole lines."""
    options = ("--max-new-tokens", "100000", "--max-model-len", "512", "--ignore-eos", "--max-num-seqs", "16")
    with started(files, emulated, *options, "--stages", stages) as run:
        run.wait_for_lines(1)
        run.process.send_signal(number)
        time.sleep(0.5)
        began_s = time.monotonic()
        if run.process.poll() is None:
            run.process.send_signal(number)
        said = run.end()
        assert time.monotonic() - began_s < PROMPT_END_S
        assert run.process.returncode == (130 if number == signal.SIGINT else 75), said
        assert "Traceback" not in said
        assert "unfinished, was stopped by" in said
        expect_said(said, files, number)
    assert len(answers(files)) >= 1


@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
@pytest.mark.parametrize("told", [True, False])
def test_signals_until_the_process_has_ended_change_no_exit_code(told, stages, files, emulated):
    """A supervisor repeats SIGTERM: from the middle of the run, or only after rank 0 has written its exit code."""
    if not told:
        files.write_prompts(PROMPTS[:8])
    with started(files, emulated, *OPTIONS, "--stages", stages) as run:
        run.wait_for_lines(8)
        while not told and run.process.poll() is None and not (files.run / "exit_code").exists():
            time.sleep(0.001)
        deadline_s = time.monotonic() + PROMPT_END_S
        while run.process.poll() is None and time.monotonic() < deadline_s:
            run.process.terminate()
            time.sleep(0.005)
        said = run.end()
        assert run.process.returncode == files.exit_code() == (75 if told else 0), said
    answers(files)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_while_it_is_set_up_there_is_nothing_to_finish(number, files, model):
    """Stage 1 never ends loading."""
    with started(files, model, *OPTIONS, "--stages", "2", **fault(1, "stall")) as run:
        deadline_s = time.monotonic() + patient(60)
        while not (files.folder / "stalled").exists():
            assert time.monotonic() < deadline_s and run.process.poll() is None
            time.sleep(0.02)
        began_s = time.monotonic()
        run.process.send_signal(number)
        said = run.end()
        assert time.monotonic() - began_s < PROMPT_END_S
        assert run.process.returncode == (130 if number == signal.SIGINT else 75), said
    assert not files.output.exists()


def test_a_stage_that_is_silent_is_not_waited_for(files, emulated):
    """The coordinator waits for a stopped stage, for a minute by its own timeout."""
    with started(files, emulated, *OPTIONS, "--stages", "2") as run:
        run.wait_for_lines(30)
        silent = run.stage(1)
        silent.suspend()
        time.sleep(1)
        began_s = time.monotonic()
        run.process.terminate()
        said = run.end()
        assert time.monotonic() - began_s < SILENT_END_S, said
        assert run.process.returncode == 75, said
        assert "unfinished, was stopped by SIGTERM" in said
        assert not silent.is_running()
    assert len(answers(files)) >= 30


def test_a_run_that_waits_for_its_input_ends_too(emulated, tmp_path):
    files = Files(tmp_path)
    os.mkfifo(files.input)
    with started(files, emulated, *OPTIONS) as run:
        with files.input.open("w") as stream:
            stream.write('{"prompt_token_ids": [5]}\n')
            stream.flush()
            run.wait_for_lines(1)
            began_s = time.monotonic()
            run.process.terminate()
            run.end()
        assert time.monotonic() - began_s < PROMPT_END_S
        assert run.process.returncode == 75
    assert len(answers(files)) == 1


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(more, marks=pytest.mark.full) for more in (signal.SIGUSR1, signal.SIGHUP))],
)
@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_while_the_input_is_looked_through_there_is_nothing_to_finish(number, stages, emulated, tmp_path):
    """This takes minutes if the input is large, and no stage exists yet."""
    files = Files(tmp_path)
    line = json.dumps({"prompt_token_ids": [3] * 200}) + "\n"
    files.input.write_text(line * 400_000)
    with started(files, emulated, *OPTIONS, "--stages", stages) as run:
        process = psutil.Process(run.process.pid)
        deadline_s = time.monotonic() + patient(60)
        while str(files.input) not in [file.path for file in process.open_files()]:
            assert time.monotonic() < deadline_s and run.process.poll() is None
            time.sleep(0.01)
        began_s = time.monotonic()
        run.process.send_signal(number)
        said = run.end()
        assert time.monotonic() - began_s < HEEDED_S
        assert run.process.returncode == 75, said
        assert said == f"StoppedError: the run was stopped by {signal.Signals(number).name}\n"
    assert not files.output.exists()
