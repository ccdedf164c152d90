"""A run whose standard error or output has lost its reader still does its work."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

from tests.commands.processes import COMMAND, ROOT, Files, environment
from tests.machine import patient

pytestmark = pytest.mark.timeout(180)
MODEL = ROOT / "examples" / "tiny-adder"
NUM_ROWS = 300
on_one_stage, on_two_stages = (
    pytest.mark.parametrize(
        "stages", [pytest.param(stages, marks=[pytest.mark.full] * (stages != default)) for stages in ("1", "2")]
    )
    for default in ("1", "2")
)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    made = Files(tmp_path)
    made.write_prompts([tuple(3 + (row + place) % 9 for place in range(4 + row % 5)) for row in range(NUM_ROWS)])
    return made


def command(files: Files, stages: str, *more: str) -> tuple[str, ...]:
    return (*COMMAND, *files.options(MODEL, "--stages", stages, "--max-new-tokens", "20", *more))


@on_two_stages
def test_a_pipe_that_nobody_reads_ends_no_run(stages, files):
    """As with `2>&1 | head -1`. A write of progress to that pipe must not end the run."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.Popen(command(files, stages), cwd=files.folder, env=environment(), stderr=writer)
    os.close(writer)
    assert done.wait(patient(120)) == 0
    assert len(files.rows()) == NUM_ROWS and files.exit_code() == 0
    assert files.report()["completed"] == NUM_ROWS


@on_two_stages
def test_a_terminal_that_was_closed_ends_no_run(stages, files):
    """SIGHUP is ignored, as under nohup, so drawing on the closed terminal fails, also at the end."""
    terminal, side = pty.openpty()
    process = subprocess.Popen(
        command(files, stages),
        cwd=files.folder,
        env={**environment(), "TERM": "xterm"},
        stderr=side,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    os.close(side)
    os.read(terminal, 1)  # wait until something is shown
    os.close(terminal)
    assert process.wait(patient(120)) == 0
    assert len(files.rows()) == NUM_ROWS and files.exit_code() == 0
    assert files.report()["completed"] == NUM_ROWS


@on_one_stage
def test_a_report_that_nobody_reads_is_no_crash(stages, files):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command(files, stages, "--quiet", "--json"),
        cwd=files.folder,
        env=environment(),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=patient(120),
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (74, "")
    assert len(files.rows()) == NUM_ROWS and files.report()["completed"] == NUM_ROWS


@on_two_stages
def test_a_report_that_cannot_be_written_says_where_it_is(stages, files):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(files, stages, "--quiet", "--json"),
            cwd=files.folder,
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=patient(120),
        )
    assert done.returncode == 74 and done.stderr.count("OutputError: ") == 1, done.stderr
    assert "report.json holds it" in done.stderr and "Traceback" not in done.stderr
    assert json.loads((files.run / "report.json").read_text())["completed"] == NUM_ROWS
