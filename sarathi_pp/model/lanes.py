"""512-bit registers for numba: sixteen lanes of float32, multiplied in pairs of bfloat16.

numba knows neither bfloat16 nor an instruction that multiplies it. The functions here are such instructions and the
loads and stores around them; kernels are written with them in plain numba. All addresses are integers, in bytes, as
`Tensor.data_ptr()` gives them: passing an array costs more than what a small kernel takes.

A *pair* is two neighbouring bfloat16 in one 32-bit word. A *panel* is what a row of pairs is multiplied with, sixteen
outputs wide, one 64-byte line for each pair:

    panel   word[k][lane] = (w[lane][2k], w[lane][2k + 1])          one lane for each of 16 outputs

`dot_tile` is the one product: rows of pairs times panels that lie side by side, summed in float32 registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import chain, cycle, product
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
_FLOAT = np.float32
_LOWEST = _FLOAT(-80)
# Sums may be reordered, so that loops fill the lanes. Not "fast": that would let a NaN vanish, and a broken sequence
# has to be seen.
_SETTINGS = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz", "arcp"}}
_DIGEST = sha256(Path(__file__).read_bytes()).hexdigest()


class _BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's type, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


_BF16, _F32 = _BFloat16(), ir.FloatType()
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOATS = ir.VectorType(_F32, LANES)
_WORDS = ir.VectorType(_I32, LANES)
_PAIRS = ir.VectorType(_BF16, 2 * LANES)
_HALVES = ir.VectorType(_BF16, LANES)
_SHORTS = ir.VectorType(_I16, LANES)


def has_lanes(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor multiplies bfloat16 in 512-bit registers, as far as Linux tells."""
    if not cpuinfo.exists():
        return False
    flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
    return {"avx512f", "avx512bw", "avx512_bf16"} <= set(flags.split())


def compiled(**options: Any) -> Callable[[Any], Any]:
    """`numba.njit` that lets other threads run and keeps its machine code, where there is a folder to keep it in.

    numba compiles a kept function anew when that function's file has changed, and knows nothing of this one, whose
    instructions it is made of. So what is kept is kept under a digest of this file, in a variable that nobody reads.
    """
    settings = {**_SETTINGS, **options}

    def decorate(function: Any) -> Any:
        code, cells = function.__code__, function.__closure__ or ()
        code = code.replace(co_freevars=(*code.co_freevars, "instructions"))
        function = FunctionType(code, function.__globals__, function.__name__, None, (*cells, CellType(_DIGEST)))
        try:
            return numba.njit(**settings, cache=True)(function)
        except RuntimeError:  # no such folder: compile at every start
            return numba.njit(**settings)(function)

    return decorate


def inlined(function: Any) -> Any:
    """For parts of kernels."""
    return numba.njit(**_SETTINGS, inline="always")(function)


def _at(builder: Any, address: Any, element: Any, index: Any) -> Any:
    """Pointer to element `index` of the array at an address."""
    return builder.gep(builder.inttoptr(address, element.as_pointer()), [index])


def _call(builder: Any, name: str, returned: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(returned, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _prefetch(builder: Any, pointer: Any) -> None:
    read, keep, data = (ir.Constant(_I32, value) for value in (0, 3, 1))
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), [builder.bitcast(pointer, _I8.as_pointer()), read, keep, data])


# 2^x for |x| <= 1/2, from the lowest power on: a Chebyshev fit, within 4e-6 of its value.
_TWO_TO = (1.0, 0.6931210452034274, 0.24022349038021354, 0.05592197584225338, 0.009666368515338686)


class _Loop:
    """A value that a loop over lines hands on: `carried` at the begin of a turn, `result` behind the loop."""

    def __init__(self, carried: Any) -> None:
        self.carried = carried
        self.result: Any = None

    def carry(self, value: Any) -> None:
        self.result = value


@contextmanager
def _each_line(builder: Any, num_lines: Any, begin: Any = None) -> Iterator[tuple[Any, _Loop]]:
    """What is built inside is done for line 0, 1, ... num_lines - 1; at least once."""
    entry = builder.block
    body, after = builder.append_basic_block("line"), builder.append_basic_block("done")
    builder.branch(body)
    builder.position_at_end(body)
    line = builder.phi(_I64)
    loop = _Loop(builder.phi(begin.type) if begin is not None else None)
    yield line, loop
    following = builder.add(line, _index(1))
    line.add_incoming(_index(0), entry)
    line.add_incoming(following, body)
    if begin is not None:
        loop.carried.add_incoming(begin, entry)
        loop.carried.add_incoming(loop.result, body)
    builder.cbranch(builder.icmp_signed("<", following, num_lines), body, after)
    builder.position_at_end(after)


