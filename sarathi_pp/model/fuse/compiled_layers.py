"""The layers of a stage as one module, which runs them in one compiled call where it can; put in from outside."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sarathi_pp.model.attention.adapter import PagedCall
from sarathi_pp.model.fuse.cpu_modules import Block, GatedMLP, RotaryAttention, RowNorm
from sarathi_pp.model.fuse.packed_linear import PanelLinear
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.missing_layer import Hole

if TYPE_CHECKING:
    from sarathi_pp_kernels.cpu.decoder_layers import Code, Shape, Work


# Bytes by which memory to work in grows: with a decode's context, but not at every token.
_WORK_STEP = 1 << 20
_NO_CHUNKS = np.zeros((0, 4), np.int64)


def stack(layers: nn.ModuleList) -> bool:
    """Makes one module of those that hold a stage's layers, if all are Llama's and alike; whether it did.

    It stands in the place of the first; in those of the others nothing is done.
    """
    held = [index for index, layer in enumerate(layers) if isinstance(layer, Block)]
    blocks = [layers[index] for index in held]
    if not blocks or held != list(range(held[0], held[-1] + 1)) or len({_likeness(block) for block in blocks}) != 1:
        return False
    if _likeness(blocks[0]) is None:
        return False
    layers[held[0]] = Stack(blocks)
    for index in held[1:]:
        layers[index] = Hole()
    return True


def _likeness(block: Any) -> tuple[object, ...] | None:
    """What must be the same of all layers; None where a part is none that the compiled call knows."""
    attention, mlp, norms = block.self_attn, block.mlp, (block.input_layernorm, block.post_attention_layernorm)
    known = type(attention) is RotaryAttention and type(mlp) is GatedMLP and all(type(n) is RowNorm for n in norms)
    if not known:
        return None
    linears = attention.qkv, attention.o_proj, mlp.gate_up, mlp.down_proj
    if any(type(linear) is not PanelLinear for linear in linears):  # a tensor shard's are not all there is
        return None
    epsilons = {norm.epsilon for norm in norms}
    if len(epsilons) != 1:
        return None
    has_norms = attention.query_norm is not None
    sizes = tuple((linear.in_features, linear.out_features) for linear in linears)
    heads = attention.num_heads, attention.num_kv_heads, attention.head_dim
    return (*sizes, *heads, attention.scaling, *epsilons, has_norms, attention.epsilon)


class Stack(nn.Module):
    """Blocks one after the other, bit for bit: in one call where a single thread computes and attention is numba's.

    One thread at a time may run it. It keeps the memory that its largest microbatch took.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        super().__init__()
        from sarathi_pp_kernels.cpu import decoder_layers

        from sarathi_pp.model.attention.numba import NumbaAttention

        self._code = decoder_layers
        self._numba = NumbaAttention
        self.blocks = nn.ModuleList(blocks)
        first = blocks[0]
        self._attention = first.self_attn
        self._inner_size = first.mlp.width
        self._epsilon = first.input_layernorm.epsilon
        self._made: tuple[Shape, Code] | None = None
        self._made_for = (0, 0)
        self._table: tuple[KVShard, NDArray[np.void]] | None = None
        self._work: dict[str, Tensor] = {}
        self._room: Work | None = None  # bytes of each, and where they lie
        self._places: Work | None = None
        self._sinks = torch.full((first.self_attn.num_heads,), -torch.inf)

    def forward(self, hidden_states: Tensor, **call: Any) -> Tensor:
        paged: PagedCall = call["paged"]
        if not self._in_one_call(paged):
            for block in self.blocks:
                hidden_states = block(hidden_states, **call)
            return hidden_states
        assert call.get("attention_mask") is None, "a mask was made; it would be T x T"
        return self._run(hidden_states.contiguous(), call["position_embeddings"], paged)

    def _in_one_call(self, paged: PagedCall) -> bool:
        backend = paged.backend
        return torch.get_num_threads() == 1 and isinstance(backend, self._numba) and backend.fits_lanes(paged.kv)

    def _run(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor], paged: PagedCall) -> Tensor:
        kv, inputs = paged.kv, paged.inputs
        shape, code = self._shape_and_code(kv.page_size)
        num_rows = inputs.num_tokens
        cos, sin = (one.contiguous() for one in position_embeddings)
        # All goes by addresses: nothing behind it would notice.
        assert x.shape == (1, num_rows, shape.hidden_size), f"{x.shape}, {num_rows} rows"
        assert cos.shape == sin.shape == (1, num_rows, shape.head_dim), f"{cos.shape}, {sin.shape}"
        assert {x.dtype, cos.dtype, sin.dtype, kv.dtype} == {torch.bfloat16}, f"{x.dtype}, {cos.dtype}, {kv.dtype}"
        assert (kv.num_kv_heads, kv.head_dim) == (shape.num_kv_heads, shape.head_dim)
        chunks: list[tuple[int, int, int, int]] = []
        places, ends, tables = array("q"), array("q"), array("q")
        for start, num_tokens, first_row, first_page, _, _, prompt in inputs.spans:
            if num_tokens > 1 or prompt:
                chunks.append((first_row, num_tokens, start, first_page))
            else:
                places.append(first_row)
                ends.append(start + 1)
                tables.append(first_page)
        call = self._code.Call(
            num_rows=num_rows,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            write_pages=inputs.write_pages.data_ptr(),
            write_offsets=inputs.write_offsets.data_ptr(),
            pages=inputs.pages.data_ptr(),
            num_decodes=len(places),
            places=_address(places),
            ends=_address(ends),
            tables=_address(tables),
            sinks=self._sinks.data_ptr(),
        )
        most_chunk = max((rows for _, rows, _, _ in chunks), default=0)
        work = self._addresses(self._code.work_bytes(num_rows, max(ends, default=0), most_chunk, shape))
        out = torch.empty_like(x)
        told_of_chunks = np.array(chunks, np.int64) if chunks else _NO_CHUNKS
        layers = self._layer_table(kv, paged.specs.windows)
        self._code.run_stack(layers, code, shape, call, told_of_chunks, work, paged.steps, x.data_ptr(), out.data_ptr())
        return out

    def _shape_and_code(self, page_size: int) -> tuple[Shape, Code]:
        """Made anew only where they have changed."""
        attention = self._attention
        most_high_rows = attention.qkv.most_high_rows  # of all products, when they have been tried
        if self._made is None or self._made_for != (page_size, most_high_rows):
            group = attention.num_heads // attention.num_kv_heads
            shape = self._code.Shape(
                hidden_size=attention.qkv.in_features,
                num_heads=attention.num_heads,
                num_kv_heads=attention.num_kv_heads,
                head_dim=attention.head_dim,
                page_size=page_size,
                inner_size=self._inner_size,
                epsilon=self._epsilon,
                head_epsilon=attention.epsilon,
                scaling=np.float32(attention.scaling),
                most_rows=self._code.rows_at_once(group),
                most_high_rows=most_high_rows,
            )
            self._made = shape, self._code.code_for(attention.head_dim, group, page_size)
            self._made_for = page_size, most_high_rows
        return self._made

    def _layer_table(self, kv: KVShard, windows: tuple[int | None, ...]) -> NDArray[np.void]:
        """Made once for a KV shard."""
        if self._table is None or self._table[0] is not kv:
            told = [_layer(block, kv, windows) for block in self.blocks]
            names = self._code.LAYER.names or ()
            self._table = kv, np.array([tuple(one[name] for name in names) for one in told], self._code.LAYER)
        return self._table[1]

    def _addresses(self, needed: Work) -> Work:
        """Memory that is kept: fresh one would be page faults at every call."""
        if self._places is None or self._room is None or any(map(operator.gt, needed, self._room)):
            self._places = self._room = None  # until there is memory for all of it
            for name, size in needed._asdict().items():
                if name not in self._work or self._work[name].numel() < size:
                    self._work.pop(name, None)
                    self._work[name] = torch.empty(-(-size // _WORK_STEP) * _WORK_STEP, dtype=torch.uint8)
            self._room = self._code.Work(**{name: memory.numel() for name, memory in self._work.items()})
            self._places = self._code.Work(**{name: memory.data_ptr() for name, memory in self._work.items()})
        return self._places


def _address(numbers: array[int]) -> int:
    address, _ = numbers.buffer_info()
    return address


def _layer(block: Any, kv: KVShard, windows: tuple[int | None, ...]) -> dict[str, int]:
    attention, mlp = block.self_attn, block.mlp
    index = attention.layer_idx
    found = {
        "input_norm": block.input_layernorm.weight.data_ptr(),
        "query_norm": 0 if attention.query_norm is None else attention.query_norm.data_ptr(),
        "key_norm": 0 if attention.key_norm is None else attention.key_norm.data_ptr(),
        "keys": kv.keys(index).data_ptr(),
        "values": kv.values(index).data_ptr(),
        "window": windows[index] or 0,
        "norm": block.post_attention_layernorm.weight.data_ptr(),
    }
    linears = {"qkv": attention.qkv, "output": attention.o_proj, "gate_up": mlp.gate_up, "down": mlp.down_proj}
    for name, linear in linears.items():
        found[name], found[f"{name}_bias"] = linear.addresses()
    return found
