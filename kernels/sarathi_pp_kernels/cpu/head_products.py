"""The matrix products of attention heads on CPU: each head multiplies its own rows with its own weight.

    x (T, heads, K), weight of each head (N, K)  ->  out (T, heads, N)

These are the products of gemm.py, one after the other for all heads. So the bits of a row depend on nothing but the
row. Weights are packed as there, with all heads below each other. Latent attention needs two of these products per
layer (model/attention/latent.py).
"""

from __future__ import annotations

from typing import Any

from sarathi_pp_kernels.cpu.gemm import PANELS, in_steps, multiply_tiles_of, tile_height
from sarathi_pp_kernels.cpu.simd.compile import compiled
from sarathi_pp_kernels.cpu.simd.products import BF16, FLOAT32, FLOAT32_BF16, FLOAT32_FP16, NARROW
from sarathi_pp_kernels.cpu.simd.transpose import transpose


def _multiply_heads_of(kind: int) -> Any:
    """Return the kernel for packed weights of a kind: BF16, FLOAT32, FLOAT32_BF16 or FLOAT32_FP16."""
    multiply_tiles, out_bytes = multiply_tiles_of(kind), 2 if kind == BF16 else 4
    words_per_line = 2 if kind in NARROW else 1

    @compiled()
    def multiply_heads(  # type: ignore[no-untyped-def]
        x, x_row, x_head, tiles, packed, begin, out, num_rows, lines, panels, num_heads, first, end
    ):
        """Compute out[:, h] = x[:, h] @ weight[h].T for the heads h in [first, end). Arrays are given by address.

        Args:
            x: bfloat16 pairs or float32. Rows are x_row words apart, and heads x_head words.
            tiles: memory for padded_rows(num_rows) rows of one head.
            packed: (num_heads * panels, lines, 16) words.
            begin: (16 * panels,) float32 zeros.
            out: (padded_rows(num_rows), num_heads, 16 * panels).
        """
        height, words, few = tile_height(num_rows, False), lines * words_per_line, panels < 16 * PANELS
        out_row = num_heads * panels * 16
        for head in range(first, end):
            source, weight = x + head * x_head * 4, packed + head * panels * lines * 64
            to = out + head * panels * 16 * out_bytes
            for row in range(0, num_rows, height):
                rows = min(height, in_steps(num_rows - row))
                transpose(source + row * x_row * 4, x_row, num_rows - row, tiles + row * words * 4, rows, words)
            for panel in range(0, panels, PANELS):
                at = weight + panel * lines * 64
                count = min(PANELS, panels - panel)
                multiply_tiles(
                    count, tiles, at, lines, begin, to + panel * 16 * out_bytes, out_row, num_rows, height,
                    at + count * lines * 64, few,
                )  # fmt: skip

    return multiply_heads


MULTIPLY_HEADS = {kind: _multiply_heads_of(kind) for kind in (BF16, FLOAT32, FLOAT32_BF16, FLOAT32_FP16)}
"""The kernels, by the kind of the packed weights. See `_multiply_heads_of`."""
