"""Modules that replace a model's own (rewrite.py): the same values with fewer passes over memory.

All modules compute in bfloat16 or float32, on CPU. Every rounding to bfloat16 is at the same
point as in the model. The linear layers o_proj and down_proj keep their names, because tensor_parallel.py finds by name
the modules whose outputs it sums.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sarathi_pp_kernels.cpu.threads import run_parallel, scratch_of_thread, split_range
from torch import Tensor, nn

from sarathi_pp.model.attention.adapter import PagedCall
from sarathi_pp.model.fuse.float_linear import PANEL, FloatLinear
from sarathi_pp.model.fuse.packed_linear import PackedLinear, packed_class
from sarathi_pp.model.kv import RowTarget

if TYPE_CHECKING:
    from sarathi_pp_kernels.cpu.row_ops import RowOps

# Fewest rows per thread: for fewer, waking a thread is not worth it.
_ROWS_A_THREAD = 32


def _pack(dtype: torch.dtype, *linears: nn.Linear) -> PackedLinear | FloatLinear:
    """Return one packed layer with the outputs of all these layers, which have the same input."""
    packed = packed_class(linears[0], dtype)
    assert packed is PackedLinear or packed is FloatLinear, f"{linears[0].weight.dtype}: {packed}"
    # Otherwise there are gaps between the rows of the output, and the next pass takes only an address.
    assert all(linear.out_features % PANEL == 0 for linear in linears), [linear.out_features for linear in linears]
    return packed(*linears)


def row_ops(dtype: torch.dtype) -> RowOps:
    """Return the passes over rows of this dtype. numba is needed."""
    from sarathi_pp_kernels.cpu import row_ops as passes  # numba is optional

    return {torch.bfloat16: passes.BFLOAT16, torch.float32: passes.FLOAT32}[dtype]


class GatedMLP(nn.Module):
    """A gated MLP: down(silu(gate(x)) * up(x)) for x (..., hidden_size)."""

    def __init__(self, mlp: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self._silu_multiply = row_ops(dtype).silu_multiply
        self.width = mlp.up_proj.out_features
        assert mlp.gate_proj.out_features == self.width, f"gate {mlp.gate_proj.out_features}, up {self.width}"
        self.gate_up = _pack(dtype, mlp.gate_proj, mlp.up_proj)
        mlp.gate_proj = mlp.up_proj = None  # frees them before the next one is packed
        self.down_proj = _pack(dtype, mlp.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        gated = torch.empty(*x.shape[:-1], self.width, dtype=x.dtype)
        num_rows = gated.numel() // self.width
        run_parallel([partial(self._gate, both, gated, rows) for rows in split_range(num_rows, _ROWS_A_THREAD)])
        return self.down_proj(gated)  # type: ignore[no-any-return]

    def _gate(self, both: Tensor, gated: Tensor, rows: range) -> None:
        self._silu_multiply(both.data_ptr(), gated.data_ptr(), rows.start, rows.stop, self.width)


class RowNorm(nn.Module):
    """An RMSNorm: weight * x / sqrt(mean(x * x) + eps) for x (..., width).

    The quotient is rounded to the dtype, and then its product with the weight.
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        ops = row_ops(norm.weight.dtype)
        self._rms_norm, self._add_rms_norm = ops.rms_norm, ops.add_rms_norm
        self.weight = norm.weight
        self.epsilon = float(norm.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        x, width = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        run_parallel([partial(self._norm, x, out, rows) for rows in split_range(x.numel() // width, _ROWS_A_THREAD)])
        return out

    def _check(self, x: Tensor) -> None:
        """Check what the passes over the rows cannot notice, since they take addresses."""
        weight = self.weight
        assert x.dtype == weight.dtype, f"fused for {weight.dtype}, called with {x.dtype}"
        assert x.shape[-1] == weight.numel(), f"rows {tuple(x.shape)}, weight {tuple(weight.shape)}"
        assert weight.is_contiguous(), f"weight with strides {weight.stride()}"

    def _norm(self, x: Tensor, out: Tensor, rows: range) -> None:
        width = x.shape[-1]
        weight, scratch = self.weight.data_ptr(), scratch_of_thread(width).data_ptr()
        self._rms_norm(x.data_ptr(), weight, out.data_ptr(), rows.start, rows.stop, width, self.epsilon, scratch)

    def after(self, x: Tensor, added: Tensor) -> Tensor:
        """Return the norm of the sum x + added. `added` is overwritten with the sum."""
        self._check(x)
        assert x.dtype == added.dtype and x.shape == added.shape, f"{x.dtype} {x.shape}, {added.dtype} {added.shape}"
        assert added.is_contiguous()
        x = x.contiguous()
        width, out = x.shape[-1], torch.empty_like(added)
        run_parallel(
            [partial(self._add_norm, x, added, out, rows) for rows in split_range(x.numel() // width, _ROWS_A_THREAD)]
        )
        return out

    def _add_norm(self, x: Tensor, added: Tensor, out: Tensor, rows: range) -> None:
        width = x.shape[-1]
        weight, scratch = self.weight.data_ptr(), scratch_of_thread(width).data_ptr()
        self._add_rms_norm(
            x.data_ptr(),
            added.data_ptr(),
            weight,
            out.data_ptr(),
            rows.start,
            rows.stop,
            width,
            self.epsilon,
            scratch,
        )


class RotaryAttention(nn.Module):
    """Attention with rotary embedding: one product for query, key and value, and one pass over its output.

    The pass rotates queries and keys, and writes keys and values to their pages.

    Args:
        with_norms: first apply attention.q_norm and k_norm, RMSNorms of head_dim, to the heads of queries and keys.
    """

    def __init__(self, attention: Any, dtype: torch.dtype, *, with_norms: bool = False) -> None:
        super().__init__()
        self._dtype = dtype
        self._rotate_and_write = row_ops(self._dtype).rotate_and_write
        self.layer_idx = attention.layer_idx
        self.head_dim = attention.head_dim
        self.scaling = attention.scaling
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        assert attention.k_proj.out_features == attention.v_proj.out_features == self.num_kv_heads * self.head_dim
        assert attention.q_proj.out_features == self.num_heads * self.head_dim
        self.qkv = _pack(dtype, attention.q_proj, attention.k_proj, attention.v_proj)
        attention.q_proj = attention.k_proj = attention.v_proj = None
        self.o_proj = _pack(dtype, attention.o_proj)
        self.query_norm = attention.q_norm.weight if with_norms else None
        self.key_norm = attention.k_norm.weight if with_norms else None
        self.epsilon = float(attention.q_norm.variance_epsilon) if with_norms else 0.0
        for weight in (self.query_norm, self.key_norm):
            assert weight is None or (weight.numel() == self.head_dim and weight.is_contiguous()), weight

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        paged: PagedCall,
        attention_mask: Tensor | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """Return the attention output (1, T, hidden_size), and None instead of attention weights.

        Args:
            hidden_states: (1, T, hidden_size).
            position_embeddings: cosines and sines, (1, T, head_dim) each.
        """
        assert attention_mask is None, "a mask was made; it would be T x T"
        rows = self.qkv(hidden_states)[0]
        cos, sin = (one.contiguous() for one in position_embeddings)
        # The pass takes addresses, so it would not notice wrong shapes.
        expected = (1, paged.inputs.num_tokens, self.head_dim)
        assert cos.shape == sin.shape == expected and len(rows) == expected[1], f"{cos.shape}, {sin.shape}, {expected}"
        assert rows.dtype == cos.dtype == sin.dtype == paged.kv.dtype == self._dtype, f"{cos.dtype}, {paged.kv.dtype}"
        assert (paged.kv.num_kv_heads, paged.kv.head_dim) == (self.num_kv_heads, self.head_dim)
        pieces = split_range(rows.shape[0], _ROWS_A_THREAD)
        target = paged.kv.row_target(self.layer_idx, paged.inputs)
        run_parallel([partial(self._rotate, rows, cos, sin, target, piece) for piece in pieces])
        paged.kv.store_rows(self.layer_idx, target, paged.inputs)
        query = rows.view(rows.shape[0], -1, self.head_dim)[:, : self.num_heads]
        attended = paged.attend(self.layer_idx, query, scaling=self.scaling)
        return self.o_proj(attended.reshape(1, rows.shape[0], -1)), None

    def _rotate(self, rows: Tensor, cos: Tensor, sin: Tensor, target: RowTarget, piece: range) -> None:
        self._rotate_and_write(
            rows.data_ptr(),
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            cos.data_ptr(),
            sin.data_ptr(),
            target.keys.data_ptr(),
            target.values.data_ptr(),
            target.pages.data_ptr(),
            target.offsets.data_ptr(),
            target.keys.shape[2],
            piece.start,
            piece.stop,
            self.query_norm.data_ptr() if self.query_norm is not None else 0,
            self.key_norm.data_ptr() if self.key_norm is not None else 0,
            self.epsilon,
            scratch_of_thread(self.head_dim).data_ptr(),
        )


class Block(nn.Module):
    """A decoder layer: attention and MLP, each after a norm and with a residual."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.input_layernorm = layer.input_layernorm
        self.self_attn = layer.self_attn
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp

    def forward(self, hidden_states: Tensor, **call: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **call)
        normed = self.post_attention_layernorm.after(hidden_states, attended)
        return attended + self.mlp(normed)  # type: ignore[no-any-return]
