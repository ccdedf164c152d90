"""Decoder layers as one callable object, which turns tensors into the addresses that decoder_layers.py takes.

The tensors of the layers and of one KV shard keep their addresses, so those are collected once. The memory for
intermediate results is kept too: new memory would cost page faults in every call.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sarathi_pp_kernels.cpu.attention_prefill import rows_at_once
from sarathi_pp_kernels.cpu.decoder_layers import LAYER, Microbatch, Shape, Work, code_for, run_layers, work_bytes
from sarathi_pp_kernels.cpu.gemm import packed_shape

# Memory is allocated in multiples of this number of bytes. A decode needs more with every token, and most tokens then
# need no new memory.
_STEP_BYTES = 1 << 20
_NO_CHUNKS = np.zeros((0, 4), np.int64)


class DecoderLayer(NamedTuple):
    """The tensors of one layer, bfloat16 unless a comment names another type. The fields are those of LAYER."""

    input_norm: Tensor  # (hidden_size,)
    qkv: Tensor  # weights are packed for gemm.py: int32 of packed_shape(outputs, inputs)
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


class DecoderLayersCall:
    """Llama's decoder layers with the pages of one KV shard. Only one thread at a time may call it.

    Args:
        layers: at least one. All have the same shapes. Their tensors must keep their addresses.
        epsilon: epsilon of the norms before attention and MLP.
        head_epsilon: epsilon of the norms of queries and keys.
        scaling: factor of the attention scores.
    """

    def __init__(self, layers: Sequence[DecoderLayer], *, epsilon: float, head_epsilon: float, scaling: float) -> None:
        first = layers[0]
        _, num_kv_heads, page_size, head_dim = first.keys.shape
        num_heads = _inputs(first.output) // head_dim
        group = num_heads // num_kv_heads
        self._shape = Shape(
            hidden_size=first.input_norm.shape[0],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            inner_size=_inputs(first.down),
            epsilon=epsilon,
            head_epsilon=head_epsilon,
            scaling=np.float32(scaling),
            most_rows=rows_at_once(group),
        )
        for layer in layers:
            _check(layer, self._shape)
        self._layers = tuple(layers)  # they own the memory at these addresses
        self._addresses = np.array([tuple(map(_address, layer)) for layer in layers], LAYER)
        self._code = code_for(head_dim, group, page_size)
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
        decodes: tuple[array[int], array[int], array[int]],
        most_high_rows: int,
        steps: NDArray[np.int64],
    ) -> Tensor:
        """Run all layers on one microbatch, and return the last layer's (1, num_rows, hidden_size) output.

        Args:
            x: (1, num_rows, hidden_size) bfloat16.
            cos: (1, num_rows, head_dim) bfloat16, the cosines of the rotary embedding.
            sin: like cos.
            write_pages: (num_rows,) int64, id of the page to which each row's key and value are written.
            write_offsets: (num_rows,) int64, index of the row's token within that page.
            pages: int64 page ids of all sequences, one sequence after the other.
            chunks: for each chunk: index of its first row, number of rows, position of the first row in its sequence,
                and index in `pages` of its first page id.
            decodes: three arrays with an entry per decode: index of its row, number of its keys, and index in `pages`
                of its first page id.
            most_high_rows: gemm.py, which computes the linear layers, has two ways of dividing rows into tiles. Up to
                this number of rows it uses high tiles; above it, wide tiles.
            steps: (1,) int64, a counter of layers. Each layer adds 1.
        """
        shape, num_rows = self._shape, write_pages.shape[0]
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        # The kernel takes addresses and would not notice wrong shapes.
        assert x.shape == (1, num_rows, shape.hidden_size), f"x {x.shape}; expected (1, {num_rows}, hidden_size)"
        assert cos.shape == sin.shape == (1, num_rows, shape.head_dim), f"cos {cos.shape}, sin {sin.shape}"
        assert {x.dtype, cos.dtype, sin.dtype} == {torch.bfloat16}, f"x {x.dtype}, cos {cos.dtype}, sin {sin.dtype}"
        decode_rows, decode_ends, decode_tables = decodes
        microbatch = Microbatch(
            num_rows=num_rows,
            most_high_rows=most_high_rows,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            write_pages=write_pages.data_ptr(),
            write_offsets=write_offsets.data_ptr(),
            pages=pages.data_ptr(),
            num_decodes=len(decode_rows),
            places=_array_address(decode_rows),
            ends=_array_address(decode_ends),
            tables=_array_address(decode_tables),
            sinks=self._sinks.data_ptr(),
        )
        most_keys = max(decode_ends, default=0)
        most_chunk = max((rows for _, rows, _, _ in chunks), default=0)
        work = self._memory.addresses(work_bytes(num_rows, most_keys, most_chunk, shape))
        chunk_table = np.array(chunks, np.int64) if chunks else _NO_CHUNKS
        out = torch.empty_like(x)
        run_layers(
            self._addresses, self._code, shape, microbatch, chunk_table, work, steps, x.data_ptr(), out.data_ptr()
        )
        return out


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


def _inputs(packed: Tensor) -> int:
    """Return the number of inputs of a packed weight, which has two inputs in each word."""
    return 2 * packed.shape[1]


def _check(layer: DecoderLayer, shape: Shape) -> None:
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
        assert weight.shape == packed_shape(outputs, inputs) and weight.dtype == torch.int32, (
            f"{name}: {weight.shape}, {weight.dtype}; expected a packed weight of {outputs} outputs and {inputs} inputs"
        )
        assert bias.shape == (outputs,) and bias.dtype == torch.float32, (
            f"{name}: bias {bias.shape}, {bias.dtype}; expected ({outputs},), torch.float32"
        )
    page = (shape.num_kv_heads, shape.page_size, head_dim)
    assert layer.keys.shape[1:] == layer.values.shape[1:] == page, (
        f"keys {layer.keys.shape}, values {layer.values.shape}; expected pages of {page}"
    )
    assert layer.keys.dtype == layer.values.dtype == torch.bfloat16, (
        f"keys {layer.keys.dtype}, values {layer.values.dtype}; expected torch.bfloat16"
    )
    for norm, size in ((layer.input_norm, hidden), (layer.norm, hidden), (layer.query_norm, head_dim)):
        assert norm is None or (norm.shape == (size,) and norm.dtype == torch.bfloat16), (
            f"weight of a norm: {norm.shape}, {norm.dtype}; expected ({size},), torch.bfloat16"
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
