"""The matrix product (GEMM) of linear layers in float32 on CPU: packed weights, one kernel for any number of rows.

    weight (N, K)  ->  packed: panels of 16 outputs, K lines of float32 or K / 2 lines of bfloat16 pairs (simd/)

It works as gemm.py does: rows are copied into tiles, and every panel is multiplied with every tile. Each sum is over
ascending k in one register. So the bits of a row do not depend on the other rows, the tiles or the threads. A weight
whose values all are bfloat16 is stored as bfloat16. Its values are widened in registers, so the results are the same.

A line takes one register with AVX512, and two with AVX2. A tile fills the registers: 12 rows by two panels with AVX512
(24 of 32 registers), and 6 rows by one panel with AVX2 (12 of 16).

Measured on one thread of an Ice Lake at 2.8 GHz, 1024 -> 5632, with the times of torch's product (MKL) in parentheses.
With AVX512: 4 rows 1.72 ms (3.16), and 0.79 with a weight of bfloat16; 16 rows 1.88 (3.49); 256 rows 139 GFLOP/s (140),
and 149 with bfloat16. With AVX2: 4 rows 1.89 ms (3.51), and 1.10; 256 rows 92 GFLOP/s (84). (Least of 15 to 40
alternating calls; other programs were running.)
"""

from __future__ import annotations

from typing import Any

from sarathi_pp_kernels.cpu.simd.compile import compiled, inlined
from sarathi_pp_kernels.cpu.simd.memory import load_word, store_word
from sarathi_pp_kernels.cpu.simd.products import float_tile
from sarathi_pp_kernels.cpu.simd.target import target
from sarathi_pp_kernels.cpu.simd.transpose import transpose

