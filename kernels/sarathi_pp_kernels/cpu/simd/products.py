"""Products of bfloat16 pairs or float32 rows, summed in float32 registers."""

from __future__ import annotations

from itertools import chain, product
from typing import Any, NamedTuple

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
    both_fp16,
    both_halves,
    dot,
    each_line,
    element_at,
    fma,
    for_count,
    index,
    load_values,
    pairs_at,
    prefetch_at,
    spread,
    store_values,
)

# How a tile multiplies: the type of x, then of the weight. Sums are float32.
BF16, FLOAT32, FLOAT32_BF16, FLOAT32_FP16 = 0, 1, 2, 3
# Kinds whose x is float32 and whose weight is pairs of 16-bit numbers.
NARROW = FLOAT32_BF16, FLOAT32_FP16


class _Tile(NamedTuple):
    """A tile: rows of x, multiplied with adjacent panels. Its sums take rows * panels * 16 lanes of the registers.

    Attributes:
        rows: number of rows.
        panels: number of panels.
        kind: BF16, FLOAT32, FLOAT32_BF16 or FLOAT32_FP16.
        cache: level (1, 2) of the cache to which lines are prefetched; 0 for none.
        rounded: outputs are bfloat16; otherwise float32.
        continued: sums begin with the outputs so far.
    """

    rows: int
    panels: int
    kind: int
    cache: int
    rounded: bool
    continued: bool = False


class _Operands(NamedTuple):
    """The LLVM values that a tile is computed from. `dot_tile` and `multiply_rows` explain most of them.

    Attributes:
        row_words: number of words from a row of x to the next.
        step_words: number of words from a word of a row of x to its next word.
        added: address of what is added to the sums at the end, or with which they begin in BF16; None for nothing.
        line_words: number of words from a line of a panel to its next line.
    """

    weight: Any
    panel_words: Any
    x: Any
    row_words: Any
    step_words: Any
    num_lines: Any
    added: Any
    added_row: Any
    out: Any
    out_row: Any
    ahead: Any = None
    ahead_step: Any = None
    line_words: Any = index(LANES)


@intrinsic(prefer_literal=True)
def dot_tile(  # type: ignore[no-untyped-def]
    typing, rows, panels, weight, panel_words, x, row_words, pair_words, num_pairs, begin, out, out_row
):
    """Compute out[r][lane of panel p] = begin[lane of p] + sum over k of x[r][k] . panel p[k][lane].

    Rows and panels are pairs of bfloat16, and outputs are float32.

    simd/__init__.py explains panels, pairs and literals.

    Args:
        rows: number of rows of the tile, a literal.
        panels: number of panels of the tile, a literal.
        weight: address of the panels. Panel p is p * panel_words words after it.
        x: address of the rows. Pair k of row r is r * row_words + k * pair_words words after it.
        num_pairs: number of pairs per row, at least 1.
        begin: float32, one for each output.
        out: address of the outputs. Row r is r * out_row outputs after it.
    """
    tile = _Tile(rows.literal_value, panels.literal_value, BF16, cache=0, rounded=False)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *words, begin_, out_, out_row_ = arguments[2:]
        operands = _Operands(*words, begin_, index(0), out_, out_row_)  # type: ignore[call-arg]
        _build_tile(builder, tile, operands)
        return context.get_dummy_value()

    return types.void(rows, panels, *[types.int64] * 9), generate


@intrinsic(prefer_literal=True)
def multiply_tile(  # type: ignore[no-untyped-def]
    typing, least_rows, most_rows, panels, continued, asks, rows, weight, panel_words, line_words, x, row_words,
    num_lines, out, out_row, ahead,
):  # fmt: skip
    """Compute out[r][lane of panel p] = sum over k of x[r][k] * panel p[k][lane], or add the sum to `out`, in float32.

    Each sum is over ascending k, in one register.

    Args:
        least_rows: smallest number of rows, a literal.
        most_rows: largest number of rows, a literal.
        panels: number of panels of the tile, a literal.
        continued: a literal: 1 if the sums begin with what `out` has; 0 if they begin with 0.
        asks: a literal: 1 to prefetch, for each line that is read, the one as far after `ahead` as it is after
            `weight`; 0 for none.
        rows: number of rows of the tile.
        weight: address of the panels. Line k of panel p is p * panel_words + k * line_words float32 after it.
        x: address of the rows. Row r is r * row_words float32 after it.
        num_lines: number of lines of a panel, at least 1.
        out: address of the outputs. Row r is r * out_row outputs after it.
    """
    least, most, count, adds, asked = (one.literal_value for one in (least_rows, most_rows, panels, continued, asks))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows_, weight_, panel_words_, line_words_, x_, row_words_, num_lines_, out_, out_row_, ahead_ = arguments[5:]
        given = weight_, panel_words_, x_, row_words_, index(1), num_lines_, None, None, out_, out_row_
        operands = _Operands(*given, ahead_, builder.mul(line_words_, index(4)), line_words_)
        for height in for_count(builder, rows_, range(least, most + 1)):
            tile = _Tile(height, count, FLOAT32, cache=2 * asked, rounded=False, continued=bool(adds))
            _build_tile(builder, tile, operands)
        return context.get_dummy_value()

    return types.void(least_rows, most_rows, panels, continued, asks, *[types.int64] * 10), generate


