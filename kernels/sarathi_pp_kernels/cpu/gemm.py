"""The matrix products (GEMM) of linear layers on CPU: packed weights, and one kernel for any number of rows.

    weight (N, K)  ->  packed: N / 16 panels of lines (simd/), read front to back in every call

    kernel                 x           line of a weight                               sums       out
    multiply_bf16          bfloat16    16 pairs of bfloat16                           float32    bfloat16
    multiply_float         float32     16 float32                                     float32    float32
    multiply_float_bf16    float32     16 pairs of bfloat16, widened in registers     float32    float32
    multiply_float_fp16    float32     16 pairs of float16, widened in registers      float32    float32

A panel is 16 outputs of a weight, as in BLIS (Van Zee and van de Geijn 2015). A tile is a group of rows of x. Rows are
first copied into tiles, in which the same word of all rows is next to each other: a float32, or a pair of bfloat16.
Then every panel is multiplied with every tile. Sums stay in registers, x stays in the second-level cache, and each
panel is read from memory once.

In bfloat16, each sum is in one register over all of K. In float32, it is over blocks of 512 k, each summed in one
register. That is more exact than one sum over a large K. In both, the order is that of ascending k. So the bits of a
row depend neither on the other rows, nor on the tiles or the threads. (With oneDNN and MKL, they do.) In float32 they
do not depend on the processor either.

There are two kinds of tiles. Their heights follow from the number of registers (simd/target.py):

                            AVX512                    AVX2                    AArch64
    high (only bfloat16)    28 rows by one panel      -                       6 rows by one panel
    wide                    12 rows by two panels     6 rows by one panel     4 rows by one panel

With few rows, a product takes little more than the reading of the weight. So in high tiles, all rows are computed while
a panel is read once. Wide tiles need fewer loads for each product.

A panel comes from memory once, for its first tile. While the other tiles are multiplied with it, nothing would be read.
So while a panel is multiplied, the next one is prefetched to the second-level cache, and each tile takes a part of it.
That cache can have more lines under way than the first one, and a panel does not fit into the first one. On a Zen 4
with eight layers of the 254M model, in ms (least of seven calls), with the former prefetching in parentheses: lone
tiles read 4 or 16 kB ahead, and most others prefetched to the first-level cache.

    rows                 4             6             8             12            16            24
    bfloat16             7.7 (8.3)     7.7 (8.8)     8.1 (9.1)     12.5 (15.2)   14.8 (14.6)   21.1 (21.4)
    float32, AVX2        -             13.5 (18.5)   17.0 (31.2)   22.1 (31.6)   30.0 (36.6)   43.2 (43.6)
    float32, AVX512      -             15.0 (16.9)   15.3 (17.6)   21.4 (22.6)   28.2 (30.0)   41.3 (43.1)

It is not always the faster way: in bfloat16 with 4,096 inputs and 16,384 outputs, 6 rows take 5.8 ms against 4.9, and 8
rows 5.0 ms against 5.5.

Lone tiles still read ahead of their own lines in two cases. Up to four rows wait only for memory. With float32 weights
they take 15.9 ms against 17.5 ms (AVX2), and with bfloat16 weights and AVX512 about a tenth less. And a thread with few
panels would have no lines prefetched in the first of them: with 8 panels of 4,096 inputs, a lone tile of 6 or 8 rows
would take 1.1 to 1.3 times as long.

The processor and its memory decide up to how many rows high tiles are the faster ones: 112 on one Zen 5, 4 or none on
another, and 4 on a Zen 4. On that Zen 4, high tiles of 12 to 112 rows take 10 to 30 % longer than wide ones. So this
number, most_high_rows, is measured at the start (packed_linear.py).

Heights come in steps of two, so that at most one row is computed for nothing. With steps of four, 9 and 10 rows took 15
% longer, and 14 and 18 rows took 8 and 9 % longer (Zen 5, wide tiles, eight layers of the 254M model).

multiply_bf16 on one core of a Zen 5, 1024 -> 5632, with the time of oneDNN's packed product in parentheses: 4 rows 276
us (359), 8 rows 294 (450), 16 rows 440 (629), 32 rows 843 (1013), 256 rows 498 GFLOP/s (494). On a Zen 4, 1024 -> 7424:
4 rows 0.71 ms (1.50), 16 rows 1.40 (1.64), 32 rows 2.36 (2.62), 64 rows 4.5 (4.8), 256 rows 227 GFLOP/s (218).

multiply_float on one thread of an Ice Lake at 2.8 GHz, 1024 -> 5632, with the times of torch's product (MKL) in
parentheses. With AVX512: 4 rows 1.72 ms (3.16), and 0.79 with a weight of bfloat16; 16 rows 1.88 (3.49); 256 rows 139
GFLOP/s (140), and 149 with bfloat16. With AVX2: 4 rows 1.89 ms (3.51), and 1.10; 256 rows 92 GFLOP/s (84). (Least of 15
to 40 alternating calls; other programs were running.)
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sarathi_pp_kernels.cpu.simd.compile import compiled, inlined
from sarathi_pp_kernels.cpu.simd.memory import load_half, load_word, store_word
from sarathi_pp_kernels.cpu.simd.products import BF16, FLOAT32, FLOAT32_BF16, FLOAT32_FP16, NARROW, multiply_rows
from sarathi_pp_kernels.cpu.simd.target import target
from sarathi_pp_kernels.cpu.simd.transpose import transpose

ROW_STEP = 2
# Number of panels of a wide tile, and the most rows of wide and of high tiles. The sums of a high tile take all
# registers but four.
PANELS = 2 if target().lanes == 16 else 1
_WIDE_ROWS = target().most_rows(target().num_sums, PANELS)
_HIGH_ROWS = target().most_rows(target().num_registers - 4, 1)
# With float32 x, a lone tile of up to this many rows prefetches its own lines to the first-level cache.
_NEAR_ROWS = 4
# Bytes ahead at which a tile prefetches its own lines. If a thread has fewer steps than this, all its lone tiles do so.
_OWN_AHEAD, _FEW_STEPS = 4096, 16
# In float32, inputs whose products are summed in one register.
_BLOCK = 512
_HALF_BITS = np.uint32(16)


def padded_rows(num_rows: int) -> int:
    """Return the number of rows that the kernels write: num_rows, rounded up, because the last tile is padded."""
    return -(-num_rows // ROW_STEP) * ROW_STEP


def packed_shape(outputs: int, inputs: int) -> tuple[int, int, int]:
    """Return the shape of a packed weight, int32: (panels of 16 outputs, pairs of inputs, outputs of a panel)."""
    return outputs // 16, inputs // 2, 16


@inlined
def in_steps(rows):  # type: ignore[no-untyped-def]
    return (rows + ROW_STEP - 1) // ROW_STEP * ROW_STEP


@inlined
def tile_height(num_rows, high):  # type: ignore[no-untyped-def]
    """Return the number of rows per tile, for as few tiles as possible of similar height."""
    most = _HIGH_ROWS if high else _WIDE_ROWS
    count = (num_rows + most - 1) // most
    return in_steps((num_rows + count - 1) // count)


@compiled()
def lay_out(x, tiles, num_rows, words, high, thread, num_threads):  # type: ignore[no-untyped-def]
    """Copy x (num_rows, words), contiguous, into high or wide tiles. A word is a float32 or a pair of bfloat16.

    Args:
        tiles: address of memory for padded_rows(num_rows) rows.
        high: make high tiles; otherwise wide ones.
        thread: index of the calling thread, from 0. Each of the num_threads threads makes the tiles of its turn.
    """
    height = tile_height(num_rows, high)
    for row in range(thread * height, num_rows, num_threads * height):
        rows = min(height, in_steps(num_rows - row))
        transpose(x + row * words * 4, words, num_rows - row, tiles + row * words * 4, rows, words)


def _tile_of(kind: int, most_rows: int, panels: int, level: int = 2) -> Any:
    """Return a function that multiplies one tile with some panels. See multiply_rows for the arguments."""
    if kind == BF16:

        @inlined
        def whole(rows, weight, x, lines, begin, out, outputs, ahead, ahead_step):  # type: ignore[no-untyped-def]
            multiply_rows(
                kind, most_rows, panels, level, rows, weight, lines * 16, x, lines, begin, 0, out, outputs, ahead,
                ahead_step,
            )  # fmt: skip

        return whole
    x_bytes, block = (8, _BLOCK // 2) if kind in NARROW else (4, _BLOCK)

    @inlined
    def in_blocks(rows, weight, x, lines, begin, out, outputs, ahead, ahead_step):  # type: ignore[no-untyped-def]
        for first in range(0, lines, block):
            added, added_row = (out, outputs) if first else (begin, 0)
            multiply_rows(
                kind, most_rows, panels, level, rows, weight + first * 64, lines * 16, x + first * rows * x_bytes,
                min(block, lines - first), added, added_row, out, outputs, ahead + first * ahead_step, ahead_step,
            )  # fmt: skip

    return in_blocks


@inlined
def _no_tile(rows, weight, x, lines, begin, out, outputs, ahead, ahead_step):  # type: ignore[no-untyped-def]
    """Stand for a tile that a kind of product does not have."""


def multiply_tiles_of(kind: int) -> Any:
    """Return a function that multiplies all tiles with the panels of one tile, for weights of a kind."""
    near_rows = _NEAR_ROWS if kind == FLOAT32 or (kind in NARROW and PANELS > 1) else 0
    x_words, out_bytes = 2 if kind in NARROW else 1, 2 if kind == BF16 else 4
    narrow_tile = _tile_of(kind, _HIGH_ROWS if kind == BF16 else _WIDE_ROWS, 1)
    wide_tile = _tile_of(kind, _WIDE_ROWS, PANELS)
    near_tile = _tile_of(kind, near_rows, PANELS, level=1) if near_rows else _no_tile

    @inlined
    def multiply_tiles(  # type: ignore[no-untyped-def]
        panels, tiles, weight, lines, begin, out, outputs, num_rows, height, following, few
    ):
        """Compute the outputs of `panels` panels, 1 or PANELS, for all rows.

        Args:
            weight: address of the panels, of `lines` lines each.
            begin: address of the first of these outputs' numbers in the bias; `out` likewise in the first row.
            following: address of the next panels, which all tiles prefetch together.
            few: the thread has few panels.
        """
        num_tiles = (num_rows + height - 1) // height
        for tile in range(num_tiles):
            row = tile * height
            rows = min(height, in_steps(num_rows - row))
            x, to = tiles + row * lines * (x_words * 4), out + row * outputs * out_bytes
            ahead, ahead_step = following + tile * lines // num_tiles * 64, -(-64 // num_tiles)
            if num_tiles == 1 and (few or num_rows <= near_rows):
                ahead = weight + _OWN_AHEAD
            if panels == PANELS and num_rows <= near_rows:
                near_tile(rows, weight, x, lines, begin, to, outputs, ahead, ahead_step)
            elif panels < PANELS or PANELS == 1:
                narrow_tile(rows, weight, x, lines, begin, to, outputs, ahead, ahead_step)
            else:
                wide_tile(rows, weight, x, lines, begin, to, outputs, ahead, ahead_step)

    return multiply_tiles


@functools.cache
def multiply_of(kind: int) -> Any:
    """Return the kernel for packed weights of a kind: BF16, FLOAT32, FLOAT32_BF16 or FLOAT32_FP16."""
    multiply_tiles, out_bytes = multiply_tiles_of(kind), 2 if kind == BF16 else 4

    @compiled()
    def multiply(tiles, packed, begin, out, num_rows, lines, first, end, outputs, high):  # type: ignore[no-untyped-def]
        """Compute out[:, 16 * first : 16 * end] = x @ weight.T + begin. Arrays are contiguous and given by address.

        Args:
            tiles: x, as `lay_out` has written it with the same `high`.
            packed: the whole weight, (panels, lines, 16) words.
            begin: (outputs,) float32, the bias. In bfloat16 the sums begin with it. In float32 it is added last.
            out: (padded_rows(num_rows), outputs).
            first: index of the first panel of outputs to compute. `end` is the index after the last one.
            high: the tiles are high. Only bfloat16 has high tiles.
        """
        height, step = tile_height(num_rows, high), 1 if high else PANELS
        few = end - first < _FEW_STEPS * step
        for panel in range(first, end, step):
            weight = packed + panel * lines * 64
            start, to = begin + panel * 64, out + panel * 16 * out_bytes
            following = weight + step * lines * 64
            multiply_tiles(
                min(step, end - panel), tiles, weight, lines, start, to, outputs, num_rows, height, following, few
            )

    return multiply


@inlined
def _copy_words(weight, outputs, first, to, lines):  # type: ignore[no-untyped-def]
    """Pack the outputs [first, first + 16) of a float32 weight (inputs, outputs). Those that are missing become 0."""
    there = min(16, outputs - first)
    for line in range(lines):
        source = weight + (line * outputs + first) * 4
        for lane in range(16):
            store_word(to, line * 16 + lane, load_word(source, lane) if lane < there else 0)


@inlined
def _copy_pairs(weight, outputs, first, to, lines):  # type: ignore[no-untyped-def]
    """Pack outputs as `_copy_words` does, for a weight of 16-bit numbers: a word for every two inputs."""
    there = min(16, outputs - first)
    for line in range(lines):
        source = weight + (2 * line * outputs + first) * 2
        for lane in range(16):
            word = np.uint32(0)
            if lane < there:
                word = np.uint32(load_half(source, lane)) | np.uint32(load_half(source, outputs + lane)) << _HALF_BITS
            store_word(to, line * 16 + lane, word)


def _multiply_unpacked_of(kind: int) -> Any:
    multiply_tiles, copy_panel = multiply_tiles_of(kind), _copy_pairs if kind in NARROW else _copy_words

    @compiled()
    def multiply_unpacked(  # type: ignore[no-untyped-def]
        tiles, weight, in_columns, rows_of_weight, begin, out, num_rows, lines, first, end, outputs, packed
    ):
        """Compute what `multiply` of the same kind does, with the same bits, for a weight that is not packed.

        Each panel is packed before it is multiplied. That costs time, and no other memory than one panel's.

        Args:
            weight: (rows_of_weight, lines) words. Outputs without a row are 0.
            in_columns: the weight is stored as its transpose, (inputs, rows_of_weight).
            packed: address of memory for PANELS panels of `lines` lines.
        """
        height = tile_height(num_rows, False)
        for panel in range(first, end, PANELS):
            panels = min(PANELS, end - panel)
            for one in range(panels):
                at, to = (panel + one) * 16, packed + one * lines * 64
                if in_columns:
                    copy_panel(weight, rows_of_weight, at, to, lines)
                else:
                    transpose(weight + at * lines * 4, lines, rows_of_weight - at, to, 16, lines)
            start, to = begin + panel * 64, out + panel * 64
            # These panels are in the cache already, and the next ones come to the same place.
            multiply_tiles(panels, tiles, packed, lines, start, to, outputs, num_rows, height, packed, True)

    return multiply_unpacked


multiply_bf16, multiply_float, multiply_float_bf16, multiply_float_fp16 = map(
    multiply_of, (BF16, FLOAT32, FLOAT32_BF16, FLOAT32_FP16)
)
multiply_unpacked_float, multiply_unpacked_bf16, multiply_unpacked_fp16 = map(
    _multiply_unpacked_of, (FLOAT32, FLOAT32_BF16, FLOAT32_FP16)
)
