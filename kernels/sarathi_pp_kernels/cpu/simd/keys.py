"""Scores of sixteen float32 keys, which are read from the page where they are stored."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sarathi_pp_kernels.cpu.simd.registers import (
    F32,
    FLOATS,
    LANES,
    each_line,
    element_at,
    floats_at,
    fma,
    for_count,
    index,
    joined,
    prefetch_at,
    spread,
)
from sarathi_pp_kernels.cpu.simd.transpose import QUARTER, interleaved


@intrinsic(prefer_literal=True)
def score_keys(  # type: ignore[no-untyped-def]
    typing, most_rows, rows, queries, query_step, keys, channels, out, out_step, ahead
):
    """Compute out[r][t] = queries[r] . keys[t] for sixteen keys, in float32.

    Each sum is over ascending channels in one lane, as in a tile that is multiplied with a panel of keys. So its bits
    are the same.

    Args:
        most_rows: largest number of queries, a literal.
        rows: number of queries. Query r is r * query_step float32 after `queries`.
        keys: (16, channels) float32, contiguous.
        channels: a multiple of 4, at least 4.
        out: address of the scores. Those of query r are r * out_step float32 after it.
        ahead: address of keys that are read later. As many lines are prefetched from there as are read here.
    """
    most = most_rows.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        for count in for_count(builder, arguments[1], range(1, most + 1)):
            _build_scores(builder, count, *arguments[2:])
        return context.get_dummy_value()

    return types.void(most_rows, *[types.int64] * 8), generate


def _build_scores(builder: Any, rows: int, *arguments: Any) -> None:
    """Build the scores of `rows` queries. The arguments are those of `score_keys` from `queries` on."""
    queries, query_step, keys, channels, out, out_step, ahead = arguments
    nothing = ir.Constant(FLOATS, [0.0] * LANES)
    with each_line(builder, builder.udiv(channels, index(QUARTER)), *[nothing] * rows) as (four, loop):
        channel = builder.mul(four, index(QUARTER))
        for line in range(QUARTER):  # sixteen keys of four channels are four lines
            word = builder.mul(builder.add(channel, index(line)), index(LANES))
            prefetch_at(builder, element_at(builder, ahead, F32, word), cache=2)
        sums = list(loop.carried)
        for place, values in enumerate(_columns(builder, keys, channels, channel)):
            at = builder.add(channel, index(place))
            for row in range(rows):
                word = builder.add(builder.mul(query_step, index(row)), at)
                factor = spread(builder, builder.load(element_at(builder, queries, F32, word)))
                sums[row] = fma(builder, factor, values, sums[row])
        loop.carry(*sums)
    for row, total in enumerate(loop.results):
        builder.store(total, floats_at(builder, out, builder.mul(out_step, index(row))), align=4)


def _columns(builder: Any, keys: Any, channels: Any, channel: Any) -> list[Any]:
    """Return four registers, for four channels. Lane t of each is key t.

    Quarter q of the register that is loaded k-th has the four channels of key 4 * q + k.
    """
    fours = ir.VectorType(F32, QUARTER)
    loaded = []
    for first in range(QUARTER):
        parts = []
        for token in range(first, LANES, QUARTER):
            place = element_at(builder, keys, F32, builder.add(builder.mul(channels, index(token)), channel))
            parts.append(builder.load(builder.bitcast(place, fours.as_pointer()), align=4))
        loaded.append(joined(builder, joined(builder, *parts[:2]), joined(builder, *parts[2:])))
    return interleaved(builder, loaded)
