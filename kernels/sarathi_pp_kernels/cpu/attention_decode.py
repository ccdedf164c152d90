"""Attention of few rows of a sequence over paged keys and values: one compiled pass that reads every page in place.

A row is one token. A tile is one row or some consecutive rows of a sequence. Each tile takes three steps over the pages
of its sequence:

    scores    products of every query head with the keys, and the largest product per head
    weights   softmax of the scores in place, with the soft cap and the sinks
    sums      the values, multiplied by the weights and added up

Pages are walked in order with all heads of a page together, because they are stored in that order. The next page is
prefetched while this one is computed. The time of a decode is that of reading its pages, which are scattered in memory.
Without prefetching, the processor would wait for each of them. Pages come to the second-level cache, which can have
more lines under way than the first.

Measured on one core of a Zen 4, with 700 keys of 8 KV heads of 64 channels. bfloat16 in attention_decode_simd.py takes
83 us per row and layer, which is 17 GB/s. It takes 142 us if pages come to the first-level cache, and 137 us without
prefetching. float32 takes 217 us against 284 us. On a Zen 5, gathering the pages for torch's products takes 330 to 400
us for 763 keys.

In float32, attention_float.py is faster, and is used wherever it fits. Other float32 shapes are computed here, with
tiles of several rows, and so are decodes in bfloat16 and float16 without SIMD kernels of their own.

Products and sums are float32 for every dtype. Operations may be reordered, but NaN and infinity stay what they are. The
result of a row depends on nothing but the row: neither on its tile nor on any other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from sarathi_pp_kernels.cpu.simd.compile import compiled, inlined
from sarathi_pp_kernels.cpu.simd.memory import (
    load_bf16,
    load_float,
    load_fp16,
    load_index,
    prefetch,
    store_bf16,
    store_float,
    store_fp16,
)
from sarathi_pp_kernels.cpu.simd.softmax import exponential

Kernel = Callable[..., None]

_FLOAT = np.float32
_LINE_BYTES = 64
_UNROLL = 16
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2


def scratch_floats(count: int, end: int, num_heads: int, head_dim: int, value_dim: int) -> int:
    """Return the number of float32 values of scratch memory that the kernel of `compile_kernel` needs for a tile.

    The scratch holds queries, sums, largest scores and scores.

    Args:
        count: number of rows of the tile.
        end: number of keys that the tile's first row sees.
    """
    return count * num_heads * (head_dim + value_dim + 1 + end + count)


@inlined
def _load(kind, array, index):  # type: ignore[no-untyped-def]
    if kind == BFLOAT16:
        return load_bf16(array, index)
    if kind == FLOAT16:
        return load_fp16(array, index)
    return load_float(array, index)


@inlined
def _store(kind, array, index, value):  # type: ignore[no-untyped-def]
    if kind == BFLOAT16:
        store_bf16(array, index, value)
    elif kind == FLOAT16:
        store_fp16(array, index, value)
    else:
        store_float(array, index, value)


@inlined
def _fetch(first, num_bytes):  # type: ignore[no-untyped-def]
    for at in range(first, first + num_bytes, _LINE_BYTES):
        prefetch(at)


@inlined
def _score_block(kind, keys, low, high, query, scores, top, head_dim):  # type: ignore[no-untyped-def]
    """Multiply one query head with keys [low, high) of a page. Return the largest of `top` and the products."""
    for token in range(low, high):
        dot = _FLOAT(0)
        for channel in range(head_dim):
            dot += load_float(query, channel) * _load(kind, keys, token * head_dim + channel)
        store_float(scores, token, dot)
        if dot > top:
            top = dot
    return top


@inlined
def _to_weights(scores, count, top, scaling, softcap, sink):  # type: ignore[no-untyped-def]
    """Turn `count` products into softmax weights, in place.

    Args:
        top: the largest product.
        softcap: soft cap of the scores; 0 for none.
        sink: the head's sink; -inf for none.
    """
    top *= scaling
    if softcap > 0:
        top = _FLOAT(np.tanh(top / softcap)) * softcap
        for at in range(count):
            store_float(scores, at, _FLOAT(np.tanh(load_float(scores, at) * scaling / softcap)) * softcap)
    else:
        for at in range(count):
            store_float(scores, at, load_float(scores, at) * scaling)
    total = _FLOAT(0)
    if sink > -np.inf:
        top = max(top, sink)
        total = exponential(sink - top)
    for at in range(count):
        weight = exponential(load_float(scores, at) - top)
        store_float(scores, at, weight)
        total += weight
    inverse = _FLOAT(1) / total
    for at in range(count):
        store_float(scores, at, load_float(scores, at) * inverse)


@inlined
def _sum_block(kind, values, low, high, weights, out, head_dim, value_dim):  # type: ignore[no-untyped-def]
    """Add values [low, high) of a page, times their weights, to `out`. Others may not have been written: never read."""
    token = low
    while token + _UNROLL <= high:
        for channel in range(value_dim):
            total = load_float(out, channel)
            for step in range(_UNROLL):
                value = _load(kind, values, (token + step) * head_dim + channel)
                total += load_float(weights, token + step) * value
            store_float(out, channel, total)
        token += _UNROLL
    while token < high:
        for channel in range(value_dim):
            value = _load(kind, values, token * head_dim + channel)
            store_float(out, channel, load_float(out, channel) + load_float(weights, token) * value)
        token += 1


@functools.cache
def compile_kernel(  # noqa: C901  (loop in loop)
    kind: int, head_dim: int, value_dim: int, group: int, page_size: int
) -> Kernel:
    """Return the kernel for one dtype (FLOAT32, BFLOAT16, FLOAT16) and shape. `group` query heads share a KV head.

    Of each token in `values`, the first value_dim channels are its value. In latent attention, `values` are the keys.

        kernel(query, row_step, head_step, keys, values, num_kv_heads, places, counts, pages, tables, ends, window,
               scaling, softcap, sinks, scratch, out, begin, stop)

    The kernel computes tiles [begin, stop) without the interpreter's lock. Arrays are given by address, and integer
    arrays are int64. Tile t is rows [places[t], places[t] + counts[t]) of the microbatch.

        query           (T, H, D), with rows row_step and heads head_step elements apart
        keys, values    of one layer, (num_pages, num_kv_heads, page_size, head_dim)
        pages           page ids of all tiles; those of tile t start at index tables[t]
        ends            the first row of tile t sees the keys before ends[t], and each further row sees one more
        window          most keys that a row sees, the last ones; 0 for all
        scaling         factor on the products of queries and keys
        softcap         soft cap of the scores; 0 for none
        sinks           (H,) float32, -inf for none
        scratch         memory for the most float32 values that `scratch_floats` returns for one of the tiles
        out             (T, H, value_dim), contiguous
    """
    item = 4 if kind == FLOAT32 else 2
    head_bytes, sum_bytes = head_dim * 4, value_dim * 4
    block_bytes = page_size * head_dim * item

    def attend(  # type: ignore[no-untyped-def]  # noqa: C901
        query, row_step, head_step, keys, values, num_kv_heads, places, counts, pages, tables, ends, window, scaling,
        softcap, sinks, scratch, out, begin, stop,
    ):  # fmt: skip
        num_heads = num_kv_heads * group
        page_bytes = num_kv_heads * block_bytes
        for tile in range(begin, stop):
            place, count, end = load_index(places, tile), load_index(counts, tile), load_index(ends, tile)
            width = end + count
            table = pages + load_index(tables, tile) * 8
            queries, sums = scratch, scratch + count * num_heads * head_bytes
            tops = sums + count * num_heads * sum_bytes
            scores = tops + count * num_heads * 4
            first_page = max(end - window, 0) // page_size if window else 0
            last_page, origin = (end + count - 2) // page_size, first_page * page_size
            for at in range(count * num_heads):
                source = query + ((place + at // num_heads) * row_step + at % num_heads * head_step) * item
                for channel in range(head_dim):
                    store_float(queries + at * head_bytes, channel, _load(kind, source, channel))
                for channel in range(value_dim):
                    store_float(sums + at * sum_bytes, channel, _FLOAT(0))
                store_float(tops, at, _FLOAT(-np.inf))
            for index in range(first_page, last_page + 1):
                page = keys + load_index(table, index) * page_bytes
                ahead = keys + load_index(table, min(index + 1, last_page)) * page_bytes
                for kv_head in range(num_kv_heads):
                    _fetch(ahead + kv_head * block_bytes, block_bytes)
                    for row in range(count):
                        first = max(end + row - window, 0) if window else 0
                        low, high = max(first - index * page_size, 0), min(end + row - index * page_size, page_size)
                        for member in range(group):
                            head = row * num_heads + kv_head * group + member
                            at = scores + (head * width + index * page_size - origin) * 4
                            top = _score_block(
                                kind, page + kv_head * block_bytes, low, high, queries + head * head_bytes, at,
                                load_float(tops, head), head_dim,
                            )  # fmt: skip
                            store_float(tops, head, top)
            for row in range(count):
                first = max(end + row - window, 0) if window else 0
                for head in range(num_heads):
                    at = row * num_heads + head
                    _to_weights(
                        scores + (at * width + first - origin) * 4, end + row - first, load_float(tops, at), scaling,
                        softcap, load_float(sinks, head),
                    )  # fmt: skip
            for index in range(first_page, last_page + 1):
                page = values + load_index(table, index) * page_bytes
                ahead = values + load_index(table, min(index + 1, last_page)) * page_bytes
                for kv_head in range(num_kv_heads):
                    _fetch(ahead + kv_head * block_bytes, block_bytes)
                    for row in range(count):
                        first = max(end + row - window, 0) if window else 0
                        low, high = max(first - index * page_size, 0), min(end + row - index * page_size, page_size)
                        for member in range(group):
                            head = row * num_heads + kv_head * group + member
                            at = scores + (head * width + index * page_size - origin) * 4
                            _sum_block(
                                kind, page + kv_head * block_bytes, low, high, at, sums + head * sum_bytes, head_dim,
                                value_dim,
                            )  # fmt: skip
            to = out + place * num_heads * value_dim * item
            for channel in range(count * num_heads * value_dim):
                _store(kind, to, channel, load_float(sums, channel))

    kernel: Kernel = compiled()(attend)
    return kernel
