"""Tensors that are described from config.json have the bytes of the stored tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sarathi_pp.checkpoint.shapes import describe_tensors
from sarathi_pp.errors import InputError
from sarathi_pp.model.loader import stage_bytes
from sarathi_pp.model.tensor_parallel import TensorShard
from sarathi_pp.model.weights import HeldTypes
from tests.model.families import FAMILIES, NUM_LAYERS, write_checkpoint

SPANS = ((0, 2), (2, 4), (4, NUM_LAYERS), (0, NUM_LAYERS), (NUM_LAYERS, NUM_LAYERS))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_stage_has_the_bytes_that_loading_takes(family: str, tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path)
    described = describe_tensors(tmp_path, "float32")
    for dtype, spans in ((torch.float32, SPANS), (torch.bfloat16, SPANS[-2:])):
        held = HeldTypes.on("cuda", dtype)
        stored = [stage_bytes(tmp_path, span, held) for span in spans]
        assert [stage_bytes(tmp_path, span, held, checkpoint=described) for span in spans] == stored


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2", "gemma3_text"])
def test_narrow_weights_have_the_bytes_that_loading_takes(family: str, tmp_path: Path) -> None:
    """Matrices stay in bfloat16 in a computation in float32."""
    write_checkpoint(family, tmp_path)
    path, held = tmp_path / "model.safetensors", HeldTypes.on("cpu", torch.float32)
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    described = describe_tensors(tmp_path, "bfloat16")
    for span in SPANS:
        assert stage_bytes(tmp_path, span, held, checkpoint=described) == stage_bytes(tmp_path, span, held)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_each_shard_has_the_bytes_that_loading_takes(family: str, tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path)
    shard = TensorShard(0, 2, lambda summand: summand)
    stored, described = (
        stage_bytes(tmp_path, (1, NUM_LAYERS), HeldTypes.on("cuda", torch.float32), shard, checkpoint)
        for checkpoint in (None, describe_tensors(tmp_path, "float32"))
    )
    assert stored == described


def test_a_config_for_which_transformers_has_no_model_is_an_input_error(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "none-such"}))
    with pytest.raises(InputError, match="hidden_act is 'none-such'"):
        describe_tensors(tmp_path, "float32")
