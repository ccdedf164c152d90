"""Attention of prompt chunks over paged bfloat16 keys and values: SIMD products, one compiled pass.

For each KV head, keys are read in blocks of a size that stays in the second-level cache. A block is copied once, for
all rows and all query heads that share it, into the order that products read (simd/ explains panels and lines):

    keys     panels of 16 tokens, a line for each pair of channels        scores = queries x panels
    values   panels of 16 channels, a line for each pair of tokens        sums = weights x panels

Then scores, softmax and sums are computed for six rows (a tile) at a time. A row's state so far is its largest score,
the sum of its weights and its weighted values. The state is kept between blocks and scaled down if a larger score
comes. This is the online softmax of FlashAttention (arXiv 2205.14135, section 3.1), so scratch memory is limited
whatever the length of the context. Queries, keys, values and weights are bfloat16 in the products, and everything else
is float32.

Measured on one core of a Zen 5, with 16 heads and 8 KV heads of 64 channels, 256 rows after 512 keys. It takes 1.76 ms
per layer, at 73 % of the rate of the linear layers' products. torch's products (sdpa.py) take 4.9 ms.

Latent attention has one KV head, whose values are the first channels of its keys. All heads of a token see the same
keys, so a decode's heads are computed like the rows of a chunk. On one core of a Zen 4, with 16 heads and latents of
256 + 32 channels, 32 decodes with 700 keys each take 4.8 ms per layer. attention_decode.py takes 11 ms.
"""

from __future__ import annotations

import numpy as np

from sarathi_pp_kernels.cpu.simd.compile import compiled, inlined
from sarathi_pp_kernels.cpu.simd.memory import (
    load_float,
    load_index,
    load_word,
    round_lines,
    store_float,
    store_word,
)
from sarathi_pp_kernels.cpu.simd.products import dot_tile
from sarathi_pp_kernels.cpu.simd.softmax import cap, exponential, hide, largest, weigh_lines
from sarathi_pp_kernels.cpu.simd.transpose import pair, transpose

_FLOAT = np.float32
_NONE = _FLOAT(-np.inf)
_LOG2_E = _FLOAT(1.4426950408889634)
TILE_ROWS = 6
BLOCK_KEYS = 1024
# Most states that are kept at once. A state belongs to one row and one query head of a KV head.
_MOST_STATES = 960


