"""Passes over rows in bfloat16 on CPU: what a model does between its products, without a trip to memory for each step.

Values are float32 within a step and rounded to bfloat16 where the model's own operations round. Addresses; widths are
multiples of 16; scratch holds one row of float32.
"""

from __future__ import annotations

import numpy as np

from sarathi_pp.model.lanes import compiled, exponential, load_bf16, round_lines, store_float

_FLOAT = np.float32


@compiled()
def silu_multiply(both, out, first, end, width, scratch):  # type: ignore[no-untyped-def]
    """out[r] = silu(both[r, :width]) * both[r, width:] for the rows [first, end)."""
    for row in range(first, end):
        gate, to = both + row * width * 4, out + row * width * 2
        up = gate + width * 2
        for at in range(width):
            value = load_bf16(gate, at)
            small = exponential(-abs(value))
            share = _FLOAT(1) / (_FLOAT(1) + small)
            store_float(scratch, at, value * (share if value >= _FLOAT(0) else small * share))
        round_lines(scratch, to, width // 16)
        for at in range(width):
            store_float(scratch, at, load_bf16(to, at) * load_bf16(up, at))
        round_lines(scratch, to, width // 16)


@compiled()
def rms_norm(x, weight, out, first, end, width, epsilon, scratch):  # type: ignore[no-untyped-def]
    """out[r] = weight * (x[r] / sqrt(mean(x[r] * x[r]) + epsilon)) for the rows [first, end)."""
    for row in range(first, end):
        source, to = x + row * width * 2, out + row * width * 2
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
