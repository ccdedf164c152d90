"""Linear layers whose weights stay in FP8 on a GPU. A call of many rows expands the weight, and torch multiplies.

    codes, scales  ->  scratch, shared by all modules of the stage  ->  x @ weight.T + bias

A weight of n values is read and written once more than a weight in bfloat16: n bytes are read, 2 n written and 2 n read
again, instead of 2 n. In return it takes half the memory. The expanded bits are those of dequantising on load.

A call of at most 16 rows multiplies with the codes instead, which are read once and expanded in registers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sarathi_pp.checkpoint.quantised.float8 import Float8Codes


class Float8Linear(nn.Module):
    """A linear layer with weights in FP8: x @ weight.T + bias for x (..., in_features).

    Several linear layers with the same input become one layer, with their outputs next to each other. Before the first
    call it needs `hold` and `use`. The addresses of its tensors then stay the same, so that a CUDA graph can hold it.

    Args:
        bias: (out_features,), or None.
    """

    def __init__(self, in_features: int, out_features: int, bias: nn.Parameter | None) -> None:
        super().__init__()
        from sarathi_pp_kernels.triton.expand import expand  # triton is optional
        from sarathi_pp_kernels.triton.few_rows import MOST_ROWS, multiply_float8

        self._expand = expand
        self._multiply, self._most_rows = multiply_float8, MOST_ROWS
        self.in_features, self.out_features = in_features, out_features
        self.bias = bias
        self._held: tuple[Float8Codes, ...] = ()
        self._weight = torch.empty(0)
        self._targets: tuple[Tensor, ...] = ()

    @classmethod
    def merge(cls, *linears: Float8Linear) -> Float8Linear:
        """Return one layer for several with the same input. All or none have a bias."""
        biases: list[Tensor] = [one.bias for one in linears if one.bias is not None]
        bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        merged = cls(linears[0].in_features, sum(one.out_features for one in linears), bias)
        merged.hold(*(codes for one in linears for codes in one._held))
        return merged

    def hold(self, *held: Float8Codes) -> None:
        """Take the weight: matrices (1, rows, in_features) on the device, whose rows follow each other."""
        assert sum(one.codes.shape[1] for one in held) == self.out_features
        self._held = held
        for index, one in enumerate(held):
            self.register_buffer(f"codes_{index}", one.codes, persistent=False)
            self.register_buffer(f"scales_{index}", one.scales, persistent=False)

    @property
    def num_values(self) -> int:
        """Number of values that it expands at once."""
        return self.in_features * self.out_features

    def use(self, scratch: Tensor) -> None:
        """Expand the weight into this memory from now on: at least num_values values in the type of the inputs."""
        self._weight = scratch[: self.num_values].view(self.out_features, self.in_features)
        rows = [one.codes.shape[1] for one in self._held]
        self._targets = tuple(part[None] for part in torch.split(self._weight, rows))

    def forward(self, x: Tensor) -> Tensor:
        if 0 < x.numel() <= self._most_rows * self.in_features:
            return self._multiply_codes(x)
        for one, target in zip(self._held, self._targets, strict=True):
            self._expand(one.codes, one.scales, target, one.block, one.first, e5m2=one.e5m2)
        return functional.linear(x, self._weight, self.bias)

    def _multiply_codes(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 1, self.in_features)
        out = x.new_empty(len(rows), 1, self.out_features)
        begin = 0
        for one in self._held:
            part = slice(begin, begin + one.codes.shape[1])
            bias = None if self.bias is None else self.bias[None, part]
            self._multiply(rows, one.codes, one.scales, out[..., part], one.block, one.first, e5m2=one.e5m2, bias=bias)
            begin = part.stop
        return out.view(*x.shape[:-1], self.out_features)
