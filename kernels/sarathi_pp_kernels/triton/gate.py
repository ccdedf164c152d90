"""The gate of a gated MLP: silu(gate) * up, for the outputs of two linear layers that are next to each other.

It rounds as the model's own two operations round: once after silu, once after the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

_BLOCK = 1024


def silu_multiply(both: Tensor) -> Tensor:
    """Return silu(both[..., :width]) * both[..., width:], (..., width), for both (..., 2 * width)."""
    both = both.contiguous()
    width = both.shape[-1] // 2
    assert both.shape[-1] == 2 * width, f"{both.shape[-1]} columns are no two halves"
    out = torch.empty((*both.shape[:-1], width), dtype=both.dtype, device=both.device)
    if out.numel():
        _gate_rows[(out.numel() // width, triton.cdiv(width, _BLOCK))](both, out, width, BLOCK=_BLOCK)
    return out


def reference_silu_multiply(both: Tensor) -> Tensor:
    """Compute what `silu_multiply` computes, in plain torch."""
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up


@triton.jit
def _gate_rows(both, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    dtype = out.dtype.element_ty
    gate = tl.load(both + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # at most 1, however large the gate is
    share = tl.where(gate >= 0, 1.0, small) / (1.0 + small)
    gated = (gate * share).to(dtype).to(tl.float32)
    tl.store(out + row * width + at, (gated * up).to(dtype), mask=inside)
