"""Slots travel through a whole pipeline: stages refuse a chunk whose sequence has none."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sarathi_pp.checkpoint.facts.support import ModelFacts
from tests.engine.pipeline import run_pipeline
from tests.model.families import write_checkpoint

# Two prompts fit into these pages of four tokens, but not two prompts with their outputs. So some are preempted.
FEW_PAGES = 16


@pytest.mark.parametrize(
    "policy",
    [
        *("sarathi", "chunkllm:threshold=9,overlap=0.3"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("balanced", "orca")),
    ],
)
def test_each_chunk_finds_a_slot_on_each_stage(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model keeps no states, but its sequences get slots like those of one that does."""
    write_checkpoint("llama", tmp_path)
    draw = random.Random(7)
    prompts = [[draw.randrange(3, 40) for _ in range(length)] for length in (24, 22, 23, 24, 21, 24)]

    def tokens(num_pages: int) -> list[tuple[int, ...]]:
        options = {"stages": 2, "policy": policy, "max_num_seqs": 3, "max_new_tokens": 20, "num_pages": num_pages}
        found = run_pipeline(tmp_path, prompts, **options)
        assert (found.num_preemptions > 0) == (num_pages == FEW_PAGES)
        return found.tokens

    expected = tokens(512)
    monkeypatch.setattr(ModelFacts, "has_states", property(lambda facts: True))
    assert tokens(512) == expected == tokens(FEW_PAGES)
