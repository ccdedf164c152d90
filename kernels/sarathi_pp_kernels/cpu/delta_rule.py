"""The recurrence of a gated delta-net (arXiv 2412.06464): linear attention with a state per value head.

    S = exp(g) * S                  decay, g <= 0
    S = S + k x beta * (v - k S)    replace what S holds at key k by a share beta of value v
    o = q S

The state of a head is (key channels, value channels) float32. Its columns do not depend on each other. It is stored in
blocks of sixteen columns, one after the other, so a block of 128 rows is 8 KB and stays in the first-level cache while
the rows (tokens) of a span are computed one after the other. States are changed in place.

A span that starts at position 0 begins with a state of zeros, and does not read its slot. The rows of a sequence are
computed in the same way whatever spans they are in. So a prompt has the same bits however it was cut, and a decode is
the same computation.

Arrays are given by address. Spans are as in convolution.py.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sarathi_pp_kernels.cpu.simd.compile import compiled, inlined
from sarathi_pp_kernels.cpu.simd.memory import (
    load_bf16,
    load_float,
    load_index,
    store_bf16,
    store_float,
)
from sarathi_pp_kernels.cpu.simd.norm import sum_of_squares
from sarathi_pp_kernels.cpu.simd.state import delta_step, multiply_lines, to_float_lines
from sarathi_pp_kernels.cpu.threads import run_parallel, scratch_of_thread, split_range

_FLOAT = np.float32
# Rows of a span for which keys and queries are prepared at a time: they fit into the second-level cache.
_TILE = 64
# Columns of a block.
COLUMNS = 16
# softplus(x) is x above it, as in torch.
_LINEAR_FROM = _FLOAT(20)
_NORM_EPSILON = _FLOAT(1e-6)


def apply_delta_rule(
    rows: Tensor,
    gates: Tensor,
    rates: Tensor,
    gate_bias: Tensor,
    states: Tensor,
    spans: NDArray[np.int64],
    key_heads: int,
    value_dim: int,
) -> Tensor:
    """Return the (T, value heads, value_dim) outputs of rows, and change the states. Threads divide the heads.

    Args:
        rows: (T, channels) float32 or bfloat16: queries, keys and values of all heads.
        gates: (T, 2 * value heads): logits of beta, then logits of g.
        rates: (value heads,) float32, negative. g = rates * softplus(logit + gate_bias).
        gate_bias: (value heads,) float32.
        states: (num_slots, value heads * value_dim / 16, key_dim, 16) float32.
        key_heads: number of key heads.
        value_dim: channels of a value.
    """
    heads, key_dim, gates = len(rates), states.shape[2], gates.contiguous()
    # The kernel takes addresses, so it would not notice wrong shapes.
    assert rows.shape[1] == 2 * key_heads * key_dim + heads * value_dim and rows.is_contiguous(), rows.shape
    assert gates.shape == (len(rows), 2 * heads) and gates.dtype == rows.dtype and states.is_contiguous()
    assert states.shape[1:] == (heads * value_dim // COLUMNS, key_dim, COLUMNS), states.shape
    out = torch.empty(len(rows), heads, value_dim, dtype=rows.dtype)
    kernel = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}[rows.dtype]

    def compute(piece: range) -> None:
        kernel(
            *(rows.data_ptr(), gates.data_ptr(), rates.data_ptr(), gate_bias.data_ptr()),
            *(spans.ctypes.data, len(spans), states.data_ptr(), key_heads, heads // key_heads, key_dim, value_dim),
            *(piece.start, piece.stop, scratch_of_thread(_TILE * (2 * key_dim + 2)).data_ptr(), out.data_ptr()),
        )

    run_parallel([partial(compute, piece) for piece in split_range(key_heads)])
    return out


@inlined
def softplus(x):  # type: ignore[no-untyped-def]
    """Return log(1 + exp(x)) of float32 x."""
    return x if x > _LINEAR_FROM else _FLOAT(math.log1p(math.exp(float(x))))


@inlined
def load_value(size, array, index):  # type: ignore[no-untyped-def]
    """Load a value of `size` bytes as float32."""
    return load_bf16(array, index) if size == 2 else load_float(array, index)


@inlined
def rounded(size, value, scratch):  # type: ignore[no-untyped-def]
    """Return a float32 rounded to a type of `size` bytes. `scratch` is memory for one value."""
    if size == 2:
        store_bf16(scratch, 0, value)
        return load_bf16(scratch, 0)
    return value


@inlined
def _unit_row(size, row, scale, num_lines, to):  # type: ignore[no-untyped-def]
    """Write to = scale * row / |row| in float32."""
    to_float_lines(size, row, to, num_lines)
    length = _FLOAT(np.sqrt(sum_of_squares(to, num_lines) + _NORM_EPSILON))
    multiply_lines(to, scale / length, num_lines)


@inlined
def set_zero(block, count):  # type: ignore[no-untyped-def]
    """Set `count` float32 to zero."""
    for at in range(count):
        store_float(block, at, _FLOAT(0))


@inlined
def _unit_rows(size, row, row_bytes, num_rows, between, key_dim, queries, keys):  # type: ignore[no-untyped-def]
    """Normalise the queries and keys of one head in several rows. Queries are divided by the root of key_dim.

    Args:
        row: address of the first query. Its key is `between` bytes after it.
    """
    query_scale = _FLOAT(1) / _FLOAT(np.sqrt(_FLOAT(key_dim)))
    for index in range(num_rows):
        at, to = row + index * row_bytes, index * key_dim * 4
        _unit_row(size, at, query_scale, key_dim // 16, queries + to)
        _unit_row(size, at + between, _FLOAT(1), key_dim // 16, keys + to)


@inlined
def _gate_rows(size, gates, heads, num_rows, rate, bias, decays, betas):  # type: ignore[no-untyped-def]
    """Write the decays and the betas of one head in several rows. `gates` is the address of the first logit of beta."""
    for row in range(num_rows):
        g = rate * softplus(load_value(size, gates, row * 2 * heads + heads) + bias)
        store_float(decays, row, _FLOAT(math.exp(g)))
        beta = _FLOAT(1 / (1 + math.exp(-float(load_value(size, gates, row * 2 * heads)))))
        store_float(betas, row, rounded(size, beta, betas + row * 4))


def _delta_rule(size: int) -> Any:
    @compiled(fastmath=False)
    def compute_heads(  # type: ignore[no-untyped-def]
        rows, gates, rates, gate_bias, spans, num_spans, states, key_heads, group, key_dim, value_dim, first, end,
        scratch, out,
    ):  # fmt: skip
        """Compute the key heads [first, end), and the value heads that use them, of all rows.

        Args:
            rows: (T, key_heads * (2 * key_dim + group * value_dim)): queries, keys and values of all heads.
            gates: (T, 2 * value heads): logits of beta, then logits of g.
            rates: (value heads,) float32, negative. g = rates * softplus(logit + gate_bias).
            gate_bias: (value heads,) float32.
            states: (num_slots, value heads * value_dim / 16, key_dim, 16) float32.
            key_heads: number of key heads.
            group: number of value heads per key head.
            key_dim: channels of a key, a multiple of 16, as value_dim is.
            scratch: memory for _TILE * (2 * key_dim + 2) float32.
            out: (T, value heads, value_dim).
        """
        heads, blocks = key_heads * group, value_dim // COLUMNS
        row_bytes = (2 * key_heads * key_dim + heads * value_dim) * size
        block_bytes, key_bytes = key_dim * COLUMNS * 4, key_dim * 4
        keys, queries = scratch, scratch + _TILE * key_bytes
        decays, betas = queries + _TILE * key_bytes, queries + _TILE * (key_bytes + 4)
        for span in range(num_spans):
            first_row, count = load_index(spans, 4 * span), load_index(spans, 4 * span + 1)
            state = states + load_index(spans, 4 * span + 3) * heads * blocks * block_bytes
            if load_index(spans, 4 * span + 2) == 0:
                of_head = group * blocks * block_bytes
                set_zero(state + first * of_head, (end - first) * of_head // 4)
            for tile in range(first_row, first_row + count, _TILE):
                num_rows = min(_TILE, first_row + count - tile)
                for key_head in range(first, end):
                    query = rows + tile * row_bytes + key_head * key_dim * size
                    _unit_rows(
                        size, query, row_bytes, num_rows, key_heads * key_dim * size, key_dim, queries, keys
                    )  # fmt: skip
                    for head in range(key_head * group, (key_head + 1) * group):
                        rate, bias = load_float(rates, head), load_float(gate_bias, head)
                        _gate_rows(
                            size, gates + (tile * 2 * heads + head) * size, heads, num_rows, rate, bias, decays, betas
                        )  # fmt: skip
                        value = rows + tile * row_bytes + (2 * key_heads * key_dim + head * value_dim) * size
                        to = out + (tile * heads + head) * value_dim * size
                        for block in range(blocks):
                            held = state + (head * blocks + block) * block_bytes
                            for row in range(num_rows):
                                delta_step(
                                    size, held, keys + row * key_bytes, queries + row * key_bytes, key_dim,
                                    load_float(decays, row), load_float(betas, row),
                                    value + row * row_bytes + block * COLUMNS * size,
                                    to + (row * heads * value_dim + block * COLUMNS) * size,
                                )  # fmt: skip

    return compute_heads


BFLOAT16 = _delta_rule(2)
FLOAT32 = _delta_rule(4)