@intrinsic(prefer_literal=True)
def multiply_rows(  # type: ignore[no-untyped-def]
    typing, kind, most_rows, panels, level, rows, weight, panel_words, x, num_lines, added, added_row, out, out_row,
    ahead, ahead_step,
):  # fmt: skip
    """Multiply a tile of a linear layer: out[r][lane of panel p] = added[r][lane of p] + x[r] . column of panel p.

    Each sum is over ascending k, in one register. So the bits of a row depend on nothing but the row. Registers are
    assigned at compile time, so each number of rows has its own loop.

    Args:
        kind: BF16, FLOAT32, FLOAT32_BF16 or FLOAT32_FP16, a literal. For BF16, x and the lines of the weight are
            pairs, and outputs are bfloat16. For FLOAT32, all are float32. For the others, a line holds pairs, and x and
            outputs are float32.
        most_rows: largest number of rows, a literal, even.
        panels: number of panels of the tile, a literal.
        level: level (1, 2) of the cache to which lines are prefetched, a literal.
        rows: number of rows of the tile, even.
        weight: address of the panels. Panel p is p * panel_words words after it.
        x: address of the words of the rows. Word k of row r is k * rows + r words after it.
        num_lines: number of lines of a panel that are multiplied, at least 1.
        added: float32, one for each output. Row r is r * added_row after it. For BF16, all rows have the same, with
            which their sums begin. Otherwise they are added to the sums at the end.
        out: address of the outputs. Row r is r * out_row outputs after it. It may be `added`.
        ahead: address of the lines to prefetch. With line k of panel p, the line is prefetched that is
            ahead_step * k bytes and p panels after it.
    """
    multiplies, most, count, cache = (one.literal_value for one in (kind, most_rows, panels, level))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows_, weight_, panel_words_, x_, num_lines_, added_, added_row_, out_, out_row_, *prefetched = arguments[4:]
        for height in for_count(builder, rows_, range(2, most + 1, 2)):
            tile = _Tile(height, count, multiplies, cache, multiplies == BF16)
            words = weight_, panel_words_, x_, index(1), index(height), num_lines_
            _build_tile(builder, tile, _Operands(*words, added_, added_row_, out_, out_row_, *prefetched))
        return context.get_dummy_value()

    return types.void(kind, most_rows, panels, level, *[types.int64] * 11), generate


def _build_tile(builder: Any, tile: _Tile, operands: _Operands) -> None:
    """Build the loop over the lines of a tile's panels."""
    weight, panel_words, x, row_words, step_words, num_lines, *outputs, ahead, ahead_step, line_words = operands
    added, added_row, out, out_row = outputs
    parts = 2 if tile.kind in NARROW else 1  # numbers of x, or pairs, per line
    panels = range(tile.panels)
    with each_line(builder, num_lines, *_first_sums(builder, tile, operands)) as (line, loop):
        lines = []
        for panel in panels:
            if tile.cache:
                asked = builder.add(builder.mul(panel_words, index(4 * panel)), builder.mul(line, ahead_step))
                prefetch_at(builder, element_at(builder, ahead, I8, asked), tile.cache)
            word = builder.add(builder.mul(line, line_words), builder.mul(panel_words, index(panel)))
            lines.append(_line_of(builder, tile.kind, element_at(builder, weight, I32, word)))
        sums = list(loop.carried)
        for part in range(parts):
            place = builder.mul(builder.add(builder.mul(line, index(parts)), index(part)), step_words)
            for row in range(tile.rows):
                at = builder.add(place, builder.mul(row_words, index(row)))
                value = spread(builder, builder.load(element_at(builder, x, I32 if tile.kind == BF16 else F32, at)))
                for panel in panels:
                    held = row * tile.panels + panel
                    if tile.kind == BF16:
                        sums[held] = dot(builder, sums[held], builder.bitcast(value, PAIRS), lines[panel][part])
                    else:
                        sums[held] = fma(builder, value, lines[panel][part], sums[held])
        loop.carry(*sums)
    for held, total in enumerate(loop.results):
        row, panel = divmod(held, tile.panels)
        if tile.kind != BF16 and added is not None:
            place = builder.add(builder.mul(added_row, index(row)), index(LANES * panel))
            total = builder.fadd(load_values(builder, 4, added, place), total)
        at = builder.add(builder.mul(out_row, index(row)), index(LANES * panel))
        store_values(builder, 2 if tile.rounded else 4, total, out, at)


def _first_sums(builder: Any, tile: _Tile, operands: _Operands) -> list[Any]:
    """Return what the sums of a tile begin with, row by row."""
    places = [[index(LANES * panel) for panel in range(tile.panels)] for _ in range(tile.rows)]
    if tile.kind == BF16:
        return [load_values(builder, 4, operands.added, place) for place in places[0]] * tile.rows
    if not tile.continued:
        return [ir.Constant(FLOATS, [0.0] * LANES)] * (tile.rows * tile.panels)
    return [
        load_values(builder, 4, operands.out, builder.add(builder.mul(operands.out_row, index(row)), place))
        for row, of_row in enumerate(places)
        for place in of_row
    ]


def _line_of(builder: Any, kind: int, pointer: Any) -> list[Any]:
    """Load a line of a panel, and return one register of it for each number or pair of x that it is multiplied with."""
    words = builder.load(builder.bitcast(pointer, WORDS.as_pointer()), align=4)
    if kind == FLOAT32_BF16:
        return both_halves(builder, words)
    if kind == FLOAT32_FP16:
        return both_fp16(builder, words)
    return [builder.bitcast(words, PAIRS if kind == BF16 else FLOATS)]


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
        asks: a literal: 1 to prefetch as many lines from the address `ahead` on to the second-level cache; 0 for none.
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
                    prefetch_at(builder, element_at(builder, ahead_, I32, word), cache=2)
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
        ahead: address of values that are read later. As many lines are prefetched from there to the second-level cache
            as are read here.
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
            prefetch_at(builder, element_at(builder, ahead_, I32, word), cache=2)
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
