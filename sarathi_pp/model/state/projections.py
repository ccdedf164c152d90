"""Linear layers with the outputs of others in another order. A product's sum does not depend on its place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def with_rows(linear: nn.Linear, parts: Sequence[int]) -> nn.Linear:
    """Return a linear layer whose outputs are sorted by part instead of by head.

    Args:
        linear: its outputs are those of the first head, then those of the second head and so on.
        parts: number of outputs of each part of a head, in order.
    """
    assert linear.bias is None
    heads = linear.weight.detach().unflatten(0, (-1, sum(parts)))
    return _linear(torch.cat([part.flatten(0, 1) for part in heads.split(list(parts), dim=1)]))


def merged(*linears: nn.Linear) -> nn.Linear:
    """Return one linear layer with the outputs of all these layers, which have the same input."""
    assert all(linear.bias is None for linear in linears)
    return _linear(torch.cat([linear.weight.detach() for linear in linears]))


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
