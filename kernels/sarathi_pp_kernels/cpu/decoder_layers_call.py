"""Decoder layers as one callable object, which turns tensors into the addresses that decoder_layers.py takes.

The tensors of the layers and of one KV shard keep their addresses, so those are collected once. The memory for
intermediate results is kept too: new memory would cost page faults in every call.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sarathi_pp_kernels.cpu import attention_decode, attention_decode_simd, attention_float, attention_prefill
from sarathi_pp_kernels.cpu.decoder_layers import (
    LAYER,
    Microbatch,
    Shape,
    Team,
    Work,
    code_for,
    run_layers_bf16,
    run_layers_float,
    work_bytes,
)
from sarathi_pp_kernels.cpu.simd.barrier import GIVEN_UP
from sarathi_pp_kernels.cpu.simd.products import BF16, FLOAT32, FLOAT32_BF16, FLOAT32_FP16
from sarathi_pp_kernels.cpu.threads import run_team

# Memory is allocated in multiples of this number of bytes. A decode needs more with every token, and most tokens then
# need no new memory.
_STEP_BYTES = 1 << 20
_NO_CHUNKS = np.zeros((0, 4), np.int64)
_LINE_BYTES = 64
# How linear layers multiply, by the dtype of the layers and the type of the weights in memory.
_KINDS = {
    (torch.bfloat16, torch.bfloat16): BF16,
    (torch.float32, torch.float32): FLOAT32,
    (torch.float32, torch.bfloat16): FLOAT32_BF16,
    (torch.float32, torch.float16): FLOAT32_FP16,
}


class DecoderLayer(NamedTuple):
    """The tensors of one layer, in its dtype unless a comment names another type. The fields are those of LAYER."""

    input_norm: Tensor  # (hidden_size,)
    qkv: Tensor  # weights are packed for gemm.py: int32, (outputs / 16, lines, 16)
    qkv_bias: Tensor  # biases are (outputs,) float32
    query_norm: Tensor | None  # (head_dim,); None if queries and keys have no norms
    key_norm: Tensor | None
    keys: Tensor  # (num_pages, num_kv_heads, page_size, head_dim)
    values: Tensor
    window: int  # most keys that a row sees; 0 for all
    output: Tensor
    output_bias: Tensor
    norm: Tensor  # (hidden_size,), before the MLP
    gate_up: Tensor
    gate_up_bias: Tensor
    down: Tensor
    down_bias: Tensor


class Tiles(NamedTuple):
    """Tiles of rows of one sequence, for attention. Each is a row, or consecutive rows. An entry per tile.

    Attributes:
        places: index of its first row in the microbatch.
        counts: number of its rows.
        ends: number of keys that its first row sees.
        tables: index in `pages` of the first page id of its sequence.
        bounds: index of each thread's first tile, and the number of all tiles.
    """

    places: array[int]
    counts: array[int]
    ends: array[int]
    tables: array[int]
    bounds: array[int]


class DecoderLayersCall:
    """Llama's decoder layers with the pages of one KV shard. Only one thread at a time may call it.

    It computes in the dtype of the pages, bfloat16 or float32.

    Args:
        layers: at least one. All have the same shapes. Their tensors must keep their addresses.
        held_type: type of the weights in memory. In float32 they may be bfloat16 or float16 too.
        epsilon: epsilon of the norms before attention and MLP.
        head_epsilon: epsilon of the norms of queries and keys.
        scaling: factor of the attention scores.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        held_type: torch.dtype,
        *,
        epsilon: float,
        head_epsilon: float,
        scaling: float,
    ) -> None:
        first = layers[0]
        self._dtype = first.keys.dtype
        kind = _KINDS[self._dtype, held_type]
        per_line = 1 if kind == FLOAT32 else 2
        _, num_kv_heads, page_size, head_dim = first.keys.shape
        num_heads = per_line * first.output.shape[1] // head_dim
        group = num_heads // num_kv_heads
        self._shape = Shape(
            hidden_size=first.input_norm.shape[0],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            inner_size=per_line * first.down.shape[1],
            epsilon=epsilon,
            head_epsilon=head_epsilon,
            scaling=np.float32(scaling),
            most_rows=attention_prefill.rows_at_once(group),
            inputs_per_line=per_line,
        )
        for layer in layers:
            _check(layer, self._shape, self._dtype)
        self._layers = tuple(layers)  # they own the memory at these addresses
        self._addresses = np.array([tuple(map(_address, layer)) for layer in layers], LAYER)
        self._code = code_for(kind, head_dim, group, page_size)
        self._run = run_layers_bf16 if kind == BF16 else run_layers_float
        self._memory = WorkingMemory()
        self._sinks = torch.full((num_heads,), -torch.inf)

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        write_pages: Tensor,
        write_offsets: Tensor,
        pages: Tensor,
        chunks: Sequence[tuple[int, int, int, int]],
        tiles: Tiles,
        most_high_rows: int,
        steps: NDArray[np.int64],
    ) -> Tensor:
        """Run all layers on one microbatch, and return the last layer's (1, num_rows, hidden_size) output.

        Args:
            x: (1, num_rows, hidden_size).
            cos: (1, num_rows, head_dim), the cosines of the rotary embedding.
            sin: like cos.
            write_pages: (num_rows,) int64, id of the page to which each row's key and value are written.
            write_offsets: (num_rows,) int64, index of the row's token within that page.
            pages: int64 page ids of all sequences, one sequence after the other.
            chunks: for each chunk: index of its first row, number of rows, position of the first row in its sequence,
                and index in `pages` of its first page id. Empty in float32.
            tiles: in bfloat16 the decodes, one per tile; in float32 all rows. As many threads as it has bounds for
                compute the layers together.
            most_high_rows: gemm.py, which computes the linear layers, has two ways of dividing rows into tiles. Up to
                this number of rows it uses high tiles; above it, wide tiles.
            steps: (1,) int64, a counter of layers. Each layer adds 1.
        """
        shape, num_rows = self._shape, write_pages.shape[0]
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        # The kernel takes addresses and would not notice wrong shapes.
        assert x.shape == (1, num_rows, shape.hidden_size), f"x {x.shape}; expected (1, {num_rows}, hidden_size)"
        assert cos.shape == sin.shape == (1, num_rows, shape.head_dim), f"cos {cos.shape}, sin {sin.shape}"
        assert {x.dtype, cos.dtype, sin.dtype} == {self._dtype}, f"x {x.dtype}, cos {cos.dtype}, sin {sin.dtype}"
        assert self._dtype == torch.bfloat16 or not chunks, "chunks in float32"
        microbatch = Microbatch(
            num_rows=num_rows,
            most_high_rows=most_high_rows,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            write_pages=write_pages.data_ptr(),
            write_offsets=write_offsets.data_ptr(),
            pages=pages.data_ptr(),
            **{name: _array_address(numbers) for name, numbers in tiles._asdict().items()},
            sinks=self._sinks.data_ptr(),
        )
        num_threads = len(tiles.bounds) - 1
        needed = work_bytes(num_rows, self._attention_floats(chunks, tiles), shape, self._dtype.itemsize)
        floats_bytes = -(-needed.floats // _LINE_BYTES) * _LINE_BYTES  # no two threads write to one line
        work = self._memory.addresses(needed._replace(floats=num_threads * floats_bytes))
        chunk_table = np.array(chunks, np.int64) if chunks else _NO_CHUNKS
        out, arrived = torch.empty_like(x), torch.zeros(2, dtype=torch.int64)

        def run(thread: int) -> None:
            team = Team(thread, num_threads, arrived.data_ptr(), floats_bytes)
            given = shape, microbatch, chunk_table, work, team, steps
            self._run(self._addresses, self._code, *given, x.data_ptr(), out.data_ptr())

        run_team([partial(run, thread) for thread in range(num_threads)], lambda: arrived[0].fill_(GIVEN_UP))
        return out

    def _attention_floats(self, chunks: Sequence[tuple[int, int, int, int]], tiles: Tiles) -> int:
        """Return the number of float32 values of scratch memory that attention needs on one thread."""
        heads, head_dim, page_size = self._shape.num_heads, self._shape.head_dim, self._shape.page_size
        if self._code.attend_tiles:
            most_rows = max(tiles.counts, default=0)
            return attention_float.scratch_floats(most_rows, heads, self._shape.num_kv_heads, head_dim, head_dim)
        if self._dtype == torch.float32:
            sizes = zip(tiles.counts, tiles.ends, strict=True)
            return max((attention_decode.scratch_floats(*size, heads, head_dim, head_dim) for size in sizes), default=0)
        group, found = heads // self._shape.num_kv_heads, 0
        if chunks:
            found = attention_prefill.scratch_floats(max(rows for _, rows, _, _ in chunks), group, head_dim, head_dim)
        if tiles.ends:
            of_decodes = attention_decode_simd.scratch_floats(heads, head_dim, max(tiles.ends), page_size)
            found = max(found, of_decodes)
        return found


class WorkingMemory:
    """Memory for each intermediate result of Work, as large as any call so far has needed."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._sizes = self._addresses = _NOTHING

    def addresses(self, needed: Work) -> Work:
        """Return the addresses of memory of at least `needed` bytes each. They are valid until the next call."""
        if any(map(operator.gt, needed, self._sizes)):
            self._grow(needed)
        return self._addresses

    def _grow(self, needed: Work) -> None:
        self._sizes = _NOTHING  # in case memory runs out below: the next call then tries again
        for name, size in needed._asdict().items():
            if name not in self._memory or self._memory[name].numel() < size:
                self._memory.pop(name, None)
                self._memory[name] = torch.empty(-(-size // _STEP_BYTES) * _STEP_BYTES, dtype=torch.uint8)
        self._sizes = Work(**{name: memory.numel() for name, memory in self._memory.items()})
        self._addresses = Work(**{name: memory.data_ptr() for name, memory in self._memory.items()})


_NOTHING = Work(*[0] * len(Work._fields))


def _check(layer: DecoderLayer, shape: Shape, dtype: torch.dtype) -> None:
    """Assert that the kernel reads no tensor of this layer beyond its end."""
    hidden, inner, head_dim = shape.hidden_size, shape.inner_size, shape.head_dim
    attended, qkv = shape.num_heads * head_dim, (shape.num_heads + 2 * shape.num_kv_heads) * head_dim
    weights = {
        "qkv": (layer.qkv, layer.qkv_bias, qkv, hidden),
        "output": (layer.output, layer.output_bias, hidden, attended),
        "gate_up": (layer.gate_up, layer.gate_up_bias, 2 * inner, hidden),
        "down": (layer.down, layer.down_bias, hidden, inner),
    }
    for name, (weight, bias, outputs, inputs) in weights.items():
        expected = outputs // 16, inputs // shape.inputs_per_line, 16
        assert weight.shape == expected and weight.dtype == torch.int32, (
            f"{name}: {weight.shape}, {weight.dtype}; expected a packed weight of {outputs} outputs and {inputs} inputs"
        )
        assert bias.shape == (outputs,) and bias.dtype == torch.float32, (
            f"{name}: bias {bias.shape}, {bias.dtype}; expected ({outputs},), torch.float32"
        )
    page = (shape.num_kv_heads, shape.page_size, head_dim)
    assert layer.keys.shape[1:] == layer.values.shape[1:] == page, (
        f"keys {layer.keys.shape}, values {layer.values.shape}; expected pages of {page}"
    )
    assert layer.keys.dtype == layer.values.dtype == dtype, (
        f"keys {layer.keys.dtype}, values {layer.values.dtype}; expected {dtype}"
    )
    for norm, size in ((layer.input_norm, hidden), (layer.norm, hidden), (layer.query_norm, head_dim)):
        assert norm is None or (norm.shape == (size,) and norm.dtype == dtype), (
            f"weight of a norm: {norm.shape}, {norm.dtype}; expected ({size},), {dtype}"
        )
    assert (layer.query_norm is None) == (layer.key_norm is None)
    assert layer.key_norm is None or layer.key_norm.shape == (head_dim,), (
        f"weight of the key norm: {layer.key_norm.shape}; expected ({head_dim},)"
    )


def _address(value: Tensor | int | None) -> int:
    """Return the value for LAYER: a tensor's address, 0 for no tensor, or the number itself."""
    return value.data_ptr() if isinstance(value, Tensor) else value or 0


def _array_address(numbers: array[int]) -> int:
    address, _ = numbers.buffer_info()
    return address
