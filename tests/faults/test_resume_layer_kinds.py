"""A killed batch of a model with other layers than attention resumes, and replicas share it: the answers stay equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sarathi_pp.checkpoint.facts.layer_cache import state_bytes
from sarathi_pp.checkpoint.facts.support import ModelFacts, check_model
from sarathi_pp.model.kv import page_bytes
from tests.commands.processes import Files
from tests.faults.jobs import Answers, answers, num_lines, started
from tests.model.families import write_checkpoint

pytestmark = pytest.mark.timeout(300)

NUM_ROWS = 100
OPTIONS = ("--max-new-tokens", "16", "--ignore-eos", "--temperature", "0.8", "--dtype", "float32", "--chunk-size", "32")
# Latents in pages, and three kinds of states.
KINDS = [
    "qwen3_next",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("deepseek_v3", "granitemoehybrid", "lfm2")),
]


def run(model: Path, folder: Path, *options: str) -> tuple[Files, Answers]:
    folder.mkdir(exist_ok=True)
    files = Files(folder)
    files.write_prompts([tuple(range(3, 4 + row % 40)) for row in range(NUM_ROWS)])
    with started(files, model, *OPTIONS, *options) as job:
        said = job.end()
        assert job.process.returncode == 0, said
    return files, answers(files)


def memory_of(facts: ModelFacts) -> int:
    """Return bytes for 16 states and 16 pages on the stage that needs more for them."""
    parts = [facts.caches[:3], facts.caches[2:]]  # whatever the split
    return max(16 * (state_bytes(part, 4) + page_bytes(part, 16, torch.float32)) for part in parts)


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
    memory = ("--max-num-seqs", "16", "--kv-cache-memory", f"{memory_of(check_model(model))}B")
    files, found = run(model, tmp_path / "replicas", "--stages", "2", "--replicas", "2", *memory)
    assert found == expected
    assert files.report()["preemptions"] > 0
