"""Rewrites of a loaded stage that make it faster. Applied from outside: no model knows of them.

In bfloat16 on CPU, where our own products run (packed.py), a gated MLP becomes one product for gate and up, one pass
for the activation and one product for down, and an RMSNorm becomes one pass. Then every other linear layer is packed.
Which modules those are is read off their code: one whose `forward` is Llama's own, instruction by instruction, does
what Llama's does, whatever its name. Every rounding to bfloat16 stays where the model has it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from sarathi_pp.model.crew import scratch_of_thread, share_out, shares
from sarathi_pp.model.packed import PanelLinear, fits_panels, has_panels, packing

# Rows below which threads are not worth their waking.
_ROWS_A_THREAD = 32


def fuse(module: nn.Module) -> int:
    """Replaces what can be replaced; returns how many modules.

    One weight at a time is held twice, of an MLP gate and up together. Weights that another module shares (tied
    embeddings) stay as they are, since packing would copy them; no module that is fused shares any.
    """
    # Places, not modules: nothing here may keep a weight alive that has been packed.
    count = 0
    for rewrite in (_fused, _packed(module)):
        places = [
            (parent, name, made)
            for parent in module.modules()
            for name, child in parent.named_children()
            if (made := rewrite(child)) is not None
        ]
        for parent, name, make in places:
            setattr(parent, name, make(getattr(parent, name)))
        count += len(places)
    return count


Rewrite = Callable[[Any], nn.Module]


def _fused(child: nn.Module) -> Rewrite | None:
    if _forward_is(child, LlamaMLP) and _is_silu(child.act_fn):
        linears = [child.gate_proj, child.up_proj, child.down_proj]
        return GatedMLP if all(type(one) is nn.Linear and fits_panels(one) for one in linears) else None
    if _forward_is(child, LlamaRMSNorm):
        weight: Any = child.weight
        fits = weight.dtype == torch.bfloat16 and weight.is_cpu and weight.numel() % 16 == 0
        return RowNorm if fits and has_panels() else None
    return None


def _packed(module: nn.Module) -> Callable[[nn.Module], Rewrite | None]:
    owners: dict[int, int] = {}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1

    def rewrite(child: nn.Module) -> Rewrite | None:
        return packing(child) if type(child) is nn.Linear and owners[id(child.weight)] == 1 else None

    return rewrite


def _forward_is(child: Any, known: type[nn.Module]) -> bool:
    ours, theirs = type(child).forward, known.forward
    if not hasattr(ours, "__code__"):
        return False
    names = ("co_code", "co_names", "co_consts")
    return all(getattr(ours.__code__, name) == getattr(theirs.__code__, name) for name in names)


def _is_silu(activation: object) -> bool:
    return type(activation) in (nn.SiLU, SiLUActivation)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) for bfloat16 x (..., hidden_size)."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        from sarathi_pp.model import rows  # numba is an optional package, and a slow import

        self._kernel = rows
        self.width = mlp.up_proj.out_features
        self.gate_up = PanelLinear(mlp.gate_proj, mlp.up_proj)
        self.down = PanelLinear(mlp.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        gated = torch.empty(*x.shape[:-1], self.width, dtype=torch.bfloat16)
        num_rows = gated.numel() // self.width
        share_out([partial(self._gate, both, gated, rows) for rows in shares(num_rows, _ROWS_A_THREAD)])
        return self.down(gated)  # type: ignore[no-any-return]

    def _gate(self, both: Tensor, gated: Tensor, rows: range) -> None:
        scratch = scratch_of_thread(self.width).data_ptr()
        self._kernel.silu_multiply(both.data_ptr(), gated.data_ptr(), rows.start, rows.stop, self.width, scratch)


class RowNorm(nn.Module):
    """weight * x / sqrt(mean(x * x) + eps) for bfloat16 x (..., width); the quotient is rounded, then the product."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        from sarathi_pp.model import rows  # numba is an optional package, and a slow import

        self._kernel = rows
        self.weight = norm.weight
        self.epsilon = float(norm.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.bfloat16, f"fused for bfloat16, called with {x.dtype}"
        x, width = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        share_out([partial(self._norm, x, out, rows) for rows in shares(x.numel() // width, _ROWS_A_THREAD)])
        return out

    def _norm(self, x: Tensor, out: Tensor, rows: range) -> None:
        width = x.shape[-1]
        weight, scratch = self.weight.data_ptr(), scratch_of_thread(width).data_ptr()
        self._kernel.rms_norm(x.data_ptr(), weight, out.data_ptr(), rows.start, rows.stop, width, self.epsilon, scratch)
