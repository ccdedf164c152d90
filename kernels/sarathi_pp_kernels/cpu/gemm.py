"""The matrix product (GEMM) of linear layers in bfloat16 on CPU: packed weights, one kernel for any number of rows.

    weight (N, K)  ->  packed: N / 16 panels of K / 2 lines (simd/), read front to back in every call

A panel is 16 outputs of a weight, as in BLIS (Van Zee and van de Geijn 2015). A tile is a group of rows of x. Rows are
first copied into tiles, in which the same pair of all rows is next to each other. Then every panel is multiplied with
every tile. Sums stay in registers over all of K, x stays in the second-level cache, and each panel is read from memory
once. There are two kinds of tiles. Both sum up a row in the same order, so neither the kind nor the other rows change a
bit of it. (With oneDNN, the number of rows does.)

    high    up to 28 rows by one panel: with few rows, a product takes little more than the reading of the weight, so
            all rows are computed while a panel is read once, and lines are prefetched well ahead
    wide    up to 12 rows by two panels: fewer loads for each product

A panel comes from memory once, for its first tile. While the other tiles are multiplied with it, nothing would be read.
So several tiles share the prefetching of the next panel, and each takes a part. On a Zen 4 with six layers of the 298M
model, 16 rows take 14.3 ms against 16.2 ms without this. 32 rows take 26.3 ms against 27.4 ms (least of six alternating
runs of both). Memory alone takes 9.3 ms.

A lone tile of up to eight rows waits only for memory. It prefetches lines to the second-level cache, which can have
more of them under way than the first. On a Zen 4 with eight layers of the 254M model, 4 rows take 9.3 ms against 12.8
ms with high tiles. They take 10.0 ms against 10.8 ms with wide tiles. 8 rows take 10.6 ms against 11.5 ms (least of 16
alternating runs of both). If computing takes as long as reading, this gains nothing or costs 3 %.

The processor and its memory decide up to how many rows high tiles are the faster ones: 112 on one Zen 5, 4 or none on
another, and 4 on a Zen 4. On that Zen 4, high tiles of 12 to 112 rows take 10 to 30 % longer than wide ones. So this
number, most_high_rows, is measured at the start (packed_linear.py).

Heights come in steps of two, so that at most one row is computed for nothing. With steps of four, 9 and 10 rows took 15
% longer, and 14 and 18 rows took 8 and 9 % longer (Zen 5, wide tiles, eight layers of the 254M model).

Measured on one core of a Zen 5, 1024 -> 5632, with the time of oneDNN's packed product in parentheses: 4 rows 276 us
(359), 8 rows 294 (450), 16 rows 440 (629), 32 rows 843 (1013), 256 rows 498 GFLOP/s (494). On a Zen 4, 1024 -> 7424: 4
rows 0.71 ms (1.50), 16 rows 1.40 (1.64), 32 rows 2.36 (2.62), 64 rows 4.5 (4.8), 256 rows 227 GFLOP/s (218).
"""

from __future__ import annotations

from sarathi_pp_kernels.cpu.simd.compile import compiled, inlined
from sarathi_pp_kernels.cpu.simd.products import dot_tile
from sarathi_pp_kernels.cpu.simd.transpose import transpose

ROW_STEP = 2
# Bytes ahead at which lines are prefetched if there is only one tile. Then memory takes longer than the products.
_HIGH_AHEAD, _WIDE_AHEAD = 16384, 4096


