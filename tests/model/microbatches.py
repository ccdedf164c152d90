"""Microbatches over paged keys and values, and their attention written out in float64 over contiguous keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sarathi_pp.checkpoint.facts.layer_cache import plain_caches
from sarathi_pp.model.attention import AttentionBackend, choose_backend
from sarathi_pp.model.attention.spec import AttentionSpec
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard, page_dtype, to_float8

CPU = torch.device("cpu")


def visible(start: int, num_tokens: int, window: int | None) -> Tensor:
    """Return a (num_tokens, start + num_tokens) bool mask: the keys that each row sees."""
    row = torch.arange(start, start + num_tokens)[:, None]
    key = torch.arange(start + num_tokens)
    return (key <= row) if window is None else (key <= row) & (key > row - window)


def naive(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Compute one sequence in float64: the last rows' (T, H, D) queries over all its (K, Hkv, D) keys."""
    group = query.shape[1] // key.shape[1]
    query, key, value = query.double(), key.double(), value.double()
    scores = torch.einsum("thd,khd->htk", query, key.repeat_interleave(group, 1)) * spec.scaling
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    num_tokens = query.shape[0]
    seen = visible(key.shape[0] - num_tokens, num_tokens, spec.sliding_window)
    scores = scores.masked_fill(~seen, -torch.inf)
    if spec.sinks is not None:
        column = spec.sinks.double()[:, None, None].expand(-1, num_tokens, 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("htk,khd->thd", weights, value.repeat_interleave(group, 1))


@dataclass
class Case:
    """Sequences whose last tokens form one microbatch; unwritten places of the pages hold NaN.

    Attributes:
        float8: pages are in FP8. The expected output is that of rounded keys and values.
    """

    extents: list[tuple[int, int]]
    page_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    seed: int = 0
    backend: str = "sdpa"
    float8: bool = False

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random).to(self.dtype)

        counts = [-(-(start + tokens) // self.page_size) for start, tokens in self.extents]
        ids = torch.randperm(sum(counts) + 3, generator=random).tolist()
        tables = [[ids.pop() for _ in range(count)] for count in counts]
        layer = 3
        self.layer = layer
        self.kv = KVShard(
            (layer, layer + 1),
            sum(counts) + 3,
            self.page_size,
            plain_caches(layer + 1, self.num_kv_heads, self.head_dim),
            self.dtype,
            CPU,
            pages=page_dtype("fp8" if self.float8 else "auto", self.dtype),
        )
        self.kv.keys(layer).fill_(torch.nan)
        self.kv.values(layer).fill_(torch.nan)
        self.keys, self.values = [], []
        for (start, tokens), table in zip(self.extents, tables, strict=True):
            key, value = (normal(start + tokens, self.num_kv_heads, self.head_dim) for _ in range(2))
            self.kv.write(layer, key, value, build_inputs([Span(0, start + tokens, table)], [], self.page_size, CPU))
            if self.float8:
                key, value = (to_float8(one).to(self.dtype) for one in (key, value))
            self.keys.append(key)
            self.values.append(value)
        spans = [Span(*extent, table) for extent, table in zip(self.extents, tables, strict=True)]
        self.inputs = build_inputs(spans, [], self.page_size, CPU)
        self.query = normal(self.inputs.num_tokens, self.num_heads, self.head_dim)
        self.sinks = normal(self.num_heads) * 2

    def expected(self, spec: AttentionSpec) -> Tensor:
        parts = [
            naive(self.query[span.first_row : span.first_row + span.num_tokens], key, value, spec)
            for span, key, value in zip(self.inputs.spans, self.keys, self.values, strict=True)
        ]
        return torch.cat(parts)

    def run(self, spec: AttentionSpec, backend: AttentionBackend | None = None) -> Tensor:
        backend = backend or choose_backend(self.backend, CPU, self.page_size)
        return backend(self.query, self.kv, self.layer, self.inputs, spec)


def spec_for(
    case: Case, *, window: int | None = None, softcap: float | None = None, sinks: bool = False
) -> AttentionSpec:
    return AttentionSpec(case.head_dim**-0.5, window, softcap, case.sinks if sinks else None)
