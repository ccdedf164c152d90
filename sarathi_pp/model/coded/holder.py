"""The weights of a stage that stay coded: they are taken from transformers' loader, and loaded as they are stored.

construct   take_modules: modules with coded weights replace those of the model, which is still without memory
load        transformers loads the other weights, then `load` reads codes and scales to the device
fuse        linear layers with the same input are merged (fuse/cuda_modules.py)
last        share_scratch: one piece of memory for the expanded weights of all modules
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sarathi_pp.checkpoint.quantised.coded import CodedTensor
from sarathi_pp.checkpoint.quantised.float8 import Float8Codes, Float8Tensor
from sarathi_pp.checkpoint.quantised.mxfp4 import Mxfp4Codes, Mxfp4Tensor
from sarathi_pp.checkpoint.stored_tensor import Weight
from sarathi_pp.model.coded.experts import WEIGHTS, CodedExperts, Float8Experts, Mxfp4Experts
from sarathi_pp.model.coded.linear import Float8Linear
from sarathi_pp.model.fuse.rewrite import reads_weight

_log = logging.getLogger(__name__)
# Weights of transformers' experts, and the names under which files have their parts for each expert.
_OF_EXPERTS = (
    {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
)
# Parts of names in the model, and those that some files have instead: Mixtral and MiniMax, HY 3.
_RENAMED = ((".mlp.", ".block_sparse_moe."), (".mlp.shared_experts.", ".mlp.shared_mlp."))
# For each weight of experts: for each of its parts, the weights of all experts.
_Sources = dict[str, list[list[Float8Tensor]]]
# Shapes of the parameters of a module of experts.
_Shapes = dict[str, tuple[int, ...]]


class CodedHolder:
    """The weights of a stage that stay coded, and the modules that hold them.

    Args:
        tensors: the stage's weights by stored name. Those that are held are removed.
        base: name of the base model, which stored names may lack.

    Attributes:
        weights: all of the stage's weights by stored name, in the form in which they will be in memory.
    """

    def __init__(self, tensors: dict[str, Weight], base: str) -> None:
        self._tensors = tensors
        self._base = base
        self.weights = dict(tensors)
        self._taken: set[int] = set()  # ids of the weights that modules hold
        self._linears: list[tuple[Float8Linear, Float8Tensor]] = []
        self._experts: list[tuple[Float8Experts, _Sources]] = []
        self._mxfp4_experts: list[tuple[Mxfp4Experts, dict[str, Mxfp4Tensor]]] = []

    def take_modules(self, model: nn.Module) -> None:
        """Replace the modules that can hold coded weights. The other coded weights will be dequantised."""
        for path, owner in list(model.named_modules()):
            for name, child in list(owner.named_children()):
                made = self._replacement(f"{path}.{name}", owner, child)
                if made is not None:
                    setattr(owner, name, made)
        num_dequantised = 0
        for key, weight in list(self._tensors.items()):
            if id(weight) in self._taken:
                del self._tensors[key]
            elif isinstance(weight, CodedTensor):
                self.weights[key] = self._tensors[key] = weight.dequantised()
                num_dequantised += 1
        if num_dequantised:
            _log.info("%d weights are dequantised, since no module can hold them as stored", num_dequantised)

    def load(self, device: torch.device) -> None:
        """Read the weights that are held to the device, and forget the modules. Some will be merged.

        Raises:
            InputError: a file has become shorter.
        """
        for linear, weight in self._linears:
            linear.hold(weight.read_codes().to(device))
        for experts, sources in self._experts:
            experts.hold(
                {name: tuple(_read_stack(weights, device) for weights in parts) for name, parts in sources.items()}
            )
        for mxfp4_experts, weights in self._mxfp4_experts:
            mxfp4_experts.hold({name: _read_experts(weight, device) for name, weight in weights.items()})
        self._linears.clear()
        self._experts.clear()
        self._mxfp4_experts.clear()

    def _replacement(self, path: str, owner: nn.Module, child: Any) -> nn.Module | None:
        if type(child) is nn.Linear:
            weight = self._float8(f"{path}.weight")
            if weight is None or weight.shape != tuple(child.weight.shape) or reads_weight(owner):
                return None
            self._taken.add(id(weight))
            linear = Float8Linear(child.in_features, child.out_features, child.bias)
            self._linears.append((linear, weight))
            return linear
        shapes = {name: tuple(weight.shape) for name, weight in child.named_parameters(recurse=False)}
        if not set(WEIGHTS) <= set(shapes):
            return None
        if getattr(child, "is_transposed", False):
            return self._mxfp4_replacement(path, child, shapes)
        sources = self._find_experts(path, shapes)
        if sources is None:
            return None
        self._taken.update(id(weight) for parts in sources.values() for weights in parts for weight in weights)
        experts = Float8Experts(child)
        self._experts.append((experts, sources))
        return experts

    def _mxfp4_replacement(self, path: str, child: nn.Module, shapes: _Shapes) -> nn.Module | None:
        weights = {name: self._find(f"{path}.{name}") for name in WEIGHTS}
        coded = {name: weight for name, weight in weights.items() if isinstance(weight, Mxfp4Tensor)}
        if {name: weight.shape for name, weight in coded.items()} != {name: shapes[name] for name in WEIGHTS}:
            return None
        self._taken.update(map(id, coded.values()))
        experts = Mxfp4Experts(child)
        self._mxfp4_experts.append((experts, coded))
        return experts

    def _find_experts(self, path: str, shapes: _Shapes) -> _Sources | None:
        """Return the stored parts of the experts' weights in FP8; None if there are others, or a part cannot stay."""
        if set(shapes) != set(WEIGHTS):
            return None
        count = next(iter(shapes.values()))[0]
        for names in _OF_EXPERTS:
            found = {
                weight: [[self._float8(f"{path}.{index}.{part}.weight") for index in range(count)] for part in parts]
                for weight, parts in names.items()
            }
            sources = {weight: list(_alike(parts)) for weight, parts in found.items()}
            if all(_shape(sources[weight]) == shape for weight, shape in shapes.items()):
                return sources
        return None

    def _float8(self, name: str) -> Float8Tensor | None:
        """Return the weight with this name in the model; None if it is not stored in FP8 under this name."""
        for stored in (name, *(name.replace(*parts) for parts in _RENAMED)):
            found = self._find(stored)
            if isinstance(found, Float8Tensor):
                return found
        return None

    def _find(self, name: str) -> Weight | None:
        return self._tensors.get(name) or self._tensors.get(name.removeprefix(f"{self._base}."))


