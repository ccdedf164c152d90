"""Paged attention in plain torch operations: the CPU backend, and the oracle for every other backend.

The rows (tokens) of a sequence are computed in tiles of up to 128. The keys that a tile sees are read in blocks of
whole pages. So the sizes of tile and block limit the memory, whatever the length of the context. Row i sees the keys
j <= i, and with a sliding window only the last ones:

            keys of one sequence
            |  block 0  |  block 1  |     #  computed and seen
    tile 0  . . # # # # # x x             x  computed and masked, at the edges only
            . . x # # # # # x             .  after every row or outside every row's window: not read
            . . x x # # # # #
    tile 1  . . . . . # # # # # x x

A tile keeps its output so far and the log-sum-exp of its scores. No more is needed to merge another block. An attention
sink (a logit without a value) counts as a first block whose values are 0. So it is the state that a tile starts with.

These points decide the time on CPU in bf16 (measured, one thread with AVX512-BF16):

- Products take float32 copies of a block. A bf16 `bmm` rounds its scores to 8 bits, which is 2 to 6 times
  the error of transformers' own bf16 attention. Chunks permit oneDNN its fastest float32 products
  (`fp32_precision`). These may round factors to bf16 but sum and return float32. Queries and keys are bf16
  values already, so scores stay exact. That is twice as fast as the default library on AMD.
- oneDNN builds a kernel for each new shape, in 1 to 2 ms. So the shapes of a chunk's products are
  multiples of ROW_STEP and KEY_STEP, padded with zeros. A single row has a new length at every step of a
  decode. So it uses the default library, which builds nothing. It waits for memory anyway.
- New buffers of this size cause page faults, up to half of the time. So the backend keeps its own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from sarathi_pp.model.attention.spec import AttentionSpec
from sarathi_pp.model.inputs import StageInputs
from sarathi_pp.model.kv import KVShard, as_indexable

TILE_ROWS = 128
BLOCK_KEYS = 1024
ROW_STEP = 32
KEY_STEP = 64
HIDDEN = -1e30  # finite: a block that a row does not see gets weight 0 in the merge, not NaN


class SdpaAttention:
    """Attention in torch operations.

    It owns scratch for one tile and one block, so it serves one microbatch at a time.
    """

    name = "sdpa"
    page_multiple = 1
    default_page_size = 16

    def __init__(self) -> None:
        self._scratch: dict[str, Tensor] = {}

    def __call__(self, query: Tensor, kv: KVShard, layer: int, inputs: StageInputs, spec: AttentionSpec) -> Tensor:
        """See AttentionBackend. Scores, softmax and sums are float32 for every dtype."""
        out = query.new_empty(*query.shape[:2], kv.value_dim)
        keys, values = kv.keys(layer), kv.values(layer)
        for span in inputs.spans:
            for row in range(0, span.num_tokens, TILE_ROWS):
                first_row = span.first_row + row
                num_rows = min(span.num_tokens - row, TILE_ROWS)
                tile = _Tile(query[first_row : first_row + num_rows], kv.num_kv_heads, kv.value_dim, spec.sinks)
                with _fast_products(num_rows > 1 and query.dtype == torch.bfloat16):
                    self._attend(tile, span.start + row, span.pages, keys, values, spec)
                out[first_row : first_row + num_rows] = tile.rows()
        return out

    def _attend(
        self, tile: _Tile, start: int, pages: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec
    ) -> None:
        """Compute a tile's attention over all keys that it sees. `start` is the position of its first row."""
        page_size = keys.shape[2]
        end = start + tile.num_rows
        last_page = -(-end // page_size)
        step = 1 if tile.num_rows == 1 else KEY_STEP
        pages_per_block = max(BLOCK_KEYS // page_size, 1)
        blocks = range(_first_key(spec, start) // page_size, last_page, pages_per_block)
        for page in blocks:
            block = pages[page : min(page + pages_per_block, last_page)]
            first = page * page_size
            count = min(end - first, block.shape[0] * page_size)
            key = self._load(keys, block, count, step)
            scores = self._buffer("scores", (*tile.query.shape[:2], key.shape[1]), torch.float32, key.device)
            torch.baddbmm(scores, tile.query, key.mT, beta=0, alpha=spec.scaling, out=scores)
            _hide(scores.view(*tile.folded, -1), spec, start, tile.num_rows, first, count)
            value = self._load(values, block, count, step)
            tile.merge(scores, value, alone=len(blocks) == 1)

    def _load(self, pool: Tensor, pages: Tensor, count: int, step: int) -> Tensor:
        """Return the keys or values of the first `count` tokens of some pages, (num_kv_heads, K, D) float32.

        K is `count`, rounded up to a multiple of `step`. The added ones are zeros.

        Pages are copied whole and in order, the fastest way to read memory. The conversion to float32 also moves heads
        to the front. Tokens after `count` may never have been written, so they may be NaN. A masked weight of 0 times
        NaN is NaN, so they are cut off or zeroed. The result is valid until the next load.

        Args:
            pool: all key pages or all value pages of the layer.
            pages: ids of the pages to read.
        """
        _, heads, page_size, head_dim = pool.shape
        num_pages = pages.shape[0]
        gathered = self._buffer("pages", (num_pages, heads, page_size, head_dim), pool.dtype, pool.device)
        torch.index_select(as_indexable(pool), 0, pages, out=as_indexable(gathered))
        gathered_tokens = num_pages * page_size
        width = _round_up(count, step)
        block = self._buffer("block", (heads, max(gathered_tokens, width), head_dim), torch.float32, pool.device)
        block[:, :gathered_tokens].view(heads, num_pages, page_size, head_dim).copy_(gathered.transpose(0, 1))
        if width > count:
            block[:, count:width] = 0
        return block[:, :width]

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = math.prod(shape)
        buffer = self._scratch.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype or buffer.device != device:
            buffer = self._scratch[name] = torch.empty(size, dtype=dtype, device=device)
        return buffer[:size].view(shape)


def _first_key(spec: AttentionSpec, position: int) -> int:
    """Return the position of the first key that the row at a position sees."""
    return 0 if spec.sliding_window is None else max(position - spec.sliding_window + 1, 0)


def _hide(scores: Tensor, spec: AttentionSpec, start: int, num_rows: int, first: int, num_keys: int) -> None:
    """Apply the soft cap to the scores of a block, then hide the keys that a row must not see: give them no weight.

    Only the columns that some row must not see are changed.

    Args:
        scores: (num_kv_heads, group, R, K), changed in place. Rows from num_rows on and keys from num_keys on are
            padding.
        start: position of the first row.
        first: position of the first key.
    """
    if spec.softcap is not None:
        scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    rows, width = scores.shape[2:]
    offset = start - first
    seen_by_all = max(offset + 1, 0)
    left_by_some = min(_first_key(spec, start + num_rows - 1) - first, num_keys)
    if seen_by_all < num_keys:
        distance = _distances(rows, range(seen_by_all, num_keys), offset, scores.device)
        scores[..., seen_by_all:num_keys] += (distance < 0) * HIDDEN
    if spec.sliding_window is not None and left_by_some > 0:
        distance = _distances(rows, range(left_by_some), offset, scores.device)
        scores[..., :left_by_some] += (distance >= spec.sliding_window) * HIDDEN
    if num_keys < width:
        scores[..., num_keys:] = HIDDEN


def _distances(rows: int, columns: range, offset: int, device: torch.device) -> Tensor:
    """Return (rows, len(columns)) float32: how many positions each column's key is before each row's token.

    Args:
        offset: position of row 0 minus position of column 0.
    """
    row = torch.arange(offset, offset + rows, dtype=torch.float32, device=device)
    return row[:, None] - torch.arange(columns.start, columns.stop, dtype=torch.float32, device=device)


class _Tile:
    """Consecutive rows of one sequence while their attention is summed up.

    The query heads that share a KV head are folded into the rows of `query`. So each key is read once for all of them
    and never repeated.

    Attributes:
        query: (num_kv_heads, group * R, D) float32. R is num_rows, padded with rows of zeros.
    """

    def __init__(self, query: Tensor, num_kv_heads: int, value_dim: int, sinks: Tensor | None) -> None:
        self.num_rows, num_heads, head_dim = query.shape
        self._value_dim = value_dim
        group = num_heads // num_kv_heads
        heads = query.view(self.num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).float()
        if self.num_rows > 1 and self.num_rows % ROW_STEP:
            heads = functional.pad(heads, (0, 0, 0, -self.num_rows % ROW_STEP))
        self.folded = heads.shape[:3]
        self.query = heads.reshape(num_kv_heads, -1, head_dim)
        self._output: Tensor | None = None
        self._log_sum: Tensor | None = None
        if sinks is not None:
            self._output = self.query.new_zeros(*self.query.shape[:2], value_dim)
            state = sinks.float().view(num_kv_heads, group, 1, 1).expand(*self.folded, 1)
            self._log_sum = state.reshape(num_kv_heads, -1, 1)

    def merge(self, scores: Tensor, value: Tensor, *, alone: bool) -> None:
        """Merge one block into the tile.

        Args:
            scores: (num_kv_heads, group * R, K), overwritten.
            value: values of the block.
            alone: the tile has no other block. Then, without sinks, the log-sum-exp is not needed.
        """
        if alone and self._log_sum is None:
            self._output = torch.bmm(torch.softmax(scores, -1, out=scores), value)
            return
        top = scores.amax(-1, keepdim=True)
        weights = torch.softmax(scores, -1, out=scores)
        log_sum = top - weights.amax(-1, keepdim=True).log_()  # the largest weight is exp(0) / sum
        part = torch.bmm(weights, value)
        if self._output is None or self._log_sum is None:
            self._output, self._log_sum = part, log_sum
            return
        total = torch.logaddexp(self._log_sum, log_sum)
        self._output.mul_((self._log_sum - total).exp_()).add_(part.mul_((log_sum - total).exp_()))
        self._log_sum = total

    def rows(self) -> Tensor:
        """Return the attention output, (num_rows, H, value_dim) float32."""
        assert self._output is not None, "no key was merged: every row sees at least its own"
        heads = self._output.view(*self.folded, self._value_dim)[:, :, : self.num_rows]
        return heads.permute(2, 0, 1, 3).reshape(self.num_rows, -1, self._value_dim)


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step


class _FastProducts:
    """A context in which oneDNN may round the factors of float32 products to bf16.

    torch's setting for this belongs to the process, and several threads may be inside at once. The first thread that
    enters changes the setting, and the last one that leaves restores it. If each thread saved and restored it
    separately, one could save the changed setting of another thread and leave it changed for good.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = ""

    @contextmanager
    def __call__(self, allowed: bool) -> Iterator[None]:
        if not allowed:
            yield
            return
        matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        with self._lock:
            if self._inside == 0:
                self._before = matmul.fp32_precision
                matmul.fp32_precision = "bf16"
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    matmul.fp32_precision = self._before


_fast_products = _FastProducts()
