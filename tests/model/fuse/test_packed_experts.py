"""Experts with packed weights, compared with transformers' own loop over the experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    NemotronHConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from sarathi_pp.model.batch_invariant import batch_invariant_mode
from sarathi_pp.model.fuse.float_linear import has_float_gemm
from sarathi_pp.model.fuse.packed_experts import PackedExperts, fits
from sarathi_pp.model.fuse.packed_linear import has_gemm
from sarathi_pp.model.fuse.rewrite import fuse

HIDDEN, WIDTH, EXPERTS, CHOSEN = 64, 48, 6, 2
CPU = torch.device("cpu")
SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": CHOSEN, "hidden_act": "silu"}
# Weights that are stored with inputs first (GPT-OSS), biases, gates that alternate with their values, and no gate.
KINDS: dict[str, tuple[type[nn.Module], Any]] = {
    "mixtral": (MixtralExperts, MixtralConfig(**SIZES, intermediate_size=WIDTH, num_local_experts=EXPERTS)),
    "qwen3_moe": (Qwen3MoeExperts, Qwen3MoeConfig(**SIZES, moe_intermediate_size=WIDTH, num_experts=EXPERTS)),
    "deepseek_v3": (
        DeepseekV3Experts,
        DeepseekV3Config(**SIZES, moe_intermediate_size=WIDTH, n_routed_experts=EXPERTS),
    ),
    "granitemoe": (GraniteMoeExperts, GraniteMoeConfig(**SIZES, intermediate_size=WIDTH, num_local_experts=EXPERTS)),
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
    return torch.randn(num_rows, HIDDEN, generator=generator).to(dtype), top.indices, top.values.to(dtype)


def run(experts: Any, given: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(), batch_invariant_mode(dtype, CPU):
        return experts(*given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 70])
def test_the_results_are_those_of_transformers(kind: str, dtype: torch.dtype, num_rows: int) -> None:
    given = work(num_rows, dtype)
    expected = run(experts_of(kind, dtype), given, dtype)
    assert fits(experts_of(kind, dtype), dtype)
    found = run(PackedExperts(experts_of(kind, dtype), dtype), given, dtype)
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
    assert not fits(Qwen3MoeExperts(config).to(dtype), dtype)


def test_rules_that_are_not_known_stay() -> None:
    experts = experts_of("qwen3_moe", torch.float32)
    experts.has_post_expert_norm = True
    assert not fits(experts, torch.float32)
    assert not fits(nn.Linear(16, 16), torch.float32)
