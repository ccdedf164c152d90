"""All layers of a stage in one compiled call: Llama's decoder layers in bfloat16 on one thread.

The same kernels run in the same order as if each layer called them from Python, so no bit differs. This saves Python's
time between two kernels. All arrays are passed by address. DecoderLayersCall (decoder_layers_call.py) is the interface
that takes tensors.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import types

from sarathi_pp_kernels.cpu import attention_decode_simd, attention_prefill, gemm, row_ops
from sarathi_pp_kernels.cpu.simd.call import address_of, caller
from sarathi_pp_kernels.cpu.simd.compile import compiled, inlined
from sarathi_pp_kernels.cpu.simd.memory import load_bf16, round_lines, store_float

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


class Microbatch(NamedTuple):
    """One microbatch: numbers, and addresses of arrays. Arrays are int64, except cos, sin and sinks.

    Attributes:
        num_rows: number of rows (tokens).
        most_high_rows: up to this number of rows, linear layers use gemm.py's high tiles; above it, wide tiles.
        cos: (num_rows, head_dim) bfloat16, the cosines of the rotary embedding.
        sin: like cos.
        write_pages: (num_rows,), id of the page to which each row's key and value are written.
        write_offsets: (num_rows,), index of the row's token within that page.
        pages: page ids of all sequences, one sequence after the other.
        num_decodes: number of decodes, which `places`, `ends` and `tables` describe.
        places: index of each decode's row.
        ends: number of keys of each decode.
        tables: index in `pages` of each decode's first page id.
        sinks: (num_heads,) float32, -inf for none.
    """

    num_rows: int
    most_high_rows: int
    cos: int
    sin: int
    write_pages: int
    write_offsets: int
    pages: int
    num_decodes: int
    places: int
    ends: int
    tables: int
    sinks: int


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
        floats: float32 scratch memory of the kernels.
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


def work_bytes(num_rows: int, most_keys: int, most_chunk: int, shape: Shape) -> Work:
    """Return the number of bytes that a microbatch needs for each intermediate result.

    Args:
        most_keys: number of keys of the longest decode; 0 without decodes.
        most_chunk: number of rows of the largest chunk; 0 without chunks.
    """
    padded, hidden, inner = gemm.padded_rows(num_rows), shape.hidden_size, shape.inner_size
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    widest = max(hidden, inner, heads * head_dim)
    of_chunk = attention_prefill.scratch_floats(most_chunk, heads // kv_heads, head_dim) if most_chunk else 0
    of_decode = attention_decode_simd.scratch_floats(heads, head_dim, most_keys, shape.page_size) if most_keys else 0
    return Work(
        normed=2 * padded * hidden,
        tiles=2 * padded * widest,
        qkv=2 * padded * (heads + 2 * kv_heads) * head_dim,
        attended=2 * padded * heads * head_dim,
        middle=2 * padded * hidden,
        after=2 * padded * hidden,
        both=4 * padded * inner,
        gated=2 * padded * inner,
        floats=4 * max(hidden, heads * head_dim, of_chunk, of_decode),
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
    "lay_out": _takes(_I, _I, _I, _I, _B),
    "multiply": _takes(*[_I] * 9, _B),
    "attend": _takes(*[_I] * 15, _F, _F, _I, _I, _I, _I),
    "read": _takes(*[_I] * 11, _F, _F, _I, _I, _I, _I, _I),
}
_rms_norm, _add_rms_norm, _rotate_and_write, _silu_multiply, _lay_out, _multiply, _attend, _read = (
    caller(signature) for signature in _SIGNATURES.values()
)


class Code(NamedTuple):
    """Addresses of the kernels' machine code, in the order of _SIGNATURES.

    Attributes:
        attend: kernel for the attention of chunks.
        read: kernel for the attention of decodes, compiled for a stage's heads.
    """

    rms_norm: int
    add_rms_norm: int
    rotate_and_write: int
    silu_multiply: int
    lay_out: int
    multiply: int
    attend: int
    read: int


@functools.cache
def code_for(head_dim: int, group: int, page_size: int) -> Code:
    kernels = {
        **row_ops.BFLOAT16._asdict(),
        "lay_out": gemm.lay_out,
        "multiply": gemm.multiply_bf16,
        "attend": attention_prefill.attend,
        "read": attention_decode_simd.compile_kernel(head_dim, group, page_size),
    }
    return Code(**{name: address_of(kernel, _SIGNATURES[name]) for name, kernel in kernels.items()})


@inlined
def _linear(code, x, num_rows, inputs, weight, bias, outputs, high, tiles, out):  # type: ignore[no-untyped-def]
    """Compute out = x @ weight.T + bias with gemm.py. `tiles` is memory for x in the order that gemm.py reads."""
    pairs = inputs // 2
    _lay_out(code.lay_out, (x, tiles, num_rows, pairs, high))
    _multiply(code.multiply, (tiles, weight, bias, out, num_rows, pairs, 0, outputs // 16, outputs, high))


@inlined
def _add(x, added, out, num_rows, width, scratch):  # type: ignore[no-untyped-def]
    """Compute out = x + added. Each sum is rounded once. `out` may be `added`."""
    for row in range(num_rows):
        begin = row * width * 2
        for at in range(width):
            store_float(scratch, at, load_bf16(x + begin, at) + load_bf16(added + begin, at))
        round_lines(scratch, out + begin, width // 16)


@compiled()
def run_layers(layers, code, shape, microbatch, chunks, work, steps, x, out):  # type: ignore[no-untyped-def]
    """Run all layers of a stage on one microbatch, and write the hidden states after the last one to `out`.

    Args:
        layers: an array with a LAYER per layer.
        code: a Code, made by `code_for`.
        shape: a Shape.
        microbatch: a Microbatch.
        chunks: (n, 4) int64. For each chunk: index of its first row, number of rows, position of the first row in its
            sequence, and index in `microbatch.pages` of its first page id.
        work: a Work with addresses.
        steps: (1,) int64, a counter of layers. Each layer adds 1.
        x: address of (num_rows, hidden_size) bfloat16.
        out: like x, in other memory.
    """
    hidden, inner, heads, kv_heads = shape.hidden_size, shape.inner_size, shape.num_heads, shape.num_kv_heads
    head_dim, epsilon, floats = shape.head_dim, shape.epsilon, work.floats
    num_rows, high = microbatch.num_rows, microbatch.num_rows <= microbatch.most_high_rows
    attended_width, qkv_width, no_cap = heads * head_dim, (heads + 2 * kv_heads) * head_dim, np.float32(0)
    _rms_norm(code.rms_norm, (x, layers[0].input_norm, work.normed, 0, num_rows, hidden, epsilon, floats))
    before = x
    for index in range(len(layers)):
        layer = layers[index]
        steps[0] += 1
        _linear(
            code, work.normed, num_rows, hidden, layer.qkv, layer.qkv_bias, qkv_width, high, work.tiles, work.qkv
        )  # fmt: skip
        _rotate_and_write(
            code.rotate_and_write,
            (
                work.qkv, heads, kv_heads, head_dim, microbatch.cos, microbatch.sin, layer.keys, layer.values,
                microbatch.write_pages, microbatch.write_offsets, shape.page_size, 0, num_rows, layer.query_norm,
                layer.key_norm, shape.head_epsilon, floats,
            ),
        )  # fmt: skip
        for chunk in range(len(chunks)):
            first_row, count, start, page = chunks[chunk, 0], chunks[chunk, 1], chunks[chunk, 2], chunks[chunk, 3]
            _attend(
                code.attend,
                (
                    work.qkv + first_row * qkv_width * 2, qkv_width // 2, head_dim // 2, layer.keys, layer.values,
                    kv_heads, heads // kv_heads, head_dim, shape.page_size, microbatch.pages + page * 8, start, count,
                    shape.most_rows, 0, kv_heads, shape.scaling, no_cap, layer.window, microbatch.sinks, floats,
                    work.attended + first_row * attended_width * 2,
                ),
            )  # fmt: skip
        if microbatch.num_decodes:
            _read(
                code.read,
                (
                    work.qkv, qkv_width, head_dim, layer.keys, layer.values, kv_heads, microbatch.places,
                    microbatch.pages, microbatch.tables, microbatch.ends, layer.window, shape.scaling, no_cap,
                    microbatch.sinks, floats, work.attended, 0, microbatch.num_decodes,
                ),
            )  # fmt: skip
        _linear(
            code, work.attended, num_rows, attended_width, layer.output, layer.output_bias, hidden, high, work.tiles,
            work.middle,
        )  # fmt: skip
        _add_rms_norm(
            code.add_rms_norm, (before, work.middle, layer.norm, work.normed, 0, num_rows, hidden, epsilon, floats)
        )  # fmt: skip
        _linear(
            code, work.normed, num_rows, hidden, layer.gate_up, layer.gate_up_bias, 2 * inner, high, work.tiles,
            work.both,
        )  # fmt: skip
        _silu_multiply(code.silu_multiply, (work.both, work.gated, 0, num_rows, inner))
        _linear(code, work.gated, num_rows, inner, layer.down, layer.down_bias, hidden, high, work.tiles, work.after)
        last = index + 1 == len(layers)
        before = out if last else work.after
        _add(work.middle, work.after, before, num_rows, hidden, floats)
        if not last:
            norm = layers[index + 1].input_norm
            _rms_norm(code.rms_norm, (before, norm, work.normed, 0, num_rows, hidden, epsilon, floats))
