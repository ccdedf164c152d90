"""Products of bfloat16 pairs or float32 rows, summed in float32 registers."""

from __future__ import annotations

from itertools import chain, cycle, product
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sarathi_pp_kernels.cpu.simd.registers import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    LANES,
    PAIRS,
    WORDS,
    both_halves,
    dot,
    each_line,
    element_at,
    fma,
    halves_at,
    index,
    pairs_at,
    prefetch_at,
    prefetch_once_at,
    spread,
    to_bf16,
)


@intrinsic(prefer_literal=True)
def dot_tile(  # type: ignore[no-untyped-def]
    typing, rows, panels, asks, bf16, weight, panel_words, x, row_words, pair_words, num_pairs, begin, out, out_row,
    ahead, ahead_step,
):  # fmt: skip
    """Compute out[r][lane of panel p] = begin[lane of p] + sum over k of x[r][k] . panel p[k][lane].

    The tile takes rows * panels + panels registers, out of 32. simd/__init__.py explains panels, pairs and literals.

    Args:
        rows: number of rows of the tile, a literal.
        panels: number of panels of the tile, a literal.
        asks: a literal: the level (1, 2) of the cache to which lines are prefetched; 0 for none.
        bf16: a literal: 1 for bfloat16 outputs, 0 for float32.
        weight: address of the panels. Panel p is p * panel_words words after it.
        x: address of the rows. Pair k of row r is r * row_words + k * pair_words words after it.
        num_pairs: number of pairs per row, at least 1.
        begin: float32, one for each output.
        out: address of the outputs. Row r is r * out_row outputs after it.
        ahead: address of the lines to prefetch. With pair k of panel p, the line is prefetched that is
            ahead_step * k bytes and p panels after it.
    """
    num_rows, num_panels, cache, rounded = (one.literal_value for one in (rows, panels, asks, bf16))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weight_, panel_words_, x_, row_words_, pair_words_, num_pairs_, begin_, out_, out_row_ = arguments[4:13]
        ahead_, ahead_step_ = arguments[13:]
        starts = [
            builder.load(
                builder.bitcast(element_at(builder, begin_, F32, index(LANES * panel)), FLOATS.as_pointer()), align=4
            )
            for panel in range(num_panels)
        ]
        entry = builder.block
        loop, after = builder.append_basic_block("pair"), builder.append_basic_block("summed")
        builder.branch(loop)
        builder.position_at_end(loop)
        pair = builder.phi(I64)
        pair.add_incoming(index(0), entry)
        sums = [[builder.phi(FLOATS) for _ in range(num_panels)] for _ in range(num_rows)]
        lines = []
        for panel in range(num_panels):
            word = builder.add(builder.mul(pair, index(LANES)), builder.mul(panel_words_, index(panel)))
            pointer = element_at(builder, weight_, I32, word)
            if cache:
                behind = builder.mul(panel_words_, index(4 * panel))
                asked = builder.add(behind, builder.mul(pair, ahead_step_))
                prefetch_at(builder, element_at(builder, ahead_, I8, asked), cache)
            line = builder.load(builder.bitcast(pointer, WORDS.as_pointer()), align=4)
            lines.append(builder.bitcast(line, PAIRS))
        totals: list[list[Any]] = []
        following = builder.add(pair, index(1))
        place = builder.mul(pair, pair_words_)
        for row in range(num_rows):
            word = builder.load(element_at(builder, x_, I32, builder.add(place, builder.mul(row_words_, index(row)))))
            factor = builder.bitcast(spread(builder, word), PAIRS)
            totals.append([dot(builder, held, factor, line) for held, line in zip(sums[row], lines, strict=True)])
        for held, total, start in zip(chain(*sums), chain(*totals), cycle(starts), strict=False):
            held.add_incoming(start, entry)
            held.add_incoming(total, loop)
        pair.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, num_pairs_), loop, after)
        builder.position_at_end(after)
        for row in range(num_rows):
            for panel in range(num_panels):
                summed = totals[row][panel]
                at = builder.add(builder.mul(out_row_, index(row)), index(LANES * panel))
                if rounded:
                    builder.store(to_bf16(builder, summed), halves_at(builder, out_, at), align=2)
                else:
                    pointer = builder.bitcast(element_at(builder, out_, F32, at), FLOATS.as_pointer())
                    builder.store(summed, pointer, align=4)
        return context.get_dummy_value()

    integers = [types.int64] * 11
    return types.void(rows, panels, asks, bf16, *integers), generate


