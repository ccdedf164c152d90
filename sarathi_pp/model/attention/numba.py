"""Attention on CPU with compiled kernels.

A decode is one row (token) that reads its whole context. Its time is that of reading memory. Gathering the pages and
calling torch a dozen times takes three to four times as long as attention_decode.py. In bfloat16, faster kernels exist
for processors with AVX512-BF16 and pages of 16, 32, 64 .. 1024 tokens. Then decodes use attention_decode_simd.py, and
prompt chunks use attention_prefill.py, even for a single row. Otherwise torch's products compute the chunks (sdpa.py).

In float32, one kernel computes chunks and decodes: attention_float.py, or attention_decode.py if heads or pages do not
fit it. A row's output is then the same to the last bit, however its prompt was cut and whatever rows were computed
with it. This is the reason to choose float32.

The kernels read keys and values in the type of the computation. Pages in FP8 are copied to it first, those of a few
sequences at a time.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from sarathi_pp_kernels.cpu import attention_decode, attention_decode_simd, attention_float
from sarathi_pp_kernels.cpu.attention_prefill import BLOCK_KEYS, TILE_ROWS, attend, rows_at_once, scratch_floats
from sarathi_pp_kernels.cpu.page_copies import copy_pages
from sarathi_pp_kernels.cpu.simd.registers import LANES
from sarathi_pp_kernels.cpu.simd.target import has_avx512_bf16
from sarathi_pp_kernels.cpu.threads import run_parallel, scratch_of_thread, split_range
from torch import Tensor

from sarathi_pp.model.attention.sdpa import SdpaAttention
from sarathi_pp.model.attention.spec import AttentionSpec
from sarathi_pp.model.inputs import SpanRows, StageInputs
from sarathi_pp.model.kv import KVShard

_KINDS = {
    torch.float32: attention_decode.FLOAT32,
    torch.bfloat16: attention_decode.BFLOAT16,
    torch.float16: attention_decode.FLOAT16,
}

# In float32, the rows of a chunk are computed in tiles. A key is read once for all rows of a tile. These are, for
# attention_decode.py, the most rows of a tile, and its most scores (rows times keys), which are in memory at the same
# time.
_TILE_ROWS = 16
_TILE_KEYS = 2**18
# About the most bytes of copies of pages in FP8. With more, the C library takes new memory from the system each time.
_COPIED_BYTES = 2**24


class NumbaAttention:
    """Attention with compiled kernels, on as many threads as torch computes with.

    The threads divide a chunk by its KV heads. They divide decodes so that each thread reads about as many keys.
    """

    name = "numba"
    page_multiple = 1
    default_page_size = 16

    def __init__(self) -> None:
        self._sdpa = SdpaAttention()
        self._has_avx512_bf16 = has_avx512_bf16()
        self._split: tuple[StageInputs, StageInputs, _Tiles | None] | None = None
        self._copied: tuple[StageInputs, dict[int | None, tuple[_Copied, ...]]] | None = None
        self._copies: KVShard | None = None

    def __call__(self, query: Tensor, kv: KVShard, layer: int, inputs: StageInputs, spec: AttentionSpec) -> Tensor:
        """See AttentionBackend. Scores, softmax and sums are float32. SIMD kernels round the softmax to bfloat16."""
        if not kv.float8:
            return self._attend(query, kv, layer, inputs, spec)
        out = query.new_empty(*query.shape[:2], kv.value_dim)
        for part in self._parts(inputs, kv, spec.sliding_window):
            num_pages = len(part.pages)
            copies = self._room(kv, num_pages)
            copy_pages(kv.keys(layer), part.pages, copies.keys(0)[:num_pages])
            if not kv.latent:  # the values of latents are a part of the keys
                copy_pages(kv.values(layer), part.pages, copies.values(0)[:num_pages])
            out[part.rows] = self._attend(query[part.rows], copies, 0, part.inputs, spec)
        return out

    def _parts(self, inputs: StageInputs, kv: KVShard, window: int | None) -> tuple[_Copied, ...]:
        """Return the parts of a microbatch. They are kept, because all layers with the same window need them."""
        if self._copied is None or self._copied[0] is not inputs:
            self._copied = inputs, {}
        parts = self._copied[1]
        if window not in parts:
            parts[window] = _Copied.of(inputs, kv, window)
        return parts[window]

    def _room(self, kv: KVShard, num_pages: int) -> KVShard:
        """Return a shard of one layer for copies of pages. It is kept: the system takes long to give new memory."""
        copies = self._copies
        if copies is None or copies.num_pages < num_pages or copies.page_size != kv.page_size:
            self._copies = None  # its memory is free before the larger one is made
            self._copies = copies = kv.room_for_copies(num_pages)
        return copies

    def _attend(self, query: Tensor, kv: KVShard, layer: int, inputs: StageInputs, spec: AttentionSpec) -> Tensor:
        """Return the attention output of a layer. The pages are in the type of the computation."""
        simd = query.dtype == torch.bfloat16 and self.fits_simd(kv)
        chunks, tiles = self._halves(inputs, query.shape[1], kv, simd)
        sinks = _no_sinks(query.shape[1]) if spec.sinks is None else spec.sinks.detach().float().contiguous()
        attention = _LayerAttention(kv, layer, spec, sinks, simd)
        if query.stride(2) != 1 or query.stride(0) % 2 or query.stride(1) % 2:
            query = query.contiguous()
        if chunks.spans and not simd:
            out = self._sdpa(query, kv, layer, chunks, spec).contiguous()
        else:
            out = query.new_empty(*query.shape[:2], kv.value_dim)
            for span in chunks.spans:
                attention.chunk(query, out, span)
        if tiles is not None:
            attention.tiles(query, out, tiles)
        return out

    def _halves(
        self, inputs: StageInputs, num_heads: int, kv: KVShard, simd: bool
    ) -> tuple[StageInputs, _Tiles | None]:
        """Return the spans of a microbatch that are computed as chunks, and all others as tiles (None: no others).

        In float32, no span is a chunk. The result is kept, because all layers of a microbatch need the same one.

        Args:
            simd: the kernels for bfloat16 are used. Then a prompt's span of one row is a chunk too. So is a decode with
                latent attention, whose many heads share their keys.
        """
        if self._split is None or self._split[0] is not inputs:
            in_tiles: list[SpanRows] = []
            in_chunks: list[SpanRows] = []
            for span in inputs.spans:
                alone = span.num_tokens == 1 and not (simd and (span.prompt or kv.latent))
                (in_tiles if kv.dtype == torch.float32 or alone else in_chunks).append(span)
            chunks = inputs._replace(spans=tuple(in_chunks))
            tiles = _Tiles.of(in_tiles, num_heads, kv) if in_tiles else None
            self._split = inputs, chunks, tiles
        return self._split[1:]

    def fits_simd(self, kv: KVShard) -> bool:
        """Return whether the SIMD kernels run on this processor and can read the pages of this KV shard."""
        fits = kv.page_size % LANES == 0 and BLOCK_KEYS % kv.page_size == 0
        fits = fits and kv.head_dim % LANES == kv.value_dim % LANES == 0
        return fits and self._has_avx512_bf16 and kv.dtype == torch.bfloat16


@dataclass(frozen=True, slots=True)
class _Copied:
    """Some sequences of a microbatch, whose pages are copied at a time.

    Attributes:
        rows: their rows of the microbatch.
        pages: ids of the pages to copy. Those that lie before the window of all of a sequence's rows are left out.
        inputs: their inputs, with rows and page ids counted from 0. Pages that are left out have the id 0.
    """

    rows: slice
    pages: Tensor
    inputs: StageInputs

    @classmethod
    def of(cls, inputs: StageInputs, kv: KVShard, window: int | None) -> tuple[_Copied, ...]:
        """Divide a microbatch. A part has one sequence, or more of them if they have few pages.

        Args:
            window: number of keys that a row sees; None for all.
        """
        page_bytes = kv.num_kv_heads * kv.page_size * (kv.head_dim + kv.value_dim) * kv.dtype.itemsize
        most_pages = _COPIED_BYTES // page_bytes
        parts: list[list[SpanRows]] = []
        num_pages = 0
        for span in inputs.spans:
            num_copied = span.num_pages - _num_unseen(span, kv.page_size, window)
            num_pages += num_copied
            if not parts or num_pages > most_pages:
                parts.append([])
                num_pages = num_copied
            parts[-1].append(span)
        return tuple(cls._of_spans(part, inputs, kv.page_size, window) for part in parts)

    @classmethod
    def _of_spans(cls, spans: list[SpanRows], inputs: StageInputs, page_size: int, window: int | None) -> _Copied:
        first, last = spans[0], spans[-1]
        rows = slice(first.first_row, last.first_row + last.num_tokens)
        pages: list[Tensor] = []
        places: list[int] = []
        num_copied = 0
        for span in spans:
            unseen = _num_unseen(span, page_size, window)
            pages.append(span.pages[unseen:])
            end = num_copied + span.num_pages - unseen
            places += [0] * unseen + list(range(num_copied, end))
            num_copied = end
        table = torch.tensor(places)
        moved = [
            span._replace(
                first_row=span.first_row - first.first_row, first_page=span.first_page - first.first_page, of_all=table
            )
            for span in spans
        ]
        return cls(rows, torch.cat(pages), inputs._replace(spans=tuple(moved), pages=table))


def _num_unseen(span: SpanRows, page_size: int, window: int | None) -> int:
    """Return the number of a span's first pages that none of its rows sees."""
    return 0 if window is None else max(0, span.start - window + 1) // page_size


