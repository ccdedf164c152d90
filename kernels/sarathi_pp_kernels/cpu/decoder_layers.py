"""All layers of a stage in one compiled call: Llama's decoder layers in bfloat16 or float32, on one or more threads.

The same kernels run in the same order as if each layer called them from Python, so no bit differs. This saves Python's
time between two kernels. All arrays are passed by address. DecoderLayersCall (decoder_layers_call.py) is the interface
that takes tensors.

Several threads make the same call, each with its own index. Each computes a part of every step: some rows, outputs,
heads or tiles. Between two steps they wait for each other (simd/barrier.py). Parts change no bit, because the kernels
give a row the same bits in any company.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import types

from sarathi_pp_kernels.cpu import (
    attention_decode,
    attention_decode_simd,
    attention_float,
    attention_prefill,
    gemm,
    row_ops,
)
from sarathi_pp_kernels.cpu.simd.barrier import wait_for_all
from sarathi_pp_kernels.cpu.simd.call import address_of, caller
from sarathi_pp_kernels.cpu.simd.compile import compiled, inlined
from sarathi_pp_kernels.cpu.simd.memory import load_bf16, load_float, load_index, round_lines, store_float
from sarathi_pp_kernels.cpu.simd.products import BF16

# One layer: the addresses of its tensors, which DecoderLayer describes; 0 if it has no such tensor. Only `window` is no
# address but the most keys that a row sees; 0 for all.
LAYER = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("input_norm", "qkv", "qkv_bias", "query_norm", "key_norm", "keys", "values", "window"),
            *("output", "output_bias", "norm", "gate_up", "gate_up_bias", "down", "down_bias"),
        )
    ]
)


class Shape(NamedTuple):
    """The sizes that all layers have in common.

    Attributes:
        inner_size: number of channels inside the MLP.
        epsilon: epsilon of the norms before attention and MLP.
        head_epsilon: epsilon of the norms of query and key heads.
        scaling: factor on the products of queries and keys.
        most_rows: see attention_prefill.attend.
        inputs_per_line: number of inputs in a line of a weight: 1, or 2 for pairs of 16-bit numbers.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    inner_size: int
    epsilon: float
    head_epsilon: float
    scaling: np.float32
    most_rows: int
    inputs_per_line: int


class Microbatch(NamedTuple):
    """One microbatch: numbers, and addresses of arrays. Arrays are int64, except cos, sin and sinks.

    Attributes:
        num_rows: number of rows (tokens).
        most_high_rows: up to this number of rows, linear layers use gemm.py's high tiles; above it, wide tiles.
        cos: (num_rows, head_dim), the cosines of the rotary embedding, in the dtype of the layers.
        sin: like cos.
        write_pages: (num_rows,), id of the page to which each row's key and value are written.
        write_offsets: (num_rows,), index of the row's token within that page.
        pages: page ids of all sequences, one sequence after the other.
        places: index of the first row of each tile. In bfloat16, a tile is a decode, and other rows are in chunks. In
            float32, all rows are in tiles.
        counts: number of rows per tile.
        ends: number of keys that the first row of each tile sees.
        tables: index in `pages` of each tile's first page id.
        bounds: (num_threads + 1,), index of each thread's first tile, and the number of all tiles.
        sinks: (num_heads,) float32, -inf for none.
    """

    num_rows: int
    most_high_rows: int
    cos: int
    sin: int
    write_pages: int
    write_offsets: int
    pages: int
    places: int
    counts: int
    ends: int
    tables: int
    bounds: int
    sinks: int


class Team(NamedTuple):
    """The threads that make a call together, seen from one of them.

    Attributes:
        thread: index of the calling thread, from 0.
        arrived: see wait_for_all.
        floats_bytes: bytes of the scratch memory of each thread.
    """

    thread: int
    num_threads: int
    arrived: int
    floats_bytes: int


class Work(NamedTuple):
    """The intermediate results of a layer: for each, the number of its bytes, or the address of its memory.

    Attributes:
        normed: output of the norm before attention or MLP.
        tiles: rows laid out for a product.
        qkv: queries, keys and values.
        attended: attention output.
        middle: hidden states after attention.
        after: output of the MLP, and then the layer's output.
        both: gate and up of the MLP.
        gated: silu(gate) * up.
        floats: float32 scratch memory of the kernels, for one thread. As an address, it is that of all threads' memory.
    """

    normed: int
    tiles: int
    qkv: int
    attended: int
    middle: int
    after: int
    both: int
    gated: int
    floats: int