ROW_STEP = 2
# Bytes ahead at which lines are prefetched if there is only one tile. Then memory takes longer than the products.
_AHEAD = 4096
# Number of panels of a tile, and its most rows: their sums take three quarters of the registers.
PANELS = 2 if target().lanes == 16 else 1
_MOST_ROWS = target().most_rows(target().num_registers * 3 // 4, PANELS)


def has_float_gemm() -> bool:
    """Return whether the processor that numba compiles for has the instructions."""
    return target().lanes > 0


def padded_rows(num_rows: int) -> int:
    """Return the number of rows that `multiply` writes: num_rows, rounded up, because the last tile is padded."""
    return -(-num_rows // ROW_STEP) * ROW_STEP


@inlined
def _in_steps(rows):  # type: ignore[no-untyped-def]
    return (rows + ROW_STEP - 1) // ROW_STEP * ROW_STEP


@inlined
def _height(num_rows):  # type: ignore[no-untyped-def]
    """Return the number of rows per tile, for as few tiles as possible of similar height."""
    count = (num_rows + _MOST_ROWS - 1) // _MOST_ROWS
    return _in_steps((num_rows + count - 1) // count)


@compiled()
def lay_out(x, tiles, num_rows, inputs):  # type: ignore[no-untyped-def]
    """Copy x (num_rows, inputs), contiguous float32, into tiles.

    Args:
        tiles: address of memory for padded_rows(num_rows) rows.
    """
    height = _height(num_rows)
    for row in range(0, num_rows, height):
        rows = min(height, _in_steps(num_rows - row))
        transpose(x + row * inputs * 4, inputs, num_rows - row, tiles + row * inputs * 4, rows, inputs)


def _tile_of(panels: int, pairs: int) -> Any:
    """Return a function that multiplies a tile. Registers are assigned at compile time, so each height has a call."""

    @inlined
    def tile(rows, weight, lines, x, begin, out, outputs, ahead, ahead_step):  # type: ignore[no-untyped-def]
        if rows == 2:
            float_tile(2, panels, pairs, weight, lines * 16, x, 2, lines, begin, out, outputs, ahead, ahead_step)
        elif rows == 4:
            float_tile(4, panels, pairs, weight, lines * 16, x, 4, lines, begin, out, outputs, ahead, ahead_step)
        elif rows == 6:
            float_tile(6, panels, pairs, weight, lines * 16, x, 6, lines, begin, out, outputs, ahead, ahead_step)
        elif _MOST_ROWS > 6:
            if rows == 8:
                float_tile(8, panels, pairs, weight, lines * 16, x, 8, lines, begin, out, outputs, ahead, ahead_step)
            elif rows == 10:
                float_tile(10, panels, pairs, weight, lines * 16, x, 10, lines, begin, out, outputs, ahead, ahead_step)
            else:
                float_tile(12, panels, pairs, weight, lines * 16, x, 12, lines, begin, out, outputs, ahead, ahead_step)

    return tile


def _multiply_of(pairs: int) -> Any:
    tile, narrow_tile = _tile_of(PANELS, pairs), _tile_of(1, pairs)

    @compiled()
    def multiply(tiles, packed, begin, out, num_rows, lines, inputs, first, end, outputs):  # type: ignore[no-untyped-def]
        height = _height(num_rows)
        num_tiles = (num_rows + height - 1) // height
        for panel in range(first, end, PANELS):
            weight, start, to = packed + panel * lines * 64, begin + panel * 64, out + panel * 64
            for at in range(num_tiles):
                row = at * height
                rows = min(height, _in_steps(num_rows - row))
                there, here = tiles + row * inputs * 4, to + row * outputs * 4
                if num_tiles == 1:
                    ahead, ahead_step = weight + _AHEAD, 64
                else:
                    # All tiles together prefetch the next panels, so that memory is read all the time.
                    ahead, ahead_step = weight + (PANELS * lines + at * lines // num_tiles) * 64, -(-64 // num_tiles)
                if panel + PANELS <= end:
                    tile(rows, weight, lines, there, start, here, outputs, ahead, ahead_step)
                else:
                    narrow_tile(rows, weight, lines, there, start, here, outputs, ahead, ahead_step)

    return multiply


_tile, _narrow_tile = _tile_of(PANELS, 0), _tile_of(1, 0)


@inlined
def _copy_panel(weight, outputs, first, to, inputs):  # type: ignore[no-untyped-def]
    """Pack the outputs [first, first + 16) of a weight (inputs, outputs). Those that are missing become 0."""
    there = min(16, outputs - first)
    for line in range(inputs):
        source = weight + (line * outputs + first) * 4
        if there == 16:
            for lane in range(16):
                store_word(to, line * 16 + lane, load_word(source, lane))
        else:
            for lane in range(16):
                store_word(to, line * 16 + lane, load_word(source, lane) if lane < there else 0)


@compiled()
def multiply_unpacked(  # type: ignore[no-untyped-def]
    tiles, weight, in_columns, rows_of_weight, begin, out, num_rows, inputs, first, end, outputs, panels
):
    """Compute what multiply_float computes, with the same bits, for a weight that is not packed.

    Each panel is packed before it is multiplied. That costs time, and no other memory than one panel's.

    Args:
        weight: (rows_of_weight, inputs) float32. Outputs without a row are 0.
        in_columns: the weight is stored as its transpose, (inputs, rows_of_weight).
        panels: address of memory for PANELS panels of `inputs` lines.
    """
    height = _height(num_rows)
    num_tiles = (num_rows + height - 1) // height
    for panel in range(first, end, PANELS):
        count = min(PANELS, end - panel)
        for one in range(count):
            at = (panel + one) * 16
            to = panels + one * inputs * 64
            if in_columns:
                _copy_panel(weight, rows_of_weight, at, to, inputs)
            else:
                transpose(weight + at * inputs * 4, inputs, rows_of_weight - at, to, 16, inputs)
        start, to = begin + panel * 64, out + panel * 64
        for at in range(num_tiles):
            row = at * height
            rows = min(height, _in_steps(num_rows - row))
            there, here = tiles + row * inputs * 4, to + row * outputs * 4
            if count == PANELS:
                _tile(rows, panels, inputs, there, start, here, outputs, panels, 64)
            else:
                _narrow_tile(rows, panels, inputs, there, start, here, outputs, panels, 64)


# multiply(tiles, packed, begin, out, num_rows, lines, inputs, first, end, outputs) computes the outputs
# [16 * first, 16 * end) of x @ weight.T + begin. Arrays are contiguous and given by address: tiles as `lay_out` writes
# them, the whole packed weight of (panels, lines, 16) words, begin (outputs,) and out (padded_rows, outputs) float32.
multiply_float = _multiply_of(0)
multiply_bf16 = _multiply_of(1)
