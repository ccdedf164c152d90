"""The operations of layers with a state: a convolution and two recurrences over the rows of a microbatch.

All of them read and write the states of the microbatch's sequences in place. The rows of a sequence change its state
one after the other. A span that starts at position 0 begins with a state of zeros, and never reads its slot, which may
hold NaN.

A recurrent state is stored in blocks of columns (layer_cache.py): (num_slots, blocks, rows, columns).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sarathi_pp.model.inputs import StageInputs


@dataclass(frozen=True, slots=True)
class Convolution:
    """A causal convolution of each channel.

    Attributes:
        weights: (taps, channels) float32. The last tap is that of the row itself.
        bias: (channels,) float32.
        silu: apply SiLU to the outputs.
    """

    weights: Tensor
    bias: Tensor
    silu: bool

    @classmethod
    def of(cls, conv: torch.nn.Conv1d, *, silu: bool) -> Convolution:
        """Return the convolution of a module with one filter per channel."""
        weights = conv.weight.detach().float().squeeze(1).T.contiguous()
        bias = torch.zeros_like(weights[0]) if conv.bias is None else conv.bias.detach().float()
        return cls(weights, bias, silu)

    @property
    def taps(self) -> int:
        return self.weights.shape[0]


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """A gated delta rule with several value heads per key head (arXiv 2412.06464).

    Attributes:
        key_dim: channels of a key and of a query.
        value_dim: channels of a value.
        rates: (value heads,) float32, negative. A head's log decay is rates * softplus(logit + gate_bias).
        gate_bias: (value heads,) float32.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    rates: Tensor
    gate_bias: Tensor


@dataclass(frozen=True, slots=True)
class SelectiveScan:
    """A selective state space with one decay rate per head, as in Mamba-2 (arXiv 2405.21060).

    Attributes:
        groups: number of groups of heads that share B and C.
        head_dim: channels of a head.
        state_dim: rows of a head's state.
        rates: (heads,) float32, negative.
        step_bias: (heads,) float32, added to the logits of dt.
        skips: (heads,) float32, the factors D of the inputs.
    """

    heads: int
    groups: int
    head_dim: int
    state_dim: int
    rates: Tensor
    step_bias: Tensor
    skips: Tensor


class StateBackend(Protocol):
    """An implementation of the three operations. T is the number of rows of the microbatch."""

    @property
    def name(self) -> str: ...

    def convolve(self, x: Tensor, conv: Convolution, latest: Tensor, inputs: StageInputs) -> Tensor:
        """Return the (T, channels) outputs for (T, channels) inputs, contiguous.

        Args:
            latest: (num_slots, taps - 1, channels), the latest inputs of each slot's sequence.
        """
        ...

    def apply_delta_rule(
        self, rows: Tensor, gates: Tensor, rule: DeltaRule, states: Tensor, inputs: StageInputs
    ) -> Tensor:
        """Return the (T, value heads, value_dim) outputs, in the dtype of the rows.

        Args:
            rows: (T, channels), the queries of all heads, then the keys, then the values. Contiguous.
            gates: (T, 2 * value heads), the logits of beta, then those of the decay.
        """
        ...

    def scan(self, rows: Tensor, steps: Tensor, scan: SelectiveScan, states: Tensor, inputs: StageInputs) -> Tensor:
        """Return the (T, heads, head_dim) outputs, in float32.

        Args:
            rows: (T, channels), the inputs of all heads, then B and C of all groups. Contiguous.
            steps: (T, heads), the logits of dt.
        """
        ...
