"""Latent attention over pages: against attention written out in float64, with the same bits for every cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sarathi_pp_kernels.cpu.simd.target import has_avx512_bf16
from torch import Tensor, nn

from sarathi_pp.checkpoint.facts.layer_cache import PagedCache
from sarathi_pp.model.attention import BACKENDS, AttentionBackend, Needs, choose_backend
from sarathi_pp.model.attention.adapter import PagedCall
from sarathi_pp.model.attention.latent import LatentCache, LatentProducts, absorb_latents
from sarathi_pp.model.attention.spec import AttentionSpec, AttentionSpecs
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard

CPU = torch.device("cpu")
NUM_PAGES, PAGE_SIZE = 9, 16
TABLE = (7, 0, 3, 8, 2)
# Channels of the latent and of the rotary part: those that attention_float.py can read, and others.
WIDTHS = [(32, 16), (24, 8)]

every_backend = pytest.mark.parametrize("name", ["numba", "sdpa"])
every_width = pytest.mark.parametrize(("latent", "rotary"), WIDTHS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Rows:
    """Latents and queries of one sequence, and their attention by a backend."""

    def __init__(self, latent: int, rotary: int, num_heads: int, num_tokens: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(latent + num_heads)
        self.latent, self.rotary = latent, rotary
        self.latents = torch.randn(num_tokens, 1, latent + rotary, generator=generator).to(dtype)
        self.query = torch.randn(num_tokens, num_heads, latent + rotary, generator=generator).to(dtype)
        self.spec = AttentionSpec(0.3)

    def expected(self) -> Tensor:
        keys = self.latents[:, 0].double()
        scores = torch.einsum("thd,sd->hts", self.query.double(), keys) * self.spec.scaling
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hts,sr->thr", weights, keys[:, : self.latent])

    def attend(self, backend: AttentionBackend, cuts: Sequence[int]) -> Tensor:
        cache = PagedCache(1, self.latent + self.rotary, self.latent, latent=True)
        kv = KVShard((0, 1), NUM_PAGES, PAGE_SIZE, [cache], self.query.dtype, CPU)
        kv.keys(0).fill_(torch.nan)
        paged = PagedCall(backend, kv, None, AttentionSpecs((None,)))  # type: ignore[arg-type]
        found = []
        for start, end in zip(cuts, cuts[1:], strict=False):
            inputs = build_inputs([Span(start, end - start, TABLE, prompt=True)], [], PAGE_SIZE, CPU)
            object.__setattr__(paged, "inputs", inputs)
            rows = self.latents[start:end].transpose(0, 1)[None]
            left = LatentCache(paged).update(rows[..., : self.latent], rows[..., self.latent :], 0)
            assert [one.shape[2] for one in left] == [1, 1]
            found.append(backend(self.query[start:end], kv, 0, inputs, self.spec))
        return torch.cat(found)


@every_backend
@every_width
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_attention_is_that_over_contiguous_latents(
    name: str, latent: int, rotary: int, dtype: torch.dtype
) -> None:
    rows = Rows(latent, rotary, 6, 70, dtype)
    found = rows.attend(choose_backend(name, CPU, PAGE_SIZE), [0, 1, 24, 68, 69, 70])
    assert found.shape == (70, 6, latent) and found.dtype == dtype
    assert (found.double() - rows.expected()).abs().max() < (1e-5 if dtype == torch.float32 else 0.03)


@every_width
@pytest.mark.parametrize("num_heads", [2, 5, 128])
def test_float32_bits_do_not_depend_on_the_cut(latent: int, rotary: int, num_heads: int) -> None:
    rows, backend = Rows(latent, rotary, num_heads, 40, torch.float32), choose_backend("numba", CPU, PAGE_SIZE)
    whole = rows.attend(backend, [0, 40])
    assert torch.equal(rows.attend(backend, range(41)), whole)
    assert torch.equal(rows.attend(backend, [0, 3, 10, 33, 40]), whole)


def attention_module(num_heads: int) -> Any:
    torch.manual_seed(num_heads)
    module = SimpleNamespace(qk_nope_head_dim=12, v_head_dim=20, kv_lora_rank=32)
    module.kv_b_proj = nn.Linear(32, num_heads * (12 + 20), bias=False)
    return module


def test_products_are_those_of_kv_b_proj() -> None:
    module = attention_module(3)
    products = LatentProducts(module, torch.float32)
    query, latent = torch.randn(7, 3, 12 + 4), torch.randn(7, 32)
    key, value = module.kv_b_proj(latent).view(7, 3, 32).split([12, 20], -1)
    absorbed = products.absorb(query)
    assert torch.equal(absorbed[..., 32:], query[..., 12:])
    scores = torch.einsum("thr,sr->hts", absorbed[..., :32], latent)
    torch.testing.assert_close(scores, torch.einsum("thd,shd->hts", query[..., :12], key))
    torch.testing.assert_close(products.of_outputs(latent[:, None].expand(-1, 3, -1)), value)


def test_no_latent_is_expanded() -> None:
    products = LatentProducts(attention_module(3), torch.float32)
    assert products(torch.ones(1, 1, 1, 32)).shape == (1, 1, 1, 96)
    with pytest.raises(AssertionError, match="would be expanded"):
        products(torch.ones(1, 1, 2, 32))


def test_every_layer_gets_its_products() -> None:
    layers = nn.ModuleList()
    for _ in range(2):
        layer = nn.Module()
        layer.self_attn = nn.Module()
        for name, value in vars(attention_module(2)).items():
            setattr(layer.self_attn, name, value)
        layers.append(layer)
    absorb_latents(layers, torch.float32)
    assert all(type(layer.self_attn.kv_b_proj) is LatentProducts for layer in layers)


def test_kernels_without_latents_are_passed_over() -> None:
    needs = Needs(torch.bfloat16, 192, softcap=False, sinks=False, latent=True)
    assert choose_backend("auto", CPU, 16, needs).name == "numba"
    takes = {name: known.takes(needs) for name, known in BACKENDS.items()}
    assert takes.pop("numba") is takes.pop("sdpa") is None
    assert set(takes.values()) == {"does not support latent attention, which this model has"}


@pytest.mark.skipif(not has_avx512_bf16(), reason="needs AVX512-BF16")
@pytest.mark.parametrize("num_heads", [1, 6, 16, 20])
def test_bfloat16_bits_do_not_depend_on_the_cut(num_heads: int) -> None:
    rows, backend = Rows(32, 16, num_heads, 40, torch.bfloat16), choose_backend("numba", CPU, PAGE_SIZE)
    whole = rows.attend(backend, [0, 40])
    assert torch.equal(rows.attend(backend, range(41)), whole)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(rows.attend(backend, [0, 17, 18, 40]), whole)
