"""Quantised weights that stay as they are stored, as codes and scales, and the memory that expanding them takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from sarathi_pp.checkpoint.quantised.tensor import QuantisedTensor
from sarathi_pp.checkpoint.stored_tensor import Weight

# Linear layers with the same input, which become one product.
_MERGED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


class CodedTensor(QuantisedTensor):
    """A quantised weight whose codes and scales stay as they are stored."""

    def dequantised(self) -> QuantisedTensor:
        """Return the same weight for the loader, which dequantises it."""
        return QuantisedTensor(self._entry, self._count, self.dtype, self._cut, self._device)


def scratch_bytes(tensors: Mapping[str, Weight]) -> int:
    """Return the bytes of the memory into which a stage expands its coded weights; 0 if it has none.

    It holds the largest weight that is expanded at once. All experts of a layer are one weight.

    Args:
        tensors: weights of the stage by stored name.
    """
    sizes: Counter[str] = Counter()
    for key, weight in tensors.items():
        if isinstance(weight, CodedTensor):
            sizes[_module_of(key)] += math.prod(weight.shape) * weight.dtype.itemsize
    return max(sizes.values(), default=0)


def _module_of(key: str) -> str:
    """Return the name of the module that expands this weight: experts, merged linear layers, or a linear layer."""
    if ".experts." in key:
        return key.partition(".experts.")[0]
    parent, _, name = key.removesuffix(".weight").rpartition(".")
    return f"{parent}.{_MERGED.get(name, name)}"
