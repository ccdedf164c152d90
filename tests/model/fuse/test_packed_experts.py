"""Experts with packed weights, compared with transformers' own loop over the experts."""

from __future__ import annotations

import copy
import mmap
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, Lfm2MoeConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from sarathi_pp.model.batch_invariant import batch_invariant_mode
from sarathi_pp.model.fuse.float_linear import has_float_gemm
from sarathi_pp.model.fuse.packed_experts import PackedExperts, can_pack_experts
from sarathi_pp.model.fuse.packed_linear import has_gemm
from sarathi_pp.model.fuse.rewrite import fuse

HIDDEN, WIDTH, EXPERTS, CHOSEN = 64, 48, 6, 2
CPU = torch.device("cpu")
SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": CHOSEN, "hidden_act": "silu"}
# The experts of most families have the code of Qwen3's. GPT-OSS stores weights with inputs first, has biases, and gates
# that alternate with their values. LFM2's activation is a function, and Nemotron has no gate.
KINDS: dict[str, tuple[type[nn.Module], Any]] = {
    "qwen3_moe": (Qwen3MoeExperts, Qwen3MoeConfig(**SIZES, moe_intermediate_size=WIDTH, num_experts=EXPERTS)),
    "gelu": (
        Qwen3MoeExperts,
        Qwen3MoeConfig(**SIZES | {"hidden_act": "gelu"}, moe_intermediate_size=WIDTH, num_experts=EXPERTS),
    ),
    "half panels": (Qwen3MoeExperts, Qwen3MoeConfig(**SIZES, moe_intermediate_size=24, num_experts=EXPERTS)),
    "lfm2_moe": (Lfm2MoeExperts, Lfm2MoeConfig(**SIZES, moe_intermediate_size=WIDTH, num_experts=EXPERTS)),
    "gpt_oss": (GptOssExperts, GptOssConfig(**SIZES, intermediate_size=WIDTH, num_local_experts=EXPERTS)),
    "nemotron_h": (NemotronHExperts, NemotronHConfig(**SIZES, moe_intermediate_size=WIDTH, n_routed_experts=EXPERTS)),
}
DTYPES = [
    pytest.param(torch.float32, marks=pytest.mark.skipif(not has_float_gemm(), reason="no own float32 product")),
    pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not has_gemm(), reason="no own bfloat16 product")),
]


def experts_of(kind: str, dtype: torch.dtype) -> Any:
    made, config = KINDS[kind]
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    experts = made(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    return experts.to(dtype).requires_grad_(False)


def work(num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, their experts and the weights of these. No row has expert 4."""
    generator = torch.Generator().manual_seed(num_rows)
    scores = torch.randn(num_rows, EXPERTS, generator=generator)
    scores[:, 4] = -torch.inf
    top = scores.softmax(-1).topk(CHOSEN)
    # Routers give weights in float32 (DeepSeek) or in the type of the rows.
    weights = top.values if num_rows == 1 else top.values.to(dtype)
    return torch.randn(num_rows, HIDDEN, generator=generator).to(dtype), top.indices, weights


def run(experts: Any, given: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(), batch_invariant_mode(dtype, CPU):
        return experts(*given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 70])
def test_the_results_are_those_of_transformers(kind: str, dtype: torch.dtype, num_rows: int) -> None:
    given = work(num_rows, dtype)
    expected = run(experts_of(kind, dtype), given, dtype)
    packed = PackedExperts(experts_of(kind, dtype), dtype)
    fused = packed._silu_multiply is not None
    assert fused == (kind in ("qwen3_moe", "lfm2_moe"))
    found = run(packed, given, dtype)
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert found.dtype == dtype and error < {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_others(kind: str, dtype: torch.dtype) -> None:
    packed, (x, index, weights) = PackedExperts(experts_of(kind, dtype), dtype), work(40, dtype)
    whole = run(packed, (x, index, weights), dtype)
    for part in (slice(0, 1), slice(7, 12), slice(39, 40)):
        assert torch.equal(run(packed, (x[part], index[part], weights[part]), dtype), whole[part])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_expert_that_is_none_adds_nothing(dtype: torch.dtype) -> None:
    x, index, weights = work(9, dtype)
    packed = PackedExperts(experts_of("qwen3_moe", dtype), dtype)
    masked = index.clone()
    masked[3] = EXPERTS
    found, whole = run(packed, (x, masked, weights), dtype), run(packed, (x, index, weights), dtype)
    assert not found[3].any() and whole[3].any()
    assert torch.equal(found[4:], whole[4:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_in_memory_once(kind: str, dtype: torch.dtype) -> None:
    model = nn.Module()
    model.experts = experts_of(kind, dtype)
    names = [name for name, _ in model.named_parameters()]
    assert names
    assert fuse(model, dtype, by_kernels=False) == 1
    assert isinstance(model.experts, PackedExperts)
    assert [name for name, _ in model.named_parameters()] == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_widths_that_fill_no_panels_stay(dtype: torch.dtype) -> None:
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=20, num_experts=EXPERTS)
    assert not can_pack_experts(Qwen3MoeExperts(config).to(dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rules_that_are_not_known_stay(dtype: torch.dtype) -> None:
    experts = experts_of("qwen3_moe", dtype)
    assert can_pack_experts(experts, dtype)
    experts.has_post_expert_norm = True
    assert not can_pack_experts(experts, dtype)
    assert not can_pack_experts(nn.Linear(16, 16), dtype)


@pytest.mark.skipif(not has_float_gemm(), reason="no own float32 product")
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_narrow_weights_stay_narrow(stored: torch.dtype) -> None:
    given = work(20, torch.float32)
    narrow = PackedExperts(experts_of("qwen3_moe", stored), torch.float32)
    wide = PackedExperts(experts_of("qwen3_moe", stored).float(), torch.float32)
    assert narrow.up.held_type == narrow.down.held_type == stored
    assert torch.equal(run(narrow, given, torch.float32), run(wide, given, torch.float32))


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="memory cannot be given back here")
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_is_given_back_expert_by_expert(kind: str, dtype: torch.dtype) -> None:
    """Linux gives zeros for memory that was given back."""
    made, config = KINDS[kind]
    config = copy.deepcopy(config)
    config.update({"hidden_size": 512, "moe_intermediate_size": 256, "intermediate_size": 256})
    experts = made(config).to(dtype)
    weights = [parameter.data for parameter in experts.parameters() if parameter.dim() == 3]
    for weight in weights:
        weight.fill_(1.0)
    packed = PackedExperts(experts, dtype)
    for weight in weights:
        assert all(one.float().mean() < 0.1 for one in weight), weight.shape
    x = torch.ones(3, 512, dtype=dtype)
    up = packed.up(x, range(16))
    assert torch.equal(up, torch.full_like(up, 512.0) + (0 if kind == "qwen3_moe" else packed.up.tensors()[1][:16]))
