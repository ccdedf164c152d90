"""Checkpoints as people publish and keep them, besides the plain form: right, or refused with the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.errors import UnsupportedModelError
from tests.checkpoint.quantised import answers
from tests.engine.pipeline import run_pipeline
from tests.model.families import write_checkpoint

PROMPTS = [(5, 6, 7, 8, 9, 10, 11, 12, 13), (40, 41)]


def expect_transformers(directory: Path) -> None:
    expected = answers(directory, PROMPTS, 8)
    for stages in (1, 2):
        outcome = run_pipeline(directory, PROMPTS, stages=stages, chunk_size=7)
        assert [tuple(tokens) for tokens in outcome.tokens] == expected


@pytest.mark.parametrize("same", [True, False], ids=["equal", "different"])
def test_a_tied_lm_head_that_is_stored_too(same: bool, tmp_path: Path) -> None:
    """transformers unties them if they differ, and so does every stage."""
    write_checkpoint("llama", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(1))
    stored["lm_head.weight"] = embedding.clone() if same else noise
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expect_transformers(tmp_path)


def test_mixed_types_in_several_files_behind_the_links_of_a_hub_cache(tmp_path: Path) -> None:
    written = tmp_path / "written"
    write_checkpoint("qwen3", written, shards=3)
    for file in written.glob("*.safetensors"):
        stored = load_file(file)
        mixed = {key: one.bfloat16() if "mlp" in key else one for key, one in stored.items()}
        save_file(mixed, file, metadata={"format": "pt"})
    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots" / "0123", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(written.iterdir())):
        file.rename(blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / f"{number:040x}", snapshot))
    expect_transformers(snapshot)


def test_the_authors_own_file_beside_an_index_is_ignored(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path, shards=2)
    save_file({"layers.0.wq": torch.ones(4)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text("{}")
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "consolidated.00.pth").write_bytes(b"x")
    expect_transformers(tmp_path)


def test_rotary_tables_in_every_layer_are_ignored(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(6) for i in range(5)}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expect_transformers(tmp_path)


def test_the_authors_own_form_alone_is_refused_with_the_reason(tmp_path: Path) -> None:
    save_file({"layers.0.wq": torch.ones(4)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="their author's own format"):
        check_model(tmp_path)