def padded_rows(num_rows: int) -> int:
    """Return the number of rows that `multiply` writes: num_rows, rounded up, because the last tile is padded."""
    return -(-num_rows // ROW_STEP) * ROW_STEP


def packed_shape(outputs: int, inputs: int) -> tuple[int, int, int]:
    """Return the shape of a packed weight, int32: (panels of 16 outputs, pairs of inputs, outputs of a panel)."""
    return outputs // 16, inputs // 2, 16


@inlined
def _high_tile(rows, weight, x, pairs, begin, out, outputs, ahead, ahead_step):  # type: ignore[no-untyped-def]  # noqa: C901
    """Multiply up to 28 rows with one panel.

    Registers are assigned at compile time, so each height has its own call.
    """
    if rows == 2:
        dot_tile(2, 1, 2, 1, weight, 0, x, 1, 2, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 4:
        dot_tile(4, 1, 2, 1, weight, 0, x, 1, 4, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 6:
        dot_tile(6, 1, 2, 1, weight, 0, x, 1, 6, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 8:
        dot_tile(8, 1, 2, 1, weight, 0, x, 1, 8, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 10:
        dot_tile(10, 1, 1, 1, weight, 0, x, 1, 10, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 12:
        dot_tile(12, 1, 1, 1, weight, 0, x, 1, 12, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 14:
        dot_tile(14, 1, 1, 1, weight, 0, x, 1, 14, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 16:
        dot_tile(16, 1, 1, 1, weight, 0, x, 1, 16, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 18:
        dot_tile(18, 1, 1, 1, weight, 0, x, 1, 18, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 20:
        dot_tile(20, 1, 1, 1, weight, 0, x, 1, 20, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 22:
        dot_tile(22, 1, 1, 1, weight, 0, x, 1, 22, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 24:
        dot_tile(24, 1, 1, 1, weight, 0, x, 1, 24, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 26:
        dot_tile(26, 1, 1, 1, weight, 0, x, 1, 26, pairs, begin, out, outputs, ahead, ahead_step)
    else:
        dot_tile(28, 1, 1, 1, weight, 0, x, 1, 28, pairs, begin, out, outputs, ahead, ahead_step)


@inlined
def _wide_tile(rows, alone, weight, x, pairs, begin, out, outputs, ahead, ahead_step):  # type: ignore[no-untyped-def]
    """Multiply up to 12 rows with two panels."""
    if rows == 12:
        dot_tile(12, 2, 1, 1, weight, pairs * 16, x, 1, 12, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 10:
        dot_tile(10, 2, 1, 1, weight, pairs * 16, x, 1, 10, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 8 and alone:
        dot_tile(8, 2, 2, 1, weight, pairs * 16, x, 1, 8, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 6 and alone:
        dot_tile(6, 2, 2, 1, weight, pairs * 16, x, 1, 6, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 4 and alone:
        dot_tile(4, 2, 2, 1, weight, pairs * 16, x, 1, 4, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 2 and alone:
        dot_tile(2, 2, 2, 1, weight, pairs * 16, x, 1, 2, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 8:
        dot_tile(8, 2, 1, 1, weight, pairs * 16, x, 1, 8, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 6:
        dot_tile(6, 2, 1, 1, weight, pairs * 16, x, 1, 6, pairs, begin, out, outputs, ahead, ahead_step)
    elif rows == 4:
        dot_tile(4, 2, 1, 1, weight, pairs * 16, x, 1, 4, pairs, begin, out, outputs, ahead, ahead_step)
    else:
        dot_tile(2, 2, 1, 1, weight, pairs * 16, x, 1, 2, pairs, begin, out, outputs, ahead, ahead_step)


@inlined
def _in_steps(rows):  # type: ignore[no-untyped-def]
    return (rows + ROW_STEP - 1) // ROW_STEP * ROW_STEP


@inlined
def _height(num_rows, high):  # type: ignore[no-untyped-def]
    """Return the number of rows per tile, for as few tiles as possible of similar height."""
    most = 28 if high else 12
    count = (num_rows + most - 1) // most
    return _in_steps((num_rows + count - 1) // count)


@compiled()
def lay_out(x, tiles, num_rows, pairs, high):  # type: ignore[no-untyped-def]
    """Copy x (num_rows, 2 * pairs), contiguous bfloat16, into high or wide tiles.

    Args:
        tiles: address of memory for padded_rows(num_rows) rows.
        pairs: number of pairs of inputs.
        high: make high tiles; otherwise wide ones.
    """
    height = _height(num_rows, high)
    for row in range(0, num_rows, height):
        rows = min(height, _in_steps(num_rows - row))
        transpose(x + row * pairs * 4, pairs, num_rows - row, tiles + row * pairs * 4, rows, pairs)


@compiled()
def multiply(tiles, packed, begin, out, num_rows, pairs, first, end, outputs, high):  # type: ignore[no-untyped-def]
    """Compute out[:, 16 * first : 16 * end] = x @ weight.T + begin. Arrays are contiguous and given by address.

    Args:
        tiles: x, as `lay_out` has written it with the same `high`.
        packed: the whole weight, see `packed_shape`.
        begin: (outputs,) float32, with which the sums begin: the bias.
        out: (padded_rows(num_rows), outputs) bfloat16.
        pairs: number of pairs of inputs.
        first: index of the first panel of outputs to compute. `end` is the index after the last one.
    """
    height, step = _height(num_rows, high), 1 if high else 2
    num_tiles = (num_rows + height - 1) // height
    for panel in range(first, end, step):
        weight, start, to = packed + panel * pairs * 64, begin + panel * 64, out + panel * 32
        for tile in range(num_tiles):
            row = tile * height
            rows = min(height, _in_steps(num_rows - row))
            there, here = tiles + row * pairs * 4, to + row * outputs * 2
            if num_tiles == 1:
                ahead, ahead_step = weight + (_HIGH_AHEAD if high else _WIDE_AHEAD), 64
            else:
                # All tiles together prefetch the next panels, so that memory is read all the time.
                ahead, ahead_step = weight + (step * pairs + tile * pairs // num_tiles) * 64, -(-64 // num_tiles)
            if high or panel + 1 == end:
                _high_tile(rows, weight, there, pairs, start, here, outputs, ahead, ahead_step)
            else:
                _wide_tile(rows, num_tiles == 1, weight, there, pairs, start, here, outputs, ahead, ahead_step)
