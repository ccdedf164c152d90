"""The targets of CUDA fusions. No greedy token changes: here in the interpreter, on CPU tensors."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sarathi_pp.checkpoint.facts.families import FAMILIES as SUPPORTED
from sarathi_pp.checkpoint.facts.layer_cache import plain_caches
from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.model import loader
from sarathi_pp.model.attention.adapter import PAGED
from sarathi_pp.model.attention.sdpa import SdpaAttention
from sarathi_pp.model.attention.triton import TritonAttention
from sarathi_pp.model.fuse import cuda_modules
from sarathi_pp.model.fuse.cpu_modules import Block
from sarathi_pp.model.fuse.rewrite import fuse
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import layer_windows
from sarathi_pp.model.stage_model import StageModel
from sarathi_pp.model.tensor_parallel import Summed, TensorShard
from sarathi_pp.model.triton_available import has_kernels
from sarathi_pp.stages.model_stage import ModelStages
from tests.model.families import build_model, with_layers, write_checkpoint
from tests.model.shards import load_gang

CPU = torch.device("cpu")
PAGE_SIZE = 8


def logits(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of (15,) token ids over pages, in chunks of 9 and 6.

    The second runs with another sequence's decode.
    """
    model.set_attn_implementation(PAGED)
    config, layers = model.config, model.config.num_hidden_layers
    windows = layer_windows(config, SUPPORTED[type(model).__name__])
    stage = StageModel(model, (0, layers), layers, windows, SdpaAttention(), 0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv = KVShard(
        (0, layers), 6, PAGE_SIZE, plain_caches(layers, config.num_key_value_heads, head_dim), model.dtype, CPU
    )
    found = []
    for spans, rows, given in (
        ((Span(0, 9, (4, 2)),), 9, ids[:9]),
        ((Span(9, 6, (4, 2)), Span(0, 1, (5,))), 6, torch.cat([ids[9:], ids[:1]])),
    ):
        found.append(stage.forward(given, build_inputs(spans, range(rows), PAGE_SIZE, CPU), kv))
    return torch.cat(found)


def fused(model: Any) -> Any:
    faster = copy.deepcopy(model).requires_grad_(False)
    fuse(faster, by_kernels=True)
    return faster


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@torch.inference_mode()
def test_no_greedy_token_changes(family: str) -> None:
    model = build_model(family, config=with_layers(family, 2))
    faster, ids = fused(model), torch.arange(3, 18)
    found, expected = logits(faster, ids), model(ids[None]).logits[0]
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert torch.allclose(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_half_precision_is_about_as_near_to_float32_as_unfused(dtype: torch.dtype) -> None:
    exact, ids = build_model("qwen3", config=with_layers("qwen3", 2)), torch.arange(3, 18)
    plain = copy.deepcopy(exact).to(dtype)
    target = exact(ids[None]).logits[0]

    def error(found: Tensor) -> float:
        return float((found.float() - target).norm() / target.norm())

    assert error(logits(fused(plain), ids)) < 1.2 * error(logits(plain, ids))


@pytest.mark.parametrize(
    ("family", "gated", "norms", "attention", "blocks"),
    [
        ("llama", True, True, True, True),
        ("mistral", True, True, True, True),
        ("qwen2", True, True, True, True),
        ("granite", True, True, True, False),
        ("qwen3", True, True, True, True),
        ("qwen3_moe", False, True, True, True),
        ("glm4", False, True, False, False),
        ("olmo2", True, False, False, False),
        ("gemma2", False, False, False, False),
    ],
)
def test_what_applies_to_a_family(family: str, gated: bool, norms: bool, attention: bool, blocks: bool) -> None:
    model = fused(build_model(family))
    layers = model.config.num_hidden_layers
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(cuda_modules.GatedMLP) == layers) == gated
    assert (kinds.count(cuda_modules.RowNorm) >= 2 * layers) == norms
    assert (kinds.count(cuda_modules.RotaryAttention) == layers) == attention
    assert (kinds.count(Block) == layers) == blocks


def test_linears_of_several_kinds_are_not_merged() -> None:
    plain, biased, half = nn.Linear(8, 4, bias=False), nn.Linear(8, 4), nn.Linear(8, 4, bias=False).half()
    assert cuda_modules.can_merge(plain, plain) and cuda_modules.can_merge(biased, biased)
    assert not cuda_modules.can_merge(plain, biased) and not cuda_modules.can_merge(plain, half)
    assert not cuda_modules.can_merge(plain, nn.Identity())


def test_kernels_are_for_cuda() -> None:
    assert not has_kernels(CPU)
    assert fuse(build_model("llama").half()) == 0, "float16 on CPU is left alone"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tensor_shards_add_up_behind_fused_products(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama's tiny model has biases after the sums."""
    monkeypatch.setattr(loader, "fuse", partial(fuse, by_kernels=True))
    model = write_checkpoint(family, tmp_path, config=with_layers(family, 2))
    layers = (0, model.config.num_hidden_layers)
    gang = load_gang(tmp_path, check_model(tmp_path), layers, 2, PAGE_SIZE, 6, backend="sdpa")
    for stage in gang.stages:
        for layer in stage.module.model.layers:
            assert type(layer) is Block
            assert type(layer.self_attn) is cuda_modules.RotaryAttention and type(layer.mlp) is cuda_modules.GatedMLP
            assert type(layer.self_attn.o_proj) is Summed and type(layer.mlp.down_proj) is Summed
    ids = torch.arange(3, 18)
    found = []
    for start, count in ((0, 9), (9, 5), (14, 1)):
        inputs = build_inputs([Span(start, count, (4, 2))], range(count), PAGE_SIZE, CPU)
        found.append(gang.forward(ids[start : start + count], inputs))
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
    assert torch.equal(torch.cat(found).argmax(-1), expected.argmax(-1))
    assert torch.allclose(torch.cat(found), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(("size", "by_nccl"), [(1, False), (2, False), (2, True)])
def test_sums_of_shards_are_captured_if_nccl_adds_up(size: int, by_nccl: bool) -> None:
    shard = TensorShard(0, size, lambda x: x, capturable=by_nccl)
    stages: Any = SimpleNamespace(
        _device=torch.device("cuda"),
        _config=SimpleNamespace(enforce_eager=False),
        _backend=TritonAttention(),
        _shard=shard,
        _facts=SimpleNamespace(has_states=False),
    )
    assert ModelStages._can_capture(stages) == (size == 1 or by_nccl)