def work_bytes(num_rows: int, attention_floats: int, shape: Shape, item: int) -> Work:
    """Return the number of bytes that a microbatch needs for each intermediate result.

    Args:
        attention_floats: float32 values of scratch memory that attention needs on one thread.
        item: bytes of a number, 2 for bfloat16 and 4 for float32.
    """
    padded, hidden, inner = gemm.padded_rows(num_rows), shape.hidden_size, shape.inner_size
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    widest = max(hidden, inner, heads * head_dim)
    return Work(
        normed=item * padded * hidden,
        tiles=item * padded * widest,
        qkv=item * padded * (heads + 2 * kv_heads) * head_dim,
        attended=item * padded * heads * head_dim,
        middle=item * padded * hidden,
        after=item * padded * hidden,
        both=2 * item * padded * inner,
        gated=item * padded * inner,
        floats=4 * max(hidden, heads * head_dim, attention_floats),
    )


def _takes(*arguments: Any) -> Any:
    return types.void(*arguments)


_I, _D, _F, _B = types.int64, types.float64, types.float32, types.boolean
# Types of the arguments of the kernels that make up a layer.
_SIGNATURES = {
    "rms_norm": _takes(_I, _I, _I, _I, _I, _I, _D, _I),
    "add_rms_norm": _takes(_I, _I, _I, _I, _I, _I, _I, _D, _I),
    "rotate_and_write": _takes(*[_I] * 15, _D, _I),
    "silu_multiply": _takes(*[_I] * 5),
    "lay_out": _takes(_I, _I, _I, _I, _B, _I, _I),
    "multiply": _takes(*[_I] * 9, _B),
    "attend": _takes(*[_I] * 17, _F, _F, _I, _I, _I, _I),
    "read": _takes(*[_I] * 11, _F, _F, _I, _I, _I, _I, _I),
    "read_tiles": _takes(*[_I] * 12, _F, _F, _I, _I, _I, _I, _I),
    "attend_tiles": _takes(*[_I] * 16, _F, _F, _I, _I, _I, _I, _I),
}
_callers = {name: caller(signature) for name, signature in _SIGNATURES.items()}
_rms_norm, _add_rms_norm, _rotate_and_write, _silu_multiply, _lay_out, _multiply, *_attentions = _callers.values()
_attend, _read, _read_tiles, _attend_tiles = _attentions


class Code(NamedTuple):
    """Addresses of the kernels' machine code, in the order of _SIGNATURES.

    Attributes:
        attend: in bfloat16, the kernel for the attention of chunks; otherwise 0.
        read: in bfloat16, the kernel for the attention of decodes, compiled for a stage's heads; otherwise 0.
        read_tiles: in float32, the kernel for all attention if `attend_tiles` is 0, compiled for a stage's heads.
        attend_tiles: in float32, the kernel for all attention with heads and pages that it can read; otherwise 0.
    """

    rms_norm: int
    add_rms_norm: int
    rotate_and_write: int
    silu_multiply: int
    lay_out: int
    multiply: int
    attend: int
    read: int
    read_tiles: int
    attend_tiles: int


@functools.cache
def code_for(kind: int, head_dim: int, group: int, page_size: int) -> Code:
    """Return the machine code for layers of a kind of product (simd/products.py), BF16 or one with float32 rows."""
    kernels: dict[str, Any] = {"lay_out": gemm.lay_out, "multiply": gemm.multiply_of(kind)}
    if kind == BF16:
        read = attention_decode_simd.compile_kernel(head_dim, group, page_size)
        kernels |= {**row_ops.BFLOAT16._asdict(), "attend": attention_prefill.attend, "read": read}
    else:
        kernels |= row_ops.FLOAT32._asdict()
        if attention_float.fits(head_dim, head_dim, page_size):
            kernels["attend_tiles"] = attention_float.attend
        else:
            read = attention_decode.compile_kernel(attention_decode.FLOAT32, head_dim, head_dim, group, page_size)
            kernels["read_tiles"] = read
    addresses = {name: address_of(kernel, _SIGNATURES[name]) for name, kernel in kernels.items()}
    return Code(**{name: addresses.get(name, 0) for name in Code._fields})


@inlined
def _part(count, step, team):  # type: ignore[no-untyped-def]
    """Return the range [begin, end) of a thread's part of range(count). It begins at a multiple of `step`."""
    steps, last = count // step, team.thread + 1 == team.num_threads
    begin = steps * team.thread // team.num_threads * step
    return begin, count if last else steps * (team.thread + 1) // team.num_threads * step


