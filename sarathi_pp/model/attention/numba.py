"""Attention on CPU with compiled kernels.

Rows that are alone in their span, decodes, are read along their whole context: a read of memory, for which gathering
pages and calling torch a dozen times costs three to four times what decode_kernel.py takes. Chunks go through
chunk_kernel.py where that runs: in bfloat16, on a processor that multiplies it, with pages of a size that it lays out.
Elsewhere torch's products do (sdpa.py).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sarathi_pp.model.attention.chunk_kernel import BLOCK_KEYS, attend, rows_at_once, scratch_floats
from sarathi_pp.model.attention.decode_kernel import compile_kernel
from sarathi_pp.model.attention.sdpa import SdpaAttention
from sarathi_pp.model.crew import scratch_of_thread, share_out, shares
from sarathi_pp.model.inputs import SpanRows, StageInputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.lanes import LANES, has_lanes

# How the kernel takes each dtype: numba itself knows no 16-bit floats.
_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.float32: torch.float32}


class NumbaAttention:
    """Owns scratch and threads for one microbatch at a time; as many threads as torch computes with."""

    name = "numba"
    device_types = ("cpu",)
    page_multiple = 1
    default_page_size = 16

    def __init__(self) -> None:
        self._sdpa = SdpaAttention()
        self._has_lanes = has_lanes()
        self._split: tuple[StageInputs, StageInputs, _Rows | None] | None = None
        self._scratch: list[NDArray[np.float32]] = []
        self._threads: ThreadPoolExecutor | None = None

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
        """See AttentionBackend. Scores, softmax and sums are float32 for every dtype."""
        chunks, rows = self._halves(inputs)
        limits = np.full(query.shape[1], -np.inf, np.float32) if sinks is None else sinks.detach().float().numpy()
        if chunks.spans and query.dtype == torch.bfloat16 and self._compiles(kv):
            out = torch.empty(query.shape, dtype=query.dtype)
            for span in chunks.spans:
                self._chunk(query, out, span, _Rule(kv, layer, scaling, sliding_window or 0, softcap or 0.0, limits))
        else:
            out = self._sdpa(
                query, kv, layer, chunks, scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=sinks
            )
        if rows is not None:
            firsts = np.maximum(rows.ends - (sliding_window or rows.longest), 0)
            call = _Call(kv, layer, rows, firsts, scaling, softcap or 0.0, limits)
            out[rows.places] = self._decode(query[rows.places].float(), call).to(out.dtype)
        return out

    def _halves(self, inputs: StageInputs) -> tuple[StageInputs, _Rows | None]:
        """The chunks and the single rows of a microbatch; every layer asks for the same one."""
        if self._split is None or self._split[0] is not inputs:
            single = [span for span in inputs.spans if span.num_tokens == 1]
            chunks = replace(inputs, spans=tuple(span for span in inputs.spans if span.num_tokens > 1))
            self._split = inputs, chunks, _Rows.of(single) if single else None
        return self._split[1:]

    def _compiles(self, kv: KVShard) -> bool:
        fits = kv.page_size % LANES == 0 and BLOCK_KEYS % kv.page_size == 0 and kv.head_dim % LANES == 0
        return fits and self._has_lanes and kv.dtype == torch.bfloat16

    def _chunk(self, query: Tensor, out: Tensor, span: SpanRows, rule: _Rule) -> None:
        """One span's rows of the (T, H, D) queries; threads share KV heads out, and rows where there are too few."""
        heads = shares(rule.kv.num_kv_heads)
        parts = -(-torch.get_num_threads() // len(heads))
        ends = [span.num_tokens * part // parts for part in range(parts + 1)]
        share_out(
            [
                partial(rule.attend, query, out, span, range(begin, end), piece)
                for begin, end in pairwise(ends)
                for piece in heads
                if begin < end
            ]
        )

    def _decode(self, query: Tensor, call: _Call) -> Tensor:
        """(R, H, D) float32 queries to outputs, rows shared out over threads by the keys they read."""
        out = torch.empty(query.shape, dtype=torch.float32)
        pieces = call.rows.pieces(torch.get_num_threads())
        if len(pieces) == 1:
            call.run(query, out, pieces[0], self._scores(0, query.shape[1], call))
            return out
        if self._threads is None:
            self._threads = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="decode attention")
        tasks = [
            self._threads.submit(call.run, query, out, piece, self._scores(index, query.shape[1], call))
            for index, piece in enumerate(pieces)
        ]
        for task in tasks:
            task.result()
        return out

    def _scores(self, piece: int, num_heads: int, call: _Call) -> NDArray[np.float32]:
        """Scratch of one thread, (num_heads, keys); fresh memory at every call would be page faults."""
        if piece == len(self._scratch):
            self._scratch.append(np.empty((0, 0), np.float32))
        width = call.rows.longest + call.kv.page_size
        if self._scratch[piece].shape[0] != num_heads or self._scratch[piece].shape[1] < width:
            self._scratch[piece] = np.empty((num_heads, 2 * width), np.float32)
        return self._scratch[piece]


@dataclass(frozen=True, slots=True)
class _Rule:
    """One layer's attention of chunks. window 0: none; softcap 0: none; sinks: (H,), -inf for none."""

    kv: KVShard
    layer: int
    scaling: float
    window: int
    softcap: float
    sinks: NDArray[np.float32]

    def attend(self, query: Tensor, out: Tensor, span: SpanRows, rows: range, heads: range) -> None:
        """(T, H, D) bfloat16 queries of a microbatch; out is contiguous. rows: of the span. heads: of KV."""
        kv, group = self.kv, query.shape[1] // self.kv.num_kv_heads
        place = slice(span.first_row + rows.start, span.first_row + rows.stop)
        query, out = query[place], out[place]
        if query.stride(2) != 1 or query.stride(0) % 2 or query.stride(1) % 2:
            query = query.contiguous()
        scratch = scratch_of_thread(scratch_floats(len(rows), group, kv.head_dim))
        attend(
            query.data_ptr(),
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
            self.sinks.ctypes.data,
            scratch.data_ptr(),
            out.data_ptr(),
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """The single rows of a microbatch as the kernel reads them; all int64.

    places: their rows in the microbatch. ends: keys that each has behind it, its own included. pages: their
    page tables one after the other, that of row r from tables[r] on.
    """

    places: Tensor
    ends: NDArray[np.int64]
    pages: NDArray[np.int64]
    tables: NDArray[np.int64]
    longest: int

    @classmethod
    def of(cls, spans: list[SpanRows]) -> _Rows:
        ends = np.array([span.end for span in spans], np.int64)
        counts = np.array([span.pages.shape[0] for span in spans], np.int64)
        return cls(
            places=torch.tensor([span.first_row for span in spans]),
            ends=ends,
            pages=torch.cat([span.pages for span in spans]).numpy(),
            tables=np.cumsum(counts) - counts,
            longest=int(ends.max()),
        )

    def pieces(self, num_threads: int) -> list[range]:
        """Consecutive rows for each thread, with about as many keys each."""
        behind = np.cumsum(self.ends)
        shares = behind[-1] * np.arange(1, num_threads) / num_threads
        cuts = [0, *np.searchsorted(behind, shares).tolist(), len(self.ends)]
        return [range(first, end) for first, end in zip(cuts, cuts[1:], strict=False) if first < end]


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's attention of single rows. sinks: (H,), -inf for none; softcap 0 for none."""

    kv: KVShard
    layer: int
    rows: _Rows
    firsts: NDArray[np.int64]
    scaling: float
    softcap: float
    sinks: NDArray[np.float32]

    def run(self, query: Tensor, out: Tensor, piece: range, scores: NDArray[np.float32]) -> None:
        kv = self.kv
        bits = _BITS[kv.keys(self.layer).dtype]
        kernel = compile_kernel(kv.head_dim, query.shape[1] // kv.num_kv_heads, kv.page_size)
        kernel(
            query.numpy().ravel(),
            kv.keys(self.layer).view(bits).numpy().ravel(),
            kv.values(self.layer).view(bits).numpy().ravel(),
            kv.num_kv_heads,
            self.rows.pages,
            self.rows.tables,
            self.firsts,
            self.rows.ends,
            np.float32(self.scaling),
            np.float32(self.softcap),
            self.sinks,
            scores.ravel(),
            scores.shape[1],
            out.numpy().ravel(),
            piece.start,
            piece.stop,
        )
