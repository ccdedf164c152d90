"""The routed experts of a layer (mixture of experts, MoE) on CPU, with packed weights.

    rows, and the experts that the router chose for each  ->  rows sorted by expert
    for each expert that was chosen: gate and up in one product  ->  activation  ->  down  ->  times the router's weight
    the results of a row's experts are added up, in the order of the experts

This is the computation of transformers' own loop over experts, which rounds at the same points. (It adds a bias after
the product was rounded, and our product adds it before.) But a plain product repacks the weight of an expert in every
call. With the few rows that an expert gets, that takes most of the time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sarathi_pp_kernels.cpu.threads import run_parallel, split_range
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import SiLUActivation

from sarathi_pp.model.fuse.cpu_modules import row_ops
from sarathi_pp.model.fuse.float_linear import PANEL, FloatLinear
from sarathi_pp.model.fuse.packed_linear import PackedLinear, packed_class

# Fewest rows per thread: for fewer, waking a thread is not worth it.
_ROWS_A_THREAD = 32
# What transformers calls the projections of an expert. Those without a gate have `up_proj` alone.
_GATE_UP, _UP, _DOWN = "gate_up_proj", "up_proj", "down_proj"


class PackedExperts(nn.Module):
    """All experts of a layer, called as transformers calls its module of experts.

    Args:
        experts: transformers' module, one that `can_pack_experts` accepts. It gives up its weights.
        compute: float type of the computation.
    """

    def __init__(self, experts: Any, compute: torch.dtype) -> None:
        super().__init__()
        self.num_experts = experts.num_experts
        self.up = _pack(experts, _GATE_UP if experts.has_gate else _UP, compute)
        self.down = _pack(experts, _DOWN, compute)
        self._activation = experts  # without its weights
        act = getattr(experts, "act_fn", None)
        silu = type(act) in (nn.SiLU, SiLUActivation) or act is functional.silu
        plain = silu and experts.has_gate and experts.is_concatenated
        fused = plain and type(experts)._apply_gate.__module__ == "transformers.integrations.moe"
        self._silu_multiply = row_ops(compute).silu_multiply if fused and self._width % PANEL == 0 else None

    @property
    def _width(self) -> int:
        """Return the number of inputs of an expert's last product."""
        return self.down.in_features

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the results of each row's experts, (T, hidden_size).

        Args:
            hidden_states: (T, hidden_size).
            top_k_index: (T, K) ids of the experts of each row; `num_experts` for none.
            top_k_weights: (T, K).
        """
        experts = top_k_index.reshape(-1)
        order = experts.argsort(stable=True)
        rows, weights = order // top_k_index.shape[1], top_k_weights.reshape(-1, 1)[order]
        out = torch.zeros_like(hidden_states)
        begin = 0
        for expert, count in enumerate(experts.bincount(minlength=self.num_experts)[: self.num_experts].tolist()):
            if count:
                own = rows[begin : begin + count]
                result = self._compute(expert, hidden_states[own]) * weights[begin : begin + count]
                out[own] = out[own] + result.to(out.dtype)
            begin += count
        return out

    def _compute(self, expert: int, x: Tensor) -> Tensor:
        """Return an expert's results for its rows x, (n, hidden_size)."""
        up, down = (linear.out_features // self.num_experts for linear in (self.up, self.down))
        both = self.up(x, range(expert * up, (expert + 1) * up))
        return self.down(self._activate(both), range(expert * down, (expert + 1) * down))  # type: ignore[no-any-return]

    def _activate(self, both: Tensor) -> Tensor:
        if self._silu_multiply is None:
            own = self._activation
            gated: Tensor = own._apply_gate(both) if own.has_gate else own.act_fn(both)
            return gated
        gated = both.new_empty(len(both), self._width)
        run_parallel([partial(self._gate, both, gated, rows) for rows in split_range(len(both), _ROWS_A_THREAD)])
        return gated

    def _gate(self, both: Tensor, gated: Tensor, rows: range) -> None:
        assert self._silu_multiply is not None
        self._silu_multiply(both.data_ptr(), gated.data_ptr(), rows.start, rows.stop, self._width)


def can_pack_experts(experts: Any, compute: torch.dtype) -> bool:
    """Return whether PackedExperts computes what this module does: it follows the rules of transformers' experts.

    transformers' modules of experts have attributes that describe them. Other implementations rely on them too
    (transformers' integrations/moe.py).
    """
    if not hasattr(experts, "is_transposed") or getattr(experts, "has_post_expert_norm", False):
        return False
    for name in (_GATE_UP if experts.has_gate else _UP, _DOWN):
        weight = getattr(experts, name, None)
        if not isinstance(weight, nn.Parameter) or weight.dim() != 3 or len(weight) != experts.num_experts:
            return False
        linear = _linears(experts, name)[0]
        if linear.out_features % PANEL or packed_class(linear, compute) not in (PackedLinear, FloatLinear):
            return False
    return True


def _pack(experts: Any, name: str, compute: torch.dtype) -> PackedLinear | FloatLinear:
    """Return one packed layer with the outputs of all experts, next to each other. The module gives up its weight."""
    linears = _linears(experts, name)
    packed = packed_class(linears[0], compute)
    assert packed is PackedLinear or packed is FloatLinear, f"{linears[0].weight.dtype}: {packed}"
    layer = packed(*linears, frees=True)  # otherwise the weights of all experts would be in memory twice
    layer.num_parts = len(linears)
    delattr(experts, name)
    if experts.has_bias:
        delattr(experts, f"{name}_bias")
    return layer


def _linears(experts: Any, name: str) -> list[nn.Linear]:
    """Return a projection of each expert as a linear layer, which shares its weight."""
    weights = getattr(experts, name).detach()
    biases = getattr(experts, f"{name}_bias").detach() if experts.has_bias else [None] * len(weights)
    linears = []
    for weight, bias in zip(weights.mT if experts.is_transposed else weights, biases, strict=True):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=False)
        linears.append(linear)
    return linears