def share_scratch(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give all modules with coded weights the same memory for their expanded weights.

    Call it after the modules are fused. One stream computes the stage, so no two modules need it at the same time.

    Args:
        dtype: float type of the computation.
    """
    held = [child for child in module.modules() if isinstance(child, (Float8Linear, CodedExperts))]
    if held:
        scratch = torch.zeros(max(child.num_values for child in held), dtype=dtype, device=device)
        for child in held:
            child.use(scratch)


def _alike(parts: list[list[Float8Tensor | None]]) -> Iterator[list[Float8Tensor]]:
    """Yield the parts of which every expert has one, all in the same form."""
    for weights in parts:
        held = [weight for weight in weights if weight is not None]
        if len(held) == len(weights) and len({weight.form for weight in held}) == 1:
            yield held


def _shape(parts: list[list[Float8Tensor]]) -> tuple[int, ...] | None:
    """Return the shape of the experts' weight that these parts are; None if they do not fit together."""
    if not parts or len({part[0].shape[1] for part in parts}) != 1:
        return None
    return len(parts[0]), sum(part[0].shape[0] for part in parts), parts[0][0].shape[1]


def _read_stack(weights: list[Float8Tensor], device: torch.device) -> Float8Codes:
    """Return the matrices of all experts on the device. One expert at a time is in host memory."""
    codes = scales = torch.empty(0)
    for index, weight in enumerate(weights):
        one = weight.read_codes()
        if index == 0:
            codes = torch.empty((len(weights), *one.codes.shape[1:]), dtype=one.codes.dtype, device=device)
            scales = torch.empty((len(weights), *one.scales.shape[1:]), dtype=one.scales.dtype, device=device)
        codes[index].copy_(one.codes[0])
        scales[index].copy_(one.scales[0])
    return Float8Codes(codes, scales, one.block, one.first, one.e5m2)


def _read_experts(weight: Mxfp4Tensor, device: torch.device) -> Mxfp4Codes:
    """Return the matrices of all experts on the device. One expert at a time is in host memory."""
    count, inputs, outputs = weight.shape
    codes = torch.empty((count, outputs, inputs // 2), dtype=torch.uint8, device=device)
    scales = torch.empty((count, outputs, inputs // 32), dtype=torch.uint8, device=device)
    for index in range(count):
        one = weight.read_codes(index)
        codes[index].copy_(one.codes[0])
        scales[index].copy_(one.scales[0])
    return Mxfp4Codes(codes, scales)
