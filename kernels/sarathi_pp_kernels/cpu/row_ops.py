"""Passes over rows in bfloat16 on CPU: a model's steps between its products.

One pass replaces several operations, each of which would read and write memory. Values are float32 within a step and
are rounded to bfloat16 at the points at which the model's own operations round. Arrays are given by address, and are
bfloat16 unless a docstring names another type. Widths are multiples of 16. `scratch` is memory for one row of float32.
"""

from __future__ import annotations

import numpy as np

from sarathi_pp_kernels.cpu.simd.compile import compiled, inlined
from sarathi_pp_kernels.cpu.simd.gate import silu_multiply_lines
from sarathi_pp_kernels.cpu.simd.memory import (
    load_bf16,
    load_index,
    load_word,
    round_lines,
    store_float,
    store_word,
)
from sarathi_pp_kernels.cpu.simd.rotary import rotate_lines

_FLOAT = np.float32


@compiled()
def silu_multiply(both, out, first, end, width):  # type: ignore[no-untyped-def]
    """Compute out[r] = silu(both[r, :width]) * both[r, width:] for the rows [first, end)."""
    for row in range(first, end):
        gate = both + row * width * 4
        silu_multiply_lines(gate, gate + width * 2, out + row * width * 2, width // 16)


@inlined
def _normalise(source, weight, to, width, epsilon, scratch):  # type: ignore[no-untyped-def]
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


@compiled()
def rms_norm(x, weight, out, first, end, width, epsilon, scratch):  # type: ignore[no-untyped-def]
    """Compute out[r] = weight * (x[r] / sqrt(mean(x[r] * x[r]) + epsilon)) for the rows [first, end)."""
    for row in range(first, end):
        _normalise(x + row * width * 2, weight, out + row * width * 2, width, epsilon, scratch)


@compiled()
def add_rms_norm(x, added, weight, out, first, end, width, epsilon, scratch):  # type: ignore[no-untyped-def]
    """Compute added[r] += x[r] and then out[r] = rms_norm of that sum, for the rows [first, end)."""
    for row in range(first, end):
        source, total = x + row * width * 2, added + row * width * 2
        for at in range(width):
            store_float(scratch, at, load_bf16(source, at) + load_bf16(total, at))
        round_lines(scratch, total, width // 16)
        _normalise(total, weight, out + row * width * 2, width, epsilon, scratch)


@compiled()
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
    size = head_dim * 2
    for row in range(first, end):
        at = rows + row * (heads + 2 * kv_heads) * size
        row_cos, row_sin = cos + row * size, sin + row * size
        for _ in range(heads):
            if query_norm:
                _normalise(at, query_norm, at, head_dim, epsilon, scratch)
            rotate_lines(at, at, row_cos, row_sin, head_dim // 32)
            at += size
        begin = load_index(pages, row) * kv_heads * page_size + load_index(offsets, row)
        for head in range(kv_heads):
            place = (begin + head * page_size) * size
            if key_norm:
                _normalise(at, key_norm, at, head_dim, epsilon, scratch)
            rotate_lines(at, keys + place, row_cos, row_sin, head_dim // 32)
            value, to = at + kv_heads * size, values + place
            for word in range(head_dim // 2):
                store_word(to, word, load_word(value, word))
            at += size
