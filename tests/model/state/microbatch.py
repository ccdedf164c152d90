"""Microbatches of rows for layers with a state, on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from sarathi_pp.model.inputs import Span, StageInputs, build_inputs
from sarathi_pp.model.state.backend import Convolution, DeltaRule, SelectiveScan

CPU = torch.device("cpu")
NUM_SLOTS = 5


def inputs(*spans: tuple[int, int, int]) -> StageInputs:
    """Return the inputs of spans (position of the first row, number of rows, slot)."""
    pages = list(range(40))
    return build_inputs([Span(start, count, pages, slot=slot) for start, count, slot in spans], [], 16, CPU)


class Values:
    """Random values in a dtype, from a seed."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.dtype)

    def floats(self, *shape: int) -> Tensor:
        """Return float32 values that the dtype can hold."""
        return self.normal(*shape).float()

    def convolution(self, taps: int, channels: int, *, silu: bool) -> Convolution:
        return Convolution(self.floats(taps, channels), self.floats(channels), silu)

    def delta_rule(self, key_heads: int, share: int, key_dim: int, value_dim: int) -> DeltaRule:
        heads = key_heads * share
        return DeltaRule(key_heads, heads, key_dim, value_dim, -(self.floats(heads) - 2).exp(), self.floats(heads))

    def scan(self, heads: int, groups: int, head_dim: int, state_dim: int) -> SelectiveScan:
        of_heads = -(self.floats(heads) - 2).exp(), self.floats(heads), self.floats(heads)
        return SelectiveScan(heads, groups, head_dim, state_dim, *of_heads)
