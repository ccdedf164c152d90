"""launch/multinode.sh on two nodes, and launch/local.sh on one: real runs, ending with the run's own exit code."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.commands.processes import ROOT, environment, free_port
from tests.launch.nodes import ADDER, PROMPTS, SMALL, started
from tests.machine import patient

pytestmark = pytest.mark.timeout(280)


def test_two_nodes_answer_a_file_and_end_with_the_code_of_the_run(tmp_path: Path) -> None:
    """A bad line ends a run with 3, and torchrun turns that into 1. Each node sees only its own files."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(PROMPTS.read_text() + '{"id": "none"}\n')
    script, port = str(ROOT / "launch" / "multinode.sh"), str(free_port())
    common = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "INTERFACE": "lo"}
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        folder.mkdir()
    command = ("bash", script, "--model", str(ADDER), "--input", str(prompts), "--output", "answers.jsonl", *SMALL)
    with (
        started(command, folders[1], NODE_RANK="1", **common) as second,
        started(command, folders[0], NODE_RANK="0", **common) as first,
    ):
        code, said = first.end()
        assert code == 3, said
        code, said = second.end()
        assert code == 0, said
    rows = [json.loads(line) for line in (folders[0] / "answers.jsonl").read_text().splitlines()]
    assert len(rows) == 25 and [row["id"] for row in rows if "error" in row] == ["none"]
    run = folders[0] / "answers.jsonl.run"
    assert (run / "exit_code").read_text() == "3\n"
    assert len(json.loads((run / "report.json").read_text())["per_stage"]) == 2
    assert not (folders[1] / "answers.jsonl").exists()


def test_local_runs_as_many_stages_as_it_is_told(tmp_path: Path) -> None:
    command = ("bash", str(ROOT / "launch" / "local.sh"), "--model", str(ADDER), "--input", str(PROMPTS))
    run = subprocess.run(
        (*command, "--output", "answers.jsonl", *SMALL),
        cwd=tmp_path,
        env={**environment(), "STAGES": "3"},
        capture_output=True,
        text=True,
        timeout=patient(120),
    )
    assert run.returncode == 0, run.stderr
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 24
    report = json.loads((tmp_path / "answers.jsonl.run" / "report.json").read_text())
    assert report["stages"] == 3
    again = subprocess.run(
        (*command, "--output", "answers.jsonl", *SMALL), cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert again.returncode == 2 and "--overwrite" in again.stderr
