"""Expansion of weights in MXFP4 to the float type of a product (OCP Microscaling Formats, section 5).

    value (input i, output o)  =  e2m1 (code (o, i)) * 2 ** (scale (o, i // 32) - 127)

Two codes of neighbouring inputs share a byte, the first one in the lower half. Rows of codes are outputs. The weight
has inputs as rows, as the products of gpt_oss need it. So a program reads bytes along the inputs, and writes along the
outputs:

    codes    rows of outputs, 64 bytes each        weight    rows of inputs, 64 values each

Each value is exact in bfloat16, except those that are larger than its largest value. These become infinity.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Inputs that share a scale, and the bytes of their codes.
GROUP, GROUP_BYTES = 32, 16
# Groups and outputs of a step.
_STEP_GROUPS, _STEP_OUTPUTS = 4, 64
# Steps of a program that expands one of several matrices. See expand.py.
_STEPS_OF_SEVERAL = 16


def expand_mxfp4(codes: Tensor, scales: Tensor, target: Tensor, needed: Tensor | None = None) -> None:
    """Write the values of some matrices of codes to `target`. All shapes are known without a read from the device.

    Args:
        codes: (n, outputs, inputs / 2) uint8, two codes each. Contiguous.
        scales: (n, outputs, inputs / 32) uint8, exponents of 2 that are biased by 127. 255 is NaN. Contiguous.
        target: (n, inputs, outputs) in a float type. Contiguous.
        needed: (n,) integers. Only matrices whose number is not 0 are written. None: all are.
    """
    count, outputs, num_bytes = codes.shape
    # The kernel takes addresses and would not notice wrong shapes.
    assert codes.dtype == scales.dtype == torch.uint8 and codes.is_contiguous() and scales.is_contiguous()
    assert num_bytes % GROUP_BYTES == 0, f"{num_bytes} bytes per row are no whole groups"
    groups = num_bytes // GROUP_BYTES
    assert scales.shape == (count, outputs, groups), f"scales {tuple(scales.shape)} for {tuple(codes.shape)}"
    assert target.shape == (count, groups * GROUP, outputs) and target.is_contiguous()
    assert needed is None or needed.shape == (count,)
    steps = triton.cdiv(groups, _STEP_GROUPS)
    each = 1 if count == 1 else min(steps, _STEPS_OF_SEVERAL)
    _expand_matrix[(triton.cdiv(outputs, _STEP_OUTPUTS), triton.cdiv(steps, each), count)](
        codes, scales, needed, target, outputs, groups, each, GROUPS=_STEP_GROUPS, OUTPUTS=_STEP_OUTPUTS
    )


def reference_expand_mxfp4(codes: Tensor, scales: Tensor, target: Tensor, needed: Tensor | None = None) -> None:
    """Compute what `expand_mxfp4` computes, in plain torch."""
    count, outputs, _ = codes.shape
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).view(count, outputs, -1, GROUP).int()
    values = torch.where(nibbles < 8, 1.0, -1.0) * magnitudes[nibbles & 7]
    powers = scales.view(torch.float8_e8m0fnu).float()
    found = (values * powers[..., None]).bfloat16().flatten(2).mT.to(target.dtype)
    target.copy_(found if needed is None else torch.where(needed[:, None, None] != 0, found, target))


@triton.jit
def _expand_matrix(  # type: ignore[no-untyped-def]
    codes, scales, needed, target, outputs, groups, steps, GROUPS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(2).to(tl.int64)
    own_codes, own_scales = codes + index * outputs * groups * 16, scales + index * outputs * groups
    own_target = target + index * outputs * groups * 32
    if needed is None:
        _expand_groups(own_codes, own_scales, own_target, outputs, groups, steps, GROUPS, OUTPUTS)
    else:
        if tl.load(needed + index) != 0:
            _expand_groups(own_codes, own_scales, own_target, outputs, groups, steps, GROUPS, OUTPUTS)


@triton.jit
def _expand_groups(  # type: ignore[no-untyped-def]
    codes, scales, target, outputs, groups, steps, GROUPS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Expand the steps of a program: GROUPS groups of inputs of the same OUTPUTS outputs in each."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    place = tl.arange(0, 16)
    inside_outputs = output < outputs
    row = output.to(tl.int64) * groups
    for step in range(steps):
        group = (tl.program_id(1) * steps + step) * GROUPS + tl.arange(0, GROUPS)
        inside = (group < groups)[:, None] & inside_outputs[None, :]
        scale = power_of_two(tl.load(scales + row[None, :] + group[:, None], mask=inside, other=0))
        byte = group[:, None, None] * 16 + place[None, :, None]
        inside = inside[:, None, :] & (place < 16)[None, :, None]
        pairs = tl.load(codes + row[None, None, :] * 16 + byte, mask=inside, other=0)
        # Rows of the two inputs whose codes share a byte.
        first = target + byte.to(tl.int64) * 2 * outputs + output[None, None, :]
        scale = scale[:, None, :]
        tl.store(first, (e2m1(pairs & 15) * scale).to(target.dtype.element_ty), mask=inside)
        tl.store(first + outputs, (e2m1(pairs >> 4) * scale).to(target.dtype.element_ty), mask=inside)


@triton.jit
def e2m1(code):  # type: ignore[no-untyped-def]
    """Return the float32 values of 4-bit floats. A float16 with the same exponent and mantissa is exact."""
    wide = code.to(tl.uint16)
    half = ((wide & 8) << 12) | ((wide & 7) << 9)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0  # exponents are biased by 1, float16's by 15


@triton.jit
def power_of_two(exponent):  # type: ignore[no-untyped-def]
    """Return the float32 values of exponents that are biased by 127. 255 is NaN."""
    wide = exponent.to(tl.uint32)
    # 2 ** -127 has no exponent of its own in float32.
    power = tl.where(wide == 0, 0x00400000, wide << 23).to(tl.float32, bitcast=True)
    return tl.where(wide == 255, float("nan"), power)
