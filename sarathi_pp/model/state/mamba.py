"""A Mamba-2 layer, as in Granite 4: a convolution and a selective state space."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sarathi_pp.model.attention.adapter import PagedCall
from sarathi_pp.model.state.backend import Convolution, SelectiveScan
from sarathi_pp.model.state.choice import Backends


class Mamba(nn.Module):
    """A Mamba-2 layer: input projection, convolution, selective scan, gated norm and output projection.

    Args:
        mamba: transformers' module. Its linear layers and its norm are used.
    """

    def __init__(self, mamba: Any, backends: Backends, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_idx = mamba.layer_idx
        self.width = mamba.intermediate_size
        assert mamba.activation == "silu", f"{mamba.activation} after the convolution"
        self._conv = Convolution.of(mamba.conv1d, silu=True)
        self._scan = SelectiveScan(
            mamba.num_heads,
            mamba.n_groups,
            mamba.head_dim,
            mamba.ssm_state_size,
            -mamba.A_log.detach().float().exp(),
            mamba.dt_bias.detach().float(),
            mamba.D.detach().float(),
        )
        self.in_proj, self.norm, self.out_proj = mamba.in_proj, mamba.norm, mamba.out_proj
        widths = (self._scan.head_dim, self._scan.state_dim)
        self._backend = backends.choose(dtype, self._conv.weights.device, widths)

    def forward(
        self, hidden_states: Tensor, paged: PagedCall, attention_mask: Tensor | None = None, **unused: object
    ) -> Tensor:
        """Return the output (1, T, hidden_size) for hidden states (1, T, hidden_size)."""
        assert attention_mask is None, "a mask was made; rows have no padding"
        paged.steps[0] += 1
        kv, inputs, layer = paged.kv, paged.inputs, self.layer_idx
        projected = self.in_proj(hidden_states)[0]
        heads = self._scan.heads
        parts = [self.width, projected.shape[1] - self.width - heads, heads]
        gate, mixed, steps = projected.split(parts, dim=1)
        rows = self._backend.convolve(mixed, self._conv, kv.conv_state(layer), inputs)
        out = self._backend.scan(rows, steps, self._scan, kv.recurrent_state(layer), inputs)
        normed = self.norm(out.flatten(1)[None], gate[None])
        return self.out_proj(normed.to(hidden_states.dtype))  # type: ignore[no-any-return]
