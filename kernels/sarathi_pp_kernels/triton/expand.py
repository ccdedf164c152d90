"""Expansion of weights that are stored as 8-bit float codes with scales per block, to the float type of a product.

    value (r, c)  =  code (r, c) * scale ((r + first row) // height, (c + first column) // width)

Each product is rounded as the loader rounds when it dequantises: to the type of the scales, then to the type of the
target. The codes are decoded by integer operations, since GPUs before compute capability 8.9 have no instruction for
them. A program expands a few rows. Its steps never cross a column of scales, so each row of a step has one scale:

    columns    | block 0        | block 1        | block 2   |
    steps      | 0      | 1     | 2      | 3     | 4      | 5 |
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sarathi_pp_kernels.triton.float8 import from_codes

# Values of a step, and most columns of a step.
_STEP_VALUES, _MOST_COLUMNS = 4096, 256
# Steps of a program that expands one of several matrices. Programs for matrices that are not needed end at once, but
# starting them takes time, so there should be few.
_STEPS_OF_SEVERAL = 16


def expand(
    codes: Tensor,
    scales: Tensor,
    target: Tensor,
    block: tuple[int, int],
    first: tuple[int, int] = (0, 0),
    *,
    e5m2: bool = False,
    needed: Tensor | None = None,
) -> None:
    """Write the values of some matrices of codes to `target`. All shapes are known without a read from the device.

    Args:
        codes: (n, rows, columns) uint8, the bits of 8-bit floats. Contiguous.
        scales: (n, R, C) float32, float16 or bfloat16. Contiguous.
        target: (n, rows, columns) in a float type. Each matrix is contiguous.
        block: rows and columns of a block, whose values share a scale.
        first: row and column of the first block at which a matrix begins. It is not (0, 0) for parts of matrices.
        e5m2: the codes have 5 bits of exponent and 2 of mantissa. Otherwise they have 4 and 3, and no infinity.
        needed: (n,) integers. Only matrices whose number is not 0 are written. None: all are.
    """
    count, rows, columns = codes.shape
    (height, width), (top, left) = block, first
    # The kernel takes addresses and would not notice wrong shapes.
    assert codes.dtype == torch.uint8 and codes.is_contiguous() and scales.is_contiguous()
    assert target.shape == codes.shape and target[0].is_contiguous(), f"{target.shape} for {codes.shape}"
    assert 0 <= top < height and 0 <= left < width, f"a part begins at {first} of a block of {block}"
    grid = -(-(top + rows) // height), -(-(left + columns) // width)
    assert scales.shape == (count, *grid), f"scales {tuple(scales.shape)} for {(count, *grid)} blocks"
    assert needed is None or needed.shape == (count,)
    step_columns = min(triton.next_power_of_2(width), _MOST_COLUMNS)
    step_rows = _STEP_VALUES // step_columns
    steps = grid[1] * triton.cdiv(width, step_columns)
    each = 1 if count == 1 else min(steps, _STEPS_OF_SEVERAL)
    _expand_rows[(triton.cdiv(rows, step_rows), triton.cdiv(steps, each), count)](
        codes,
        scales,
        needed,
        target,
        rows,
        columns,
        *grid,
        height,
        width,
        top,
        left,
        target.stride(0),
        each,
        ROWS=step_rows,
        COLUMNS=step_columns,
        E5M2=e5m2,
    )


def reference_expand(
    codes: Tensor,
    scales: Tensor,
    target: Tensor,
    block: tuple[int, int],
    first: tuple[int, int] = (0, 0),
    *,
    e5m2: bool = False,
    needed: Tensor | None = None,
) -> None:
    """Compute what `expand` computes, in plain torch."""
    _, rows, columns = codes.shape
    values = codes.view(torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn).to(scales.dtype)
    row = (torch.arange(rows, device=codes.device) + first[0]) // block[0]
    column = (torch.arange(columns, device=codes.device) + first[1]) // block[1]
    found = (values * scales[:, row][:, :, column]).to(target.dtype)
    target.copy_(found if needed is None else torch.where(needed[:, None, None] != 0, found, target))


@triton.jit
def _expand_rows(  # type: ignore[no-untyped-def]
    codes, scales, needed, target, rows, columns, scale_rows, scale_columns, height, width, top, left, stride, steps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(2).to(tl.int64)
    own_scales = scales + index * scale_rows * scale_columns
    own_codes, own_target = codes + index * rows * columns, target + index * stride
    if needed is None:
        _expand_steps(
            own_codes, own_scales, own_target, rows, columns, scale_columns, height, width, top, left, steps,
            ROWS, COLUMNS, E5M2,
        )  # fmt: skip
    else:
        if tl.load(needed + index) != 0:
            _expand_steps(
                own_codes, own_scales, own_target, rows, columns, scale_columns, height, width, top, left, steps,
                ROWS, COLUMNS, E5M2,
            )  # fmt: skip


@triton.jit
def _expand_steps(  # type: ignore[no-untyped-def]
    codes, scales, target, rows, columns, scale_columns, height, width, top, left, steps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    """Expand the steps of a program, which are ROWS rows of COLUMNS columns each."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_rows = row < rows
    own_scales = scales + (row + top) // height * scale_columns
    place = row[:, None].to(tl.int64) * columns
    of_block = tl.cdiv(width, COLUMNS)  # steps of a block
    for step in range(steps):
        number = tl.program_id(1) * steps + step
        block = number // of_block
        at = number % of_block * COLUMNS + tl.arange(0, COLUMNS)
        column = block * width + at - left
        inside_columns = (at < width) & (column >= 0) & (column < columns)
        inside = inside_rows[:, None] & inside_columns[None, :]
        scale = tl.load(own_scales + block, mask=inside_rows & (block < scale_columns), other=0.0)
        value = decoded(tl.load(codes + place + column[None, :], mask=inside, other=0), E5M2)
        value *= scale.to(tl.float32)[:, None]
        if scales.dtype.element_ty != tl.float32:
            value = value.to(scales.dtype.element_ty).to(tl.float32)
        tl.store(target + place + column[None, :], value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def decoded(code, E5M2: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the float32 values of 8-bit floats. A float16 with the exponent and mantissa of E5M2 is exact."""
    if E5M2:
        return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    return from_codes(code)