@intrinsic(prefer_literal=True)
def float_tile(  # type: ignore[no-untyped-def]
    typing, rows, panels, pairs, weight, panel_words, x, x_step, num_lines, begin, out, out_row, ahead, ahead_step
):
    """Compute out[r][lane of panel p] = begin[lane of p] + sum over k of x[k][r] * panel p[k][lane], in float32.

    The sum is over ascending k, one number at a time. So the bits of a row depend on nothing but the row.

    Args:
        rows: number of rows of the tile, a literal.
        panels: number of panels of the tile, a literal.
        pairs: a literal: 1 if a line of a panel holds pairs of bfloat16, so that it has two k; 0 if it holds float32.
        weight: address of the panels. Panel p is p * panel_words words after it.
        x: address of the numbers of the rows, float32. Number k of row r is k * x_step + r after it.
        num_lines: number of lines of a panel, at least 1.
        begin: float32, one for each output.
        out: address of the outputs, float32. Row r is r * out_row outputs after it.
        ahead: address of the lines to prefetch. With line k of panel p, the line is prefetched that is
            ahead_step * k bytes and p panels after it.
    """
    num_rows, num_panels, of_pairs = rows.literal_value, panels.literal_value, pairs.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weight_, panel_words_, x_, x_step_, num_lines_, begin_, out_, out_row_, ahead_, ahead_step_ = arguments[3:]

        def floats_at(address: Any, place: Any) -> Any:
            return builder.bitcast(element_at(builder, address, F32, place), FLOATS.as_pointer())

        starts = [builder.load(floats_at(begin_, index(LANES * panel)), align=4) for panel in range(num_panels)]
        with each_line(builder, num_lines_, *(starts * num_rows)) as (line, loop):
            factors: list[list[Any]] = []  # for each panel, a register for each k of the line
            for panel in range(num_panels):
                asked = builder.add(builder.mul(panel_words_, index(4 * panel)), builder.mul(line, ahead_step_))
                prefetch_at(builder, element_at(builder, ahead_, I8, asked), cache=1)
                word = builder.add(builder.mul(line, index(LANES)), builder.mul(panel_words_, index(panel)))
                words = builder.load(
                    builder.bitcast(element_at(builder, weight_, I32, word), WORDS.as_pointer()), align=4
                )
                factors.append(both_halves(builder, words) if of_pairs else [builder.bitcast(words, FLOATS)])
            sums = list(loop.carried)
            for part in range(1 + of_pairs):
                number = builder.add(builder.mul(line, index(1 + of_pairs)), index(part))
                place = builder.mul(number, x_step_)
                for row in range(num_rows):
                    one = builder.load(element_at(builder, x_, F32, builder.add(place, index(row))))
                    value = spread(builder, one)
                    for panel in range(num_panels):
                        at = row * num_panels + panel
                        sums[at] = fma(builder, value, factors[panel][part], sums[at])
            loop.carry(*sums)
        for at, total in enumerate(loop.results):
            row, panel = divmod(at, num_panels)
            place = builder.add(builder.mul(out_row_, index(row)), index(LANES * panel))
            builder.store(total, floats_at(out_, place), align=4)
        return context.get_dummy_value()

    return types.void(rows, panels, pairs, *[types.int64] * 10), generate


