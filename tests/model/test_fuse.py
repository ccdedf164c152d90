"""Fusions change no bit of what a stage computes, on every family that they apply to."""

import copy

import pytest
import torch
from torch import nn

from sarathi_pp.model.fuse import PackedLinear, _can_pack, pack_linears
from tests.model.families import FAMILIES, build_model

needs_packing = pytest.mark.skipif(not _can_pack(), reason="this processor or torch has no packed bfloat16 products")


@needs_packing
@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.inference_mode()
def test_packed_linears_give_the_same_bits(family):
    plain = build_model(family).to(torch.bfloat16)
    packed = copy.deepcopy(plain)
    linears = sum(type(m) is nn.Linear for m in plain.modules())
    count = pack_linears(packed)
    assert count >= linears - 1, "all but a tied head"
    ids = torch.arange(3, 40)[None]
    assert torch.equal(plain(ids).logits, packed(ids).logits)


@needs_packing
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 256, 257, 511, 700])
@pytest.mark.parametrize("bias", [False, True])
def test_any_number_of_rows(rows, bias):
    torch.manual_seed(rows)
    linear = nn.Linear(96, 80, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(1, rows, 96, dtype=torch.bfloat16)
    assert torch.equal(PackedLinear(linear)(x), linear(x))


@needs_packing
def test_a_shared_weight_is_left_alone_and_float32_too():
    tied = nn.Module()
    tied.embedding = nn.Embedding(32, 16, dtype=torch.bfloat16)
    tied.head = nn.Linear(16, 32, bias=False, dtype=torch.bfloat16)
    tied.head.weight = tied.embedding.weight
    assert pack_linears(tied) == 0 and type(tied.head) is nn.Linear
    assert pack_linears(nn.Sequential(nn.Linear(8, 8))) == 0
