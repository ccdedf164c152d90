"""Pipes instead of files: which process waits for which, which processes get them, and what they cannot do."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.commands.processes import COMMAND, ROOT, Files, console_script, environment, torchrun
from tests.faults.jobs import started
from tests.machine import patient

pytestmark = pytest.mark.timeout(150)

ADDER = ROOT / "examples" / "tiny-adder"
PROMPTS = [(3, 4, 5), (6, 7)]


@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_a_pipe_that_nobody_reads_yet_is_waited_for_until_a_signal_comes(stages, emulated, tmp_path):
    files = Files(tmp_path)
    files.write_prompts(PROMPTS)
    os.mkfifo(files.output)
    options = ("--stages", stages, "--max-new-tokens", "2", "--overwrite", "--run-dir", str(files.run))
    with started(files, emulated, *options) as run, files.output.open("rb") as reader:
        assert len(reader.read().splitlines()) == len(PROMPTS)
        assert run.end() == "" and run.process.returncode == 0
    with started(files, emulated, *options) as run:
        deadline_s = time.monotonic() + patient(60)
        while not list(files.run.glob("attempt-0001/trace-00000*")):
            assert time.monotonic() < deadline_s and run.process.poll() is None
            time.sleep(0.1)
        time.sleep(patient(1))
        began_s = time.monotonic()
        run.process.terminate()
        said = run.end()
        assert time.monotonic() - began_s < patient(3 * 3.0), said
        assert run.process.returncode == 75 and "was stopped by SIGTERM" in said and "File " not in said, said


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_a_pipe_that_nobody_writes_yet_is_waited_for_until_a_signal_comes(stages, number, code, emulated, tmp_path):
    files = Files(tmp_path)
    os.mkfifo(files.input)
    with started(files, emulated, "--stages", stages) as run:
        deadline_s = time.monotonic() + patient(60)
        while not list(files.run.glob("attempt-0000/trace-00000*")):
            assert time.monotonic() < deadline_s and run.process.poll() is None
            time.sleep(0.1)
        time.sleep(patient(1))
        began_s = time.monotonic()
        run.process.send_signal(number)
        said = run.end(timeout_s=60)
        assert time.monotonic() - began_s < patient(3 * 3.0), said
        assert run.process.returncode == code, said
        assert f"stopped by {signal.Signals(number).name}" in said and "File " not in said, said
    assert files.report()["requests"] == 0 and files.output.read_bytes() == b""


@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_what_a_shell_puts_in_place_of_files_reaches_the_stage_that_reads_and_writes(stages, model, tmp_path):
    files = Files(tmp_path)
    files.write_prompts(PROMPTS)
    command = (*COMMAND, "generate", "--model", str(model), "--kv-cache-memory", "16MiB", "--max-new-tokens", "2")
    command += ("--stages", stages, "--quiet", "--run-dir", str(files.run))
    line = f"{shlex.join(command)} --input <(cat in.jsonl) --output >(cat > copy.jsonl)"
    done = subprocess.run(
        ("bash", "-c", line), cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=patient(100)
    )
    assert done.returncode == 0, done.stderr
    deadline_s = time.monotonic() + patient(10)
    copy = tmp_path / "copy.jsonl"
    while copy.read_bytes().count(b"\n") < len(PROMPTS) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert {json.loads(row)["id"] for row in copy.read_text().splitlines()} == {"1", "2"}


def test_a_descriptor_of_nobody_is_said_to_be_one(model, tmp_path):
    files = Files(tmp_path)
    command = (*COMMAND, "generate", "--model", str(model), "--input", "/dev/fd/63", "--output", str(files.output))
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 66 and "/dev/fd/63 is a stream of another process" in done.stderr, done.stderr


@pytest.mark.parametrize("name", ["input", "output"])
def test_what_cannot_be_gone_on_with_is_not_restarted(name, emulated, tmp_path):
    """The error comes before anything is lost."""
    files = Files(tmp_path)
    files.write_prompts(PROMPTS)
    place: Path = getattr(files, name)
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    command = (*COMMAND, *files.options(emulated, "--quiet", "--stages", "2", "--max-restarts", "1"))
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 2 and "a stream cannot be resumed" in done.stderr, done.stderr
    assert not files.run.exists()


@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
@pytest.mark.parametrize("name", ["-", "in.jsonl"])
def test_strict_refuses_an_input_that_cannot_be_looked_over(name, stages, emulated, tmp_path):
    files = Files(tmp_path)
    os.mkfifo(files.input)
    command = (*COMMAND, *files.options(emulated, "--quiet", "--strict", "--stages", stages, "--input", name))
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), input="{}\n", capture_output=True, text=True, timeout=patient(60)
    )
    assert done.returncode == 2, done.stderr
    assert f"--strict: --input {name} is a stream" in done.stderr and "give a regular file" in done.stderr
    assert not files.run.exists() and not files.output.exists()


@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_answers_to_a_stream_leave_nothing_behind(stages, tmp_path):
    """The current directory, /dev and the temporary files stay clean, so the same command works twice."""
    here, scratch = tmp_path / "here", tmp_path / "tmp"
    here.mkdir()
    scratch.mkdir()
    os.mkfifo(here / "pipe")
    (here / "file").touch()
    generate = (*COMMAND, "generate", "--model", str(ADDER), "--stages", stages, "-q", "-i", "-", "-o")
    for output in ("-", "/dev/null", "/dev/stdout", "pipe"):
        with (here / "file").open("w") as file, ExitStack() as stack:
            reader = None
            if output == "pipe":
                reader = stack.enter_context(subprocess.Popen(("cat", "pipe"), cwd=here, stdout=file))
                stack.callback(reader.kill)
            done = subprocess.run(
                (*generate, output),
                cwd=here,
                env={**environment(), "TMPDIR": str(scratch)},
                input="17+26=\n",
                stdout=file if output == "/dev/stdout" else subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                timeout=patient(100),
            )
            assert (done.returncode, done.stderr) == (0, ""), output
            assert reader is None or reader.wait(patient(10)) == 0
        answered = (done.stdout or "") + (here / "file").read_text()
        assert output == "/dev/null" or '"text":"43"' in answered, output
        assert sorted(path.name for path in here.iterdir()) == ["file", "pipe"], output
        assert not list(scratch.glob("sarathi-pp*")) and not Path(f"{output}.run").exists(), output


@pytest.mark.parametrize("how", ["alone", "launched", "torchrun"])
def test_a_run_whose_reader_left_leaves_nothing_and_says_nothing(how, tmp_path):
    """`-o - | head`: ranks end without the usual removal of temporary folders, and no rank names another."""
    here, scratch = tmp_path / "here", tmp_path / "tmp"
    here.mkdir()
    scratch.mkdir()
    (tmp_path / "in.jsonl").write_text("".join(f'{{"prompt": "{n}+1="}}\n' for n in range(3000)))
    front = torchrun(2, console_script(tmp_path)) if how == "torchrun" else COMMAND
    options = ("--stages", "1") if how == "alone" else ("--stages", "2")
    command = (*front, "generate", "--model", str(ADDER), *options, "-q")
    process = subprocess.Popen(
        (*command, "-i", str(tmp_path / "in.jsonl"), "-o", "-"),
        cwd=here,
        env={**environment(), "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(patient(60)) == (1 if how == "torchrun" else 74), said
    assert "sarathi-pp" not in "".join(os.listdir(scratch)) and not os.listdir(here), said
    assert "PeerLostError" not in said and "StoppedError" not in said, said
    assert said == "" or how == "torchrun"
