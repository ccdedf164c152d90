"""RMSNorm of rows, alone and after the addition of a residual.

It rounds at the same points as Llama: a row is normalised in float32, rounded to its dtype, multiplied by the weight,
and rounded again. One program takes one row, which stays in registers from its sum of squares on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return weight * x / sqrt(mean(x * x) + epsilon) for x (..., width). weight (width,) has the dtype of x."""
    return _launch(x.contiguous(), None, weight, epsilon)


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return rms_norm of the sum x + added, both (..., width). `added` must be contiguous and becomes that sum."""
    assert x.shape == added.shape and x.dtype == added.dtype, f"{x.dtype} {x.shape}, {added.dtype} {added.shape}"
    assert added.is_contiguous(), "the sum is written back"
    return _launch(x.contiguous(), added, weight, epsilon)


def reference_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute what `rms_norm` computes, in plain torch."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def reference_add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute what `add_rms_norm` computes, in plain torch."""
    added += x
    return reference_rms_norm(added, weight, epsilon)


def _launch(x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    width = x.shape[-1]
    assert weight.shape == (width,) and weight.dtype == x.dtype, f"{weight.dtype} {weight.shape} for {x.dtype} {width}"
    out = torch.empty_like(x)
    num_rows = x.numel() // width
    block = triton.next_power_of_2(width)
    if num_rows:
        _norm_rows[(num_rows,)](
            x,
            added,
            weight,
            out,
            epsilon,
            WIDTH=width,
            BLOCK=block,
            # With this number of warps, no number belongs to two of them, whatever the width. `added` is read and
            # written at the same place, so two warps must not do both there.
            num_warps=min(max(block // 512, 1), 8),
        )
    return out


@triton.jit
def _norm_rows(x, added, weight, out, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    begin = tl.program_id(0).to(tl.int64) * WIDTH
    dtype = out.dtype.element_ty
    row = tl.load(x + begin + at, mask=inside, other=0.0).to(tl.float32)
    # This load comes before the sum, which it would otherwise wait for: loads do not cross a barrier.
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        row += tl.load(added + begin + at, mask=inside, other=0.0).to(tl.float32)
        total = row.to(dtype)
        tl.store(added + begin + at, total, mask=inside)
        row = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(row * row, 0) / WIDTH + epsilon)
    normed = (row * inverse).to(dtype).to(tl.float32)
    tl.store(out + begin + at, (normed * gain).to(dtype), mask=inside)
