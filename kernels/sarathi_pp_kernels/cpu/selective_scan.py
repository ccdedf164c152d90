"""The recurrence of a Mamba-2 layer (arXiv 2405.21060, section 7): a selective state space with a state per head.

    dt = softplus(logit + bias)
    S  = exp(rate * dt) * S + B x dt * x
    y  = C S + D * x

The state of a head is (state channels, head channels) float32, in blocks of sixteen columns as in delta_rule.py. The
same holds for spans, for the bits of a row, and for the first rows of a sequence.

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

from sarathi_pp_kernels.cpu.delta_rule import COLUMNS, load_value, rounded, set_zero, softplus
from sarathi_pp_kernels.cpu.simd.compile import compiled, inlined
from sarathi_pp_kernels.cpu.simd.memory import load_float, load_index, store_float
from sarathi_pp_kernels.cpu.simd.state import scan_step, to_float_lines
from sarathi_pp_kernels.cpu.threads import run_parallel, scratch_of_thread, split_range

_FLOAT = np.float32
# Rows of a span for which B and C are converted at a time: they fit into the second-level cache.
_TILE = 64


def scan(
    rows: Tensor,
    steps: Tensor,
    rates: Tensor,
    step_bias: Tensor,
    skips: Tensor,
    states: Tensor,
    spans: NDArray[np.int64],
    groups: int,
) -> Tensor:
    """Return the (T, heads, head_dim) float32 outputs of rows, and change the states. Threads divide the heads.

    Args:
        rows: (T, channels) float32 or bfloat16: x of all heads, then B and C of all groups.
        steps: (T, heads), logits of dt, with any step between rows.
        rates: (heads,) float32, negative.
        step_bias: (heads,) float32.
        skips: (heads,) float32, the factors D.
        states: (num_slots, heads * head_dim / 16, state_dim, 16) float32.
        groups: number of groups of heads that share B and C.
    """
    heads, state_dim = len(rates), states.shape[2]
    head_dim = states.shape[1] * COLUMNS // heads
    # The kernel takes addresses, so it would not notice wrong shapes.
    assert rows.shape[1] == heads * head_dim + 2 * groups * state_dim and rows.is_contiguous(), rows.shape
    assert steps.shape == (len(rows), heads) and steps.stride(1) == 1 and steps.dtype == rows.dtype
    assert states.shape[3] == COLUMNS and head_dim % COLUMNS == 0 and states.is_contiguous(), states.shape
    out = torch.empty(len(rows), heads, head_dim)
    kernel = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}[rows.dtype]

    def compute(piece: range) -> None:
        kernel(
            *(rows.data_ptr(), steps.data_ptr(), steps.stride(0)),
            *(rates.data_ptr(), step_bias.data_ptr(), skips.data_ptr(), spans.ctypes.data, len(spans)),
            *(states.data_ptr(), heads, groups, head_dim, state_dim, piece.start, piece.stop),
            *(scratch_of_thread(_TILE * (2 * state_dim + 2)).data_ptr(), out.data_ptr()),
        )

    run_parallel([partial(compute, piece) for piece in split_range(heads)])
    return out


@inlined
def _float_rows(size, row, row_bytes, num_rows, between, state_dim, keys, queries):  # type: ignore[no-untyped-def]
    """Convert B and C of one group in several rows. `row` is the address of the first B. C is `between` bytes after."""
    for index in range(num_rows):
        at, to = row + index * row_bytes, index * state_dim * 4
        to_float_lines(size, at, keys + to, state_dim // 16)
        to_float_lines(size, at + between, queries + to, state_dim // 16)


@inlined
def _step_rows(size, steps, steps_step, num_rows, rate, bias, deltas, decays):  # type: ignore[no-untyped-def]
    """Write dt and the decays of one head in several rows. `steps` is the address of the first logit."""
    for row in range(num_rows):
        place = deltas + row * 4
        logit = load_value(size, steps, row * steps_step)
        delta = rounded(size, softplus(rounded(size, logit + bias, place)), place)
        store_float(deltas, row, delta)
        store_float(decays, row, _FLOAT(math.exp(rate * delta)))


def _selective_scan(size: int) -> Any:
    @compiled(fastmath=False)
    def compute_heads(  # type: ignore[no-untyped-def]
        rows, steps, steps_step, rates, step_bias, skips, spans, num_spans, states, heads, groups, head_dim,
        state_dim, first, end, scratch, out,
    ):  # fmt: skip
        """Compute the heads [first, end) of all rows.

        Args:
            rows: (T, heads * head_dim + 2 * groups * state_dim): x of all heads, then B and C of all groups.
            steps: logits of dt, (T, heads), `steps_step` values from one row to the next.
            rates: (heads,) float32, negative.
            step_bias: (heads,) float32.
            skips: (heads,) float32, the factors D.
            states: (num_slots, heads * head_dim / 16, state_dim, 16) float32.
            groups: number of groups of heads that share B and C.
            head_dim: channels of a head, a multiple of 16, as state_dim is.
            scratch: memory for _TILE * (2 * state_dim + 2) float32.
            out: (T, heads, head_dim) float32.
        """
        blocks, width = head_dim // COLUMNS, heads * head_dim
        row_bytes = (width + 2 * groups * state_dim) * size
        block_bytes, key_bytes = state_dim * COLUMNS * 4, state_dim * 4
        keys, queries = scratch, scratch + _TILE * key_bytes
        decays, deltas = queries + _TILE * key_bytes, queries + _TILE * (key_bytes + 4)
        for span in range(num_spans):
            first_row, count = load_index(spans, 4 * span), load_index(spans, 4 * span + 1)
            state = states + load_index(spans, 4 * span + 3) * heads * blocks * block_bytes
            if load_index(spans, 4 * span + 2) == 0:
                set_zero(state + first * blocks * block_bytes, (end - first) * blocks * state_dim * COLUMNS)
            for tile in range(first_row, first_row + count, _TILE):
                num_rows = min(_TILE, first_row + count - tile)
                converted = -1
                for head in range(first, end):
                    group = head * groups // heads
                    if group != converted:
                        converted = group
                        key = rows + tile * row_bytes + (width + group * state_dim) * size
                        _float_rows(size, key, row_bytes, num_rows, groups * state_dim * size, state_dim, keys, queries)
                    rate, bias, skip = load_float(rates, head), load_float(step_bias, head), load_float(skips, head)
                    logits = steps + (tile * steps_step + head) * size
                    _step_rows(
                        size, logits, steps_step, num_rows, rate, bias, deltas, decays
                    )  # fmt: skip
                    x = rows + tile * row_bytes + head * head_dim * size
                    to = out + (tile * width + head * head_dim) * 4
                    for block in range(blocks):
                        held = state + (head * blocks + block) * block_bytes
                        for row in range(num_rows):
                            scan_step(
                                size, held, keys + row * key_bytes, queries + row * key_bytes, state_dim,
                                load_float(decays, row), load_float(deltas, row), skip,
                                x + row * row_bytes + block * COLUMNS * size,
                                to + (row * width + block * COLUMNS) * 4,
                            )  # fmt: skip

    return compute_heads


BFLOAT16 = _selective_scan(2)
FLOAT32 = _selective_scan(4)
