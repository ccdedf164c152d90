"""Attention of single rows over paged bfloat16 keys and values, with SIMD products.

The steps are those of attention_decode.py, with instructions that multiply pairs of bfloat16. The scores of sixteen
tokens are computed at once, and so are the weighted values of two tokens and several heads. Softmax weights are rounded
to bfloat16 as in attention_prefill.py. Scores, the softmax and sums are float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from sarathi_pp_kernels.cpu.simd.compile import compiled, inlined
from sarathi_pp_kernels.cpu.simd.memory import load_float, load_index, round_lines, store_float
from sarathi_pp_kernels.cpu.simd.products import add_weighted, dot_lines
from sarathi_pp_kernels.cpu.simd.softmax import cap, exponential, hide, largest, weigh_lines

Kernel = Callable[..., None]

_FLOAT = np.float32
_LOG2_E = _FLOAT(1.4426950408889634)
# Distance, in bytes, from the line that is read to the line that is prefetched. It is far enough for memory to answer
# in time, and near enough for the second-level cache to keep the lines in between.
AHEAD_BYTES = 32768
# Most registers for sums, out of 32.
_MOST_SUMS = 16


def scratch_floats(num_heads: int, head_dim: int, most_keys: int, page_size: int) -> int:
    """Return the number of float32 values of scratch memory for rows that see up to most_keys keys.

    The scratch holds sums, totals, largest scores, scores and weights.
    """
    return num_heads * (head_dim + 1 + 2 * (most_keys + 2 * page_size + 16)) + _MOST_SUMS


@inlined
def _seen(end, window, page_size):  # type: ignore[no-untyped-def]
    """Return the first key that a row sees, and the indices of the first and the last page with such keys."""
    first = max(end - window, 0) if window else 0
    return first, first // page_size, (end - 1) // page_size


@inlined
def distance(page_bytes):  # type: ignore[no-untyped-def]
    """Return AHEAD_BYTES as (pages, bytes), and the bytes of a page, as `address_ahead` takes them."""
    return AHEAD_BYTES // page_bytes, AHEAD_BYTES % page_bytes, page_bytes


@inlined
def address_ahead(index, offset, step, current, following):  # type: ignore[no-untyped-def]
    """Return the address that is read AHEAD_BYTES after an offset in page `index` of a page table.

    After the last page, the first pages that follow are read, or the last one of these if there are too few.

    Args:
        step: the result of `distance`. It is computed once, because divisions are slow.
        current: (address of all pages, address of the page ids, index of the last page).
        following: (address of all pages, address of the page ids, index of the first page, index of the last page) of
            what is read next.
    """
    pages, rest, page_bytes = step
    page, there = index + pages, offset + rest
    if there >= page_bytes:
        page, there = page + 1, there - page_bytes
    if page <= current[2]:
        return current[0] + load_index(current[1], page) * page_bytes + there
    page = min(page - current[2] - 1 + following[2], following[3])
    return following[0] + load_index(following[1], page) * page_bytes + there


@inlined
def _weigh(  # type: ignore[no-untyped-def]
    heads, scores, weights, step, low, high, width, scaling, softcap, sinks, tops, totals
):
    """Turn scores [0, width) of several heads into weights, 0 outside [low, high), and sum up each head's weights.

    The scores are overwritten.

    Args:
        heads: number of heads, a literal (simd/).
        step: number of elements between the scores of two heads, and between their weights.
        softcap: soft cap of the scores; 0 for none.
        sinks: one per head, -inf for none.
        tops: scratch memory for the largest score of each head.
        totals: each head's sum is written here.
    """
    slope = _FLOAT(1) if softcap > 0 else scaling * _LOG2_E  # capped scores are already scaled
    for head in range(heads):
        here = scores + head * step * 4
        if softcap > 0:
            cap(here, low, high, scaling * _LOG2_E, softcap * _LOG2_E)
        hide(here, low, high, width)
    largest(heads, scores, step, width // 16, tops)
    for head in range(heads):
        store_float(tops, head, max(load_float(sinks, head) * _LOG2_E, load_float(tops, head) * slope))
    weigh_lines(heads, scores, step, weights, step, width // 16, slope, tops, totals)
    for head in range(heads):
        sink = load_float(sinks, head)
        if sink > -np.inf:
            share = exponential((sink * _LOG2_E - load_float(tops, head)) / _LOG2_E)
            store_float(totals, head, load_float(totals, head) + share)


@functools.cache
def compile_kernel(head_dim: int, group: int, page_size: int) -> Kernel:  # noqa: C901  (loop in loop)
    """Return the kernel for heads of a multiple of 32 channels and pages of a multiple of 16 tokens.

        kernel(query, row_step, head_step, keys, values, num_kv_heads, places, pages, tables, ends, window, scaling,
               softcap, sinks, scratch, out, begin, stop)

    See attention_decode.compile_kernel for the arguments. Each tile is one row. Queries, keys, values and outputs
    are bfloat16.
    """
    lines = head_dim // 32
    at_once = next(n for n in range(group, 0, -1) if n == 1 or (group % n == 0 and n * 2 * lines <= _MOST_SUMS))
    block_bytes = page_size * head_dim * 2

    def attend(  # type: ignore[no-untyped-def]  # noqa: C901
        query, row_step, head_step, keys, values, num_kv_heads, places, pages, tables, ends, window, scaling, softcap,
        sinks, scratch, out, begin, stop,
    ):  # fmt: skip
        num_heads = num_kv_heads * group
        page_bytes = num_kv_heads * block_bytes
        step = distance(page_bytes)
        sums, totals = scratch, scratch + num_heads * head_dim * 4
        tops = totals + num_heads * 4
        scores = tops + _MOST_SUMS * 4
        for row in range(begin, stop):
            place, table = load_index(places, row), pages + load_index(tables, row) * 8
            end = load_index(ends, row)
            first, first_page, last_page = _seen(end, window, page_size)
            # The next row is read after this one.
            later = min(row + 1, stop - 1)
            _, later_first, later_last = _seen(load_index(ends, later), window, page_size)
            of_keys, of_values = (keys, table, last_page), (values, table, last_page)
            next_values = values, table, first_page, last_page
            next_keys = keys, pages + load_index(tables, later) * 8, later_first, later_last
            # A window may begin anywhere in its page, and a weight may be read together with the next one.
            width = (last_page + 2) * page_size + 16
            weights = scores + num_heads * width * 4
            origin, filled = first_page * page_size, (last_page + 1 - first_page) * page_size + 16
            for index in range(first_page, last_page + 1):
                page = keys + load_index(table, index) * page_bytes
                for kv_head in range(num_kv_heads):
                    asked = query + (place * row_step + kv_head * group * head_step) * 2
                    to = scores + (kv_head * group * width + index * page_size - origin) * 4
                    for token in range(0, page_size, 16):
                        at = kv_head * block_bytes + token * head_dim * 2
                        ahead = address_ahead(index, at, step, of_keys, next_values)
                        dot_lines(lines, 1, asked, page + at, to + token * 4, ahead)
                        for member in range(1, group):
                            of_member, to_member = asked + member * head_step * 2, to + (member * width + token) * 4
                            dot_lines(lines, 0, of_member, page + at, to_member, 0)
            for head in range(0, num_heads, at_once):
                _weigh(
                    at_once, scores + head * width * 4, weights + head * width * 2, width, first - origin, end - origin,
                    filled, scaling, softcap, sinks + head * 4, tops, totals + head * 4,
                )  # fmt: skip
            for at in range(num_heads * head_dim):
                store_float(sums, at, _FLOAT(0))
            for index in range(first_page, last_page + 1):
                page = values + load_index(table, index) * page_bytes
                # Values outside may never have been written, and even a weight of 0 times NaN is NaN.
                low, high = max(first - index * page_size, 0), min(end - index * page_size, page_size)
                pairs = (high - low) // 2
                for kv_head in range(num_kv_heads):
                    at = (kv_head * page_size + low) * head_dim * 2
                    block, ahead = page + at, address_ahead(index, at, step, of_values, next_keys)
                    for head in range(kv_head * group, (kv_head + 1) * group, at_once):
                        given = weights + (head * width + index * page_size - origin + low) * 2
                        to = sums + head * head_dim * 4
                        if pairs:
                            add_weighted(at_once, lines, 0, block, given, width, to, pairs, ahead)
                        if (high - low) % 2:
                            done = pairs * head_dim * 4
                            add_weighted(at_once, lines, 1, block + done, given + pairs * 4, width, to, 1, ahead + done)
            for head in range(num_heads):
                inverse = _FLOAT(1) / load_float(totals, head)
                for at in range(head * head_dim, (head + 1) * head_dim):
                    store_float(sums, at, load_float(sums, at) * inverse)
            round_lines(sums, out + place * num_heads * head_dim * 2, num_heads * head_dim // 16)

    kernel: Kernel = compiled()(attend)
    return kernel