def rows_at_once(group: int) -> int:
    """Return the number of rows of a chunk for which each block of keys is laid out once.

    Args:
        group: number of query heads that share a KV head.
    """
    return max(_MOST_STATES // group // TILE_ROWS, 1) * TILE_ROWS


def scratch_floats(rows: int, group: int, head_dim: int, value_dim: int) -> int:
    """Return the number of float32 values of scratch memory that `attend` needs for chunks of up to `rows` rows."""
    rows = min(-(-rows // TILE_ROWS) * TILE_ROWS, rows_at_once(group))
    laid_out = BLOCK_KEYS * head_dim  # keys and values, two to a word
    tile = TILE_ROWS * (BLOCK_KEYS + BLOCK_KEYS // 2 + value_dim)
    return laid_out + tile + group * rows * (head_dim // 2 + value_dim + 2) + 96


@inlined
def _lay_out_keys(keys, page, page_tokens, row_words, to):  # type: ignore[no-untyped-def]
    """Copy a page's keys of one head, (page_tokens, row_words) words, into page_tokens / 16 panels."""
    for panel in range(page_tokens // 16):
        words = panel * 16 * row_words
        transpose(keys + (page + words) * 4, row_words, 16, to + words * 4, 16, row_words)


@inlined
def _lay_out_values(values, page, first, count, head_dim, value_dim, to, panel_words):  # type: ignore[no-untyped-def]
    """Copy the values of `count` tokens of a page into all channel panels, from line first / 2 on.

    A line holds pairs of tokens. If `count` is odd, the last token is paired with zeros.
    """
    for token in range(0, count, 2):
        place = values + (page + token * head_dim) * 2
        pair(place, place + head_dim * 2, token + 1 < count, to + (first + token) * 32, panel_words, value_dim // 16)


@inlined
def _product(x, row_words, pairs, panels, num_panels, panel_words, zeros, out, out_row):  # type: ignore[no-untyped-def]
    """Multiply six rows of x with num_panels adjacent panels: four at a time, then two, then one. Write float32."""
    panel = 0
    while panel + 4 <= num_panels:
        weight, to = panels + panel * panel_words * 4, out + panel * 64
        dot_tile(6, 4, weight, panel_words, x, row_words, 1, pairs, zeros, to, out_row)
        panel += 4
    if panel + 2 <= num_panels:
        weight, to = panels + panel * panel_words * 4, out + panel * 64
        dot_tile(6, 2, weight, panel_words, x, row_words, 1, pairs, zeros, to, out_row)
        panel += 2
    if panel < num_panels:
        weight, to = panels + panel * panel_words * 4, out + panel * 64
        dot_tile(6, 1, weight, panel_words, x, row_words, 1, pairs, zeros, to, out_row)


@inlined
def _weigh_tile(  # type: ignore[no-untyped-def]
    scores, weights, width, first, row_step, block_end, window, scaling, softcap, states, totals, value_dim, scratch
):
    """Turn a block's scores of six rows into weights, and update the state that the rows have so far.

    The scores are overwritten. Rows of scores, and of weights, are BLOCK_KEYS elements apart.

    Args:
        width: number of scores per row.
        first: position of the first row, counted from the key of the first score.
        row_step: number of positions from a row to the next.
        block_end: end of the block's keys, counted from the same key.
        window: most keys that a row sees; 0 for all.
        states: largest score and sum of weights, for each row from the first on.
        totals: weighted values, for each row from the first on.
        scratch: 2 * TILE_ROWS float32.
    """
    tops, added = scratch, scratch + TILE_ROWS * 4
    slope = _FLOAT(1) if softcap > 0 else scaling * _LOG2_E  # capped scores are already scaled
    for step in range(TILE_ROWS):
        low, high = _seen(first + step * row_step, block_end, window, width)
        here = scores + step * BLOCK_KEYS * 4
        if softcap > 0:
            cap(here, low, high, scaling * _LOG2_E, softcap * _LOG2_E)
        hide(here, low, high, width)
    largest(TILE_ROWS, scores, BLOCK_KEYS, width // 16, tops)
    for step in range(TILE_ROWS):
        low, high = _seen(first + step * row_step, block_end, window, width)
        before = load_float(states, 2 * step)
        # A row that sees no key of the block has only hidden scores there, which are below any other.
        top = max(before, load_float(tops, step) * slope) if low < high else max(before, _FLOAT(0))
        store_float(tops, step, top)
    weigh_lines(TILE_ROWS, scores, BLOCK_KEYS, weights, BLOCK_KEYS, width // 16, slope, tops, added)
    for step in range(TILE_ROWS):
        low, high = _seen(first + step * row_step, block_end, window, width)
        if low < high:
            before, top = load_float(states, 2 * step), load_float(tops, step)
            kept = exponential((before - top) / _LOG2_E) if before > _NONE else _FLOAT(0)
            store_float(states, 2 * step, top)
            store_float(states, 2 * step + 1, load_float(states, 2 * step + 1) * kept + load_float(added, step))
            for channel in range(step * value_dim, (step + 1) * value_dim):
                store_float(totals, channel, load_float(totals, channel) * kept)


@inlined
def _seen(position, block_end, window, width):  # type: ignore[no-untyped-def]
    """Return the keys [low, high) of [0, width) that the row at a position sees. It sees none if low >= high."""
    low = min(max(position - window + 1, 0), width) if window else 0
    return low, max(min(position + 1, block_end, width), 0)


@compiled()
def attend(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0915  (loops, one in the other)
    query, query_row, query_head, keys, values, num_kv_heads, group, head_dim, value_dim, page_tokens, pages, start,
    row_step, num_rows, most_rows, first_head, end_head, scaling, softcap, window, sinks, scratch, out,
):  # fmt: skip
    """Compute attention of num_rows rows of one sequence, for the KV heads [first_head, end_head).

    Arrays are given by address. page_tokens, head_dim and value_dim are multiples of 16.

    Args:
        query: bfloat16, from the first of these rows on.
        query_row: number of words (of two bfloat16) between two rows of `query`.
        query_head: number of words between two heads of `query`.
        keys: keys of one layer, (num_pages, num_kv_heads, page_tokens, head_dim) bfloat16.
        values: like keys. Of each token, the first value_dim channels are its value. In latent attention, they are the
            keys themselves.
        group: number of query heads that share a KV head.
        page_tokens: tokens per page.
        pages: int64 page ids of the sequence, from its first page on.
        start: position of the first row.
        row_step: number of positions from a row to the next: 1 for consecutive tokens, 0 for the heads of one token.
        most_rows: number of rows for which each block of keys is laid out once: `rows_at_once(group)`.
        softcap: soft cap of the scores; 0 for none.
        window: most keys that a row sees; 0 for all.
        sinks: float32 of each query head, -inf for none.
        scratch: memory for as many float32 values as `scratch_floats` returns.
        out: (num_rows, num_kv_heads * group, value_dim) bfloat16.
    """
    words, num_heads = head_dim // 2, num_kv_heads * group
    panel_words = BLOCK_KEYS // 2 * 16  # words of a channel panel of values
    zeros = scratch
    for at in range(64):
        store_float(zeros, at, _FLOAT(0))
    of_tile = zeros + 256
    key_panels = of_tile + 128
    value_panels = key_panels + BLOCK_KEYS * words * 4
    scores = value_panels + BLOCK_KEYS * words * 4
    weights = scores + TILE_ROWS * BLOCK_KEYS * 4
    sums = weights + TILE_ROWS * BLOCK_KEYS * 2
    queries = sums + TILE_ROWS * value_dim * 4
    for kv_head in range(first_head, end_head):
        for begin in range(0, num_rows, most_rows):
            count = min(most_rows, num_rows - begin)
            height = (count + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
            states = queries + group * height * words * 4  # largest score and sum of each row
            totals = states + group * height * 8
            for member in range(group):
                head = kv_head * group + member
                sink = load_float(sinks, head)
                for row in range(height):
                    at = member * height + row
                    store_float(states, 2 * at, sink * _LOG2_E)
                    store_float(states, 2 * at + 1, _FLOAT(1) if sink > _NONE else _FLOAT(0))
                    for channel in range(value_dim):
                        store_float(totals, at * value_dim + channel, _FLOAT(0))
                    source = (begin + row) * query_row + head * query_head
                    for word in range(words):
                        store_word(queries, at * words + word, load_word(query, source + word) if row < count else 0)
            first_row = start + begin * row_step
            seen_first = 0 if window == 0 else max(first_row - window + 1, 0)
            end = first_row + (count - 1) * row_step + 1
            # Blocks begin at the same keys for every chunk, so the cuts of a prompt change no bit of a row.
            for block in range(seen_first // BLOCK_KEYS * BLOCK_KEYS, end, BLOCK_KEYS):
                block_end = min(block + BLOCK_KEYS, end)
                skip = max(seen_first - block, 0) // 32 * 32
                begun = block + skip
                for token in range(begun // page_tokens * page_tokens, block_end, page_tokens):
                    page = load_index(pages, token // page_tokens) * num_kv_heads + kv_head
                    place = token - block
                    _lay_out_keys(keys, page * page_tokens * words, page_tokens, words, key_panels + place * words * 4)
                    filled = min(page_tokens, block_end - token)
                    _lay_out_values(
                        values, page * page_tokens * head_dim, place, filled, head_dim, value_dim, value_panels,
                        panel_words,
                    )  # fmt: skip
                last_line = (block_end - block + 1) // 2
                for line in range(last_line, (last_line + 15) // 16 * 16):  # weights are made in steps of 32 keys
                    for panel in range(value_dim // 16):
                        for lane in range(16):
                            store_word(value_panels, panel * panel_words + line * 16 + lane, 0)
                for at in range(0, group * height, TILE_ROWS):
                    row = at % height
                    first = first_row + row * row_step
                    last = min(first + (TILE_ROWS - 1) * row_step, end - 1)
                    if last < block or (window and block_end <= first - window + 1):
                        continue
                    num_keys = min(block_end, last + 1) - begun
                    width = (num_keys + 31) // 32 * 32
                    _product(
                        queries + at * words * 4, words, words, key_panels + skip * words * 4, (num_keys + 15) // 16,
                        words * 16, zeros, scores, BLOCK_KEYS,
                    )  # fmt: skip
                    _weigh_tile(
                        scores, weights, width, first - begun, row_step, block_end - begun, window, scaling, softcap,
                        states + at * 8, totals + at * value_dim * 4, value_dim, of_tile,
                    )  # fmt: skip
                    _product(
                        weights, BLOCK_KEYS // 2, width // 2, value_panels + skip * 32, value_dim // 16, panel_words,
                        zeros, sums, value_dim,
                    )  # fmt: skip
                    for channel in range(TILE_ROWS * value_dim):
                        held = totals + at * value_dim * 4
                        store_float(held, channel, load_float(held, channel) + load_float(sums, channel))
            for member in range(group):
                for row in range(count):
                    at = member * height + row
                    inverse = _FLOAT(1) / load_float(states, 2 * at + 1)
                    to = out + ((begin + row) * num_heads + kv_head * group + member) * value_dim * 2
                    for channel in range(value_dim):
                        store_float(sums, channel, load_float(totals, at * value_dim + channel) * inverse)
                    round_lines(sums, to, value_dim // 16)
