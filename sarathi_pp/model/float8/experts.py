"""Experts whose weights stay in FP8 on a GPU. transformers' own module computes them, with expanded weights.

The weights of all experts of a layer have a place in the stage's scratch. A call expands only those experts to which
its tokens are routed, since no implementation of transformers reads the others. Which these are stays on the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sarathi_pp.checkpoint.quantised.float8 import Float8Codes


class Float8Experts(nn.Module):
    """The experts of a layer with weights in FP8. Before the first call it needs `hold` and `use`.

    Args:
        experts: transformers' module. Each of its weights is (experts, outputs, inputs), and is taken away.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        from sarathi_pp_kernels.triton.expand import expand  # triton is optional

        self._expand = expand
        self._shapes = {name: tuple(weight.shape) for name, weight in experts.named_parameters(recurse=False)}
        for name in self._shapes:
            delattr(experts, name)
        self._experts = (experts,)  # no child: transformers would initialise the weights that it lacks
        self._held: dict[str, tuple[Float8Codes, ...]] = {}
        self._work: list[tuple[Float8Codes, Tensor]] = []

    def hold(self, held: Mapping[str, tuple[Float8Codes, ...]]) -> None:
        """Take the weights: for each one, matrices (experts, rows, inputs) whose rows follow each other."""
        self._held = dict(held)
        for name, parts in held.items():
            for index, one in enumerate(parts):
                self.register_buffer(f"{name}_codes_{index}", one.codes, persistent=False)
                self.register_buffer(f"{name}_scales_{index}", one.scales, persistent=False)

    @property
    def num_values(self) -> int:
        """Number of values that it expands at once."""
        return sum(map(math.prod, self._shapes.values()))

    def use(self, scratch: Tensor) -> None:
        """Expand the weights into this memory from now on: at least num_values values in the type of the inputs."""
        self._work = []
        begin = 0
        for name, shape in self._shapes.items():
            weight = scratch[begin : begin + math.prod(shape)].view(shape)
            begin += math.prod(shape)
            setattr(self._experts[0], name, weight)
            row = 0
            for one in self._held[name]:
                rows = one.codes.shape[1]
                self._work.append((one, weight[:, row : row + rows]))
                row += rows

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, *others: Any, **named: Any) -> Any:
        """Return the output of transformers' module.

        Args:
            hidden_states: (T, hidden_size).
            top_k_index: (T, k) integers, the experts of each token.
        """
        count = self._work[0][0].codes.shape[0]
        needed = torch.zeros(count, dtype=torch.int32, device=top_k_index.device)
        needed.index_fill_(0, top_k_index.reshape(-1), 1)
        for one, target in self._work:
            self._expand(one.codes, one.scales, target, one.block, one.first, e5m2=one.e5m2, needed=needed)
        return self._experts[0](hidden_states, top_k_index, *others, **named)
