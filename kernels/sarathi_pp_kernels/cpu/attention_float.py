"""Attention over paged float32 keys and values, of decodes and of prompt chunks: SIMD products, one compiled pass.

A tile is one row (token), or consecutive rows of a sequence. Keys are divided into blocks of 512. For each block, three
steps follow each other:

    scores     products of queries and keys
    weights    softmax of the scores, in place. The row's sums are scaled down if a larger score comes
    sums       the values, multiplied by the weights and added to the row's sums

This is the online softmax of FlashAttention (arXiv 2205.14135, section 3.1). So scratch memory is limited whatever the
length of the context.

Few rows are computed one by one. Keys and values are read where they are, page by page with all heads of a page
together, because they are stored in that order. The time is that of reading memory, so the keys and values that are
read next are prefetched meanwhile, to the second-level cache, a few lines at each step. If there are more rows, KV
heads are computed one by one. The keys and values of a block are copied once, for all rows and all query heads that
share them: keys into panels (simd/), values in their order. Then six rows at a time are multiplied.

In both ways, a score is summed over ascending channels and a weighted value over ascending keys, each in one lane.
Blocks end at the same keys for every tile, and keys that a row does not see add 0. So the bits of a row of finite
numbers depend on nothing but the row: neither on its tile nor on how its prompt was cut. No sum is reordered, so they
do not depend on the processor either, if there is no soft cap. (The soft cap calls the C library.)

Measured on one core of a Zen 4, with 16 heads and 8 KV heads of 64 channels, in ms per layer (least of 24 calls). In
parentheses are the times of attention_decode.py with tiles of 16 rows, which computed this before:

                                       AVX512         AVX2
    112 rows after 112 keys            0.91 (2.35)    0.93 (1.87)
    112 rows after 1,000 keys          5.4 (12.7)     5.9 (11.6)
    32 decodes with 300 keys each      2.0 (2.1)      1.9 (2.0)
    32 decodes with 700 keys each      4.9 (7.5)      5.0 (7.9)

The chunks reach 82 to 90 GFLOP/s, where products of linear layers reach 108. The decodes read 19 GB/s.
"""

from __future__ import annotations

import numpy as np

from sarathi_pp_kernels.cpu.simd.compile import compiled, inlined
from sarathi_pp_kernels.cpu.simd.keys import score_keys
from sarathi_pp_kernels.cpu.simd.memory import load_float, load_index, store_float
from sarathi_pp_kernels.cpu.simd.products import multiply_tile
from sarathi_pp_kernels.cpu.simd.softmax import cap, exponential, hide, largest_of, weigh_row
from sarathi_pp_kernels.cpu.simd.target import target
from sarathi_pp_kernels.cpu.simd.transpose import transpose

_FLOAT = np.float32
_NONE = _FLOAT(-np.inf)
_LOG2_E = _FLOAT(1.4426950408889634)
BLOCK_KEYS = 512
# Keys that are read at a time, one per lane of a line.
_KEYS = 16
# Rows that are multiplied with panels at a time, and the most panels.
_ROWS, _PANELS = 6, 4 if target().lanes == 16 else 1
# A tile of up to this many rows is computed row by row.
_FEW_ROWS = 4
# Then, the most query heads that are multiplied at a time with keys, and with values, and the most panels of values, by
# the number of registers. With AVX2, 4 heads and keys need some memory too, and yet 2 heads take 10 % longer.
_SCORED, _ADDED, _ADDED_PANELS = {16: (4, 4, 4), 8: (4, 2, 2)}.get(target().lanes, (2, 4, 1))
# Most rows of a tile, times the query heads that share a KV head. The sums of all are kept at once.
_MOST_STATES = 512
# If several threads compute a chunk: the number of its tiles per thread, and the least rows of a tile.
_TILES_PER_THREAD, _LEAST_ROWS = 4, 12


def fits(head_dim: int, value_dim: int, page_size: int) -> bool:
    """Return whether `attend` runs on this processor with heads of these channels and pages of page_size tokens."""
    return target().lanes > 0 and head_dim % 16 == value_dim % 16 == 0 and page_size % _KEYS == 0


