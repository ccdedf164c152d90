"""The backends that call FlashAttention libraries, on doubles that accept only what the libraries accept.

The doubles follow flash-attn 2.8 and torch 2.13: shapes, dtypes, page sizes, bottom-right masks and return values. On a
GPU with the libraries installed, `bench gpu` compares their logits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import varlen

from sarathi_pp.checkpoint.facts.layer_cache import plain_caches
from sarathi_pp.model.attention.flash import FlashAttention, VarlenAttention, token_major
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from tests.model.attention.flash_rule import PAGE, attend, attend_rows, check_pool
from tests.model.microbatches import CPU, Case, spec_for

calls: list[str] = []


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    calls.append(f"varlen {len(cu_seqlens_q) - 1}")
    assert softmax_scale is not None and block_table is not None and causal
    check_pool(q, k, v, block_table, len(cu_seqlens_q) - 1)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and int(cu_seqlens_q[-1]) == len(q)
    assert max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k == int(cu_seqlens_k.diff().max())
    how: dict[str, Any] = {"scale": softmax_scale, "window": (window_size[0], 0), "softcap": softcap}  # causal
    found = attend_rows(q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), block_table, **how)
    out, logsumexp = torch.cat([one for one, _ in found]), torch.cat([one for _, one in found]).t()
    return (out, logsumexp, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: None = None,
    v: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    calls.append(f"kvcache {len(q)}")
    assert softmax_scale is not None and block_table is not None and cache_seqlens is not None and causal
    check_pool(q, k_cache, v_cache, block_table, len(q))
    assert cache_seqlens.dtype == torch.int32 and q.dim() == 4
    how: dict[str, Any] = {"scale": softmax_scale, "window": (window_size[0], 0), "softcap": softcap}
    found = [
        attend(*one, **how)
        for one in ((q[i], k_cache, v_cache, cache_seqlens[i], block_table[i]) for i in range(len(q)))
    ]
    out = torch.stack([one for one, _ in found])
    logsumexp = torch.stack([one for _, one in found]).transpose(1, 2)
    return (out, logsumexp) if return_softmax_lse else out


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    assert enable_gqa and seqused_k is not None and block_table is not None and scale is not None
    check_pool(query, key, value, block_table, len(cu_seq_q) - 1)
    assert cu_seq_q.dtype == seqused_k.dtype == torch.int32 and query.is_contiguous()
    assert max_q == int(cu_seq_q.diff().max()) and max_k == int(seqused_k.max())
    how: dict[str, Any] = {"scale": scale, "window": window_size, "softcap": 0.0}
    return torch.cat([one for one, _ in attend_rows(query, key, value, cu_seq_q, seqused_k, block_table, **how)])


@pytest.fixture(autouse=True, scope="module")
def libraries() -> Iterator[None]:
    module: Any = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", module)
        patch.setattr(varlen, "varlen_attn", varlen_attn)
        yield


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=2e-3, rtol=2e-3)


@settings(max_examples=60)
@given(
    extents=st.lists(st.tuples(st.integers(0, 600), st.one_of(st.just(1), st.integers(2, 40))), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2)]),
    window=st.one_of(st.none(), st.integers(1, 700)),
    softcap=st.one_of(st.none(), st.just(1.5)),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_microbatch_by_flash_attn(extents, heads, window, softcap, sinks, seed):
    case = Case(extents, PAGE, *heads, 8, dtype=torch.float16, seed=seed)
    spec = spec_for(case, window=window, softcap=softcap, sinks=sinks)
    close(case.run(spec, FlashAttention()), case.expected(spec))


@settings(max_examples=40)
@given(
    extents=st.lists(st.tuples(st.integers(0, 600), st.one_of(st.just(1), st.integers(2, 40))), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 2)]),
    window=st.one_of(st.none(), st.integers(1, 700)),
    seed=st.integers(0, 1000),
)
def test_any_microbatch_by_torch(extents, heads, window, seed):
    case = Case(extents, PAGE, *heads, 8, dtype=torch.float16, seed=seed)
    spec = spec_for(case, window=window)
    close(case.run(spec, VarlenAttention()), case.expected(spec))


@pytest.mark.parametrize(
    ("extents", "expected"),
    [
        ([(0, 20), (300, 30)], ["varlen 2"]),
        ([(7, 1), (300, 1), (0, 1)], ["kvcache 3"]),
        ([(7, 1), (300, 20), (0, 1)], ["varlen 1", "kvcache 2"]),
    ],
    ids=["chunks", "decodes", "both"],
)
def test_chunks_are_one_call_and_decodes_another(extents, expected):
    calls.clear()
    case = Case(extents, PAGE, 4, 2, 8, dtype=torch.float16)
    case.run(spec_for(case), FlashAttention())
    assert calls == expected


@pytest.mark.parametrize("backend", [FlashAttention, VarlenAttention])
def test_the_layout_of_one_microbatch_is_not_the_next_ones(backend):
    case = Case([(5, 9), (0, 3)], PAGE, 4, 2, 8, dtype=torch.float16)
    made, spec = backend(), spec_for(case)
    first = case.run(spec, made)
    (span, _) = case.inputs.spans
    alone = build_inputs([Span(span.start, span.num_tokens, span.pages.tolist())], [], PAGE, CPU)
    assert torch.equal(made(case.query[:9], case.kv, case.layer, alone, spec), first[:9])
    assert torch.equal(case.run(spec, made), first)


def test_pages_are_not_copied():
    shard = KVShard((0, 1), 3, PAGE, plain_caches(1, 2, 8), torch.float16, CPU)
    keys, values = token_major(shard, 0)
    assert keys.shape == values.shape == (3, PAGE, 2, 8)
    assert keys.data_ptr() == shard.keys(0).data_ptr() and values.data_ptr() == shard.values(0).data_ptr()
