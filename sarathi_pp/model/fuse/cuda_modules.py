"""Modules that replace a model's own on CUDA (rewrite.py): the same operations in fewer launches.

Products stay torch's own, and those with the same input are merged. torch may sum a wider product in another order. Our
Triton kernels (sarathi_pp_kernels) compute the steps between products. Every rounding is at the same point as in the
model. Only the order of sums and the last bit of exp and rsqrt differ. The dtype is bfloat16, float16 or float32. The
linear layers o_proj and down_proj keep their names, because tensor_parallel.py finds by name the modules whose outputs
it sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sarathi_pp.model.attention.adapter import PagedCall
from sarathi_pp.model.coded.linear import Float8Linear

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def can_merge(*linears: nn.Module) -> bool:
    """Return whether one product can replace all these layers, which have the same input.

    They need the same float dtype and device, and all or none have a bias. All or none hold their weights in FP8.
    """
    if all(type(one) is Float8Linear for one in linears):
        return len({one.bias is None for one in linears}) == 1
    if not all(type(one) is nn.Linear and one.weight.dtype in DTYPES for one in linears):
        return False
    kinds = {(one.weight.dtype, one.weight.device, one.bias is None) for one in linears}
    return len(kinds) == 1


class MergedLinear(nn.Module):
    """Several linear layers with the same input as one product. Their outputs are next to each other."""

    def __init__(self, *linears: Any) -> None:
        super().__init__()
        biases = [one.bias for one in linears if one.bias is not None]
        self.weight = nn.Parameter(torch.cat([one.weight for one in linears]), requires_grad=False)
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


def merge(*linears: Any) -> MergedLinear | Float8Linear:
    """Return one layer for several with the same input, of which `can_merge` is true."""
    return Float8Linear.merge(*linears) if type(linears[0]) is Float8Linear else MergedLinear(*linears)


class GatedMLP(nn.Module):
    """A gated MLP: down(silu(gate(x)) * up(x)) for x (..., hidden_size)."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        from sarathi_pp_kernels.triton.gate import silu_multiply  # triton is optional

        self._gate = silu_multiply
        self.gate_up = merge(mlp.gate_proj, mlp.up_proj)
        mlp.gate_proj = mlp.up_proj = None  # frees them before the next ones are merged
        self.down_proj = mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._gate(self.gate_up(x)))  # type: ignore[no-any-return]


class RowNorm(nn.Module):
    """An RMSNorm: weight * x / sqrt(mean(x * x) + eps) for x (..., width).

    The quotient is rounded to the dtype, and then its product with the weight.
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        from sarathi_pp_kernels.triton.norm import add_rms_norm, rms_norm  # triton is optional

        self._norm, self._add_norm = rms_norm, add_rms_norm
        self.weight = norm.weight
        self.epsilon = float(norm.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.epsilon)

    def after(self, x: Tensor, added: Tensor) -> Tensor:
        """Return the norm of the sum x + added. `added` is overwritten with the sum."""
        return self._add_norm(x, added, self.weight, self.epsilon)


class RotaryAttention(nn.Module):
    """Attention with rotary embedding: one product for query, key and value, and one launch for its output.

    The launch rotates queries and keys, and writes keys and values to their pages.

    Args:
        with_norms: first apply attention.q_norm and k_norm, RMSNorms of head_dim, to the heads of queries and keys.
    """

    def __init__(self, attention: Any, *, with_norms: bool = False) -> None:
        super().__init__()
        from sarathi_pp_kernels.triton.rotary import rotate_and_write  # triton is optional

        self._rotate = rotate_and_write
        self.layer_idx = attention.layer_idx
        self.scaling = attention.scaling
        self.qkv = merge(attention.q_proj, attention.k_proj, attention.v_proj)
        attention.q_proj = attention.k_proj = attention.v_proj = None
        self.o_proj = attention.o_proj
        self.query_norm = attention.q_norm.weight if with_norms else None
        self.key_norm = attention.k_norm.weight if with_norms else None
        self.epsilon = float(attention.q_norm.variance_epsilon) if with_norms else 0.0

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
        cos, sin = (one[0].contiguous() for one in position_embeddings)
        query = self._rotate(
            self.qkv(hidden_states)[0],
            cos,
            sin,
            paged.inputs.write_pages,
            paged.inputs.write_offsets,
            paged.kv.keys(self.layer_idx),
            paged.kv.values(self.layer_idx),
            query_norm=self.query_norm,
            key_norm=self.key_norm,
            epsilon=self.epsilon,
        )
        attended = paged.attend(self.layer_idx, query, scaling=self.scaling)
        return self.o_proj(attended.reshape(1, query.shape[0], -1)), None
