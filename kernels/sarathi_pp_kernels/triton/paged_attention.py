"""Attention of a whole microbatch, prompt chunks and decodes together, over paged keys and values: one launch.

A program is a unit of the kernel's work: a piece, with the keys of one KV head (attention_work.py). It holds the
queries of a tile and reads the keys block by block, wherever their pages are.

    tile        rows: token 0 head 0, token 0 head 1, ... token 1 head 0, ...    the heads that share the KV head
    pages       (n,) page tables of the sequences, one after the other
    keys        (num_pages, num_kv_heads, page_size, head_dim), with any page size        values alike

The products of a block are computed while later blocks are loaded. Their page ids must be loaded even earlier:

    multiplied           block 0     1     2    ...
    keys, values loaded        2     3     4
    page ids loaded            3     4     5    by explicit code: Triton starts a load late if it depends on a load

The softmax is summed up from block to block (FlashAttention-2, Dao 2023). The query heads that share a KV head are rows
of the same product. Pages are read in place (PagedAttention, Kwon et al. 2023). Pieces of one tile are merged
afterwards (Flash-Decoding, Dao et al. 2023). One kernel serves chunks and decodes, as vLLM's unified attention does.
Scores, softmax and sums are float32. Products of float32 are IEEE products, not TF32. Softmax weights are rounded to
the dtype of the queries, as in FlashAttention. Keys and values in FP8 are converted to that dtype in registers.

Keys that no row sees are never read. The part of a page that was not written may hold NaN, and 0 times NaN is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sarathi_pp_kernels.triton.attention_stages import LEAST_DIM, num_stages
from sarathi_pp_kernels.triton.attention_work import MERGE_COLUMNS, PIECE_COLUMNS, AttentionWork, Extent, power_of_two
from sarathi_pp_kernels.triton.float8 import from_codes

# The softmax is computed with powers of 2, for which GPUs have an instruction.
_LOG2_E = tl.constexpr(math.log2(math.e))
# Number of pieces of a tile that a merging program reads at once.
_BLOCK_PIECES = 16
# Number of entries of the table of merges that a merging program reads at once.
_BLOCK_MERGES = 64


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    work: AttentionWork,
    *,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention output of (T, H, D) rotated queries, in the same shape.

    The keys and values of the queries are in their pages already. H is num_kv_heads times work.blocks.group.

    Args:
        keys: (num_pages, num_kv_heads, page_size, D), contiguous, in the dtype of the queries or in float8_e4m3fn.
        values: like keys.
        pages: (n,) int64 page ids of all sequences, one sequence after the other.
        work: the microbatch's work, cut for these sequences.
        scaling: factor on the products of queries and keys, above 0.
        softcap: scores become softcap * tanh(score / softcap); None for none.
        sinks: (H,), one more logit per head, only in the softmax's denominator; None for none.
    """
    if query.stride(2) != 1:
        query = query.contiguous()
    _, num_heads, head_dim = query.shape
    _, num_kv_heads, page_size, _ = keys.shape
    blocks = work.blocks
    assert num_heads == num_kv_heads * blocks.group, f"{num_heads} heads are not {num_kv_heads} times {blocks.group}"
    assert keys.is_contiguous() and values.is_contiguous() and pages.dtype == torch.int64
    assert scaling > 0, f"the largest score is found before it is multiplied by {scaling}"
    if keys.dtype == torch.float8_e4m3fn and not _converts_float8(keys.device):
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    # These are two tensors and not halves of one. If a second half is not aligned to 16 bytes, another kernel is
    # compiled.
    maxima = torch.empty((work.partial_rows, num_kv_heads), dtype=torch.float32, device=query.device)
    sums = torch.empty_like(maxima)
    weighted = torch.empty((work.partial_rows, num_kv_heads, head_dim), dtype=torch.float32, device=query.device)
    _attend[(work.pieces.shape[0] * num_kv_heads,)](
        query,
        *query.stride()[:2],
        keys,
        values,
        num_kv_heads,
        pages,
        work.pieces,
        sinks,
        maxima,
        sums,
        weighted,
        out,
        scaling / softcap if softcap else scaling * _LOG2_E.value,
        softcap * _LOG2_E.value if softcap else 0.0,
        work.window or 0,
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=work.window is not None,
        HAS_SPLITS=work.partial_rows > 0,
        GROUP=blocks.group,
        HEAD_DIM=head_dim,
        BLOCK_DIM=max(power_of_two(head_dim), LEAST_DIM),
        PAGE_SIZE=page_size,
        FEW_ROWS=blocks.few_rows,
        MANY_ROWS=blocks.many_rows if work.has_many else 0,
        BLOCK_KEYS=blocks.keys,
        AHEAD=blocks.ahead,
        COLUMNS=PIECE_COLUMNS,
        # Four warps multiply 64 rows together.
        num_warps=8 if work.most_rows >= 128 else 4,
        num_stages=num_stages(blocks, head_dim, query.element_size(), work.has_many, query.device),
        maxnreg=blocks.registers,
        # Scores are multiplied in the subtraction before their exponential.
        enable_fp_fusion=True,
    )
    if work.partial_rows:
        _merge[(work.merge_programs,)](
            work.merges,
            work.merges.shape[0],
            num_kv_heads,
            maxima,
            sums,
            weighted,
            out,
            GROUP=blocks.group,
            HEAD_DIM=head_dim,
            BLOCK_DIM=power_of_two(head_dim),
            BLOCK_PIECES=_BLOCK_PIECES,
            BLOCK_MERGES=_BLOCK_MERGES,
            COLUMNS=MERGE_COLUMNS,
        )
    return out


