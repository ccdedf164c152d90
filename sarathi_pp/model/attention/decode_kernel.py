"""Attention of single rows over paged keys and values: one compiled pass that reads every page where it lies.

For each row, three steps over the pages of its sequence:

    scores    every head's products with the keys, and the largest per head
    weights   softmax in place, with the soft cap and the sinks
    sums      the values, weighted

Pages are walked in order with all heads of a page together, because that is how they lie in memory, and the
next page is asked for while this one is worked on: a decode is a read of its KV, and pages lie scattered, so
without that the processor waits for each of them. Measured on one core with AVX512, bf16, 763 keys of 8 KV
heads: 95 to 105 us a row and layer, which is 15 GB/s; gathering the pages for torch's products takes 330 to 400.

Products and sums are float32 for every dtype. Operations may be reordered, NaN and infinity stay what they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sarathi_pp.model.lanes import compiled, exponential, inlined

Kernel = Callable[..., None]

_FLOAT = np.float32
_LINE_BYTES = 64
_UNROLL = 16


# Arrays are flat and read through these: Python's negative indices would cost a test at every element.


def _place(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


@intrinsic
def _load(typing: Any, array: Any, index: Any) -> Any:
    """array[index] as float32; uint16 holds bfloat16 and int16 float16, neither of which numba has."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.load(_place(context, builder, signature.args[0], *arguments))
        if array.dtype == types.uint16:
            word = ir.IntType(32)
            return builder.bitcast(builder.shl(builder.zext(value, word), ir.Constant(word, 16)), ir.FloatType())
        if array.dtype == types.int16:
            return builder.fpext(builder.bitcast(value, ir.HalfType()), ir.FloatType())
        return value

    return types.float32(array, index), generate


@intrinsic
def _store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] = value, float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _place(context, builder, signature.args[0], *arguments[:2]))
        return context.get_dummy_value()

    return types.void(array, index, types.float32), generate


@intrinsic
def _prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index], to be read soon."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, word, word, word]), "llvm.prefetch.p0"
        )
        address = builder.bitcast(_place(context, builder, signature.args[0], *arguments), byte)
        read, keep, data = (ir.Constant(word, value) for value in (0, 3, 1))
        builder.call(function, [address, read, keep, data])
        return context.get_dummy_value()

    return types.void(array, index), generate


