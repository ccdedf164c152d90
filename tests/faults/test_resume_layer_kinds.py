"""A killed batch of a model with other layers than attention resumes, and replicas share it: the answers stay equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.processes import Files
from tests.faults.jobs import Answers, answers, num_lines, started
from tests.model.families import write_checkpoint

pytestmark = pytest.mark.timeout(300)

NUM_ROWS = 100
OPTIONS = ("--max-new-tokens", "16", "--ignore-eos", "--temperature", "0.8", "--dtype", "float32", "--chunk-size", "32")
KINDS = ("deepseek_v3", "qwen3_next")


def run(model: Path, folder: Path, *options: str) -> tuple[Files, Answers]:
    folder.mkdir(exist_ok=True)
    files = Files(folder)
    files.write_prompts([tuple(range(3, 4 + row % 40)) for row in range(NUM_ROWS)])
    with started(files, model, *OPTIONS, *options) as job:
        said = job.end()
        assert job.process.returncode == 0, said
    return files, answers(files)


@pytest.mark.parametrize("family", KINDS)
def test_kills_and_replicas_change_no_answer(family: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_checkpoint(family, model)
    _, expected = run(model, tmp_path / "undisturbed", "--stages", "2")
    assert len(expected) == NUM_ROWS

    folder = tmp_path / "killed"
    folder.mkdir()
    files = Files(folder)
    files.write_prompts([tuple(range(3, 4 + row % 40)) for row in range(NUM_ROWS)])
    with started(files, model, *OPTIONS, "--stages", "2", "--max-num-seqs", "8") as job:
        job.wait_for_lines(20)
        job.kill_all()
    assert 20 <= num_lines(files.output) < NUM_ROWS
    _, found = run(model, folder, "--stages", "1", "--resume")
    assert found == expected

    # Two replicas with few pages: sequences are preempted, and computed again.
    files, found = run(model, tmp_path / "replicas", "--stages", "2", "--replicas", "2", "--kv-cache-memory", "60KiB")
    assert found == expected
    assert files.report()["preemptions"] > 0