@cache
def _converts_float8(device: torch.device) -> bool:
    """Return whether the device has an instruction that converts FP8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def reference_paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    extents: Sequence[Extent],
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute what `paged_attention` computes, (T, H, D), in plain torch and float64, one sequence after the other."""
    _, num_heads, head_dim = query.shape
    _, num_kv_heads, page_size, _ = keys.shape
    group = num_heads // num_kv_heads
    out = torch.empty(query.shape, dtype=torch.float64, device=query.device)
    for extent in extents:
        rows = slice(extent.first_row, extent.first_row + extent.num_tokens)
        end = extent.start + extent.num_tokens
        table = pages[extent.first_page : extent.first_page + -(-end // page_size)]
        key, value = (
            pool[table]
            .transpose(0, 1)
            .reshape(num_kv_heads, -1, head_dim)[:, :end]
            .double()
            .repeat_interleave(group, 0)
            for pool in (keys, values)
        )
        scores = torch.einsum("thd,hkd->htk", query[rows].double(), key) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(extent.start, end)[:, None] - torch.arange(end)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
        if sinks is not None:
            sink = sinks.double()[:, None, None].expand(-1, extent.num_tokens, 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., :end]
        out[rows] = torch.einsum("htk,hkd->thd", weights, value)
    return out


# `pages` starts anywhere in a larger tensor. Otherwise, Triton would compile a kernel for each alignment of its start.
@triton.jit(do_not_specialize_on_alignment=["pages"])
def _attend(
    query: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    num_kv_heads: tl.tensor,
    pages: tl.tensor,
    pieces: tl.tensor,
    sinks: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    weighted: tl.tensor,
    out: tl.tensor,
    score_factor: tl.tensor,
    cap_factor: tl.tensor,
    window: tl.tensor,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FEW_ROWS: tl.constexpr,
    MANY_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    AHEAD: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Compute a program's piece in a block of FEW_ROWS or MANY_ROWS rows.

    MANY_ROWS is 0 if no tile of the microbatch has more than FEW_ROWS rows. The score of a product, as a power of 2, is
    product * score_factor, or cap_factor * tanh(product * score_factor). Programs start in the order of pieces, the
    longest first. A piece has one program for each KV head.
    """
    kv_head = tl.program_id(0) % num_kv_heads
    piece = pieces + tl.program_id(0) // num_kv_heads * COLUMNS
    num_tokens = tl.load(piece + 1)
    # Both sizes are compiled: in a chunk's large block, a decode's few rows would take as long as a chunk's.
    if MANY_ROWS == 0 or num_tokens * GROUP <= FEW_ROWS:
        _walk(
            query, token_stride, head_stride, keys, values, num_kv_heads, kv_head, pages, piece, sinks, maxima, sums,
            weighted, out, score_factor, cap_factor, window, HAS_SOFTCAP, HAS_WINDOW, HAS_SPLITS, GROUP, HEAD_DIM,
            BLOCK_DIM, PAGE_SIZE, FEW_ROWS, BLOCK_KEYS, False,
        )  # fmt: skip
    else:
        _walk(
            query, token_stride, head_stride, keys, values, num_kv_heads, kv_head, pages, piece, sinks, maxima, sums,
            weighted, out, score_factor, cap_factor, window, HAS_SOFTCAP, HAS_WINDOW, HAS_SPLITS, GROUP, HEAD_DIM,
            BLOCK_DIM, PAGE_SIZE, MANY_ROWS, BLOCK_KEYS, AHEAD,
        )  # fmt: skip


@triton.jit
def _walk(
    query: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    num_kv_heads: tl.tensor,
    kv_head: tl.tensor,
    pages: tl.tensor,
    piece: tl.tensor,
    sinks: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    weighted: tl.tensor,
    out: tl.tensor,
    score_factor: tl.tensor,
    cap_factor: tl.tensor,
    window: tl.tensor,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    """Compute attention over a piece's keys for the BLOCK_ROWS rows of its tile. Write it, or partial results."""
    first_row = tl.load(piece)
    num_tokens = tl.load(piece + 1)
    start = tl.load(piece + 2)
    table = pages + tl.load(piece + 3)
    end_key = tl.load(piece + 5)
    partial = tl.load(piece + 6)

    row = tl.arange(0, BLOCK_ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    live = token < num_tokens
    position = start + token
    channel = tl.arange(0, BLOCK_DIM)
    of_head = channel < HEAD_DIM
    held = live[:, None] & of_head[None, :]
    source = (first_row + token).to(tl.int64) * token_stride + head.to(tl.int64) * head_stride
    queries = tl.load(query + source[:, None] + channel[None, :], mask=held, other=0.0)

    peak = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    if sinks is not None:
        # A sink is a score without a value. The sums of one piece of each tile start with it.
        takes_sinks = tl.load(piece + 7) != 0
        sink = tl.load(sinks + head, mask=live, other=float("-inf")).to(tl.float32) * _LOG2_E
        peak = tl.where(takes_sinks, sink, peak)
        total = tl.where(takes_sinks, 1.0, total)

    peak, total, summed = _sum_up(
        queries, position, peak, total, keys, values, num_kv_heads, kv_head, table, tl.load(piece + 4), end_key, start,
        num_tokens, score_factor, cap_factor, window, HAS_SOFTCAP, HAS_WINDOW, HEAD_DIM, BLOCK_DIM, PAGE_SIZE,
        BLOCK_ROWS, BLOCK_KEYS, AHEAD,
    )  # fmt: skip
    if HAS_SPLITS and partial >= 0:
        slot = (partial + row).to(tl.int64) * num_kv_heads + kv_head
        _store_partial(maxima, sums, weighted, slot, peak, total, summed, live, channel, HEAD_DIM)
    else:
        target = ((first_row + token).to(tl.int64) * num_kv_heads * GROUP + head) * HEAD_DIM
        output = summed / tl.where(live, total, 1.0)[:, None]
        tl.store(out + target[:, None] + channel[None, :], output.to(out.dtype.element_ty), mask=held)


@triton.jit
def _sum_up(
    queries: tl.tensor,
    position: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    num_kv_heads: tl.tensor,
    kv_head: tl.tensor,
    table: tl.tensor,
    begin: tl.tensor,
    end_key: tl.tensor,
    start: tl.tensor,
    num_tokens: tl.tensor,
    score_factor: tl.tensor,
    cap_factor: tl.tensor,
    window: tl.tensor,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    AHEAD: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return each row's largest score (peak), sum of weights and sum of weighted values, over [begin, end_key)."""
    channel = tl.arange(0, BLOCK_DIM)
    summed = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    # Offset of the head's channels in a page, and the distance from one page to the next, in elements.
    inside = kv_head * (PAGE_SIZE * HEAD_DIM) + channel[None, :]
    page_step = num_kv_heads * (PAGE_SIZE * HEAD_DIM)
    offset = tl.arange(0, BLOCK_KEYS)
    unseen = start - window  # the last key that no row sees
    page = _pages(table, begin, end_key, unseen, offset, HAS_WINDOW, PAGE_SIZE, BLOCK_KEYS)
    if AHEAD:
        place = inside + _places(page, page_step, begin, offset, PAGE_SIZE, HEAD_DIM, BLOCK_KEYS)[:, None]
        page = _pages(table, begin + BLOCK_KEYS, end_key, unseen, offset, HAS_WINDOW, PAGE_SIZE, BLOCK_KEYS)
        wanted = _wanted(begin, end_key, unseen, offset, channel, HAS_WINDOW, HEAD_DIM, BLOCK_DIM)
        next_scores = _products(queries, keys + place, wanted)
    for first in range(begin, end_key, BLOCK_KEYS):
        if AHEAD:
            scores = next_scores
            value_place = place
            following = first + BLOCK_KEYS
            wanted = _wanted(following, end_key, unseen, offset, channel, HAS_WINDOW, HEAD_DIM, BLOCK_DIM)
            place = inside + _places(page, page_step, following, offset, PAGE_SIZE, HEAD_DIM, BLOCK_KEYS)[:, None]
            page = _pages(table, following + BLOCK_KEYS, end_key, unseen, offset, HAS_WINDOW, PAGE_SIZE, BLOCK_KEYS)
            next_scores = _products(queries, keys + place, wanted)
            wanted = _wanted(first, end_key, unseen, offset, channel, HAS_WINDOW, HEAD_DIM, BLOCK_DIM)
        else:
            value_place = inside + _places(page, page_step, first, offset, PAGE_SIZE, HEAD_DIM, BLOCK_KEYS)[:, None]
            page = _pages(table, first + BLOCK_KEYS, end_key, unseen, offset, HAS_WINDOW, PAGE_SIZE, BLOCK_KEYS)
            wanted = _wanted(first, end_key, unseen, offset, channel, HAS_WINDOW, HEAD_DIM, BLOCK_DIM)
            scores = _products(queries, keys + value_place, wanted)
        if HAS_SOFTCAP:
            scores = cap_factor * _tanh(scores * score_factor)
        whole = first + BLOCK_KEYS <= start + 1  # every row sees every key: most blocks
        if HAS_WINDOW:
            whole = whole & (first >= unseen + num_tokens)
        masked = scores
        if not whole:
            masked = tl.where(_seen(position - first, window, offset, HAS_WINDOW), scores, float("-inf"))
        # This costs nothing. Triton finds that one product feeds the next only if no branch is in between.
        scores = tl.where(whole, scores, masked)
        peak, weights, shrink = _weights(peak, scores, 1.0 if HAS_SOFTCAP else score_factor)
        total = total * shrink + tl.sum(weights, 1)
        value_block = _loaded(values + value_place, wanted, queries.dtype)
        rounded = weights.to(value_block.dtype)
        summed = tl.dot(rounded, value_block, acc=summed * shrink[:, None], input_precision="ieee")
    return peak, total, summed


@triton.jit
def _products(queries: tl.tensor, key_block: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    """Return the products (rows, keys) of queries with the keys at these addresses, 0 for keys that are not wanted."""
    return tl.dot(queries, tl.trans(_loaded(key_block, wanted, queries.dtype)), input_precision="ieee")


@triton.jit
def _wanted(
    first: tl.tensor,
    end_key: tl.tensor,
    unseen: tl.tensor,
    offset: tl.tensor,
    channel: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """Return a mask (keys, channels or 1) of the numbers to load of the block at key `first`."""
    wanted = _there(first, end_key, unseen, offset, HAS_WINDOW)[:, None]
    if HEAD_DIM < BLOCK_DIM:
        wanted = wanted & (channel < HEAD_DIM)[None, :]
    return wanted


@triton.jit
def _loaded(place: tl.tensor, wanted: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return a block of keys or values in `dtype`, with zeros where `wanted` is false.

    Those in FP8 have a type of their own if the device has an instruction that converts them. Otherwise they are uint8.
    """
    block = tl.load(place, mask=wanted, other=0.0)
    if place.dtype.element_ty == tl.uint8:
        block = from_codes(block).to(dtype)
    elif place.dtype.element_ty == tl.float8e4nv:
        block = block.to(dtype)
    return block


@triton.jit
def _there(
    first: tl.tensor, end_key: tl.tensor, unseen: tl.tensor, offset: tl.tensor, HAS_WINDOW: tl.constexpr
) -> tl.tensor:
    """Return a mask (keys,) of the block at key `first`: true for keys that the piece has and that any row sees."""
    there = offset < end_key - first
    if HAS_WINDOW:
        there = there & (offset > unseen - first)
    return there


@triton.jit
def _pages(
    table: tl.tensor,
    first: tl.tensor,
    end_key: tl.tensor,
    unseen: tl.tensor,
    offset: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
) -> tl.tensor:
    """Return int32 page ids of the block's keys: one for each key, or a single one if the block is in one page."""
    if PAGE_SIZE % BLOCK_KEYS == 0:
        page = tl.load(table + first // PAGE_SIZE, mask=first < end_key, other=0)
    else:
        there = _there(first, end_key, unseen, offset, HAS_WINDOW)
        if BLOCK_KEYS % PAGE_SIZE == 0:
            page = tl.load(table + first // PAGE_SIZE + offset // PAGE_SIZE, mask=there, other=0)
        else:
            page = tl.load(table + (first + offset) // PAGE_SIZE, mask=there, other=0)
    return page.to(tl.int32)


@triton.jit
def _places(
    page: tl.tensor,
    page_step: tl.tensor,
    first: tl.tensor,
    offset: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
) -> tl.tensor:
    """Return (keys,) int64: the offset, in elements, of each key of the block for KV head 0."""
    # Blocks begin at multiples of BLOCK_KEYS, and mostly pages do too.
    if PAGE_SIZE % BLOCK_KEYS == 0:
        inside = first % PAGE_SIZE + offset
    elif BLOCK_KEYS % PAGE_SIZE == 0:
        inside = offset % PAGE_SIZE
    else:
        inside = (first + offset) % PAGE_SIZE
    return page.to(tl.int64) * page_step + inside * HEAD_DIM


@triton.jit
def _seen(position: tl.tensor, window: tl.tensor, offset: tl.tensor, HAS_WINDOW: tl.constexpr) -> tl.tensor:
    """Return a mask (rows, keys): true if the row at a position sees the key at an offset.

    Positions and offsets are counted from the block's first key.
    """
    seen = offset[None, :] <= position[:, None]
    if HAS_WINDOW:
        seen = seen & (offset[None, :] > (position - window)[:, None])
    return seen


@triton.jit
def _weights(peak: tl.tensor, scores: tl.tensor, factor: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return each row's new largest score (peak), the weights of these scores, and the factor for earlier weights.

    The largest score is found before it is multiplied. So all other multiplications become part of subtractions.

    Args:
        peak: (rows,), the largest score of each row so far.
        scores: (rows, keys). Multiplied by `factor`, they are the exponents of powers of 2.
    """
    higher = tl.maximum(peak, tl.max(scores, 1) * factor)
    base = tl.where(higher == float("-inf"), 0.0, higher)  # 0 for a row that has seen no key yet, not NaN
    return higher, tl.exp2(scores * factor - base[:, None]), tl.exp2(peak - base)


@triton.jit
def _store_partial(
    maxima: tl.tensor,
    sums: tl.tensor,
    weighted: tl.tensor,
    slot: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    summed: tl.tensor,
    live: tl.tensor,
    channel: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Store the partial results of each row of the tile, which `_merge` reads, at the row's index in `slot`."""
    tl.store(maxima + slot, peak, mask=live)
    tl.store(sums + slot, total, mask=live)
    held = live[:, None] & (channel < HEAD_DIM)[None, :]
    tl.store(weighted + slot[:, None] * HEAD_DIM + channel[None, :], summed, mask=held)


# Microbatches differ in num_merges. They use the same compiled kernel, also if it is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["num_merges"])
def _merge(
    merges: tl.tensor,
    num_merges: tl.tensor,
    num_kv_heads: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    weighted: tl.tensor,
    out: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    BLOCK_MERGES: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Compute output rows (a row is a head of a token) from the partial results of their tiles' pieces.

    The programs share the rows of all merges. Their number is read from the table, so a graph needs no larger grid.
    """
    num_heads = num_kv_heads * GROUP
    num_rows = _merged_tokens(merges, num_merges, BLOCK_MERGES, COLUMNS) * num_heads
    for index in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        head = index % num_heads
        merge = merges + _merge_of(merges, num_merges, index // num_heads, BLOCK_MERGES, COLUMNS) * COLUMNS
        token = index // num_heads - tl.load(merge + 4)
        first_row = tl.load(merge)
        num_tokens = tl.load(merge + 1)
        partial = tl.load(merge + 2)
        num_pieces = tl.load(merge + 3)
        channel = tl.arange(0, BLOCK_DIM)
        of_head = channel < HEAD_DIM
        peak = float("-inf")
        total = 0.0
        summed = tl.zeros((BLOCK_DIM,), tl.float32)
        for first in range(0, num_pieces, BLOCK_PIECES):
            piece = first + tl.arange(0, BLOCK_PIECES)
            there = piece < num_pieces
            row = partial + (piece * num_tokens + token) * GROUP + head % GROUP
            slot = row.to(tl.int64) * num_kv_heads + head // GROUP
            peaks = tl.load(maxima + slot, mask=there, other=float("-inf"))
            higher = tl.maximum(peak, tl.max(peaks, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(peaks - base)
            shrink = tl.exp2(peak - base)
            parts = tl.load(
                weighted + slot[:, None] * HEAD_DIM + channel[None, :],
                mask=there[:, None] & of_head[None, :],
                other=0.0,
            )
            total = total * shrink + tl.sum(weights * tl.load(sums + slot, mask=there, other=0.0), 0)
            summed = summed * shrink + tl.sum(weights[:, None] * parts, 0)
            peak = higher
        target = ((first_row + token).to(tl.int64) * num_kv_heads * GROUP + head) * HEAD_DIM
        tl.store(out + target + channel, (summed / total).to(out.dtype.element_ty), mask=of_head)


@triton.jit
def _merged_tokens(
    merges: tl.tensor, num_merges: tl.tensor, BLOCK_MERGES: tl.constexpr, COLUMNS: tl.constexpr
) -> tl.tensor:
    """Return the number of tokens of all merges. Unused entries at the table's end have none."""
    tokens = tl.zeros((), tl.int32)
    for first in range(0, num_merges, BLOCK_MERGES):
        entry = first + tl.arange(0, BLOCK_MERGES)
        tokens += tl.sum(tl.load(merges + entry * COLUMNS + 1, mask=entry < num_merges, other=0), 0)
    return tokens


@triton.jit
def _merge_of(
    merges: tl.tensor, num_merges: tl.tensor, token: tl.tensor, BLOCK_MERGES: tl.constexpr, COLUMNS: tl.constexpr
) -> tl.tensor:
    """Return the index of the merge with a token, counted over all merges: the last one that begins at it or before."""
    count = tl.zeros((), tl.int32)
    for first in range(0, num_merges, BLOCK_MERGES):
        entry = first + tl.arange(0, BLOCK_MERGES)
        there = entry < num_merges
        used = tl.load(merges + entry * COLUMNS + 1, mask=there, other=0) > 0
        begin = tl.load(merges + entry * COLUMNS + 4, mask=there, other=0)
        count += tl.sum((used & (begin <= token)).to(tl.int32), 0)
    return count - 1


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """Return tanh, exact to the last bits of float32.

    Near 0, a formula with exp loses these bits. There, this is the series of the Cephes library's tanhf.
    """
    square = x * x
    series = -5.70498872745e-3 * square + 2.06390887954e-2
    series = series * square - 5.37397155531e-2
    series = series * square + 1.33314422036e-1
    series = series * square - 3.33332819422e-1
    near = x + x * square * series
    shrunk = tl.exp2(tl.abs(x) * _LOG2_E * -2.0)
    far = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))
