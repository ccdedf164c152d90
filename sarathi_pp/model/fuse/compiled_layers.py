"""The layers of a stage as one module, which runs them in one compiled call if it can."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import mul
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sarathi_pp.model.attention.adapter import PagedCall
from sarathi_pp.model.fuse.cpu_modules import Block, GatedMLP, RotaryAttention, RowNorm
from sarathi_pp.model.fuse.float_linear import FloatLinear
from sarathi_pp.model.fuse.packed_linear import PackedLinear
from sarathi_pp.model.fuse.team_size import TeamSize, measured_team
from sarathi_pp.model.inputs import StageInputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.missing_layer import MissingLayer

if TYPE_CHECKING:
    from sarathi_pp_kernels.cpu.decoder_layers_call import DecoderLayer, DecoderLayersCall, Tiles


def compile_layers(layers: nn.ModuleList) -> bool:
    """Replace a stage's layers by one module, if the compiled call supports them. Return whether this was done.

    All layers must be like Llama's, with equal sizes and settings. CompiledLayers replaces the first layer, and a
    MissingLayer replaces each of the others.
    """
    held = [index for index, layer in enumerate(layers) if isinstance(layer, Block)]
    blocks = [layers[index] for index in held]
    if not blocks or held != list(range(held[0], held[-1] + 1)) or len({_likeness(block) for block in blocks}) != 1:
        return False
    if _likeness(blocks[0]) is None:
        return False
    layers[held[0]] = CompiledLayers(blocks)
    for index in held[1:]:
        layers[index] = MissingLayer()
    return True


def _likeness(block: Any) -> tuple[object, ...] | None:
    """Return the sizes and settings that must be equal in all layers; None if the compiled call cannot run this one."""
    attention, mlp, norms = block.self_attn, block.mlp, (block.input_layernorm, block.post_attention_layernorm)
    known = type(attention) is RotaryAttention and type(mlp) is GatedMLP and all(type(n) is RowNorm for n in norms)
    if not known:
        return None
    linears = attention.qkv, attention.o_proj, mlp.gate_up, mlp.down_proj
    kinds = {type(linear) for linear in linears}
    if kinds not in ({PackedLinear}, {FloatLinear}):  # in a tensor shard, some are Summed
        return None
    if len(held := {linear.held_type for linear in linears}) != 1:
        return None
    epsilons = {norm.epsilon for norm in norms}
    if len(epsilons) != 1:
        return None
    has_norms = attention.query_norm is not None
    sizes = tuple((linear.in_features, linear.out_features) for linear in linears)
    heads = attention.num_heads, attention.num_kv_heads, attention.head_dim
    return (*kinds, *held, *sizes, *heads, attention.scaling, *epsilons, has_norms, attention.epsilon)


class CompiledLayers(nn.Module):
    """The layers (blocks) of a stage, which run one after the other, or in one compiled call with the same bits.

    It is one call if attention is numba's. Only one thread at a time may call this module. The modules compute on
    torch's number of threads. The call uses those of `team` if they are fewer.
    """

    team: TeamSize | None = None  # None: torch's number of threads

    def __init__(self, blocks: Sequence[Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        # The compiled call for the attention backend and KV shard of the last forward; None if it cannot run with them.
        self._call: DecoderLayersCall | None = None
        self._made_for: tuple[object, object] = (None, None)

    def forward(self, hidden_states: Tensor, **call: Any) -> Tensor:
        paged: PagedCall = call["paged"]
        compiled = self._compiled_call(paged)
        if compiled is None:
            for block in self.blocks:
                hidden_states = block(hidden_states, **call)
            return hidden_states
        assert call.get("attention_mask") is None, "a mask was made; it would be T x T"
        return self._run(compiled, hidden_states, call["position_embeddings"], paged)

    @property
    def in_one_call(self) -> bool:
        """Return whether the last forward ran in one compiled call."""
        return self._call is not None

    def _compiled_call(self, paged: PagedCall) -> DecoderLayersCall | None:
        backend, kv = self._made_for
        if backend is not paged.backend or kv is not paged.kv:
            self._call = self._make_call(paged)
            self._made_for = paged.backend, paged.kv
        return self._call

    def _make_call(self, paged: PagedCall) -> DecoderLayersCall | None:
        # These need numba, which is installed if there are blocks.
        from sarathi_pp_kernels.cpu.decoder_layers_call import DecoderLayersCall

        from sarathi_pp.model.attention.numba import NumbaAttention

        if paged.kv.float8:  # the compiled call reads and writes pages in the type of the computation
            return None
        first: Any = self.blocks[0]
        in_float = type(first.mlp.down_proj) is FloatLinear
        if not isinstance(paged.backend, NumbaAttention) or not (in_float or paged.backend.fits_simd(paged.kv)):
            return None
        return DecoderLayersCall(
            [_decoder_layer(block, paged) for block in self.blocks],
            first.mlp.down_proj.held_type,
            epsilon=first.input_layernorm.epsilon,
            head_epsilon=first.self_attn.epsilon,
            scaling=first.self_attn.scaling,
        )

    def _run(
        self, compiled: DecoderLayersCall, x: Tensor, position_embeddings: tuple[Tensor, Tensor], paged: PagedCall
    ) -> Tensor:
        inputs = paged.inputs
        attention: Any = self.blocks[0].self_attn
        num_threads = torch.get_num_threads()
        if self.team is not None:
            num_threads = min(self.team.threads(inputs.num_tokens), num_threads)
        chunks, tiles = _divided(inputs, attention.num_heads, paged.kv, num_threads)
        return compiled(
            x,
            *position_embeddings,
            write_pages=inputs.write_pages,
            write_offsets=inputs.write_offsets,
            pages=inputs.pages,
            chunks=chunks,
            tiles=tiles,
            # The same for all products, once they are timed. In float32 there are no high tiles.
            most_high_rows=getattr(attention.qkv, "most_high_rows", 0),
            steps=paged.steps,
        )


def choose_team(module: nn.Module, compute: Callable[[int], object], now: Callable[[], float]) -> TeamSize | None:
    """Choose how many threads compute the layers of a stage.

    Args:
        module: the stage's modules. They have computed at least once.
        compute: computes a prompt of a number of tokens.
        now: returns the seconds of a clock.

    Returns:
        The choice; None if there is none, because torch has one thread, or the layers do not run in one compiled call.
    """
    layers = next((one for one in module.modules() if isinstance(one, CompiledLayers) and one.in_one_call), None)
    if layers is None or torch.get_num_threads() == 1:
        return None

    def seconds(rows: int, num_threads: int) -> float:
        layers.team = TeamSize(num_threads, num_threads)
        begin_s = now()
        compute(rows)
        return now() - begin_s

    layers.team = measured_team(seconds, torch.get_num_threads())
    return layers.team


def _divided(
    inputs: StageInputs, num_heads: int, kv: KVShard, num_threads: int
) -> tuple[list[tuple[int, int, int, int]], Tiles]:
    """Return a microbatch's spans as chunks, as DecoderLayersCall takes them, and as tiles.

    In float32, all rows are in tiles. Otherwise only decodes are, one per tile. Python's own arrays are filled faster
    than small arrays of numpy.
    """
    from sarathi_pp_kernels.cpu.decoder_layers_call import Tiles

    from sarathi_pp.model.attention.numba import key_bounds, tile_height

    chunks: list[tuple[int, int, int, int]] = []
    tiles = Tiles(*(array("q") for _ in Tiles._fields))
    for start, num_tokens, first_row, first_page, _, _, prompt, _ in inputs.spans:
        if kv.dtype != torch.float32 and (num_tokens > 1 or prompt):
            chunks.append((first_row, num_tokens, start, first_page))
            continue
        height = tile_height(num_tokens, start + num_tokens, num_heads, kv, num_threads)
        for row in range(0, num_tokens, height):
            tiles.places.append(first_row + row)
            tiles.counts.append(min(height, num_tokens - row))
            tiles.ends.append(start + row + 1)
            tiles.tables.append(first_page)
    keys = list(map(mul, tiles.ends, tiles.counts))
    tiles.bounds.extend(key_bounds(keys, num_threads))
    return chunks, tiles


def _decoder_layer(block: Any, paged: PagedCall) -> DecoderLayer:
    from sarathi_pp_kernels.cpu.decoder_layers_call import DecoderLayer

    attention, mlp, kv = block.self_attn, block.mlp, paged.kv
    layer = attention.layer_idx
    qkv, output, gate_up, down = (
        linear.tensors() for linear in (attention.qkv, attention.o_proj, mlp.gate_up, mlp.down_proj)
    )
    return DecoderLayer(
        input_norm=block.input_layernorm.weight,
        qkv=qkv[0],
        qkv_bias=qkv[1],
        query_norm=attention.query_norm,
        key_norm=attention.key_norm,
        keys=kv.keys(layer),
        values=kv.values(layer),
        window=paged.specs.windows[layer] or 0,
        output=output[0],
        output_bias=output[1],
        norm=block.post_attention_layernorm.weight,
        gate_up=gate_up[0],
        gate_up_bias=gate_up[1],
        down=down[0],
        down_bias=down[1],
    )