@inlined
def _wait(team):  # type: ignore[no-untyped-def]
    if team.num_threads > 1:
        wait_for_all(team.arrived, team.num_threads)


def _linear_of(item: int) -> Any:
    @inlined
    def linear(code, x, num_rows, inputs, lines, weight, bias, outputs, high, tiles, out, team):  # type: ignore[no-untyped-def]
        """Compute out = x @ weight.T + bias with gemm.py, after all threads have written x, and until all are done.

        Args:
            tiles: memory for x in the order that gemm.py reads.
        """
        _wait(team)
        words = inputs * item // 4
        _lay_out(code.lay_out, (x, tiles, num_rows, words, high, team.thread, team.num_threads))
        _wait(team)
        begin, end = _part(outputs // 16, gemm.PANELS, team)
        _multiply(code.multiply, (tiles, weight, bias, out, num_rows, lines, begin, end, outputs, high))
        _wait(team)

    return linear


@inlined
def _add_bf16(x, added, out, width, scratch):  # type: ignore[no-untyped-def]
    """Compute out = x + added for one row. Each sum is rounded once. `out` may be `added`."""
    for at in range(width):
        store_float(scratch, at, load_bf16(x, at) + load_bf16(added, at))
    round_lines(scratch, out, width // 16)


@inlined
def _add_float(x, added, out, width, scratch):  # type: ignore[no-untyped-def]
    for at in range(width):
        store_float(out, at, load_float(x, at) + load_float(added, at))


@inlined
def _attend_chunks(code, shape, microbatch, chunks, layer, work, floats, team):  # type: ignore[no-untyped-def]
    """Compute the attention of all chunks in bfloat16. Threads divide the KV heads, and the rows if there are few."""
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    qkv_width, width = (heads + 2 * kv_heads) * head_dim, heads * head_dim
    groups = min(team.num_threads, kv_heads)
    parts = team.num_threads // groups
    if team.thread >= groups * parts:
        return
    first_head, end_head = kv_heads * (team.thread % groups) // groups, kv_heads * (team.thread % groups + 1) // groups
    part = team.thread // groups
    for chunk in range(len(chunks)):
        first_row, count, start, page = chunks[chunk, 0], chunks[chunk, 1], chunks[chunk, 2], chunks[chunk, 3]
        begin, end = count * part // parts, count * (part + 1) // parts
        if begin < end:
            _attend(
                code.attend,
                (
                    work.qkv + (first_row + begin) * qkv_width * 2, qkv_width // 2, head_dim // 2, layer.keys,
                    layer.values, kv_heads, heads // kv_heads, head_dim, head_dim, shape.page_size,
                    microbatch.pages + page * 8, start + begin, 1, end - begin, shape.most_rows, first_head, end_head,
                    shape.scaling, np.float32(0), layer.window, microbatch.sinks, floats,
                    work.attended + (first_row + begin) * width * 2,
                ),
            )  # fmt: skip


@inlined
def _attention_bf16(code, shape, microbatch, chunks, layer, work, floats, team):  # type: ignore[no-untyped-def]
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    _attend_chunks(code, shape, microbatch, chunks, layer, work, floats, team)
    begin, end = load_index(microbatch.bounds, team.thread), load_index(microbatch.bounds, team.thread + 1)
    if begin < end:
        _read(
            code.read,
            (
                work.qkv, (heads + 2 * kv_heads) * head_dim, head_dim, layer.keys, layer.values, kv_heads,
                microbatch.places, microbatch.pages, microbatch.tables, microbatch.ends, layer.window, shape.scaling,
                np.float32(0), microbatch.sinks, floats, work.attended, begin, end,
            ),
        )  # fmt: skip


@inlined
def _attention_float(code, shape, microbatch, chunks, layer, work, floats, team):  # type: ignore[no-untyped-def]
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    begin, end = load_index(microbatch.bounds, team.thread), load_index(microbatch.bounds, team.thread + 1)
    if begin < end and code.attend_tiles:
        _attend_tiles(
            code.attend_tiles,
            (
                work.qkv, (heads + 2 * kv_heads) * head_dim, head_dim, layer.keys, layer.values, kv_heads,
                heads // kv_heads, head_dim, head_dim, shape.page_size, microbatch.places, microbatch.counts,
                microbatch.pages, microbatch.tables, microbatch.ends, layer.window, shape.scaling, np.float32(0),
                microbatch.sinks, floats, work.attended, begin, end,
            ),
        )  # fmt: skip
    elif begin < end:
        _read_tiles(
            code.read_tiles,
            (
                work.qkv, (heads + 2 * kv_heads) * head_dim, head_dim, layer.keys, layer.values, kv_heads,
                microbatch.places, microbatch.counts, microbatch.pages, microbatch.tables, microbatch.ends,
                layer.window, shape.scaling, np.float32(0), microbatch.sinks, floats, work.attended, begin, end,
            ),
        )  # fmt: skip


def _run_layers_of(item: int, attention: Any, add: Any) -> Any:
    """Return the kernel for numbers of `item` bytes."""
    linear = _linear_of(item)

    @compiled()
    def run_layers(layers, code, shape, microbatch, chunks, work, team, steps, x, out):  # type: ignore[no-untyped-def]
        """Run all layers of a stage on one microbatch, and write the hidden states after the last one to `out`.

        Args:
            layers: an array with a LAYER per layer.
            code: a Code, made by `code_for`.
            shape: a Shape.
            microbatch: a Microbatch.
            chunks: (n, 4) int64. For each chunk: index of its first row, number of rows, position of the first row in
                its sequence, and index in `microbatch.pages` of its first page id.
            work: a Work with addresses.
            team: a Team. All its threads must make the call at the same time.
            steps: (1,) int64, a counter of layers. Each layer adds 1.
            x: address of (num_rows, hidden_size) numbers.
            out: like x, in other memory.
        """
        hidden, inner, heads, kv_heads = shape.hidden_size, shape.inner_size, shape.num_heads, shape.num_kv_heads
        head_dim, epsilon, floats = shape.head_dim, shape.epsilon, work.floats + team.thread * team.floats_bytes
        num_rows, high = microbatch.num_rows, microbatch.num_rows <= microbatch.most_high_rows
        width, qkv_width, per_line = heads * head_dim, (heads + 2 * kv_heads) * head_dim, shape.inputs_per_line
        first, end = _part(num_rows, 1, team)
        _rms_norm(code.rms_norm, (x, layers[0].input_norm, work.normed, first, end, hidden, epsilon, floats))
        before = x
        for index in range(len(layers)):
            layer = layers[index]
            if team.thread == 0:
                steps[0] += 1
            linear(
                code, work.normed, num_rows, hidden, hidden // per_line, layer.qkv, layer.qkv_bias, qkv_width, high,
                work.tiles, work.qkv, team,
            )  # fmt: skip
            _rotate_and_write(
                code.rotate_and_write,
                (
                    work.qkv, heads, kv_heads, head_dim, microbatch.cos, microbatch.sin, layer.keys, layer.values,
                    microbatch.write_pages, microbatch.write_offsets, shape.page_size, first, end, layer.query_norm,
                    layer.key_norm, shape.head_epsilon, floats,
                ),
            )  # fmt: skip
            _wait(team)
            attention(code, shape, microbatch, chunks, layer, work, floats, team)
            linear(
                code, work.attended, num_rows, width, width // per_line, layer.output, layer.output_bias, hidden, high,
                work.tiles, work.middle, team,
            )  # fmt: skip
            _add_rms_norm(
                code.add_rms_norm,
                (before, work.middle, layer.norm, work.normed, first, end, hidden, epsilon, floats),
            )  # fmt: skip
            linear(
                code, work.normed, num_rows, hidden, hidden // per_line, layer.gate_up, layer.gate_up_bias, 2 * inner,
                high, work.tiles, work.both, team,
            )  # fmt: skip
            _silu_multiply(code.silu_multiply, (work.both, work.gated, first, end, inner))
            linear(
                code, work.gated, num_rows, inner, inner // per_line, layer.down, layer.down_bias, hidden, high,
                work.tiles, work.after, team,
            )  # fmt: skip
            last = index + 1 == len(layers)
            before = out if last else work.after
            for row in range(first, end):
                at = row * hidden * item
                add(work.middle + at, work.after + at, before + at, hidden, floats)
            if not last:
                norm = layers[index + 1].input_norm
                _rms_norm(code.rms_norm, (before, norm, work.normed, first, end, hidden, epsilon, floats))

    return run_layers


run_layers_bf16 = _run_layers_of(2, _attention_bf16, _add_bf16)
run_layers_float = _run_layers_of(4, _attention_float, _add_float)
