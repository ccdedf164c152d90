"""Transposition of rows of words, so that the words that a product reads together are next to each other."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sarathi_pp_kernels.cpu.simd.compile import inlined
from sarathi_pp_kernels.cpu.simd.memory import load_word, store_word
from sarathi_pp_kernels.cpu.simd.registers import (
    I32,
    LANES,
    SHORTS,
    WORDS,
    each_line,
    element_at,
    halves_at,
    index,
    spread,
    store_some,
)

# Words of a quarter of a register. Rows are interleaved within quarters before quarters change places.
QUARTER = 4


@inlined
def transpose(x, row_words, present, to, rows, num_words):  # type: ignore[no-untyped-def]
    """Write to[k][r] = x[r][k] for words k in [0, num_words) and rows r in [0, rows), and 0 for missing rows.

    Args:
        x: address of the rows. Row r is r * row_words words after it.
        present: number of rows that are not missing, at least 1. It may be larger than `rows`.
    """
    in_lines = num_words // 16 * 16
    for first in range(0, rows, 16):
        some, there = min(rows - first, 16), max(min(present - first, 16), 0)
        source, begin = x + first * row_words * 4 if there else x, to + first * 4
        if in_lines:
            _transpose_lines(source, row_words, there, begin, rows, some, in_lines // 16)
        for word in range(in_lines, num_words):
            for row in range(some):
                store_word(begin, word * rows + row, load_word(source, row * row_words + word) if row < there else 0)


@intrinsic
def _transpose_lines(typing, x, row_words, present, to, to_step, count, num_lines):  # type: ignore[no-untyped-def]
    """Transpose `count` rows, at most sixteen, of 16 * num_lines words. num_lines is at least 1.

    Args:
        present: number of rows that are not missing. Missing ones are written as zeros.
        to_step: number of words in `to` from one word of a row to the next.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x_, row_words_, present_, to_, to_step_, count_, num_lines_ = arguments
        there = [builder.icmp_signed("<", index(row), present_) for row in range(LANES)]
        # For a missing row, the first row is read.
        begins = [
            builder.mul(row_words_, builder.select(is_there, index(row), index(0)))
            for row, is_there in enumerate(there)
        ]
        lanes = ir.Constant(WORDS, list(range(LANES)))
        wanted = builder.icmp_signed("<", lanes, spread(builder, builder.trunc(count_, I32)))
        with each_line(builder, num_lines_) as (line, _):
            word = builder.mul(line, index(LANES))
            rows = [
                builder.select(is_there, _line(builder, x_, builder.add(begin, word)), ir.Constant(WORDS, [0] * LANES))
                for begin, is_there in zip(begins, there, strict=True)
            ]
            for column, words in enumerate(_columns(builder, rows)):
                place = builder.mul(builder.add(word, index(column)), to_step_)
                store_some(builder, words, element_at(builder, to_, I32, place), wanted)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


@intrinsic
def pair(typing, low, high, has_high, to, to_step, num_lines):  # type: ignore[no-untyped-def]
    """Write words of two bfloat16: the low half from the row `low`, the high half from the row `high`.

    Args:
        low: address of a row of 16 * num_lines bfloat16, as `high` is.
        has_high: the row `high` exists. If not, it is not read, and its values are 0.
        to: address of lines of sixteen words, each to_step words after the one before.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        low_, high_, has_high_, to_, to_step_, num_lines_ = arguments
        there = builder.select(has_high_, high_, low_)
        upper = builder.select(has_high_, ir.Constant(WORDS, [-1] * LANES), ir.Constant(WORDS, [0] * LANES))
        with each_line(builder, num_lines_) as (line, _):
            place = builder.mul(line, index(LANES))
            halves = [builder.load(halves_at(builder, row, place), align=2) for row in (low_, there)]
            first, second = (builder.zext(builder.bitcast(some, SHORTS), WORDS) for some in halves)
            second = builder.and_(builder.shl(second, ir.Constant(WORDS, [16] * LANES)), upper)
            pointer = element_at(builder, to_, I32, builder.mul(line, to_step_))
            builder.store(builder.or_(first, second), builder.bitcast(pointer, WORDS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.boolean, *[types.int64] * 3), generate


def _line(builder: Any, address: Any, word: Any) -> Any:
    return builder.load(builder.bitcast(element_at(builder, address, I32, word), WORDS.as_pointer()), align=4)


def _columns(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose sixteen rows, each in a register, four at a time. Lane r of the new register k is word k of row r."""
    # Every four rows give four registers. Quarter q of register j has word 4 * q + j of each of the four rows.
    fours = [interleaved(builder, rows[first : first + QUARTER]) for first in range(0, LANES, QUARTER)]
    columns: list[Any] = [None] * LANES
    for j, (a, b, c, d) in enumerate(zip(*fours, strict=True)):
        for quarters in ([0, 1], [2, 3]):
            low, high = _quarters(builder, a, b, quarters, quarters), _quarters(builder, c, d, quarters, quarters)
            for at, quarter in enumerate(quarters):
                columns[QUARTER * quarter + j] = _quarters(builder, low, high, [at, at + 2], [at, at + 2])
    return columns


def interleaved(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose four rows within each quarter: first by single words, then by two words."""
    low, high = [0, 4, 1, 5], [2, 6, 3, 7]
    a, b, c, d = rows
    first = [_in_quarters(builder, a, b, order) for order in (low, high)]
    second = [_in_quarters(builder, c, d, order) for order in (low, high)]
    twos = [0, 1, 4, 5], [2, 3, 6, 7]
    return [
        _in_quarters(builder, one, other, order) for one, other in zip(first, second, strict=True) for order in twos
    ]


def _in_quarters(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    """Choose the same words from each quarter. In `order`, 0 to 3 are the words of a, and 4 to 7 those of b."""
    lanes = [
        QUARTER * quarter + (word if word < QUARTER else LANES + word - QUARTER)
        for quarter in range(LANES // QUARTER)
        for word in order
    ]
    return builder.shuffle_vector(a, b, ir.Constant(WORDS, lanes))


def _quarters(builder: Any, a: Any, b: Any, of_a: list[int], of_b: list[int]) -> Any:
    """Return two quarters of a, then two of b."""
    begins = [QUARTER * quarter for quarter in of_a] + [LANES + QUARTER * quarter for quarter in of_b]
    lanes = [begin + word for begin in begins for word in range(QUARTER)]
    return builder.shuffle_vector(a, b, ir.Constant(WORDS, lanes))