def _load_line(builder: Any, address: Any, line: Any) -> Any:
    pointer = _at(builder, address, _F32, builder.mul(line, _index(LANES)))
    return builder.load(builder.bitcast(pointer, _FLOATS.as_pointer()), align=4)


def _round(builder: Any, values: Any) -> Any:
    """Sixteen float32 to bfloat16, to nearest."""
    return _call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", _HALVES, [values])


def _widen(builder: Any, halves: Any) -> Any:
    """Sixteen bfloat16 to float32."""
    words = builder.zext(builder.bitcast(halves, _SHORTS), _WORDS)
    return builder.bitcast(builder.shl(words, ir.Constant(_WORDS, [16] * LANES)), _FLOATS)


def _halves_at(builder: Any, address: Any, index: Any) -> Any:
    """Pointer to sixteen bfloat16 from element `index` on."""
    return builder.bitcast(_at(builder, address, _I16, index), _HALVES.as_pointer())


def _store_rounded(builder: Any, address: Any, line: Any, values: Any) -> None:
    builder.store(_round(builder, values), _halves_at(builder, address, builder.mul(line, _index(LANES))), align=2)


def _spread(builder: Any, value: Any) -> Any:
    """One value in all lanes."""
    lanes = ir.VectorType(value.type, LANES)
    lone = builder.insert_element(ir.Constant(lanes, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(lone, ir.Constant(lanes, ir.Undefined), ir.Constant(_WORDS, [0] * LANES))


def _fma(builder: Any, factor: Any, other: Any, added: Any) -> Any:
    return _call(builder, "llvm.fma.v16f32", _FLOATS, [factor, other, added])


def _loader(element: Any, found: Any, convert: Any = None) -> Any:
    def load(typing: Any, address: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.load(_at(builder, arguments[0], element, arguments[1]))
            return value if convert is None else convert(builder, value)

        return found(types.int64, types.int64), generate

    return intrinsic(load)


def _storer(element: Any, taken: Any, convert: Any = None) -> Any:
    def store(typing: Any, address: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = arguments[2] if convert is None else convert(builder, arguments[2])
            builder.store(value, _at(builder, arguments[0], element, arguments[1]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, taken), generate

    return intrinsic(store)


def _nearest_bf16(builder: Any, value: Any) -> Any:
    """The bits, on any processor: where it cannot round by itself, LLVM would call a function that is not there."""
    word = builder.bitcast(value, _I32)
    sixteen, odd = ir.Constant(_I32, 16), ir.Constant(_I32, 1)
    upper = builder.lshr(word, sixteen)
    carry = builder.add(ir.Constant(_I32, 0x7FFF), builder.and_(upper, odd))
    near = builder.lshr(builder.add(word, carry), sixteen)
    nan = builder.or_(upper, ir.Constant(_I32, 0x40))
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", value, value), nan, near), _I16)


# (address, index) -> value, and (address, index, value); index counts elements.
load_word, store_word = _loader(_I32, types.uint32), _storer(_I32, types.uint32)
load_half = _loader(_I16, types.uint16)
load_float, store_float = _loader(_F32, types.float32), _storer(_F32, types.float32)
load_index = _loader(_I64, types.int64)
# bfloat16 in memory, float32 as a value; stores round to nearest, and NaN stays NaN.
load_bf16 = _loader(
    _I16,
    types.float32,
    lambda b, half: b.bitcast(b.shl(b.zext(half, _I32), ir.Constant(_I32, 16)), _F32),
)
store_bf16 = _storer(_I16, types.float32, _nearest_bf16)
load_fp16 = _loader(ir.HalfType(), types.float32, lambda b, half: b.fpext(half, _F32))
store_fp16 = _storer(ir.HalfType(), types.float32, lambda b, value: b.fptrunc(value, ir.HalfType()))


@intrinsic
def prefetch(typing, address):  # type: ignore[no-untyped-def]
    """Ask for the cache line at an address, to be read soon."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _prefetch(builder, _at(builder, arguments[0], _I8, _index(0)))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic(prefer_literal=True)
def dot_tile(  # type: ignore[no-untyped-def]
    typing, rows, panels, ahead, bf16, weight, panel_words, x, row_words, pair_words, num_pairs, begin, out, out_row
):
    """out[r][lane of panel p] = begin[lane of p] + sum over k of x[r][k] . panel p[k][lane]

    rows, panels: of the tile, literals; rows * panels + panels registers are used, of 32. ahead: words by which the
    panels are prefetched, a literal, 0 for none. bf16: a literal, 1 for bfloat16 outputs, 0 for float32.
    weight: panel p lies p * panel_words behind it. x: pair k of row r lies r * row_words + k * pair_words behind it.
    begin: float32, one for each output. out: row r lies r * out_row outputs behind it. num_pairs: at least 1.
    """
    num_rows, num_panels, distance, rounded = (one.literal_value for one in (rows, panels, ahead, bf16))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weight_, panel_words_, x_, row_words_, pair_words_, num_pairs_, begin_, out_, out_row_ = arguments[4:]
        starts = [
            builder.load(
                builder.bitcast(_at(builder, begin_, _F32, _index(LANES * panel)), _FLOATS.as_pointer()), align=4
            )
            for panel in range(num_panels)
        ]
        entry = builder.block
        loop, after = builder.append_basic_block("pair"), builder.append_basic_block("summed")
        builder.branch(loop)
        builder.position_at_end(loop)
        pair = builder.phi(_I64)
        pair.add_incoming(_index(0), entry)
        sums = [[builder.phi(_FLOATS) for _ in range(num_panels)] for _ in range(num_rows)]
        lines = []
        for panel in range(num_panels):
            word = builder.add(builder.mul(pair, _index(LANES)), builder.mul(panel_words_, _index(panel)))
            pointer = _at(builder, weight_, _I32, word)
            if distance:
                _prefetch(builder, builder.gep(pointer, [_index(distance)]))
            line = builder.load(builder.bitcast(pointer, _WORDS.as_pointer()), align=4)
            lines.append(builder.bitcast(line, _PAIRS))
        totals: list[list[Any]] = []
        following = builder.add(pair, _index(1))
        place = builder.mul(pair, pair_words_)
        for row in range(num_rows):
            word = builder.load(_at(builder, x_, _I32, builder.add(place, builder.mul(row_words_, _index(row)))))
            factor = builder.bitcast(_spread(builder, word), _PAIRS)
            totals.append(
                [
                    _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, [held, factor, line])
                    for held, line in zip(sums[row], lines, strict=True)
                ]
            )
        for held, total, start in zip(chain(*sums), chain(*totals), cycle(starts), strict=False):
            held.add_incoming(start, entry)
            held.add_incoming(total, loop)
        pair.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, num_pairs_), loop, after)
        builder.position_at_end(after)
        for row in range(num_rows):
            for panel in range(num_panels):
                summed = totals[row][panel]
                at = builder.add(builder.mul(out_row_, _index(row)), _index(LANES * panel))
                if rounded:
                    builder.store(_round(builder, summed), _halves_at(builder, out_, at), align=2)
                else:
                    pointer = builder.bitcast(_at(builder, out_, _F32, at), _FLOATS.as_pointer())
                    builder.store(summed, pointer, align=4)
        return context.get_dummy_value()

    integers = [types.int64] * 9
    return types.void(rows, panels, ahead, bf16, *integers), generate


def _pairs_at(builder: Any, address: Any, word: Any) -> Any:
    line = builder.bitcast(_at(builder, address, _I32, word), _WORDS.as_pointer())
    return builder.bitcast(builder.load(line, align=4), _PAIRS)


def _dot(builder: Any, held: Any, left: Any, right: Any) -> Any:
    return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, [held, left, right])


def _across(builder: Any, registers: list[Any]) -> Any:
    """The sums over the lanes of sixteen registers, that of register r in lane r: half of them after each step."""
    width = LANES // 2
    while width:
        # Blocks of `width` lanes: those of the one half of the registers beside those of the other.
        low = [
            lane + (LANES if lane // width % 2 else 0) - (width if lane // width % 2 else 0) for lane in range(LANES)
        ]
        high = [lane + width + (LANES - width if lane // width % 2 else 0) for lane in range(LANES)]
        half = len(registers) // 2
        registers = [
            builder.fadd(
                builder.shuffle_vector(first, second, ir.Constant(_WORDS, low)),
                builder.shuffle_vector(first, second, ir.Constant(_WORDS, high)),
            )
            for first, second in zip(registers[:half], registers[half:], strict=True)
        ]
        width //= 2
    return registers[0]


@intrinsic(prefer_literal=True)
def dot_lines(typing, lines, query, keys, out):  # type: ignore[no-untyped-def]
    """out[t] = query . keys[t] for sixteen tokens of 32 * lines bfloat16 each; lines is a literal."""
    num_lines = lines.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, query_, keys_, out_ = arguments
        words = [_index(line * LANES) for line in range(num_lines)]
        queries = [_pairs_at(builder, query_, word) for word in words]
        sums = []
        for token in range(LANES):
            held: Any = ir.Constant(_FLOATS, [0.0] * LANES)
            for line, factor in enumerate(queries):
                word = _index((token * num_lines + line) * LANES)
                held = _dot(builder, held, factor, _pairs_at(builder, keys_, word))
            sums.append(held)
        pointer = builder.bitcast(_at(builder, out_, _F32, _index(0)), _FLOATS.as_pointer())
        builder.store(_across(builder, sums), pointer, align=4)
        return context.get_dummy_value()

    return types.void(lines, types.int64, types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def add_weighted(typing, heads, lines, odd, values, weights, weights_step, sums, num_pairs):  # type: ignore[no-untyped-def]
    """sums[h] += weights[h][t] * values[t] over the tokens of so many pairs, for several heads at once.

    heads, lines, odd: literals; lines: of 32 channels each; odd: 1 where the second token of a pair is not there.
    values: (tokens, 32 * lines) bfloat16. weights: bfloat16, those of the next head weights_step behind.
    sums: (heads, 32 * lines) float32. num_pairs: at least 1.
    """
    num_heads, num_lines, lone = heads.literal_value, lines.literal_value, odd.literal_value
    channels = [(line, part) for line in range(num_lines) for part in range(2)]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values_, weights_, weights_step_, sums_, num_pairs_ = arguments[3:]
        places = [
            [_index((head * num_lines * 2 + at) * LANES) for at in range(len(channels))] for head in range(num_heads)
        ]

        def pointer(place: Any) -> Any:
            return builder.bitcast(_at(builder, sums_, _F32, place), _FLOATS.as_pointer())

        begins = [[builder.load(pointer(place), align=4) for place in row] for row in places]
        entry = builder.block
        body, after = builder.append_basic_block("pair"), builder.append_basic_block("added")
        builder.branch(body)
        builder.position_at_end(body)
        pair = builder.phi(_I64)
        held = [[builder.phi(_FLOATS) for _ in row] for row in places]
        first = builder.mul(pair, _index(2 * num_lines * LANES))
        halves = ir.VectorType(_I16, 2 * LANES)
        both = [[ir.Constant(halves, [0] * 2 * LANES)] * 2 for _ in range(num_lines)]
        for line, token in product(range(num_lines), range(1 if lone else 2)):
            word = builder.add(first, _index((token * num_lines + line) * LANES))
            both[line][token] = builder.bitcast(_pairs_at(builder, values_, word), halves)
        mixed = []
        for line, part in channels:
            order = [lane // 2 + part * LANES + (lane % 2) * 2 * LANES for lane in range(2 * LANES)]
            shuffled = builder.shuffle_vector(*both[line], ir.Constant(ir.VectorType(_I32, 2 * LANES), order))
            mixed.append(builder.bitcast(shuffled, _PAIRS))
        totals = []
        for head in range(num_heads):
            token = builder.add(builder.mul(weights_step_, _index(head)), builder.mul(pair, _index(2)))
            word = builder.bitcast(_at(builder, weights_, _I16, token), _I32.as_pointer())
            factor = builder.bitcast(_spread(builder, builder.load(word, align=2)), _PAIRS)
            totals.append(
                [_dot(builder, sum_, factor, of_both) for sum_, of_both in zip(held[head], mixed, strict=True)]
            )
        following = builder.add(pair, _index(1))
        pair.add_incoming(_index(0), entry)
        pair.add_incoming(following, body)
        for phi, begin, total in zip(chain(*held), chain(*begins), chain(*totals), strict=True):
            phi.add_incoming(begin, entry)
            phi.add_incoming(total, body)
        builder.cbranch(builder.icmp_signed("<", following, num_pairs_), body, after)
        builder.position_at_end(after)
        for place, total in zip(chain(*places), chain(*totals), strict=True):
            builder.store(total, pointer(place), align=4)
        return context.get_dummy_value()

    return types.void(heads, lines, odd, *[types.int64] * 5), generate


@intrinsic
def round_lines(typing, source, to, num_lines):  # type: ignore[no-untyped-def]
    """16 * num_lines float32 to as many bfloat16, at least one line; NaN stays NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source_, to_, num_lines_ = arguments
        with _each_line(builder, num_lines_) as (line, _):
            _store_rounded(builder, to_, line, _load_line(builder, source_, line))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def rotate_lines(typing, source, to, cos, sin, num_lines):  # type: ignore[no-untyped-def]
    """Rotary embedding of one head of 32 * num_lines bfloat16, channel c with channel c + 16 * num_lines.

    x * cos + (-x[half:], x[:half]) * sin, with both products and their sum rounded. `to` may be `source`.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source_, to_, cos_, sin_, num_lines_ = arguments
        half = builder.mul(num_lines_, _index(LANES))
        with _each_line(builder, num_lines_) as (line, _):
            first = builder.mul(line, _index(LANES))
            places = first, builder.add(first, half)
            (a, b), cosines, sines = (
                [_widen(builder, builder.load(_halves_at(builder, array, at), align=2)) for at in places]
                for array in (source_, cos_, sin_)
            )
            for at, own, other, cosine, sine in zip(places, (a, b), (builder.fneg(b), a), cosines, sines, strict=True):
                parts = (
                    _widen(builder, _round(builder, builder.fmul(value, factor)))
                    for value, factor in ((own, cosine), (other, sine))
                )
                builder.store(_round(builder, builder.fadd(*parts)), _halves_at(builder, to_, at), align=2)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def weigh_lines(typing, scores, to, num_lines, slope, top):  # type: ignore[no-untyped-def]
    """2^(slope * score - top) of 16 * num_lines float32 scores, at most 1, to bfloat16, and their sum in float32.

    Within 4e-6 of its value before it is rounded; NaN stays NaN. A score of -1e30 weighs 0.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores_, to_, num_lines_, slope_, top_ = arguments
        slopes, below = _spread(builder, slope_), _spread(builder, builder.fneg(top_))
        with _each_line(builder, num_lines_, ir.Constant(_FLOATS, [0.0] * LANES)) as (line, loop):
            exponent = _fma(builder, _load_line(builder, scores_, line), slopes, below)
            whole = _call(builder, "llvm.rint.v16f32", _FLOATS, [exponent])
            rest = builder.fsub(exponent, whole)
            power = ir.Constant(_FLOATS, [_TWO_TO[-1]] * LANES)
            for coefficient in reversed(_TWO_TO[:-1]):
                power = _fma(builder, power, rest, ir.Constant(_FLOATS, [coefficient] * LANES))
            every, nearest = ir.Constant(_I16, -1), ir.Constant(_I32, 4)
            weight = _call(
                builder, "llvm.x86.avx512.mask.scalef.ps.512", _FLOATS, [power, whole, power, every, nearest]
            )
            _store_rounded(builder, to_, line, weight)
            loop.carry(builder.fadd(loop.carried, weight))
        return _call(builder, "llvm.vector.reduce.fadd.v16f32", _F32, [ir.Constant(_F32, 0.0), loop.result])

    return types.float32(types.int64, types.int64, types.int64, types.float32, types.float32), generate


@intrinsic
def largest(typing, address, num_lines):  # type: ignore[no-untyped-def]
    """Of 16 * num_lines float32, at least one line; NaN counts only where there is nothing else."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address_, num_lines_ = arguments
        with _each_line(builder, num_lines_, ir.Constant(_FLOATS, [float("-inf")] * LANES)) as (line, loop):
            loop.carry(
                _call(builder, "llvm.maxnum.v16f32", _FLOATS, [loop.carried, _load_line(builder, address_, line)])
            )
        return _call(builder, "llvm.vector.reduce.fmax.v16f32", _F32, [loop.result])

    return types.float32(types.int64, types.int64), generate


@intrinsic
def _float_of_bits(typing, bits):  # type: ignore[no-untyped-def]
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _F32)

    return types.float32(types.int32), generate


@inlined
def exponential(x):  # type: ignore[no-untyped-def]
    """exp(x) of float32 x <= 0, within 1e-7 of its value; 0 below -80, and NaN for NaN. The C library's has no lanes.

    2^n * exp(r) with n whole and |r| <= ln(2) / 2, the coefficients of Cephes' expf.
    """
    inside = x if x > _LOWEST else _LOWEST
    n = np.int32(inside * _FLOAT(1.4426950408889634) - _FLOAT(0.5))
    r = inside - _FLOAT(n) * _FLOAT(0.693359375) + _FLOAT(n) * _FLOAT(2.12194440e-4)
    p = _FLOAT(1.9875691500e-4)
    p = p * r + _FLOAT(1.3981999507e-3)
    p = p * r + _FLOAT(8.3334519073e-3)
    p = p * r + _FLOAT(4.1665795894e-2)
    p = p * r + _FLOAT(1.6666665459e-1)
    p = p * r + _FLOAT(5.0000001201e-1)
    p = p * r * r + r + _FLOAT(1)
    found = p * _float_of_bits(np.int32((n + np.int32(127)) << np.int32(23)))
    found = found if x > _LOWEST else _FLOAT(0)
    return found if x == x else x


def _index(value: int) -> Any:
    return ir.Constant(_I64, value)
