"""One microbatch's attention: random sequences in random pages, of which unwritten places hold NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sarathi_pp.checkpoint.facts.layer_cache import plain_caches
from sarathi_pp.model.attention.spec import AttentionSpec
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard, page_dtype
from tests.gpu.comparison import BF16, DEVICE, F16, F32, NAMES, Pairs, compare, normal

# For each sequence of a microbatch: (number of its earlier tokens, number of its tokens in the microbatch).
Extents = list[tuple[int, int]]

LIMITS = {BF16: 8e-3, F16: 1.5e-3, F32: 1e-5}
DECODES: Extents = [(900 + 37 * row % 250, 1) for row in range(64)]
MIXED: Extents = [(1000, 448), *((300 + 53 * row % 400, 1) for row in range(64))]
SMALL: Extents = [(0, 5), (3, 1), (100, 17), (15, 1), (16, 1), (4000, 1), (63, 2)]
FEW: Extents = [(0, 5), (3, 1), (40, 3)]


@dataclass(frozen=True)
class Attended:
    """A microbatch of attention, and how it is computed.

    Attributes:
        what: name of the microbatch.
        heads: (query heads, KV heads, channels).
        extents: its sequences.
        page_size: tokens per page.
        window: sliding window in tokens; None for none.
        softcap: see AttentionSpec.
        sinks: each head has a sink.
        least_pages: pages of the pool. The pages in use are its last ones.
        float8: keys and values are in FP8.
    """

    what: str
    heads: tuple[int, int, int]
    extents: Extents
    dtype: torch.dtype = BF16
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    least_pages: int = 0
    float8: bool = False

    def __str__(self) -> str:
        heads, kv_heads, dim = self.heads
        return f"{self.what}, {heads}/{kv_heads} x {dim} {NAMES[self.dtype]}{' over FP8' if self.float8 else ''}"

    def compare(self) -> None:
        """Compare our kernel with its float64 reference."""
        compare(self._pairs, LIMITS[self.dtype])

    def _pairs(self) -> Pairs:
        from sarathi_pp_kernels.triton.attention_work import Extent
        from sarathi_pp_kernels.triton.paged_attention import reference_paged_attention

        from sarathi_pp.model.attention.triton import TritonAttention

        heads, kv_heads, dim = self.heads
        kv, spans = self._filled()
        inputs = build_inputs(spans, (), self.page_size, DEVICE)
        query = normal(inputs.num_tokens, heads, dim, dtype=self.dtype)
        sinks = normal(heads, dtype=self.dtype) if self.sinks else None
        spec = AttentionSpec(dim**-0.5, self.window, self.softcap, sinks)
        found = TritonAttention()(query, kv, 0, inputs, spec)
        parts = [Extent(span.first_row, span.num_tokens, span.start, span.first_page) for span in inputs.spans]
        how = {"scaling": spec.scaling, "window": self.window, "softcap": self.softcap, "sinks": sinks}
        pools = (kv.keys(0).to(self.dtype), kv.values(0).to(self.dtype))
        return {"rows": (found, reference_paged_attention(query, *pools, inputs.pages, parts, **how))}

    def _filled(self) -> tuple[KVShard, list[Span]]:
        """Return pages with the keys and values of all tokens, and the spans of the microbatch."""
        _, kv_heads, dim = self.heads
        used = sum(-(-(start + count) // self.page_size) for start, count in self.extents) + 7
        total = max(used, self.least_pages)
        caches, stored = plain_caches(1, kv_heads, dim), page_dtype("fp8" if self.float8 else "auto", self.dtype)
        kv = KVShard((0, 1), total, self.page_size, caches, self.dtype, DEVICE, pages=stored)
        for pool in (kv.keys(0), kv.values(0)):
            pool[total - used :] = float("nan")
        ids = (torch.randperm(used) + total - used).tolist()
        spans, whole = [], []
        for start, count in self.extents:
            pages = [ids.pop() for _ in range(-(-(start + count) // self.page_size))]
            spans.append(Span(start, count, pages))
            whole.append(Span(0, start + count, pages))
        written = build_inputs(whole, (), self.page_size, DEVICE)
        keys, values = self._numbers(written.num_tokens), self._numbers(written.num_tokens)
        kv.write(0, keys, values, written)
        return kv, spans

    def _numbers(self, num_tokens: int) -> Tensor:
        return normal(num_tokens, *self.heads[1:], dtype=self.dtype)
