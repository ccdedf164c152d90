"""Experts whose weights stay coded on a GPU. transformers' own module computes many rows, with expanded weights.

The weights of all experts of a layer have a place in the stage's scratch. A call expands only those experts to which
its tokens are routed, since no implementation of transformers reads the others. Which these are stays on the device.

A call of at most 16 rows multiplies with the codes of these experts instead. They are read once, and expanded in
registers. It rounds at the same points as transformers' batched product.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sarathi_pp.checkpoint.quantised.float8 import Float8Codes
from sarathi_pp.checkpoint.quantised.mxfp4 import Mxfp4Codes

# Weights of transformers' experts.
WEIGHTS = ("gate_up_proj", "down_proj")


class CodedExperts(nn.Module):
    """The experts of a layer with coded weights. Before the first call it needs `hold` and `use`.

    Args:
        experts: transformers' module. Its weights are (experts, ., .), and are taken away. Its other parameters, such
            as biases, are loaded under their names in this module.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self._shapes = {name: tuple(getattr(experts, name).shape) for name in WEIGHTS}
        for name in self._shapes:
            delattr(experts, name)
        self._others = tuple(name for name, _ in experts.named_parameters(recurse=False))
        for name in self._others:
            setattr(self, name, getattr(experts, name))
        self._experts = (experts,)  # no child: transformers would initialise the weights that it lacks
        from sarathi_pp_kernels.triton.few_rows import MOST_ROWS  # triton is optional

        self._most_rows = MOST_ROWS if _can_multiply(experts) else 0

    @property
    def num_values(self) -> int:
        """Number of values that it expands at once."""
        return sum(map(math.prod, self._shapes.values()))

    def use(self, scratch: Tensor) -> None:
        """Expand the weights into this memory from now on: at least num_values values in the type of the inputs."""
        begin = 0
        for name, shape in self._shapes.items():
            setattr(self._experts[0], name, scratch[begin : begin + math.prod(shape)].view(shape))
            begin += math.prod(shape)
        for name in self._others:
            setattr(self._experts[0], name, getattr(self, name))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the results of each row's experts, (T, hidden_size).

        Args:
            hidden_states: (T, hidden_size).
            top_k_index: (T, k) integers, the experts of each row, all different.
            top_k_weights: (T, k).
        """
        if 0 < len(hidden_states) <= self._most_rows:
            return self._multiply_codes(hidden_states, top_k_index.contiguous(), top_k_weights)
        count, *_ = self._shapes[WEIGHTS[0]]
        needed = torch.zeros(count, dtype=torch.int32, device=top_k_index.device)
        needed.index_fill_(0, top_k_index.reshape(-1), 1)
        for name in self._shapes:
            self._expand_weight(name, getattr(self._experts[0], name), needed)
        return self._experts[0](hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]

    def _multiply_codes(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        gate_up = self._multiply_weight(WEIGHTS[0], hidden_states[:, None], index)
        results = self._multiply_weight(WEIGHTS[1], self._experts[0]._apply_gate(gate_up), index)
        return (results * weights[..., None]).sum(1).to(hidden_states.dtype)

    def _bias(self, name: str) -> Tensor | None:
        """Return the biases of all experts, (experts, outputs); None if they have none."""
        return getattr(self, f"{name}_bias", None)

    @abstractmethod
    def _multiply_weight(self, name: str, x: Tensor, index: Tensor) -> Tensor:
        """Return the products of each row with its experts' matrices of the weight with this name, with biases.

        Args:
            x: (T, k, inputs), or (T, 1, inputs) for all experts of a row.
            index: (T, k) int64.
        """

    @abstractmethod
    def _expand_weight(self, name: str, target: Tensor, needed: Tensor) -> None:
        """Write the expanded weight with this name to the matrices of `target` whose number in `needed` is not 0."""


class Float8Experts(CodedExperts):
    """The experts of a layer with weights in FP8. See CodedExperts."""

    def __init__(self, experts: Any) -> None:
        super().__init__(experts)
        from sarathi_pp_kernels.triton.expand import expand  # triton is optional
        from sarathi_pp_kernels.triton.few_rows import multiply_float8

        self._expand, self._multiply = expand, multiply_float8
        self._held: dict[str, tuple[Float8Codes, ...]] = {}

    def hold(self, held: Mapping[str, tuple[Float8Codes, ...]]) -> None:
        """Take the weights: for each one, matrices (experts, rows, inputs) whose rows follow each other."""
        self._held = dict(held)
        for name, parts in held.items():
            for index, part in enumerate(parts):
                self.register_buffer(f"{name}_codes_{index}", part.codes, persistent=False)
                self.register_buffer(f"{name}_scales_{index}", part.scales, persistent=False)

    def _multiply_weight(self, name: str, x: Tensor, index: Tensor) -> Tensor:
        parts, all_biases = self._held[name], self._bias(name)
        out = x.new_empty(*index.shape, sum(part.codes.shape[1] for part in parts))
        begin = 0
        for part in parts:
            rows = slice(begin, begin + part.codes.shape[1])
            target, bias = out[..., rows], None if all_biases is None else all_biases[:, rows]
            self._multiply(
                x, part.codes, part.scales, target, part.block, part.first, e5m2=part.e5m2, index=index, bias=bias
            )
            begin = rows.stop
        return out

    def _expand_weight(self, name: str, target: Tensor, needed: Tensor) -> None:
        begin = 0
        for part in self._held[name]:
            rows = slice(begin, begin + part.codes.shape[1])
            self._expand(
                part.codes, part.scales, target[:, rows], part.block, part.first, e5m2=part.e5m2, needed=needed
            )
            begin = rows.stop


class Mxfp4Experts(CodedExperts):
    """The experts of a layer with weights in MXFP4, as in gpt_oss. See CodedExperts."""

    def __init__(self, experts: Any) -> None:
        super().__init__(experts)
        from sarathi_pp_kernels.triton.expand_mxfp4 import expand_mxfp4  # triton is optional
        from sarathi_pp_kernels.triton.few_rows import multiply_mxfp4

        self._expand, self._multiply = expand_mxfp4, multiply_mxfp4
        self._held: dict[str, Mxfp4Codes] = {}

    def hold(self, held: Mapping[str, Mxfp4Codes]) -> None:
        """Take the weights: for each one, matrices of all experts."""
        self._held = dict(held)
        for name, weight in held.items():
            self.register_buffer(f"{name}_codes", weight.codes, persistent=False)
            self.register_buffer(f"{name}_scales", weight.scales, persistent=False)

    def _multiply_weight(self, name: str, x: Tensor, index: Tensor) -> Tensor:
        weight = self._held[name]
        out = x.new_empty(*index.shape, weight.codes.shape[1])
        self._multiply(x, weight.codes, weight.scales, out, index, self._bias(name))
        return out

    def _expand_weight(self, name: str, target: Tensor, needed: Tensor) -> None:
        weight = self._held[name]
        self._expand(weight.codes, weight.scales, target, needed)


def _can_multiply(experts: Any) -> bool:
    """Return whether a module of experts computes what CodedExperts does. transformers' attributes describe it."""
    if not hasattr(experts, "is_transposed") or not experts.has_gate:
        return False
    return not getattr(experts, "has_post_expert_norm", False)
