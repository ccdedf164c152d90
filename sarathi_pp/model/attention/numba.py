"""Attention on CPU with compiled kernels.

Rows that are alone in their span, decodes, are read along their whole context: a read of memory, for which gathering
pages and calling torch a dozen times costs three to four times what decode_kernel.py takes. In bfloat16, on a processor
that multiplies it and with pages of a fitting size, decodes go through decode_lanes.py and chunks through
chunk_kernel.py; elsewhere torch's products do the chunks (sdpa.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sarathi_pp.model.attention import decode_kernel, decode_lanes
from sarathi_pp.model.attention.chunk_kernel import BLOCK_KEYS, attend, rows_at_once, scratch_floats
from sarathi_pp.model.attention.sdpa import SdpaAttention
from sarathi_pp.model.crew import scratch_of_thread, share_out, shares
from sarathi_pp.model.inputs import SpanRows, StageInputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.lanes.compile import has_lanes
from sarathi_pp.model.lanes.registers import LANES

_KINDS = {
    torch.float32: decode_kernel.FLOAT32,
    torch.bfloat16: decode_kernel.BFLOAT16,
    torch.float16: decode_kernel.FLOAT16,
}


class NumbaAttention:
    """As many threads as torch computes with; they share a chunk's heads out, and decodes by the keys they read."""

    name = "numba"
    device_types = ("cpu",)
    page_multiple = 1
    default_page_size = 16

    def __init__(self) -> None:
        self._sdpa = SdpaAttention()
        self._has_lanes = has_lanes()
        self._split: tuple[StageInputs, StageInputs, _Rows | None] | None = None

    def __call__(
        self,
        query: Tensor,
        kv: KVShard,
        layer: int,
        inputs: StageInputs,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """See AttentionBackend. Scores, softmax and sums are float32; in lanes weights are rounded to bfloat16."""
        chunks, rows = self._halves(inputs)
        limits = _no_sinks(query.shape[1]) if sinks is None else sinks.detach().float().contiguous()
        in_lanes = query.dtype == torch.bfloat16 and self._fits_lanes(kv)
        rule = _Rule(kv, layer, scaling, sliding_window or 0, softcap or 0.0, limits, in_lanes)
        if query.stride(2) != 1 or query.stride(0) % 2 or query.stride(1) % 2:
            query = query.contiguous()
        if chunks.spans and not in_lanes:
            out = self._sdpa(
                query, kv, layer, chunks, scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=sinks
            ).contiguous()
        else:
            out = torch.empty(query.shape, dtype=query.dtype)
            for span in chunks.spans:
                rule.chunk(query, out, span)
        if rows is not None:
            rule.decodes(query, out, rows)
        return out

    def _halves(self, inputs: StageInputs) -> tuple[StageInputs, _Rows | None]:
        """The chunks and the single rows of a microbatch; every layer asks for the same one."""
        if self._split is None or self._split[0] is not inputs:
            single = [span for span in inputs.spans if span.num_tokens == 1]
            chunks = replace(inputs, spans=tuple(span for span in inputs.spans if span.num_tokens > 1))
            self._split = inputs, chunks, _Rows.of(single) if single else None
        return self._split[1:]

    def _fits_lanes(self, kv: KVShard) -> bool:
        fits = kv.page_size % LANES == 0 and BLOCK_KEYS % kv.page_size == 0 and kv.head_dim % LANES == 0
        return fits and self._has_lanes and kv.dtype == torch.bfloat16


@functools.cache
def _no_sinks(num_heads: int) -> Tensor:
    return torch.full((num_heads,), -torch.inf)


@dataclass(frozen=True, slots=True)
class _Rule:
    """One layer's attention. window 0: none; softcap 0: none; sinks: (H,) float32, -inf for none.

    in_lanes: by the kernels that are written with lanes. Queries are (T, H, D) of a microbatch, out is like them and
    contiguous.
    """

    kv: KVShard
    layer: int
    scaling: float
    window: int
    softcap: float
    sinks: Tensor
    in_lanes: bool

    def chunk(self, query: Tensor, out: Tensor, span: SpanRows) -> None:
        """One span's rows; threads share KV heads out, and rows where there are too few."""
        heads = shares(self.kv.num_kv_heads)
        parts = -(-torch.get_num_threads() // len(heads))
        ends = [span.num_tokens * part // parts for part in range(parts + 1)]
        share_out(
            [
                partial(self._attend, query, out, span, range(begin, end), piece)
                for begin, end in pairwise(ends)
                for piece in heads
                if begin < end
            ]
        )

    def decodes(self, query: Tensor, out: Tensor, rows: _Rows) -> None:
        """Rows that are alone in their span."""
        firsts = np.maximum(rows.ends - (self.window or rows.longest), 0)
        share_out([partial(self._decode, query, out, rows, firsts, piece) for piece in rows.pieces])

    def _attend(self, query: Tensor, out: Tensor, span: SpanRows, rows: range, heads: range) -> None:
        """rows: of the span. heads: of KV."""
        kv, group = self.kv, query.shape[1] // self.kv.num_kv_heads
        place = slice(span.first_row + rows.start, span.first_row + rows.stop)
        scratch = scratch_of_thread(scratch_floats(len(rows), group, kv.head_dim))
        attend(
            query[place].data_ptr(),
            query.stride(0) // 2,
            query.stride(1) // 2,
            kv.keys(self.layer).data_ptr(),
            kv.values(self.layer).data_ptr(),
            kv.num_kv_heads,
            group,
            kv.head_dim,
            kv.page_size,
            span.pages.data_ptr(),
            span.start + rows.start,
            len(rows),
            rows_at_once(group),
            heads.start,
            heads.stop,
            np.float32(self.scaling),
            np.float32(self.softcap),
            self.window,
            self.sinks.data_ptr(),
            scratch.data_ptr(),
            out[place].data_ptr(),
        )

    def _decode(self, query: Tensor, out: Tensor, rows: _Rows, firsts: NDArray[np.int64], piece: range) -> None:
        """piece: of `rows`."""
        kv, num_heads = self.kv, query.shape[1]
        group = num_heads // kv.num_kv_heads
        if self.in_lanes and kv.head_dim % 32 == 0:
            kernel, floats = decode_lanes.compile_kernel(kv.head_dim, group, kv.page_size), decode_lanes.scratch_floats
        else:
            kind = _KINDS[query.dtype]
            kernel = decode_kernel.compile_kernel(kind, kv.head_dim, group, kv.page_size)
            floats = decode_kernel.scratch_floats
        scratch = scratch_of_thread(floats(num_heads, kv.head_dim, rows.longest, kv.page_size))
        kernel(
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            kv.keys(self.layer).data_ptr(),
            kv.values(self.layer).data_ptr(),
            kv.num_kv_heads,
            rows.places.ctypes.data,
            rows.pages.ctypes.data,
            rows.tables.ctypes.data,
            firsts.ctypes.data,
            rows.ends.ctypes.data,
            np.float32(self.scaling),
            np.float32(self.softcap),
            self.sinks.data_ptr(),
            scratch.data_ptr(),
            rows.longest,
            out.data_ptr(),
            piece.start,
            piece.stop,
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """The single rows of a microbatch as the kernel reads them; all int64.

    places: their rows in the microbatch. ends: keys that each has behind it, its own included. pages: their
    page tables one after the other, that of row r from tables[r] on. pieces: rows of each thread.
    """

    places: NDArray[np.int64]
    ends: NDArray[np.int64]
    pages: NDArray[np.int64]
    tables: NDArray[np.int64]
    longest: int
    pieces: tuple[range, ...]

    @classmethod
    def of(cls, spans: list[SpanRows]) -> _Rows:
        ends = np.array([span.end for span in spans], np.int64)
        counts = np.array([span.pages.shape[0] for span in spans], np.int64)
        return cls(
            places=np.array([span.first_row for span in spans], np.int64),
            ends=ends,
            pages=torch.cat([span.pages for span in spans]).numpy(),
            tables=np.cumsum(counts) - counts,
            longest=int(ends.max()),
            pieces=by_keys(ends, torch.get_num_threads()),
        )


def by_keys(ends: NDArray[np.int64], num_threads: int) -> tuple[range, ...]:
    """Rows with so many keys behind each, cut into consecutive ranges with about as many keys each."""
    behind = np.cumsum(ends)
    shares_of = behind[-1] * np.arange(1, num_threads) / num_threads
    cuts = [0, *np.searchsorted(behind, shares_of).tolist(), len(ends)]
    return tuple(range(first, end) for first, end in pairwise(cuts) if first < end)
