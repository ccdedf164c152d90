"""A run of several processes ends with the exit code of its cause, not of a follow-up failure or an abort."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from sarathi_pp.outputs.run_directory import RunDirectory
from tests.commands.processes import COMMAND, Files, console_script, environment, torchrun
from tests.machine import patient

ADDER = Path(__file__).parents[2] / "examples" / "tiny-adder"
PROMPTS = ADDER.parent / "prompts.jsonl"

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_a_file_without_a_row_is_answered_by_one_without_a_line(stages, tmp_path):
    files = Files(tmp_path)
    files.write_prompts([])
    command = (*COMMAND, *files.options(ADDER, "--stages", stages, "--quiet"))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=patient(60))
    assert (done.returncode, done.stderr, files.output.read_bytes()) == (0, "", b"")
    report = files.report()
    assert (report["requests"], report["completed"], report["microbatches"], files.exit_code()) == (0, 0, 0, 0)


def start(tmp_path: Path, output: str, *options: str) -> subprocess.Popen[str]:
    command = [
        *COMMAND,
        "generate",
        "--model",
        str(ADDER),
        "--input",
        str(PROMPTS),
        "--output",
        output,
        "--stages",
        "2",
        "--quiet",
    ]
    return subprocess.Popen(
        [*command, "--run-dir", str(tmp_path / "run"), *options],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_full_disk_is_74_and_said_once(tmp_path):
    process = start(tmp_path, "/dev/full")
    said = process.communicate(timeout=patient(60))[1]
    assert process.returncode == 74, said
    assert (tmp_path / "run" / "exit_code").read_text() == "74\n"
    assert said.startswith("OutputError: --output /dev/full cannot be written: ") and said.count("\n") == 1, said


@pytest.mark.parametrize(
    ("shell", "code", "says"),
    [
        ("{generate} -i - -o out.jsonl <&-", 65, "InputError: --input - is standard input, which is closed; "),
        (
            "mkdir gone; cd gone; rmdir ../gone; {generate} -i ../in -o ../out",
            66,
            "MissingError: the current directory ",
        ),
    ],
)
@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_what_a_shell_has_closed_or_removed_is_one_line(shell, code, says, stages, tmp_path):
    generate = shlex.join((*COMMAND, "generate", "--model", str(ADDER), "--stages", stages))
    line = shell.format(generate=generate)
    done = subprocess.run(("bash", "-c", line), cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == code and done.stderr.startswith(says) and done.stderr.count("\n") == 1, done.stderr
    assert not os.listdir(tmp_path)


def test_an_option_that_no_stage_can_honour_is_2_and_said_once(tmp_path):
    process = start(tmp_path, str(tmp_path / "out.jsonl"), "--attention", "triton", "--device", "cpu")
    said = process.communicate(timeout=patient(60))[1]
    assert process.returncode == 2, said
    assert said.count("--attention triton runs on cuda, not on cpu; try another of auto, numba, triton") == 1


def test_a_start_that_is_refused_under_torchrun_leaves_its_code(tmp_path):
    """The refused start also leaves nothing that blocks the next start."""
    files = Files(tmp_path)
    files.write_prompts([(3, 4)])
    command = (*torchrun(2, console_script(tmp_path)), *files.options(tmp_path / "nowhere"))
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=patient(100)
    )
    assert (done.returncode, files.exit_code()) == (1, 66), done.stderr
    RunDirectory.check(files.run, overwrite=False)


@pytest.mark.parametrize("refused", ["output", "option", pytest.param("model", marks=pytest.mark.full)])
def test_a_start_that_is_refused_under_torchrun_says_so_once(refused, tmp_path):
    """The message comes before torchrun's own table.

    Other ranks repeat neither it nor that torchrun has stopped them.
    """
    files = Files(tmp_path)
    files.write_prompts([(3, 4)])
    if refused == "output":
        files.output.write_text("dear results\n")
    more = ("--policy", "fifo") if refused == "option" else ()
    model = tmp_path / "nowhere" if refused == "model" else ADDER
    command = (*torchrun(2, console_script(tmp_path)), *files.options(model, *more))
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=patient(100)
    )
    said = [line for line in done.stderr.splitlines() if re.match(r"\w+Error: |Error: ", line)]
    assert done.returncode == 1 and len(said) == 1, done.stderr


def test_a_second_interrupt_is_one_message(tmp_path):
    """The other stages notice that stage 0 has ended and print nothing."""
    prompts = tmp_path / "many.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{n}+1="}}\n' for n in range(20_000)))
    process = start(tmp_path, str(tmp_path / "out.jsonl"), "--input", str(prompts))
    output = tmp_path / "out.jsonl"
    while not (output.exists() and output.stat().st_size):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=patient(60))[1]
    assert process.returncode == 130 and "PeerLostError" not in said, said
    assert len([line for line in said.splitlines() if "Error: " in line]) <= 1, said


def test_a_reader_that_leaves_ends_the_run_without_a_traceback(tmp_path):
    process = start(tmp_path, "-")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    said = process.communicate(timeout=patient(60))[1]
    assert process.returncode == 74, said
    assert "Traceback" not in said and "terminate called" not in said


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_stopped_stage_is_named_when_the_timeout_is_over(stage, tmp_path):
    """SIGSTOP leaves the stage alive and silent.

    Three seconds of silence are allowed, so the end comes well within 3 x 10 s.
    """
    prompts = tmp_path / "many.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{n}+1="}}\n' for n in range(20_000)))
    process = start(tmp_path, str(tmp_path / "out.jsonl"), "--input", str(prompts), "--peer-timeout", "3")
    try:
        output = tmp_path / "out.jsonl"
        while not (output.exists() and output.stat().st_size):
            assert process.poll() is None
            time.sleep(0.05)
        family = psutil.Process(process.pid).children(recursive=True)
        victim = next(child for child in family if child.environ().get("RANK") == str(stage))
        began_s = time.monotonic()
        victim.send_signal(signal.SIGSTOP)
        said = process.communicate(timeout=patient(60))[1]
        assert process.returncode == 75, said
        assert time.monotonic() - began_s < patient(30)
        assert f"stage {stage} (rank {stage}" in said and "silent" in said
        assert (tmp_path / "run" / "exit_code").read_text() == "75\n"
        assert not psutil.wait_procs(family, timeout=patient(2))[1]
    finally:
        if process.poll() is None:
            process.kill()


def test_a_refused_second_start_leaves_the_first_ones_code(tmp_path):
    first = start(tmp_path, str(tmp_path / "out.jsonl"))
    assert first.communicate(timeout=patient(60)) and first.returncode == 0
    again = start(tmp_path, str(tmp_path / "out.jsonl"))
    assert again.communicate(timeout=patient(60)) and again.returncode == 2
    assert (tmp_path / "run" / "exit_code").read_text() == "0\n"


def test_the_echo_never_replaces_the_cause(tmp_path):
    from sarathi_pp.outputs.run_directory import RunDirectory

    run = RunDirectory(tmp_path / "run")
    for code, left in ((75, "75\n"), (74, "74\n"), (75, "74\n")):
        run.write_exit_code(code)
        assert (run.path / "exit_code").read_text() == left
    assert os.listdir(run.path) == ["exit_code"]


def test_an_output_inside_of_the_run_directory_is_refused(tmp_path):
    """The output would become a file that no run wrote, and it would block every later start."""
    (tmp_path / "run").mkdir()
    process = start(tmp_path, str(tmp_path / "run" / "out.jsonl"))
    said = process.communicate(timeout=patient(60))[1]
    assert process.returncode == 2 and "is in the run directory" in said, said
    assert not (tmp_path / "run" / "out.jsonl").exists()


@pytest.mark.parametrize("how", ["--overwrite", pytest.param("--resume", marks=pytest.mark.full)])
def test_a_start_that_is_refused_late_takes_nothing_away(how, tmp_path):
    output, run_dir = tmp_path / "out.jsonl", tmp_path / "run"

    def code(*options: str) -> int:
        process = start(tmp_path, str(output), *options)
        process.communicate(timeout=patient(60))
        return process.returncode

    def left() -> dict[Path, bytes]:
        kept = [path for path in run_dir.rglob("*") if path.is_file() and path.name not in ("exit_code", "job")]
        return {path: path.read_bytes() for path in (output, *kept)}

    assert code() == 0
    before = left()
    assert code(how, "--attention", "triton", "--device", "cpu") == 2
    assert left() == before
    assert code("--resume") == 0
    assert output.read_bytes() == before[output]
