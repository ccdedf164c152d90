"""Passes over rows in bfloat16 or float32 on CPU: a model's steps between its products.

One pass replaces several operations, each of which would read and write memory. Values are float32 within a step. In
bfloat16, which needs AVX512-BF16, they are rounded at the points at which the model's own operations round. In float32,
which needs AVX2, AVX512 or AArch64, every operation is computed as it is written. So all processors give the same bits.

Arrays are given by address, and have the dtype of the kernels unless a docstring names another type. Widths are
multiples of 16. `scratch` is memory for one row of float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sarathi_pp_kernels.cpu.simd.compile import compiled, inlined
from sarathi_pp_kernels.cpu.simd.gate import silu_multiply_lines
from sarathi_pp_kernels.cpu.simd.memory import (
    load_bf16,
    load_float,
    load_index,
    load_word,
    round_lines,
    store_float,
    store_word,
)
from sarathi_pp_kernels.cpu.simd.norm import scale_lines, sum_of_squares
from sarathi_pp_kernels.cpu.simd.rotary import rotate_lines

_FLOAT = np.float32
_WORD_BYTES = 4


class RowOps(NamedTuple):
    """The kernels of one dtype. Their docstrings are below."""

    silu_multiply: Any
    rms_norm: Any
    add_rms_norm: Any
    rotate_and_write: Any


@inlined
def _normalise_bf16(source, weight, to, width, epsilon, scratch):  # type: ignore[no-untyped-def]
    """Compute an RMSNorm of one row: to = weight * (source / sqrt(mean(source * source) + epsilon)).

    `to` may be `source`.
    """
    total = _FLOAT(0)
    for at in range(width):
        value = load_bf16(source, at)
        total += value * value
    inverse = _FLOAT(1) / _FLOAT(np.sqrt(total / _FLOAT(width) + _FLOAT(epsilon)))
    for at in range(width):
        store_float(scratch, at, load_bf16(source, at) * inverse)
    round_lines(scratch, to, width // 16)
    for at in range(width):
        store_float(scratch, at, load_bf16(to, at) * load_bf16(weight, at))
    round_lines(scratch, to, width // 16)


@inlined
def _normalise_float(source, weight, to, width, epsilon, scratch):  # type: ignore[no-untyped-def]
    """Compute what `_normalise_bf16` does, without roundings."""
    mean = sum_of_squares(source, width // 16) / _FLOAT(width)
    inverse = _FLOAT(1) / _FLOAT(np.sqrt(mean + _FLOAT(epsilon)))
    scale_lines(source, inverse, weight, to, width // 16)


@inlined
def _add_bf16(x, added, width, scratch):  # type: ignore[no-untyped-def]
    """Compute added += x for one row."""
    for at in range(width):
        store_float(scratch, at, load_bf16(x, at) + load_bf16(added, at))
    round_lines(scratch, added, width // 16)


@inlined
def _add_float(x, added, width, scratch):  # type: ignore[no-untyped-def]
    for at in range(width):
        store_float(added, at, load_float(x, at) + load_float(added, at))


def _rotate_and_write(size: int, normalise: Any, options: dict[str, Any]) -> Any:
    @compiled(**options)
    def rotate_and_write(  # type: ignore[no-untyped-def]
        rows, heads, kv_heads, head_dim, cos, sin, keys, values, pages, offsets, page_size, first, end, query_norm,
        key_norm, epsilon, scratch,
    ):  # fmt: skip
        """Rotate queries in place, and write rotated keys, and values, to their places in the pages.

        Args:
            rows: (T, heads + 2 * kv_heads, head_dim): query, key and value heads of each row.
            head_dim: number of channels of a head, a multiple of 32.
            cos: (T, head_dim), the cosines of the rotary embedding.
            sin: like cos.
            keys: keys of one layer, (num_pages, kv_heads, page_size, head_dim).
            values: like keys.
            pages: (T,) int64, id of the page to which each row's key and value are written.
            offsets: (T,) int64, index of the row's token within that page.
            first: index of the first row to compute. `end` is the index after the last one.
            query_norm: (head_dim,), weights of an RMSNorm of each head before it is rotated; 0 for none.
            key_norm: like query_norm.
        """
        head_bytes = head_dim * size
        for row in range(first, end):
            at = rows + row * (heads + 2 * kv_heads) * head_bytes
            row_cos, row_sin = cos + row * head_bytes, sin + row * head_bytes
            for _ in range(heads):
                if query_norm:
                    normalise(at, query_norm, at, head_dim, epsilon, scratch)
                rotate_lines(size, at, at, row_cos, row_sin, head_dim // 32)
                at += head_bytes
            begin = load_index(pages, row) * kv_heads * page_size + load_index(offsets, row)
            for head in range(kv_heads):
                place = (begin + head * page_size) * head_bytes
                if key_norm:
                    normalise(at, key_norm, at, head_dim, epsilon, scratch)
                rotate_lines(size, at, keys + place, row_cos, row_sin, head_dim // 32)
                value, to = at + kv_heads * head_bytes, values + place
                for word in range(head_dim // (_WORD_BYTES // size)):
                    store_word(to, word, load_word(value, word))
                at += head_bytes

    return rotate_and_write


def _row_ops(size: int, normalise: Any, add: Any, **options: Any) -> RowOps:
    """Return the kernels for a dtype.

    Args:
        size: bytes of a value, 2 for bfloat16 and 4 for float32.
        normalise: computes an RMSNorm of one row.
        add: adds one row to another.
        options: options of `compiled`.
    """

    @compiled(**options)
    def silu_multiply(both, out, first, end, width):  # type: ignore[no-untyped-def]
        """Compute out[r] = silu(both[r, :width]) * both[r, width:] for the rows [first, end)."""
        for row in range(first, end):
            gate = both + row * width * (2 * size)
            silu_multiply_lines(size, gate, gate + width * size, out + row * width * size, width // 16)

    @compiled(**options)
    def rms_norm(x, weight, out, first, end, width, epsilon, scratch):  # type: ignore[no-untyped-def]
        """Compute out[r] = weight * (x[r] / sqrt(mean(x[r] * x[r]) + epsilon)) for the rows [first, end)."""
        for row in range(first, end):
            normalise(x + row * width * size, weight, out + row * width * size, width, epsilon, scratch)

    @compiled(**options)
    def add_rms_norm(x, added, weight, out, first, end, width, epsilon, scratch):  # type: ignore[no-untyped-def]
        """Compute added[r] += x[r] and then out[r] = rms_norm of that sum, for the rows [first, end)."""
        for row in range(first, end):
            source, total = x + row * width * size, added + row * width * size
            add(source, total, width, scratch)
            normalise(total, weight, out + row * width * size, width, epsilon, scratch)

    return RowOps(silu_multiply, rms_norm, add_rms_norm, _rotate_and_write(size, normalise, options))


BFLOAT16 = _row_ops(2, _normalise_bf16, _add_bf16)
FLOAT32 = _row_ops(4, _normalise_float, _add_float, fastmath=False)