def _across(builder: Any, registers: list[Any]) -> Any:
    """Return one register. Its lane r is the sum over the lanes of register r, of sixteen registers.

    Each step adds up two halves of the registers, so that half of them are left.
    """
    width = LANES // 2
    while width:
        # Blocks of `width` lanes, alternately from one half of the registers and from the other.
        low = [
            lane + (LANES if lane // width % 2 else 0) - (width if lane // width % 2 else 0) for lane in range(LANES)
        ]
        high = [lane + width + (LANES - width if lane // width % 2 else 0) for lane in range(LANES)]
        half = len(registers) // 2
        registers = [
            builder.fadd(
                builder.shuffle_vector(first, second, ir.Constant(WORDS, low)),
                builder.shuffle_vector(first, second, ir.Constant(WORDS, high)),
            )
            for first, second in zip(registers[:half], registers[half:], strict=True)
        ]
        width //= 2
    return registers[0]


@intrinsic(prefer_literal=True)
def dot_lines(typing, lines, asks, query, keys, out, ahead):  # type: ignore[no-untyped-def]
    """Compute out[t] = query . keys[t] for sixteen tokens of 32 * lines bfloat16 each.

    Args:
        lines: number of lines of a token, a literal.
        asks: a literal: 1 to prefetch as many lines from the address `ahead` on, which are read once later; 0 for none.
    """
    num_lines, asked = lines.literal_value, asks.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, query_, keys_, out_, ahead_ = arguments
        words = [index(line * LANES) for line in range(num_lines)]
        queries = [pairs_at(builder, query_, word) for word in words]
        sums = []
        for token in range(LANES):
            held: Any = ir.Constant(FLOATS, [0.0] * LANES)
            for line, factor in enumerate(queries):
                word = index((token * num_lines + line) * LANES)
                if asked:
                    prefetch_once_at(builder, element_at(builder, ahead_, I32, word))
                held = dot(builder, held, factor, pairs_at(builder, keys_, word))
            sums.append(held)
        pointer = builder.bitcast(element_at(builder, out_, F32, index(0)), FLOATS.as_pointer())
        builder.store(_across(builder, sums), pointer, align=4)
        return context.get_dummy_value()

    return types.void(lines, asks, *[types.int64] * 4), generate


@intrinsic(prefer_literal=True)
def add_weighted(  # type: ignore[no-untyped-def]
    typing, heads, lines, odd, values, weights, weights_step, sums, num_pairs, ahead
):
    """Add weights[h][t] * values[t] to sums[h], over the tokens of num_pairs pairs and for several heads at once.

    Args:
        heads: number of heads, a literal.
        lines: number of lines of a token, of 32 channels each, a literal.
        odd: a literal: 1 if the second token of each pair is missing; otherwise 0.
        values: (tokens, 32 * lines) bfloat16.
        weights: bfloat16, weights of each head. Those of the next head are weights_step elements after them.
        sums: (heads, 32 * lines) float32.
        num_pairs: at least 1.
        ahead: address of values that are read later, once. As many lines are prefetched from there as are read here.
    """
    num_heads, num_lines, lone = heads.literal_value, lines.literal_value, odd.literal_value
    channels = [(line, part) for line in range(num_lines) for part in range(2)]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values_, weights_, weights_step_, sums_, num_pairs_, ahead_ = arguments[3:]
        places = [
            [index((head * num_lines * 2 + at) * LANES) for at in range(len(channels))] for head in range(num_heads)
        ]

        def pointer(place: Any) -> Any:
            return builder.bitcast(element_at(builder, sums_, F32, place), FLOATS.as_pointer())

        begins = [[builder.load(pointer(place), align=4) for place in row] for row in places]
        entry = builder.block
        body, after = builder.append_basic_block("pair"), builder.append_basic_block("added")
        builder.branch(body)
        builder.position_at_end(body)
        pair = builder.phi(I64)
        held = [[builder.phi(FLOATS) for _ in row] for row in places]
        first = builder.mul(pair, index(2 * num_lines * LANES))
        halves = ir.VectorType(I16, 2 * LANES)
        both = [[ir.Constant(halves, [0] * 2 * LANES)] * 2 for _ in range(num_lines)]
        for line, token in product(range(num_lines), range(1 if lone else 2)):
            word = builder.add(first, index((token * num_lines + line) * LANES))
            prefetch_once_at(builder, element_at(builder, ahead_, I32, word))
            both[line][token] = builder.bitcast(pairs_at(builder, values_, word), halves)
        mixed = []
        for line, part in channels:
            order = [lane // 2 + part * LANES + (lane % 2) * 2 * LANES for lane in range(2 * LANES)]
            shuffled = builder.shuffle_vector(*both[line], ir.Constant(ir.VectorType(I32, 2 * LANES), order))
            mixed.append(builder.bitcast(shuffled, PAIRS))
        totals = []
        for head in range(num_heads):
            token = builder.add(builder.mul(weights_step_, index(head)), builder.mul(pair, index(2)))
            word = builder.bitcast(element_at(builder, weights_, I16, token), I32.as_pointer())
            factor = builder.bitcast(spread(builder, builder.load(word, align=2)), PAIRS)
            totals.append(
                [dot(builder, sum_, factor, of_both) for sum_, of_both in zip(held[head], mixed, strict=True)]
            )
        following = builder.add(pair, index(1))
        pair.add_incoming(index(0), entry)
        pair.add_incoming(following, body)
        for phi, begin, total in zip(chain(*held), chain(*begins), chain(*totals), strict=True):
            phi.add_incoming(begin, entry)
            phi.add_incoming(total, body)
        builder.cbranch(builder.icmp_signed("<", following, num_pairs_), body, after)
        builder.position_at_end(after)
        for place, total in zip(chain(*places), chain(*totals), strict=True):
            builder.store(total, pointer(place), align=4)
        return context.get_dummy_value()

    return types.void(heads, lines, odd, *[types.int64] * 6), generate
