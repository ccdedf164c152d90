"""Products of at most 16 rows with weights in FP8 or MXFP4. Codes are read once, and expanded in registers.

    out (row, slot)  =  x (row, slot) @ weight (matrix of row and slot)  +  bias

Linear layers have one matrix and one slot. Experts have a slot for each expert of a row. A program multiplies some
outputs of one matrix with all rows that need it. Programs of matrices that no row needs end at once. The host reads
nothing, so a CUDA graph can hold the product.

The values of a weight have the bits of `expand` and `expand_mxfp4`. Only the order of the sums differs from a product
with the expanded weight. Inputs are divided into parts, whose sums are float32. A second kernel adds up the parts:

    inputs     | part 0      | part 1      | part 2      |
    steps      | 0 | 1 | 2   | 3 | 4 | 5   | 6 | 7       |     in this order

The number of parts depends on the shape of the weight and on the number of slots alone, and a tile always has 16 rows.
So the bits of a row depend neither on the other rows nor on their number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sarathi_pp_kernels.triton.expand import decoded
from sarathi_pp_kernels.triton.expand_mxfp4 import GROUP, GROUP_BYTES, e2m1, power_of_two

MOST_ROWS = 16
# Outputs of a program, most inputs of a step, and outputs of a program that adds up parts.
_OUTPUTS, _MOST_INPUTS, _MERGED_OUTPUTS = 64, 128, 1024
# Groups of a step, of 32 inputs each.
_GROUPS = 4
# Programs that should run at least: 2 for each processor of an H100. A part has at least _LEAST_STEPS steps, unless the
# weight has fewer.
_PROGRAMS, _LEAST_STEPS = 264, 4


def multiply_float8(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    block: tuple[int, int],
    first: tuple[int, int] = (0, 0),
    *,
    e5m2: bool = False,
    index: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Write the products with matrices in FP8 to `out`. All shapes are known without a read from the device.

    Args:
        x: (T, slots, K), or (T, 1, K) for all slots of a row, in a float type. T <= 16. The last dimension is
            contiguous.
        codes: (n, N, K), see `expand`. So are scales, block, first and e5m2.
        out: (T, slots, N) in the type of x. The last dimension is contiguous. A slot without a matrix becomes 0.
        index: (T, slots) int64, the matrices of each row. They are all different: of two equal ones, one gets no sums.
            A number outside of [0, n) means none. None: there is one slot, with matrix 0.
        bias: (n, N) in a float type. None: there is none.
    """
    count, outputs, inputs = codes.shape
    (height, width), (top, left) = block, first
    # The kernel takes addresses and would not notice wrong shapes.
    assert codes.dtype == torch.uint8 and codes.is_contiguous() and scales.is_contiguous()
    assert 0 <= top < height and 0 <= left < width, f"a part begins at {first} of a block of {block}"
    grid = -(-(top + outputs) // height), -(-(left + inputs) // width)
    assert scales.shape == (count, *grid), f"scales {tuple(scales.shape)} for {(count, *grid)} blocks"
    _require_rows(x, out, index, bias, (count, outputs, inputs))
    step_inputs = min(max(16, triton.next_power_of_2(width)), _MOST_INPUTS)
    num_steps = grid[1] * triton.cdiv(width, step_inputs)
    steps, sums = _parts(num_steps, out)
    _multiply_float8[(triton.cdiv(outputs, _OUTPUTS), len(sums), count)](
        x, index, codes, scales, sums, *out.shape[:2], *_strides(x), outputs, inputs, *grid, height, width,
        top, left, steps, ROWS=MOST_ROWS, SLOTS=triton.next_power_of_2(out.shape[1]), OUTPUTS=_OUTPUTS,
        INPUTS=step_inputs, E5M2=e5m2,
    )  # fmt: skip
    _add_up(sums, out, index, bias, count)


def multiply_mxfp4(
    x: Tensor, codes: Tensor, scales: Tensor, out: Tensor, index: Tensor, bias: Tensor | None = None
) -> None:
    """Write the products with matrices in MXFP4 to `out`. See multiply_float8.

    Args:
        codes: (n, N, K / 2), see `expand_mxfp4`. So are the scales.
    """
    count, outputs, num_bytes = codes.shape
    assert codes.dtype == scales.dtype == torch.uint8 and codes.is_contiguous() and scales.is_contiguous()
    assert num_bytes % GROUP_BYTES == 0, f"{num_bytes} bytes per row are no whole groups"
    groups = num_bytes // GROUP_BYTES
    assert scales.shape == (count, outputs, groups), f"scales {tuple(scales.shape)} for {tuple(codes.shape)}"
    _require_rows(x, out, index, bias, (count, outputs, groups * GROUP))
    steps, sums = _parts(triton.cdiv(groups, _GROUPS), out)
    _multiply_mxfp4[(triton.cdiv(outputs, _OUTPUTS), len(sums), count)](
        x, index, codes, scales, sums, *out.shape[:2], *_strides(x), outputs, groups, steps,
        ROWS=MOST_ROWS, SLOTS=triton.next_power_of_2(out.shape[1]), OUTPUTS=_OUTPUTS, GROUPS=_GROUPS,
    )  # fmt: skip
    _add_up(sums, out, index, bias, count)


def reference_multiply(x: Tensor, weight: Tensor, index: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Return what both functions compute, in float64, from an expanded weight (n, N, K). See multiply_float8."""
    index = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device) if index is None else index
    x = x.expand(*index.shape, -1)
    inside = (index >= 0) & (index < len(weight))
    chosen = torch.where(inside, index, 0)
    products = torch.einsum("tsk,tsnk->tsn", x.double(), weight.double()[chosen])
    if bias is not None:
        products += bias.double()[chosen]
    return torch.where(inside[..., None], products, 0.0)


def _require_rows(
    x: Tensor, out: Tensor, index: Tensor | None, bias: Tensor | None, weight: tuple[int, int, int]
) -> None:
    """Check shapes and types of one product. weight: n, N and K."""
    count, outputs, inputs = weight
    (rows, own_slots, width), slots = x.shape, out.shape[1]
    assert own_slots in (1, slots)
    assert 0 < rows <= MOST_ROWS and width == inputs and x.stride(2) == 1, f"{x.shape} for {weight}"
    assert out.shape == (rows, slots, outputs) and out.stride(2) == 1 and out.dtype == x.dtype
    assert slots == 1 if index is None else (index.shape == out.shape[:2] and index.is_contiguous())
    assert bias is None or (bias.shape == (count, outputs) and bias.stride(1) == 1)


def _strides(x: Tensor) -> tuple[int, int]:
    """Return the strides of rows and slots. A row may have one input for all slots."""
    return x.stride(0), x.stride(1) if x.shape[1] > 1 else 0


def _parts(num_steps: int, out: Tensor) -> tuple[int, Tensor]:
    """Return the steps of a part, and memory for the sums of the parts: (parts, T, slots, N) float32."""
    rows, slots, outputs = out.shape
    wanted = triton.cdiv(_PROGRAMS, triton.cdiv(outputs, _OUTPUTS) * slots)
    steps = max(triton.cdiv(num_steps, wanted), min(_LEAST_STEPS, num_steps))
    parts = triton.cdiv(num_steps, steps)
    return steps, torch.empty((parts, rows, slots, outputs), dtype=torch.float32, device=out.device)


def _add_up(sums: Tensor, out: Tensor, index: Tensor | None, bias: Tensor | None, count: int) -> None:
    """Write the sums of the parts to `out`. count: number of matrices."""
    parts, rows, slots, outputs = sums.shape
    width = min(triton.next_power_of_2(outputs), _MERGED_OUTPUTS)
    _add_parts[(rows * slots, triton.cdiv(outputs, width))](
        sums, index, bias, out, parts, rows * slots, slots, outputs, out.stride(0), out.stride(1),
        bias.stride(0) if bias is not None else 0, count, OUTPUTS=width,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _multiply_float8(  # type: ignore[no-untyped-def]
    x, index, codes, scales, sums, rows, slots, x_row, x_slot, outputs, inputs, scale_rows, scale_columns, height,
    width, top, left, steps,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, ROWS)
    slot = _slot_of(index, matrix, row, rows, slots, SLOTS)
    used = slot >= 0
    if tl.max(slot, axis=0) >= 0:
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        inside_outputs = output < outputs
        own_scales = scales + matrix * scale_rows * scale_columns + (output + top) // height * scale_columns
        own_codes = codes + matrix * outputs * inputs + output[:, None].to(tl.int64) * inputs
        own_x = x + row[:, None] * x_row + tl.maximum(slot, 0)[:, None] * x_slot
        of_block = tl.cdiv(width, INPUTS)  # steps of a block
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for step in range(steps):
            number = tl.program_id(1) * steps + step
            block = number // of_block
            at = number % of_block * INPUTS + tl.arange(0, INPUTS)
            column = block * width + at - left
            inside = (at < width) & (column >= 0) & (column < inputs)
            scale = tl.load(own_scales + block, mask=inside_outputs & (block < scale_columns), other=0.0)
            place = own_codes + column[None, :]
            value = decoded(tl.load(place, mask=inside_outputs[:, None] & inside[None, :], other=0), E5M2)
            value *= scale.to(tl.float32)[:, None]
            if scales.dtype.element_ty != tl.float32:
                value = value.to(scales.dtype.element_ty).to(tl.float32)
            activations = tl.load(own_x + column[None, :], mask=used[:, None] & inside[None, :], other=0.0)
            weight = tl.trans(value.to(x.dtype.element_ty))
            total = tl.dot(activations, weight, acc=total, input_precision="ieee")
        _store_sums(sums, total, row, slot, rows, slots, output, outputs)


@triton.jit(do_not_specialize=["rows"])
def _multiply_mxfp4(  # type: ignore[no-untyped-def]
    x, index, codes, scales, sums, rows, slots, x_row, x_slot, outputs, groups, steps,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, ROWS)
    slot = _slot_of(index, matrix, row, rows, slots, SLOTS)
    used = slot >= 0
    if tl.max(slot, axis=0) >= 0:
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        inside_outputs = output < outputs
        own_groups = (matrix * outputs + output.to(tl.int64)) * groups
        own_x = x + row[:, None] * x_row + tl.maximum(slot, 0)[:, None] * x_slot
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for step in range(steps):
            first = (tl.program_id(1) * steps + step) * GROUPS
            group = first + tl.arange(0, GROUPS)
            inside = inside_outputs[:, None] & (group < groups)[None, :]
            scale = power_of_two(tl.load(scales + own_groups[:, None] + group[None, :], mask=inside, other=0))
            byte = group[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
            inside = inside[:, :, None] & (byte < groups * 16)
            pairs = tl.load(codes + own_groups[:, None, None] * 16 + byte, mask=inside, other=0)
            scale = scale[:, :, None]
            lower = tl.reshape((e2m1(pairs & 15) * scale).to(x.dtype.element_ty), (OUTPUTS, GROUPS * 16))
            upper = tl.reshape((e2m1(pairs >> 4) * scale).to(x.dtype.element_ty), (OUTPUTS, GROUPS * 16))
            # Even inputs have the lower halves of bytes.
            place = first * 16 + tl.arange(0, GROUPS * 16)
            inside_rows = used[:, None] & (place < groups * 16)[None, :]
            even = tl.load(own_x + place[None, :] * 2, mask=inside_rows, other=0.0)
            odd = tl.load(own_x + place[None, :] * 2 + 1, mask=inside_rows, other=0.0)
            total = tl.dot(even, tl.trans(lower), acc=total, input_precision="ieee")
            total = tl.dot(odd, tl.trans(upper), acc=total, input_precision="ieee")
        _store_sums(sums, total, row, slot, rows, slots, output, outputs)


@triton.jit
def _slot_of(index, matrix, row, rows, slots, SLOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the slot in which each row has this matrix, and -1 for rows that do not have it. No row has it twice."""
    if index is None:
        slot_of_row = tl.where(row < rows, 0, -1)
    else:
        slot = tl.arange(0, SLOTS)
        inside = (row < rows)[:, None] & (slot < slots)[None, :]
        matrices = tl.load(index + row[:, None] * slots + slot[None, :], mask=inside, other=-1)
        slot_of_row = tl.max(tl.where(matrices == matrix, slot[None, :], -1), axis=1)
    return slot_of_row


@triton.jit
def _store_sums(sums, total, row, slot, rows, slots, output, outputs):  # type: ignore[no-untyped-def]
    place = ((tl.program_id(1) * rows + row) * slots + slot).to(tl.int64) * outputs
    inside = (slot >= 0)[:, None] & (output < outputs)[None, :]
    tl.store(sums + place[:, None] + output[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["pairs"])
def _add_parts(  # type: ignore[no-untyped-def]
    sums, index, bias, out, parts, pairs, slots, outputs, out_row, out_slot, bias_row, count, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Add up the parts of one slot of one row. A program writes OUTPUTS outputs.

    The bias of a linear layer is added before the sum is rounded, as in torch. That of an expert is added after, as in
    transformers.
    """
    pair = tl.program_id(0)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < outputs
    matrix = 0
    if index is not None:
        matrix = tl.load(index + pair)
    known = inside & (matrix >= 0) & (matrix < count)  # sums of other slots were never written
    total = tl.zeros((OUTPUTS,), tl.float32)
    for part in range(parts):
        place = (part * pairs + pair).to(tl.int64) * outputs + output
        total += tl.load(sums + place, mask=known, other=0.0)
    if bias is not None:
        if index is not None:
            total = total.to(out.dtype.element_ty).to(tl.float32)
        total += tl.load(bias + matrix * bias_row + output, mask=known, other=0.0).to(tl.float32)
    place = (pair // slots).to(tl.int64) * out_row + pair % slots * out_slot
    tl.store(out + place + output, total.to(out.dtype.element_ty), mask=inside)
