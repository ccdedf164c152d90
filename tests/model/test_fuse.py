"""Fusions of a whole stage: what they apply to, and that every rounding stays where the model has it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from sarathi_pp.model import fuse as fuse_module
from sarathi_pp.model import packed
from sarathi_pp.model.fuse import GatedMLP, RowNorm, fuse
from sarathi_pp.model.packed import OneDnnLinear, PanelLinear, has_onednn, has_panels
from tests.model.families import FAMILIES, build_model

needs_panels = pytest.mark.skipif(
    not has_panels(), reason="this processor has no bfloat16 products, or numba is not here"
)
needs_onednn = pytest.mark.skipif(not has_onednn(), reason="no packed bfloat16 products in torch")
needs_either = pytest.mark.skipif(not has_panels() and not has_onednn(), reason="no packed bfloat16 products")


class Mlp(nn.Module):
    """Llama's, with its code, under another name."""

    def __init__(self, hidden: int, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False, dtype=torch.bfloat16)
        self.up_proj = nn.Linear(hidden, width, bias=False, dtype=torch.bfloat16)
        self.down_proj = nn.Linear(width, hidden, bias=True, dtype=torch.bfloat16)
        self.act_fn = activation
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj


class Doubled(Mlp):
    def forward(self, x: Tensor) -> Any:
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)
        return down_proj


def fused(module: nn.Module) -> nn.Module:
    holder = nn.Sequential(copy.deepcopy(module))
    fuse(holder)
    return holder[0]


@needs_panels
@pytest.mark.parametrize("rows", [1, 2, 33, 200])
@torch.inference_mode()
def test_a_gated_mlp_gives_the_bits_of_its_parts(rows: int) -> None:
    torch.manual_seed(rows)
    mlp = Mlp(64, 160, nn.SiLU())
    x = 20 * torch.randn(1, rows, 64).bfloat16()
    x[0, 0, 0] = 3e4  # gates beyond what exp takes, both ways
    parts = copy.deepcopy(mlp)
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(parts, name, PanelLinear(getattr(mlp, name)))
    ours = fused(mlp)
    assert isinstance(ours, GatedMLP) and torch.equal(ours(x), parts(x))


@needs_panels
def test_an_mlp_that_does_something_else_is_left_alone_but_for_its_linears() -> None:
    for mlp in (Doubled(64, 96, nn.SiLU()), Mlp(64, 96, nn.GELU())):
        left = fused(mlp)
        assert type(left) is type(mlp) and type(left.gate_proj) is PanelLinear
    narrow = fused(Mlp(64, 72, nn.SiLU()))  # 72 outputs are no multiple of 16
    assert type(narrow) is Mlp


@needs_panels
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("width", [16, 1024])
@torch.inference_mode()
def test_a_norm_gives_the_bits_of_llamas(rows: int, width: int) -> None:
    torch.manual_seed(width)
    for kind in (LlamaRMSNorm, Qwen3RMSNorm):
        norm = kind(width, eps=1e-5).to(torch.bfloat16).requires_grad_(False)
        norm.weight.normal_()
        x = torch.randn(1, rows, width).bfloat16() * torch.logspace(-3, 3, rows)[:, None].bfloat16()
        ours, theirs = fused(norm)(x), norm(x)
        # The mean is summed in another order: here and there the last of 8 bits differs.
        assert torch.allclose(ours.float(), theirs.float(), rtol=2**-7, atol=0)
        assert float((ours == theirs).float().mean()) > 0.99


@needs_panels
def test_a_norm_that_rounds_elsewhere_is_left_alone() -> None:
    norm = Gemma2RMSNorm(32).to(torch.bfloat16).requires_grad_(False)
    assert type(fused(norm)) is Gemma2RMSNorm
    assert type(fused(LlamaRMSNorm(24).to(torch.bfloat16))) is LlamaRMSNorm  # no multiple of 16
    assert type(fused(LlamaRMSNorm(32))) is LlamaRMSNorm


@needs_panels
@pytest.mark.parametrize("num_threads", [2, 3])
@torch.inference_mode()
def test_threads_change_no_bit(num_threads: int) -> None:
    torch.manual_seed(0)
    mlp, norm = fused(Mlp(64, 96, nn.SiLU())), fused(LlamaRMSNorm(64).to(torch.bfloat16).requires_grad_(False))
    x = torch.randn(1, 101, 64).bfloat16()
    nothing = x[:, :0]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = mlp(x), norm(x)
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(mlp(x), alone[0]) and torch.equal(norm(x), alone[1])
        assert mlp(nothing).shape == norm(nothing).shape == (1, 0, 64)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("ours", [pytest.param(True, marks=needs_panels), pytest.param(False, marks=needs_onednn)])
@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.inference_mode()
def test_every_family_computes_what_it_did(family: str, ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to float32 as unfused, whose roundings are as many."""
    if not ours:
        for module in (packed, fuse_module):
            monkeypatch.setattr(module, "has_panels", lambda: False)
    exact = build_model(family)
    plain = copy.deepcopy(exact).to(torch.bfloat16)
    faster = copy.deepcopy(plain)
    assert fuse(faster) >= sum(type(m) is nn.Linear for m in plain.modules()) // 3
    assert sum(type(m) is nn.Linear for m in faster.modules()) <= 1, "all but a tied head"
    # Those of gpt2 are no nn.Linear, and its head is tied.
    assert any(isinstance(m, PanelLinear) for m in faster.modules()) == (ours and family != "gpt2")
    ids = torch.arange(3, 40)[None]
    target = exact(ids).logits

    def error(model: nn.Module) -> float:
        return float((model(ids).logits.float() - target).norm() / target.norm())

    assert error(faster) < 1.3 * error(plain)


@needs_panels
@pytest.mark.parametrize(
    ("family", "gated", "norms"),
    [("llama", True, True), ("qwen3", True, True), ("olmo2", True, False), ("gemma2", False, False)],
)
def test_what_applies_to_a_family(family: str, gated: bool, norms: bool) -> None:
    model = build_model(family).to(torch.bfloat16)
    layers = model.config.num_hidden_layers
    fuse(model)
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(GatedMLP) == layers) == gated and (kinds.count(RowNorm) >= 2 * layers) == norms


@needs_either
def test_a_shared_weight_is_left_alone_and_float32_too() -> None:
    tied = nn.Module()
    tied.embedding = nn.Embedding(32, 16, dtype=torch.bfloat16)
    tied.head = nn.Linear(16, 32, bias=False, dtype=torch.bfloat16)
    tied.head.weight = tied.embedding.weight
    assert fuse(tied) == 0 and type(tied.head) is nn.Linear
    assert fuse(nn.Sequential(nn.Linear(8, 8))) == 0


@needs_onednn
def test_odd_shapes_are_packed_all_the_same() -> None:
    model = nn.Sequential(nn.Linear(33, 40, dtype=torch.bfloat16).requires_grad_(False))
    assert fuse(model) == 1 and type(model[0]) is OneDnnLinear
