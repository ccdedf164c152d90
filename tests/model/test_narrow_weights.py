"""Weights that stay in bfloat16 in a float32 computation: the bits of converted weights, in half the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.checkpoint.stored_tensor import BLOCK_BYTES
from sarathi_pp.model.attention import choose_backend
from sarathi_pp.model.fuse.float_linear import has_float_gemm
from sarathi_pp.model.fuse.packed_experts import PackedExperts
from sarathi_pp.model.loader import load_lm_head, load_stage, stage_bytes
from sarathi_pp.model.stage_model import StageModel
from sarathi_pp.model.weights import HeldTypes
from tests.checkpoint.quantised import write_published
from tests.model.families import NUM_LAYERS, thinned, write_checkpoint
from tests.model.test_stage_model import CPU, PAGE_SIZE, TWO_STAGES, load, one_thread, peaks_of_loading, run_schedule

assert one_thread  # a fixture for all tests of this file
pytestmark = pytest.mark.skipif(not has_float_gemm(), reason="needs our product in float32")


def rewrite(directory: Path, changed: Any) -> None:
    """Write the weights of a checkpoint again, as `changed` returns them from their names and values."""
    path = directory / "model.safetensors"
    save_file({name: changed(name, tensor) for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def narrow(name: str, tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def held_bytes(stage: StageModel) -> int:
    """Return the bytes of all weights, with those of packed linear layers."""
    packed = sum(one.num_bytes() for one in stage.module.modules() if hasattr(one, "num_bytes"))
    return packed + sum(one.numel() * one.itemsize for one in stage.module.parameters())


def with_values_of(dtype: torch.dtype) -> Any:
    """Return a change of weights, which keeps their type and rounds their values to those of another one."""
    return lambda name, tensor: tensor.to(dtype).to(tensor.dtype) if tensor.is_floating_point() else tensor


rounded = with_values_of(torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(pytest.param(*one.values, torch.bfloat16, marks=one.marks) for one in thinned(few=True, oldest=True)),
        *((family, torch.float16) for family in ("llama", "gpt2", "qwen3_moe")),
    ],
)
def test_narrow_weights_give_the_bits_of_converted_ones(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    wide, stored = tmp_path / "wide", tmp_path / "stored"
    for directory in (wide, stored):
        write_checkpoint(family, directory)
        rewrite(directory, with_values_of(dtype))
    rewrite(stored, lambda name, tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    expected = run_schedule([load(wide, layers) for layers in TWO_STAGES], check_model(wide))
    stages = [load(stored, layers) for layers in TWO_STAGES]
    found = run_schedule(stages, check_model(stored))
    for name, logits in expected.items():
        for position, row in logits.items():
            assert row.dtype == torch.float32 and torch.equal(found[name][position], row), (name, position)
    for stage, layers in zip(stages, TWO_STAGES, strict=True):
        counted = stage_bytes(stored, layers, HeldTypes.on("cpu", torch.float32))
        assert stage.num_bytes == counted
        assert 0.9 < held_bytes(stage) / counted < 1.1  # panels are padded; biases have no bytes of their own


def test_a_lm_head_that_moves_is_narrow_too(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    rewrite(tmp_path, narrow)
    last = load(tmp_path, (3, NUM_LAYERS))
    head = load_lm_head(tmp_path, torch.float32, CPU)
    rows = torch.randn(5, head.size, generator=torch.Generator().manual_seed(1))
    assert torch.equal(head.forward(rows), last.rows_head().forward(rows))
    assert not any(one.dim() > 1 and one.dtype == torch.float32 for one in head.module.parameters())


def test_of_mixed_types_each_weight_keeps_its_own(tmp_path: Path) -> None:
    """Values that bfloat16 cannot hold must not be rounded, whatever the other weights are."""
    wide = tmp_path / "wide"
    for directory in (wide, tmp_path / "mixed"):
        write_checkpoint("qwen3_moe", directory)
    kept = ("mlp.gate.weight", "experts.1.down_proj", "layers.1.self_attn.o_proj.weight")
    rewrite(wide, lambda name, tensor: tensor if any(part in name for part in kept) else rounded(name, tensor))
    mixed = tmp_path / "mixed"
    rewrite(mixed, lambda name, tensor: tensor if any(part in name for part in kept) else narrow(name, tensor))
    expected, found = (
        run_schedule([load(directory, layers) for layers in TWO_STAGES], check_model(directory))
        for directory in (wide, mixed)
    )
    assert all(torch.equal(found[name][at], row) for name, rows in expected.items() for at, row in rows.items())


def test_one_wide_router_does_not_widen_the_experts(tmp_path: Path) -> None:
    write_checkpoint("qwen3_moe", tmp_path)
    rewrite(tmp_path, lambda name, tensor: tensor if "mlp.gate.weight" in name else narrow(name, tensor))
    for layers in TWO_STAGES:
        stage = load(tmp_path, layers)
        wide = {name for name, one in stage.module.named_parameters() if one.dim() > 1 and one.dtype == torch.float32}
        assert wide and all(name.endswith("mlp.gate.weight") for name in wide)
        assert 0.9 < held_bytes(stage) / stage.num_bytes < 1.1
        for experts in (one for one in stage.module.modules() if isinstance(one, PackedExperts)):
            assert experts.up.held_type == experts.down.held_type == torch.bfloat16


def test_a_computation_in_bfloat16_has_no_wide_embedding(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    stage = load_stage(tmp_path, (0, 2), NUM_LAYERS, torch.bfloat16, CPU, choose_backend("auto", CPU, PAGE_SIZE))
    assert type(stage.module.get_input_embeddings()) is nn.Embedding


def test_quantised_weights_are_dequantised_to_the_asked_type(tmp_path: Path) -> None:
    """So a run that `auto` computes in float32 has the weights of one in bfloat16, in as much memory."""
    found = write_published("llama", "fp8 blocks", tmp_path)
    codes = load_file(found.quantised / "model.safetensors")
    rewrite(found.reference, lambda name, tensor: rounded(name, tensor) if f"{name}_scale_inv" in codes else tensor)
    expected = run_schedule([load(found.reference, layers) for layers in TWO_STAGES], check_model(found.reference))
    backend = choose_backend("sdpa", CPU, PAGE_SIZE)
    stages = [
        load_stage(found.quantised, layers, NUM_LAYERS, torch.float32, CPU, backend, dequantised=torch.bfloat16)
        for layers in TWO_STAGES
    ]
    logits = run_schedule(stages, check_model(found.quantised))
    assert all(torch.equal(logits[name][at], row) for name, rows in expected.items() for at, row in rows.items())
    held = HeldTypes.on("cpu", torch.float32, torch.bfloat16)
    for stage, layers in zip(stages, TWO_STAGES, strict=True):
        assert stage.num_bytes == stage_bytes(found.quantised, layers, held)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc to measure a peak")
def test_loading_peaks_near_the_narrow_weights(tmp_path: Path) -> None:
    """A bfloat16 checkpoint of 84 MB, of which the slice is half. In float32 it would be the whole."""
    write_checkpoint("llama", tmp_path / "tiny")
    sizes = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    (_, in_bf16), (grown, held) = peaks_of_loading(tmp_path / "tiny", tmp_path / "model")
    assert 1 <= held / in_bf16 < 1.001  # norms are converted
    assert grown < 1.05 * held + 4 * BLOCK_BYTES, f"{grown / 1e6:.0f} MB for {held / 1e6:.0f} MB"
