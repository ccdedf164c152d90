"""Linear attention with a gated delta rule, as in Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sarathi_pp.model.attention.adapter import PagedCall
from sarathi_pp.model.state.backend import Convolution, DeltaRule
from sarathi_pp.model.state.choice import Backends
from sarathi_pp.model.state.projections import merged, with_rows


class GatedDeltaNet(nn.Module):
    """A gated delta-net: projections, a convolution, the recurrence, a gated norm and the output projection.

    The linear layers and the norm are those of transformers' module. The rows of the input projections are in another
    order: queries, keys, values and output gates of all heads, and the logits of beta and of the decay of all heads.

    Args:
        net: transformers' module. Its input projections are taken out of it.
    """

    def __init__(self, net: Any, backends: Backends, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_idx = net.layer_idx
        self.value_dim = net.value_dim
        assert net.activation == "silu", f"{net.activation} after the convolution"
        self._conv = Convolution.of(net.conv1d, silu=True)
        self._rule = DeltaRule(
            net.num_k_heads,
            net.num_v_heads,
            net.head_k_dim,
            net.head_v_dim,
            -net.A_log.detach().float().exp(),
            net.dt_bias.detach().float(),
        )
        self.in_proj, self.in_gates = _projections(net)
        self.norm, self.out_proj = net.norm, net.out_proj
        widths = (self._rule.key_dim, self._rule.value_dim)
        self._backend = backends.choose(dtype, self._conv.weights.device, widths)

    def forward(
        self, hidden_states: Tensor, paged: PagedCall, attention_mask: Tensor | None = None, **unused: object
    ) -> Tensor:
        """Return the output (1, T, hidden_size) for hidden states (1, T, hidden_size)."""
        assert attention_mask is None, "a mask was made; rows have no padding"
        paged.steps[0] += 1
        kv, inputs, layer = paged.kv, paged.inputs, self.layer_idx
        projected = self.in_proj(hidden_states)[0]
        mixed, gate = projected.split([projected.shape[1] - self.value_dim, self.value_dim], dim=1)
        rows = self._backend.convolve(mixed, self._conv, kv.conv_state(layer), inputs)
        gates = self.in_gates(hidden_states)[0]
        out = self._backend.apply_delta_rule(rows, gates, self._rule, kv.recurrent_state(layer), inputs)
        normed = self.norm(out.flatten(0, 1), gate.reshape(-1, self._rule.value_dim))
        return self.out_proj(normed.view(1, len(rows), self.value_dim))  # type: ignore[no-any-return]


def _projections(net: Any) -> tuple[nn.Linear, nn.Linear]:
    """Return the layer of queries, keys, values and output gates, and that of the logits of beta and of the decay."""
    if hasattr(net, "in_proj_qkvz"):  # each key head's rows are next to each other
        share = net.num_v_heads // net.num_k_heads
        head = [net.head_k_dim, net.head_k_dim, share * net.head_v_dim, share * net.head_v_dim]
        both = with_rows(net.in_proj_qkvz, head), with_rows(net.in_proj_ba, [share, share])
        net.in_proj_qkvz = net.in_proj_ba = None
        return both
    both = merged(net.in_proj_qkv, net.in_proj_z), merged(net.in_proj_b, net.in_proj_a)
    net.in_proj_qkv = net.in_proj_z = net.in_proj_b = net.in_proj_a = None
    return both
