"""The index of the largest value of a row on CPU, in one pass: greedy sampling.

The pass also sees whether all values are finite. Values are compared as whole numbers, because a loop that compares
floating-point numbers would not use SIMD. Addresses are integers, as in the other kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sarathi_pp_kernels.cpu.simd.compile import compiled, inlined
from sarathi_pp_kernels.cpu.simd.memory import load_half, load_index, load_word, store_index

# Results of rows without an index.
NOT_FINITE, NOTHING_ALLOWED = -1, -2

# All bits of a float32 except the sign, and these bits of infinity. Larger values of these bits are NaN.
_SIZE_BITS, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_LEAST = np.int32(-0x7FFFFFFF - 1)
_ALL = np.uint32(0xFFFFFFFF)
_WORD = 32


@inlined
def _bits_of_float(row, at):  # type: ignore[no-untyped-def]
    return np.int32(load_word(row, at))


@inlined
def _bits_of_bf16(row, at):  # type: ignore[no-untyped-def]
    return np.int32(np.uint32(load_half(row, at)) << np.uint32(16))


@inlined
def _ordered(bits):  # type: ignore[no-untyped-def]
    """Return a whole number for a value, such that larger values have larger numbers. 0 and -0 have the same one."""
    size = np.int32(bits & _SIZE_BITS)
    return size if bits >= 0 else np.int32(-size)


@inlined
def _is_set(word, at):  # type: ignore[no-untyped-def]
    return np.uint32(np.uint32(word >> np.uint32(at)) & np.uint32(1)) != 0


@inlined
def _word_of(mask, first):  # type: ignore[no-untyped-def]
    return np.uint32(load_word(mask, first // _WORD)) if mask else _ALL


def _kernel(bits_of: Any) -> Any:
    """Return the kernel for values whose float32 bits a function loads."""
    block_of, place_of = _block_of(bits_of), _place_of(bits_of)

    @compiled()
    def largest(rows, masks, found, num_rows, width):  # type: ignore[no-untyped-def]
        for row in range(num_rows):
            begin, mask = load_index(rows, row), load_index(masks, row)
            top, largest_size, block = _LEAST, np.int32(0), np.int64(0)
            for first in range(0, width, _WORD):
                if first + _WORD <= width:  # the compiler knows the number of values
                    of_block, size = block_of(begin, first, first + _WORD, _word_of(mask, first))
                else:
                    of_block, size = block_of(begin, first, width, _word_of(mask, first))
                largest_size = max(largest_size, size)
                if of_block > top:
                    top, block = of_block, np.int64(first)
            index = np.int64(NOTHING_ALLOWED)
            if largest_size >= _INFINITY:
                index = np.int64(NOT_FINITE)
            elif top > _LEAST:
                index = block + place_of(begin, block, _word_of(mask, block), top)
            store_index(found, row, index)

    return largest


def _block_of(bits_of: Any) -> Any:
    @inlined
    def block_of(row, first, end, word):  # type: ignore[no-untyped-def]
        """Return the largest number whose bit of the word is set, and the largest size of all numbers."""
        top, largest_size = _LEAST, np.int32(0)
        for at in range(first, end):
            bits = bits_of(row, at)
            size = np.int32(bits & _SIZE_BITS)
            largest_size = size if size > largest_size else largest_size
            number = _ordered(bits) if _is_set(word, at - first) else _LEAST
            top = number if number > top else top
        return top, largest_size

    return block_of


def _place_of(bits_of: Any) -> Any:
    @inlined
    def place_of(row, first, word, top):  # type: ignore[no-untyped-def]
        """Return the place of the first of these numbers that is the top and whose bit is set."""
        place = 0
        while _ordered(bits_of(row, first + place)) != top or not _is_set(word, place):
            place += 1
        return place

    return place_of


# largest(rows, masks, found, num_rows, width) writes one int64 per row to found: the lowest index of its largest value,
# NOT_FINITE or NOTHING_ALLOWED. `rows` and `masks` are int64 addresses, one per row. A mask has one bit per value, the
# lowest bit of each 32-bit word first. Values whose bit is 0 are not taken. A mask with address 0 allows every value.
largest_float = _kernel(_bits_of_float)
largest_bf16 = _kernel(_bits_of_bf16)