@inlined
def _fetch(pool, first, size):  # type: ignore[no-untyped-def]
    for index in range(first, first + size, _LINE_BYTES // pool.itemsize):
        _prefetch(pool, index)


@inlined
def _score_block(keys, block, low, high, query, q, scores, to, top, head_dim):  # type: ignore[no-untyped-def]
    """One query head against keys [low, high) of a page; returns the largest product so far."""
    for token in range(low, high):
        dot = _FLOAT(0)
        for channel in range(head_dim):
            dot += _load(query, q + channel) * _load(keys, block + token * head_dim + channel)
        _store(scores, to + token, dot)
        if dot > top:
            top = dot
    return top


@inlined
def _to_weights(scores, low, high, top, scaling, softcap, sink):  # type: ignore[no-untyped-def]
    """Softmax of the products in scores[low:high); softcap 0 and sink -inf are none."""
    top *= scaling
    if softcap > 0:
        top = _FLOAT(np.tanh(top / softcap)) * softcap
        for at in range(low, high):
            _store(scores, at, _FLOAT(np.tanh(_load(scores, at) * scaling / softcap)) * softcap)
    else:
        for at in range(low, high):
            _store(scores, at, _load(scores, at) * scaling)
    total = _FLOAT(0)
    if sink > -np.inf:
        top = max(top, sink)
        total = exponential(sink - top)
    for at in range(low, high):
        below = _load(scores, at) - top
        weight = exponential(below)
        _store(scores, at, weight)
        total += weight
    inverse = _FLOAT(1) / total
    for at in range(low, high):
        _store(scores, at, _load(scores, at) * inverse)


@inlined
def _sum_block(values, block, low, high, scores, weights, out, o, head_dim):  # type: ignore[no-untyped-def]
    """Add a page's values [low, high), weighted. What lies outside may never have been written."""
    token = low
    while token + _UNROLL <= high:
        for channel in range(head_dim):
            total = _load(out, o + channel)
            for step in range(_UNROLL):
                value = _load(values, block + (token + step) * head_dim + channel)
                total += _load(scores, weights + token + step) * value
            _store(out, o + channel, total)
        token += _UNROLL
    while token < high:
        for channel in range(head_dim):
            value = _load(values, block + token * head_dim + channel)
            _store(out, o + channel, _load(out, o + channel) + _load(scores, weights + token) * value)
        token += 1


@functools.cache
def compile_kernel(head_dim: int, group: int, page_size: int) -> Kernel:  # noqa: C901  (loops, one in the other)
    """The kernel for one shape of heads and pages; `group` query heads share a KV head.

    kernel(query, keys, values, num_kv_heads, pages, tables, firsts, ends, scaling, softcap, sinks, scores, width,
           out, begin, stop)

    Works on rows [begin, stop) and holds no lock of the interpreter. Arrays are flat and contiguous, integers
    int64: query and out float32 (R, H, D); keys and values of one layer (num_pages, num_kv_heads, page_size, D),
    float32, or the bits of bfloat16 as uint16 and of float16 as int16; pages all rows' page ids, those of row r
    from tables[r] on; row r sees the keys [firsts[r], ends[r]). scores: scratch (H, width) float32, width at
    least the most keys of a row plus page_size. softcap 0: none; sinks (H,) float32, -inf: none.
    """
    block_size = page_size * head_dim

    def attend(  # type: ignore[no-untyped-def]
        query, keys, values, num_kv_heads, pages, tables, firsts, ends, scaling, softcap, sinks, scores, width,
        out, begin, stop,
    ):  # fmt: skip
        num_heads = num_kv_heads * group
        row_pages = num_kv_heads * block_size
        tops = np.empty(num_heads, np.float32)
        for row in range(begin, stop):
            table, first, end = tables[row], firsts[row], ends[row]
            first_page, last_page = first // page_size, (end - 1) // page_size
            origin = first_page * page_size
            tops[:] = -np.inf
            for index in range(first_page, last_page + 1):
                page = pages[table + index] * row_pages
                ahead = pages[table + min(index + 1, last_page)] * row_pages
                low, high = max(first - index * page_size, 0), min(end - index * page_size, page_size)
                for kv_head in range(num_kv_heads):
                    _fetch(keys, ahead + kv_head * block_size, block_size)
                    for member in range(group):
                        head = kv_head * group + member
                        tops[head] = _score_block(
                            keys, page + kv_head * block_size, low, high, query, (row * num_heads + head) * head_dim,
                            scores, head * width + index * page_size - origin, tops[head], head_dim,
                        )  # fmt: skip
            for head in range(num_heads):
                at = head * width - origin
                _to_weights(scores, at + first, at + end, tops[head], scaling, softcap, sinks[head])
                for channel in range(head_dim):
                    _store(out, (row * num_heads + head) * head_dim + channel, _FLOAT(0))
            for index in range(first_page, last_page + 1):
                page = pages[table + index] * row_pages
                ahead = pages[table + min(index + 1, last_page)] * row_pages
                low, high = max(first - index * page_size, 0), min(end - index * page_size, page_size)
                for kv_head in range(num_kv_heads):
                    _fetch(values, ahead + kv_head * block_size, block_size)
                    for member in range(group):
                        head = kv_head * group + member
                        _sum_block(
                            values, page + kv_head * block_size, low, high, scores,
                            head * width + index * page_size - origin, out, (row * num_heads + head) * head_dim,
                            head_dim,
                        )  # fmt: skip

    kernel: Kernel = compiled()(attend)
    return kernel
