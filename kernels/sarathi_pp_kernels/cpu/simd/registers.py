"""The parts of which SIMD functions are built, as LLVM code: addresses, registers, loops over lines.

`builder` is llvmlite's IRBuilder, which appends LLVM code to the function that is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from sarathi_pp_kernels.cpu.simd.target import target

# Number of float32 values of a line. A lane is the place of one of them. LLVM divides a line among the registers that a
# processor has (target.py).
LANES = 16


class _BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat16 type, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


BF16, F32 = _BFloat16(), ir.FloatType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOATS = ir.VectorType(F32, LANES)
WORDS = ir.VectorType(I32, LANES)
PAIRS = ir.VectorType(BF16, 2 * LANES)
HALVES = ir.VectorType(BF16, LANES)
SHORTS = ir.VectorType(I16, LANES)


def index(value: int) -> Any:
    """Return a constant of 64 bits, the type of addresses and counts."""
    return ir.Constant(I64, value)


def element_at(builder: Any, address: Any, element: Any, place: Any) -> Any:
    """Return a pointer to element `place` of the array at an address."""
    return builder.gep(builder.inttoptr(address, element.as_pointer()), [place])


def halves_at(builder: Any, address: Any, place: Any) -> Any:
    """Return a pointer to sixteen bfloat16 from element `place` on."""
    return builder.bitcast(element_at(builder, address, I16, place), HALVES.as_pointer())


def pairs_at(builder: Any, address: Any, word: Any) -> Any:
    line = builder.bitcast(element_at(builder, address, I32, word), WORDS.as_pointer())
    return builder.bitcast(builder.load(line, align=4), PAIRS)


def floats_at(builder: Any, address: Any, place: Any) -> Any:
    """Return a pointer to sixteen float32 from element `place` on."""
    return builder.bitcast(element_at(builder, address, F32, place), FLOATS.as_pointer())


def call(builder: Any, name: str, returned: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(returned, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def prefetch_at(builder: Any, pointer: Any, cache: int) -> None:
    """Prefetch a line to the first-level (1) or second-level cache (2). The second one takes more requests at once."""
    read, keep, data = (ir.Constant(I32, value) for value in (0, 4 - cache, 1))
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [builder.bitcast(pointer, I8.as_pointer()), read, keep, data])


def spread(builder: Any, value: Any) -> Any:
    """Return a register with one value in all lanes."""
    lanes = ir.VectorType(value.type, LANES)
    lone = builder.insert_element(ir.Constant(lanes, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(lone, ir.Constant(lanes, ir.Undefined), ir.Constant(WORDS, [0] * LANES))


def to_bf16(builder: Any, values: Any) -> Any:
    """Round sixteen float32 to the nearest bfloat16."""
    return builder.fptrunc(values, HALVES)


def to_float(builder: Any, halves: Any) -> Any:
    """Convert sixteen bfloat16 to float32."""
    words = builder.zext(builder.bitcast(halves, SHORTS), WORDS)
    return builder.bitcast(builder.shl(words, ir.Constant(WORDS, [16] * LANES)), FLOATS)


def both_halves(builder: Any, words: Any) -> list[Any]:
    """Convert sixteen pairs of bfloat16 to float32: the first ones, and the second ones."""
    first = builder.shl(words, ir.Constant(WORDS, [16] * LANES))
    second = builder.and_(words, ir.Constant(WORDS, [0xFFFF0000] * LANES))
    return [builder.bitcast(first, FLOATS), builder.bitcast(second, FLOATS)]


def both_fp16(builder: Any, words: Any) -> list[Any]:
    """Convert sixteen pairs of float16 to float32: the first ones, and the second ones."""
    second = builder.lshr(words, ir.Constant(WORDS, [16] * LANES))
    fp16 = ir.VectorType(ir.HalfType(), LANES)
    return [builder.fpext(builder.bitcast(builder.trunc(one, SHORTS), fp16), FLOATS) for one in (words, second)]


def fma(builder: Any, factor: Any, other: Any, added: Any) -> Any:
    return call(builder, "llvm.fma.v16f32", FLOATS, [factor, other, added])


def dot(builder: Any, held: Any, left: Any, right: Any) -> Any:
    """Add the products of sixteen pairs of bfloat16 to `held`, one pair per lane, a register at a time."""
    lanes, instruction = target().lanes, target().dot
    assert instruction, "this processor has no instruction for pairs of bfloat16"
    parts = []
    for first in range(0, LANES, lanes):
        operands = [_part(builder, held, first, lanes)]
        operands += [_part(builder, pairs, 2 * first, 2 * lanes) for pairs in (left, right)]
        parts.append(call(builder, instruction, operands[0].type, operands))
    while len(parts) > 1:
        parts = [joined(builder, *two) for two in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _part(builder: Any, values: Any, first: int, count: int) -> Any:
    """Return the lanes [first, first + count) of a vector."""
    if count == values.type.count:
        return values
    lanes = ir.Constant(ir.VectorType(I32, count), list(range(first, first + count)))
    return builder.shuffle_vector(values, ir.Constant(values.type, ir.Undefined), lanes)


def joined(builder: Any, first: Any, second: Any) -> Any:
    """Return a vector with the lanes of the first one, then those of the second one."""
    lanes = 2 * first.type.count
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, lanes), list(range(lanes))))


def load_line(builder: Any, address: Any, line: Any) -> Any:
    pointer = element_at(builder, address, F32, builder.mul(line, index(LANES)))
    return builder.load(builder.bitcast(pointer, FLOATS.as_pointer()), align=4)


def store_rounded(builder: Any, address: Any, line: Any, values: Any) -> None:
    builder.store(to_bf16(builder, values), halves_at(builder, address, builder.mul(line, index(LANES))), align=2)


def store_some(builder: Any, words: Any, pointer: Any, wanted: Any) -> None:
    """Store only the lanes for which `wanted` is true. The memory of the other lanes stays as it is."""
    align = ir.Constant(I32, 4)
    call(builder, "llvm.masked.store.v16i32.p0", ir.VoidType(), [words, pointer, align, wanted])


def load_values(builder: Any, size: int, address: Any, place: Any) -> Any:
    """Load sixteen values, from element `place` on, as float32.

    Args:
        size: bytes of a value in memory, 2 for bfloat16 and 4 for float32.
    """
    if size == 2:
        return to_float(builder, builder.load(halves_at(builder, address, place), align=2))
    return builder.load(floats_at(builder, address, place), align=4)


def store_values(builder: Any, size: int, values: Any, address: Any, place: Any) -> None:
    """Store sixteen float32 from element `place` on, rounded to bfloat16 if the size of a value is 2 bytes."""
    if size == 2:
        builder.store(to_bf16(builder, values), halves_at(builder, address, place), align=2)
    else:
        builder.store(values, floats_at(builder, address, place), align=4)


def round_values(builder: Any, size: int, values: Any) -> Any:
    """Round sixteen float32 to what memory can hold: bfloat16 if the size of a value is 2 bytes."""
    return to_float(builder, to_bf16(builder, values)) if size == 2 else values


class Loop:
    """The values that a loop over lines passes from one turn to the next, such as sums.

    Call `carry` inside the loop with the values at the end of a turn.

    Attributes:
        carried: the values at the start of a turn.
        results: the values after the last turn.
    """

    def __init__(self, carried: list[Any]) -> None:
        self.carried = carried
        self.results: list[Any] = []

    def carry(self, *values: Any) -> None:
        self.results = list(values)


@contextmanager
def each_line(builder: Any, num_lines: Any, *begins: Any) -> Iterator[tuple[Any, Loop]]:
    """Build a loop: the code that is built inside runs for line 0, 1, ... num_lines - 1, at least once.

    Args:
        begins: the values that the first turn starts with. The loop passes on as many.

    Yields:
        The index of the line, and a Loop with the values that are passed on.
    """
    entry = builder.block
    body, after = builder.append_basic_block("line"), builder.append_basic_block("done")
    builder.branch(body)
    builder.position_at_end(body)
    line = builder.phi(I64)
    loop = Loop([builder.phi(begin.type) for begin in begins])
    yield line, loop
    following = builder.add(line, index(1))
    line.add_incoming(index(0), entry)
    line.add_incoming(following, body)
    for carried, begin, result in zip(loop.carried, begins, loop.results, strict=True):
        carried.add_incoming(begin, entry)
        carried.add_incoming(result, body)
    builder.cbranch(builder.icmp_signed("<", following, num_lines), body, after)
    builder.position_at_end(after)


def for_count(builder: Any, count: Any, cases: Sequence[int]) -> Iterator[int]:
    """Yield each of the cases. The code that is built meanwhile runs if `count`, one of them, is that case."""
    blocks = [builder.append_basic_block(f"count_{case}") for case in cases]
    after = builder.append_basic_block("counted")
    choice = builder.switch(count, blocks[-1])
    for case, block in zip(cases, blocks, strict=True):
        if block is not blocks[-1]:
            choice.add_case(index(case), block)
        builder.position_at_end(block)
        yield case
        builder.branch(after)
    builder.position_at_end(after)
