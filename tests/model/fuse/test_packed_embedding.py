"""LM heads that share their weight with an embedding: packed once, and tokens looked up in the packed weight."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.biogpt.modeling_biogpt import BioGptScaledWordEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from sarathi_pp.model.batch_invariant import batch_invariant_mode
from sarathi_pp.model.fuse import packed_linear
from sarathi_pp.model.fuse.float_linear import FloatLinear, has_float_gemm
from sarathi_pp.model.fuse.packed_embedding import PackedEmbedding, pack_tied_heads
from sarathi_pp.model.fuse.packed_linear import PackedLinear, has_gemm
from sarathi_pp.model.missing_layer import MissingLayer
from sarathi_pp.model.narrow_weights import WideEmbedding, widen_embeddings
from tests.model.families import FAMILIES, NUM_LAYERS, VOCAB_SIZE, build_model, thinned, write_checkpoint
from tests.model.test_stage_model import CPU, load, one_thread

assert one_thread  # a fixture for all tests of this file
needs_gemm = pytest.mark.skipif(not has_gemm(), reason="this processor has no bfloat16 products, or numba is not here")
needs_float_gemm = pytest.mark.skipif(not has_float_gemm(), reason="no AVX2, or numba is not here")
DTYPES = [pytest.param(torch.bfloat16, marks=needs_gemm), pytest.param(torch.float32, marks=needs_float_gemm)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EMBEDDINGS: dict[str, Callable[..., nn.Embedding]] = {
    "plain": nn.Embedding,
    "gemma3": lambda *sizes: Gemma3TextScaledWordEmbedding(*sizes, padding_idx=0, embed_scale=sizes[1] ** 0.5),
    "biogpt": lambda *sizes: BioGptScaledWordEmbedding(*sizes, padding_idx=1, embed_scale=sizes[1] ** 0.5),
}


def tied(embedding: nn.Embedding, dtype: torch.dtype) -> Any:
    model = nn.Module()
    model.embedding = embedding
    model.head = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False)
    model.head.weight = embedding.weight
    model.head.weight.data = torch.randn(embedding.weight.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return model.requires_grad_(False)


def is_tied(family: str) -> bool:
    return bool(FAMILIES[family]().tie_word_embeddings)


@pytest.mark.parametrize("kind", EMBEDDINGS)
@pytest.mark.parametrize(
    ("compute", "held", "vocab_size", "width"),
    [
        pytest.param(FP32, FP32, 70, 9, marks=needs_float_gemm),
        pytest.param(FP32, BF16, 70, 10, marks=needs_float_gemm),
        pytest.param(FP32, FP16, 64, 10, marks=needs_float_gemm),
        pytest.param(FP32, BF16, 70, 9, marks=needs_float_gemm),  # an odd width: packed in float32
        pytest.param(BF16, BF16, 64, 10, marks=needs_gemm),
    ],
)
@torch.inference_mode()
def test_rows_have_the_bits_of_the_embedding(
    kind: str, compute: torch.dtype, held: torch.dtype, vocab_size: int, width: int
) -> None:
    model = tied(EMBEDDINGS[kind](vocab_size, width), held)
    if compute != held:
        widen_embeddings(model)
    before = model.embedding
    pack_tied_heads(model, compute)
    assert type(model.embedding) is PackedEmbedding and type(model.head) in (PackedLinear, FloatLinear)
    assert not list(model.parameters())
    all_ids = torch.arange(vocab_size).flip(0)
    for token_ids in (all_ids, all_ids.view(2, -1), all_ids[:1, None], all_ids[:0]):
        found, expected = model.embedding(token_ids), before(token_ids)
        assert found.dtype == expected.dtype == compute and torch.equal(found, expected)
        assert found.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", thinned(filter(is_tied, FAMILIES)))
@torch.inference_mode()
def test_every_tied_family_computes_what_it_did(family: str, dtype: torch.dtype) -> None:
    """In float32 to the last bit. In bfloat16 the logits are sums in another order, and the hidden states are equal."""
    plain = build_model(family).to(dtype).requires_grad_(False)
    packed = copy.deepcopy(plain)
    pack_tied_heads(packed, dtype)
    assert type(packed.get_input_embeddings()) is PackedEmbedding
    assert type(packed.get_output_embeddings()) in (PackedLinear, FloatLinear)
    token_ids = torch.arange(3, 40)[None]
    with batch_invariant_mode(dtype, CPU):
        expected, found = (one(token_ids, output_hidden_states=True) for one in (plain, packed))
    assert torch.equal(found.hidden_states[-1], expected.hidden_states[-1])
    if dtype == torch.float32:
        assert torch.equal(found.logits, expected.logits)
    error = (found.logits - expected.logits).abs().max() / expected.logits.abs().max()
    assert error < 0.02


@needs_float_gemm
@pytest.mark.parametrize("family", [family for family in ("llama", "gemma2", "opt") if is_tied(family)])
def test_a_stage_holds_a_tied_weight_once(family: str, tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path)
    for layers, embeds in (((0, NUM_LAYERS), True), ((NUM_LAYERS - 1, NUM_LAYERS), False)):
        module = load(tmp_path, layers).module
        embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
        assert type(embedding) is (PackedEmbedding if embeds else MissingLayer) and type(head) is FloatLinear
        assert not any(VOCAB_SIZE in parameter.shape for parameter in module.parameters())
        if embeds:
            assert embedding._packed.data_ptr() == head.tensors()[0].data_ptr()


class ReadsWeight(nn.Module):
    """A model that computes its logits without calling its LM head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embedding, self.head = model.embedding, model.head

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.embedding(token_ids) @ self.head.weight.T


class OtherEmbedding(nn.Embedding):
    def forward(self, token_ids: Tensor) -> Tensor:
        return super().forward(token_ids) + 1


@needs_float_gemm
def test_weights_that_cannot_be_looked_up_stay() -> None:
    read = ReadsWeight(tied(nn.Embedding(32, 16), FP32))
    other = tied(OtherEmbedding(32, 16), FP32)
    three = tied(nn.Embedding(32, 16), FP32)
    three.third = OtherEmbedding(32, 16)
    three.third.weight = three.head.weight
    half = tied(nn.Embedding(32, 16), FP16)
    for model, compute in ((read, FP32), (other, FP32), (three, FP32), (half, FP16)):
        pack_tied_heads(model, compute)
        assert type(model.head) is nn.Linear and model.head.weight is model.embedding.weight
    untied = tied(nn.Embedding(32, 16), FP32)
    untied.head.weight = nn.Parameter(untied.head.weight.clone(), requires_grad=False)
    pack_tied_heads(untied, FP32)
    assert type(untied.embedding) is nn.Embedding and type(untied.head) is nn.Linear, "fuse packs it"


def test_without_our_product_in_bfloat16_an_embedding_keeps_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's layout cannot be read back."""
    monkeypatch.setattr(packed_linear, "has_gemm", lambda: False)
    model = tied(nn.Embedding(32, 16), BF16)
    pack_tied_heads(model, BF16)
    assert type(model.head) is nn.Linear and type(model.embedding) is nn.Embedding


@needs_float_gemm
def test_a_narrow_embedding_is_replaced_too() -> None:
    model = tied(nn.Embedding(32, 16), BF16)
    widen_embeddings(model)
    assert type(model.embedding) is WideEmbedding
    pack_tied_heads(model, FP32)
    assert type(model.embedding) is PackedEmbedding and model.head.held_type == BF16