@functools.cache
def _no_sinks(num_heads: int) -> Tensor:
    return torch.full((num_heads,), -torch.inf)


@dataclass(frozen=True, slots=True)
class _LayerAttention:
    """One layer's attention for one microbatch. Queries are (T, H, D). The output is (T, H, value_dim), contiguous.

    Args:
        layer: index of the layer in the whole model, from 0.
        spec: the settings of the layer's attention.
        sinks: (H,) float32, the sink of each head; -inf for none.
        simd: use the SIMD kernels.
    """

    kv: KVShard
    layer: int
    spec: AttentionSpec
    sinks: Tensor
    simd: bool

    def chunk(self, query: Tensor, out: Tensor, span: SpanRows) -> None:
        """Compute one span's rows, split over threads by KV heads, and by rows if there are too few heads."""
        if span.num_tokens == 1 and self.kv.latent:
            pieces = split_range(query.shape[1], TILE_ROWS)
            run_parallel([partial(self._attend_heads, query, out, span, piece) for piece in pieces])
            return
        heads = split_range(self.kv.num_kv_heads)
        parts = -(-torch.get_num_threads() // len(heads))
        ends = [span.num_tokens * part // parts for part in range(parts + 1)]
        run_parallel(
            [
                partial(self._attend, query, out, span, range(begin, end), piece)
                for begin, end in pairwise(ends)
                for piece in heads
                if begin < end
            ]
        )

    def tiles(self, query: Tensor, out: Tensor, tiles: _Tiles) -> None:
        """Compute all tiles. Each thread takes one range of `tiles.pieces`, and all read about as many keys."""
        run_parallel([partial(self._read, query, out, tiles, piece) for piece in tiles.pieces])

    def _attend(self, query: Tensor, out: Tensor, span: SpanRows, rows: range, heads: range) -> None:
        """Compute some rows of a span for some heads.

        Args:
            rows: indices of rows, counted from the span's first row.
            heads: indices of KV heads.
        """
        place, group = span.first_row + rows.start, query.shape[1] // self.kv.num_kv_heads
        steps = query.stride(0), query.stride(1)
        self._compute(query[place], steps, out[place], span, group, (span.start + rows.start, 1, len(rows)), heads)

    def _attend_heads(self, query: Tensor, out: Tensor, span: SpanRows, heads: range) -> None:
        """Compute some heads of a span's one row with latent attention. All heads share the keys, as rows do.

        Args:
            heads: indices of query heads.
        """
        row, steps = span.first_row, (query.stride(1), query.stride(1))
        asked, to = query[row, heads.start], out[row, heads.start]
        self._compute(asked, steps, to, span, 1, (span.start, 0, len(heads)), range(1))

    def _compute(
        self,
        query: Tensor,
        steps: tuple[int, int],
        out: Tensor,
        span: SpanRows,
        group: int,
        rows: tuple[int, int, int],
        heads: range,
    ) -> None:
        """Call the kernel for chunks.

        Args:
            query: begins with the first row's query.
            steps: number of elements from a row of the query to the next, and from a head to the next.
            out: begins with the first row's output.
            group: number of query heads that share a KV head.
            rows: position of the first row, number of positions from a row to the next, number of rows.
            heads: indices of KV heads.
        """
        kv, (start, row_step, num_rows) = self.kv, rows
        attend(
            query.data_ptr(),
            steps[0] // 2,
            steps[1] // 2,
            kv.keys(self.layer).data_ptr(),
            kv.values(self.layer).data_ptr(),
            kv.num_kv_heads,
            group,
            kv.head_dim,
            kv.value_dim,
            kv.page_size,
            span.pages.data_ptr(),
            start,
            row_step,
            num_rows,
            rows_at_once(group),
            heads.start,
            heads.stop,
            np.float32(self.spec.scaling),
            np.float32(self.spec.softcap or 0),
            self.spec.sliding_window or 0,
            self.sinks.data_ptr(),
            scratch_of_thread(scratch_floats(num_rows, group, kv.head_dim, kv.value_dim)).data_ptr(),
            out.data_ptr(),
        )

    def _read(self, query: Tensor, out: Tensor, tiles: _Tiles, piece: range) -> None:
        """Compute the tiles of one thread.

        Args:
            piece: indices of the tiles, one of `tiles.pieces`.
        """
        kv, num_heads = self.kv, query.shape[1]
        group, dims = num_heads // kv.num_kv_heads, (kv.head_dim, kv.value_dim)
        places = [tiles.places.ctypes.data]
        if self.simd and kv.head_dim % 32 == 0:
            kernel = attention_decode_simd.compile_kernel(kv.head_dim, group, kv.page_size)
            floats = attention_decode_simd.scratch_floats(num_heads, kv.head_dim, int(tiles.ends.max()), kv.page_size)
        elif _fits_float(kv):
            kernel = attention_float.attend
            floats = attention_float.scratch_floats(int(tiles.counts.max()), num_heads, kv.num_kv_heads, *dims)
            places = [group, *dims, kv.page_size, *places, tiles.counts.ctypes.data]
        else:
            kernel = attention_decode.compile_kernel(_KINDS[query.dtype], *dims, group, kv.page_size)
            shapes = zip(tiles.counts.tolist(), tiles.ends.tolist(), strict=True)
            floats = max(attention_decode.scratch_floats(*shape, num_heads, *dims) for shape in shapes)
            places.append(tiles.counts.ctypes.data)
        kernel(
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            kv.keys(self.layer).data_ptr(),
            kv.values(self.layer).data_ptr(),
            kv.num_kv_heads,
            *places,
            tiles.pages.ctypes.data,
            tiles.tables.ctypes.data,
            tiles.ends.ctypes.data,
            self.spec.sliding_window or 0,
            np.float32(self.spec.scaling),
            np.float32(self.spec.softcap or 0),
            self.sinks.data_ptr(),
            scratch_of_thread(floats).data_ptr(),
            out.data_ptr(),
            piece.start,
            piece.stop,
        )


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The tiles of a microbatch, as the kernels read them. A tile is one or more consecutive rows of one sequence.

    Attributes:
        places: index in the microbatch of each tile's first row.
        counts: number of rows per tile.
        ends: position of each tile's first row in its sequence, plus 1: the number of keys up to its own.
        pages: page ids of all sequences, one sequence after the other.
        tables: index in `pages` of the first page id of each tile's sequence.
        pieces: the division of the tiles among threads: for each thread, the range of indices of its tiles.
    """

    places: NDArray[np.int64]
    counts: NDArray[np.int64]
    ends: NDArray[np.int64]
    pages: NDArray[np.int64]
    tables: NDArray[np.int64]
    pieces: tuple[range, ...]

    @classmethod
    def of(cls, spans: list[SpanRows], num_heads: int, kv: KVShard) -> _Tiles:
        tiles: list[tuple[int, int, int, int]] = []
        table, num_threads = 0, torch.get_num_threads()
        for span in spans:
            height = tile_height(span.num_tokens, span.end, num_heads, kv, num_threads)
            tiles += [
                (span.first_row + row, min(height, span.num_tokens - row), span.start + row + 1, table)
                for row in range(0, span.num_tokens, height)
            ]
            table += span.num_pages
        places, counts, ends, tables = np.array(tiles, np.int64).T.copy()
        pages = torch.cat([span.pages for span in spans]).numpy()
        bounds = key_bounds((ends * counts).tolist(), num_threads)
        pieces = tuple(range(first, end) for first, end in pairwise(bounds) if first < end)
        return cls(places, counts, ends, pages, tables, pieces)


def _fits_float(kv: KVShard) -> bool:
    """Return whether attention_float.py can read the pages of this KV shard."""
    return kv.dtype == torch.float32 and attention_float.fits(kv.head_dim, kv.value_dim, kv.page_size)


def tile_height(num_tokens: int, end: int, num_heads: int, kv: KVShard, num_threads: int) -> int:
    """Return the most rows of a tile in a span of num_tokens rows, the last of which sees the keys before `end`.

    Args:
        num_threads: number of threads that divide the tiles.
    """
    if _fits_float(kv):
        return attention_float.tile_rows(num_tokens, num_heads // kv.num_kv_heads, num_threads)
    return max(min(_TILE_ROWS, _TILE_KEYS // end), 1)


def key_bounds(keys: Sequence[int], num_threads: int) -> list[int]:
    """Divide tiles among threads, so that each reads about the same number of keys.

    Args:
        keys: number of keys that each tile reads, summed over its rows.

    Returns:
        The index of each thread's first tile, and the number of all tiles.
    """
    totals = list(accumulate(keys))
    whole = totals[-1] if totals else 0
    return [0, *(bisect_left(totals, whole * thread / num_threads) for thread in range(1, num_threads)), len(keys)]
