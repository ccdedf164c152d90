"""A gated short convolution, as in LFM2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sarathi_pp.model.attention.adapter import PagedCall
from sarathi_pp.model.state.backend import Convolution
from sarathi_pp.model.state.choice import Backends


class ShortConvolution(nn.Module):
    """A convolution between two gates: out_proj(c * conv(b * x)), where in_proj gives b, c and x.

    Args:
        short: transformers' module. Its linear layers are used.
    """

    def __init__(self, short: Any, backends: Backends, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_idx = short.layer_idx
        self._conv = Convolution.of(short.conv, silu=False)
        self.in_proj, self.out_proj = short.in_proj, short.out_proj
        weights = self._conv.weights
        self._backend = backends.choose(dtype, weights.device, weights.shape[1:])

    def forward(
        self, hidden_states: Tensor, paged: PagedCall, attention_mask: Tensor | None = None, **unused: object
    ) -> Tensor:
        """Return the output (1, T, hidden_size) for hidden states (1, T, hidden_size)."""
        assert attention_mask is None, "a mask was made; rows have no padding"
        paged.steps[0] += 1
        before, after, x = self.in_proj(hidden_states)[0].chunk(3, dim=-1)
        latest = paged.kv.conv_state(self.layer_idx)
        filtered = self._backend.convolve(before * x, self._conv, latest, paged.inputs)
        return self.out_proj((after * filtered)[None])  # type: ignore[no-any-return]