def tile_rows(num_rows: int, group: int, num_threads: int) -> int:
    """Return the number of rows per tile for num_rows rows of a sequence, a multiple of six.

    Several threads divide the tiles, so there must be some of them. But keys and values are copied for each tile.

    Args:
        group: number of query heads that share a KV head.
    """
    wanted = num_rows if num_threads == 1 else max(num_rows // (_TILES_PER_THREAD * num_threads), _LEAST_ROWS)
    most = max(_MOST_STATES // group // _ROWS, 1) * _ROWS
    return min(-(-wanted // _ROWS) * _ROWS, most)


def scratch_floats(most_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int) -> int:
    """Return the number of float32 values of scratch memory that `attend` needs for tiles of up to `most_rows` rows."""
    row_by_row = num_heads * (BLOCK_KEYS + value_dim + 2)
    if most_rows <= _FEW_ROWS:
        return row_by_row
    states = num_heads // num_kv_heads * (-(-most_rows // _ROWS) * _ROWS)
    by_six = 2 * BLOCK_KEYS * head_dim + _ROWS * (BLOCK_KEYS + head_dim) + states * (value_dim + 2)
    return max(row_by_row, by_six)


@inlined
def _begin(state, sums, value_dim, sink):  # type: ignore[no-untyped-def]
    """Set the state and the sums of a row before the first block.

    Args:
        state: the row's largest score, in base 2, and the sum of its weights.
        sums: its weighted values.
        sink: the head's sink; -inf for none.
    """
    store_float(state, 0, sink * _LOG2_E)
    store_float(state, 1, _FLOAT(1) if sink > _NONE else _FLOAT(0))
    for channel in range(value_dim):
        store_float(sums, channel, _FLOAT(0))


@inlined
def _weigh(scores, low, high, width, scaling, softcap, state, sums, value_dim):  # type: ignore[no-untyped-def]
    """Turn a row's scores of a block into weights, in place, and scale the row's state and sums.

    Args:
        scores: products of the query with `width` keys, of which the row sees [low, high). width is a multiple of 16.
        softcap: soft cap of the scores; 0 for none.
        state: see _begin, as for `sums`.
    """
    if low >= high:
        for key in range(width):
            store_float(scores, key, _FLOAT(0))
        return
    slope = _FLOAT(1) if softcap > 0 else scaling * _LOG2_E  # capped scores are already scaled
    if softcap > 0:
        cap(scores, low, high, scaling * _LOG2_E, softcap * _LOG2_E)
    hide(scores, low, high, width)
    before = load_float(state, 0)
    top = max(before, largest_of(scores, width // 16) * slope)
    added = weigh_row(scores, width // 16, slope, top)
    kept = exponential((before - top) / _LOG2_E) if before > _NONE else _FLOAT(0)
    store_float(state, 0, top)
    store_float(state, 1, load_float(state, 1) * kept + added)
    if kept != _FLOAT(1):
        for channel in range(value_dim):
            store_float(sums, channel, load_float(sums, channel) * kept)


@inlined
def _end(state, sums, value_dim, out):  # type: ignore[no-untyped-def]
    inverse = _FLOAT(1) / load_float(state, 1)
    for channel in range(value_dim):
        store_float(out, channel, load_float(sums, channel) * inverse)


@inlined
def _place(array, table, token, page_size, page_floats, head_dim):  # type: ignore[no-untyped-def]
    """Return the address of a token's key or value of the first head."""
    return array + (load_index(table, token // page_size) * page_floats + token % page_size * head_dim) * 4


@inlined
def _score_block(  # type: ignore[no-untyped-def]
    query, head_step, keys, table, block_start, block_end, last, num_kv_heads, group, head_dim, page_size, scores
):
    """Write the scores of all heads of one row with keys [block_start, block_end). See _add_block for `last`."""
    page_floats, head_bytes = num_kv_heads * page_size * head_dim, page_size * head_dim * 4
    for token in range(block_start, block_end, _KEYS):
        place = _place(keys, table, token, page_size, page_floats, head_dim)
        ahead = _place(keys, table, min(token + _KEYS, last), page_size, page_floats, head_dim)
        for kv_head in range(num_kv_heads):
            for head in range(kv_head * group, (kv_head + 1) * group, _SCORED):
                count = min(_SCORED, (kv_head + 1) * group - head)
                score_keys(
                    _SCORED, count, query + head * head_step * 4, head_step, place, head_dim,
                    scores + (head * BLOCK_KEYS + token - block_start) * 4, BLOCK_KEYS, ahead,
                )  # fmt: skip
            place += head_bytes
            ahead += head_bytes


@inlined
def _add_block(  # type: ignore[no-untyped-def]
    weights, values, table, block_start, block_end, last, num_kv_heads, group, head_dim, value_dim, page_size, sums
):
    """Add the values of keys [block_start, block_end), times their weights, to the sums of all heads of one row.

    Args:
        last: first of the last 16 keys that the row sees. While 16 keys are read, the next 16 are prefetched, and none
            after these.
    """
    page_floats, head_bytes = num_kv_heads * page_size * head_dim, page_size * head_dim * 4
    for token in range(block_start, block_end, _KEYS):
        place = _place(values, table, token, page_size, page_floats, head_dim)
        ahead = _place(values, table, min(token + _KEYS, last), page_size, page_floats, head_dim)
        num_keys = min(_KEYS, block_end - token)  # the values after them may never have been written
        for kv_head in range(num_kv_heads):
            for head in range(kv_head * group, (kv_head + 1) * group, _ADDED):
                count = min(_ADDED, (kv_head + 1) * group - head)
                given, to = weights + (head * BLOCK_KEYS + token - block_start) * 4, sums + head * value_dim * 4
                channel = 0
                while channel + _ADDED_PANELS * 16 <= value_dim:
                    multiply_tile(
                        1, _ADDED, _ADDED_PANELS, 1, 1, count, place + channel * 4, 16, head_dim, given, BLOCK_KEYS,
                        num_keys, to + channel * 4, value_dim, ahead + channel * 4,
                    )  # fmt: skip
                    channel += _ADDED_PANELS * 16
                while channel < value_dim:
                    multiply_tile(
                        1, _ADDED, 1, 1, 1, count, place + channel * 4, 16, head_dim, given, BLOCK_KEYS, num_keys,
                        to + channel * 4, value_dim, ahead + channel * 4,
                    )  # fmt: skip
                    channel += 16
            place += head_bytes
            ahead += head_bytes


@inlined
def _attend_row(  # type: ignore[no-untyped-def]
    query, head_step, keys, values, num_kv_heads, group, head_dim, value_dim, page_size, table, end, window, scaling,
    softcap, sinks, scratch, out,
):  # fmt: skip
    """Compute one row, which sees the keys before `end`."""
    num_heads = num_kv_heads * group
    scores = scratch
    sums = scores + num_heads * BLOCK_KEYS * 4
    states = sums + num_heads * value_dim * 4
    for head in range(num_heads):
        _begin(states + head * 8, sums + head * value_dim * 4, value_dim, load_float(sinks, head))
    first, last = max(end - window, 0) if window else 0, (end - 1) // _KEYS * _KEYS
    for block in range(first // BLOCK_KEYS * BLOCK_KEYS, end, BLOCK_KEYS):
        block_start, block_end = max(block, first // _KEYS * _KEYS), min(block + BLOCK_KEYS, end)
        width = (block_end - block_start + _KEYS - 1) // _KEYS * _KEYS
        _score_block(
            query,
            head_step,
            keys,
            table,
            block_start,
            block_end,
            last,
            num_kv_heads,
            group,
            head_dim,
            page_size,
            scores,
        )
        for head in range(num_heads):
            _weigh(
                scores + head * BLOCK_KEYS * 4, max(first - block_start, 0), block_end - block_start, width, scaling,
                softcap, states + head * 8, sums + head * value_dim * 4, value_dim,
            )  # fmt: skip
        _add_block(
            scores,
            values,
            table,
            block_start,
            block_end,
            last,
            num_kv_heads,
            group,
            head_dim,
            value_dim,
            page_size,
            sums,
        )
    for head in range(num_heads):
        _end(states + head * 8, sums + head * value_dim * 4, value_dim, out + head * value_dim * 4)


@inlined
def _copy(source, to, count):  # type: ignore[no-untyped-def]
    for at in range(count):
        store_float(to, at, load_float(source, at))


@inlined
def _lay_out(  # type: ignore[no-untyped-def]
    keys, values, table, kv_head, block_start, block_end, num_kv_heads, head_dim, page_size, key_panels, value_lines
):
    """Copy keys and values [block_start, block_end) of one KV head: keys into panels, values line by line."""
    page_floats, head_bytes = num_kv_heads * page_size * head_dim, kv_head * page_size * head_dim * 4
    for token in range(block_start, block_end, _KEYS):
        to = (token - block_start) * head_dim * 4
        place = _place(keys, table, token, page_size, page_floats, head_dim) + head_bytes
        transpose(place, head_dim, _KEYS, key_panels + to, _KEYS, head_dim)
        num_keys = min(_KEYS, block_end - token)  # the values after them may never have been written
        place = _place(values, table, token, page_size, page_floats, head_dim) + head_bytes
        _copy(place, value_lines + to, num_keys * head_dim)


@inlined
def _multiply(x, x_row, inputs, weight, panel_floats, line_floats, num_panels, continued, out, out_row):  # type: ignore[no-untyped-def]
    """Multiply six rows of x with adjacent panels: as many panels at a time as registers can take, and then fewer."""
    panel = 0
    while panel + _PANELS <= num_panels:
        multiply_tile(
            _ROWS, _ROWS, _PANELS, continued, 0, _ROWS, weight + panel * panel_floats * 4, panel_floats, line_floats, x,
            x_row, inputs, out + panel * 64, out_row, 0,
        )  # fmt: skip
        panel += _PANELS
    if _PANELS > 2 and panel + 2 <= num_panels:
        multiply_tile(
            _ROWS, _ROWS, 2, continued, 0, _ROWS, weight + panel * panel_floats * 4, panel_floats, line_floats, x,
            x_row, inputs, out + panel * 64, out_row, 0,
        )  # fmt: skip
        panel += 2
    if _PANELS > 1 and panel < num_panels:
        multiply_tile(
            _ROWS, _ROWS, 1, continued, 0, _ROWS, weight + panel * panel_floats * 4, panel_floats, line_floats, x,
            x_row, inputs, out + panel * 64, out_row, 0,
        )  # fmt: skip


@inlined
def _attend_six(  # type: ignore[no-untyped-def]
    query, row_step, count, key_panels, value_lines, end, window, block_start, block_end, head_dim, value_dim, scaling,
    softcap, scores, padded, states, sums,
):  # fmt: skip
    """Add a block of keys [block_start, block_end) to the sums of up to six rows of one query head.

    Args:
        query: the first row's query. The next one is row_step float32 after it.
        count: number of rows.
        end: the first row sees the keys before `end`, and each further row sees one more.
        scores: memory for six rows of BLOCK_KEYS scores.
        padded: memory for six queries, used if there are fewer rows.
    """
    num_keys = min(block_end, end + count - 1) - block_start
    if num_keys <= 0 or (window and block_end <= end - window):
        return
    num_panels = (num_keys + _KEYS - 1) // _KEYS
    if count < _ROWS:
        for step in range(_ROWS):  # a row that does not exist is like the last one
            _copy(query + min(step, count - 1) * row_step * 4, padded + step * head_dim * 4, head_dim)
        query, row_step = padded, head_dim
    _multiply(query, row_step, head_dim, key_panels, _KEYS * head_dim, _KEYS, num_panels, 0, scores, BLOCK_KEYS)
    for step in range(count):
        low, high = max(end + step - window - block_start, 0) if window else 0, min(end + step, block_end) - block_start
        _weigh(
            scores + step * BLOCK_KEYS * 4, low, high, num_panels * _KEYS, scaling, softcap, states + step * 8,
            sums + step * value_dim * 4, value_dim,
        )  # fmt: skip
    _multiply(scores, BLOCK_KEYS, num_keys, value_lines, 16, head_dim, value_dim // 16, 1, sums, value_dim)


@inlined
def _attend_rows(  # type: ignore[no-untyped-def]
    query, row_step, head_step, keys, values, num_kv_heads, group, head_dim, value_dim, page_size, count, table, end,
    window, scaling, softcap, sinks, scratch, out,
):  # fmt: skip
    """Compute `count` rows. The first one sees the keys before `end`."""
    height = (count + _ROWS - 1) // _ROWS * _ROWS
    key_panels, value_lines = scratch, scratch + BLOCK_KEYS * head_dim * 4
    scores = value_lines + BLOCK_KEYS * head_dim * 4
    padded = scores + _ROWS * BLOCK_KEYS * 4
    states = padded + _ROWS * head_dim * 4
    sums = states + group * height * 8
    first, all_end = max(end - window, 0) if window else 0, end + count - 1
    for kv_head in range(num_kv_heads):
        for at in range(group * height):
            sink = load_float(sinks, kv_head * group + at // height)
            _begin(states + at * 8, sums + at * value_dim * 4, value_dim, sink)
        for block in range(first // BLOCK_KEYS * BLOCK_KEYS, all_end, BLOCK_KEYS):
            block_start, block_end = max(block, first // _KEYS * _KEYS), min(block + BLOCK_KEYS, all_end)
            _lay_out(
                keys, values, table, kv_head, block_start, block_end, num_kv_heads, head_dim, page_size, key_panels,
                value_lines,
            )  # fmt: skip
            for at in range(0, group * height, _ROWS):
                head, row = kv_head * group + at // height, at % height
                _attend_six(
                    query + (row * row_step + head * head_step) * 4, row_step, min(_ROWS, count - row), key_panels,
                    value_lines, end + row, window, block_start, block_end, head_dim, value_dim, scaling, softcap,
                    scores, padded, states + at * 8, sums + at * value_dim * 4,
                )  # fmt: skip
        for at in range(group * height):
            head, row = kv_head * group + at // height, at % height
            if row < count:
                to = out + (row * num_kv_heads * group + head) * value_dim * 4
                _end(states + at * 8, sums + at * value_dim * 4, value_dim, to)


@compiled(fastmath=False)
def attend(  # type: ignore[no-untyped-def]
    query, row_step, head_step, keys, values, num_kv_heads, group, head_dim, value_dim, page_size, places, counts,
    pages, tables, ends, window, scaling, softcap, sinks, scratch, out, begin, stop,
):  # fmt: skip
    """Compute tiles [begin, stop). Tile t is rows [places[t], places[t] + counts[t]) of the microbatch.

    Arrays are given by address, and integer arrays are int64.

    Args:
        query: (T, H, D) float32, with rows row_step and heads head_step elements apart.
        keys: keys of one layer, (num_pages, num_kv_heads, page_size, D) float32.
        values: like keys. Of each token, the first value_dim channels are its value. In latent attention they are the
            keys themselves.
        group: number of query heads that share a KV head.
        head_dim: D, a multiple of 16. So are value_dim and page_size.
        pages: page ids of all tiles. Those of tile t start at index tables[t].
        ends: the first row of tile t sees the keys before ends[t], and each further row sees one more.
        window: most keys that a row sees, the last ones; 0 for all.
        scaling: factor on the products of queries and keys.
        softcap: soft cap of the scores; 0 for none.
        sinks: (H,) float32, -inf for none.
        scratch: memory for as many float32 values as `scratch_floats` returns for the largest tile.
        out: (T, H, value_dim), contiguous.
    """
    out_step = num_kv_heads * group * value_dim
    for tile in range(begin, stop):
        place, count, end = load_index(places, tile), load_index(counts, tile), load_index(ends, tile)
        table = pages + load_index(tables, tile) * 8
        asked, to = query + place * row_step * 4, out + place * out_step * 4
        if count > _FEW_ROWS:
            _attend_rows(
                asked, row_step, head_step, keys, values, num_kv_heads, group, head_dim, value_dim, page_size, count,
                table, end, window, scaling, softcap, sinks, scratch, to,
            )  # fmt: skip
        else:
            for row in range(count):
                _attend_row(
                    asked + row * row_step * 4, head_step, keys, values, num_kv_heads, group, head_dim, value_dim,
                    page_size, table, end + row, window, scaling, softcap, sinks, scratch, to + row * out_step * 4,
                )  # fmt: skip
