"""Tensor parallelism: one rank's shard of a stage's layers.

Each shard holds a part of every large product and a full copy of all other modules.

The configuration's `base_model_tp_plan` names those products, and the style of each. Shard i of T computes:

    colwise           x -> outputs [i/T, (i+1)/T)         query, key, value, gate, up: whole heads, whole channels
    rowwise           inputs [i/T, (i+1)/T) -> a summand  the products after them, whose summands are added up
    packed_colwise    two colwise ones in one tensor      gate and up of all experts
    moe_tp_experts    experts that give summands          added up once, after all experts

The summands of all shards are added up after each such product. So hidden states are complete on every shard, and the
same to the last bit. Embedding, norms, routers, shared experts and LM head are complete on every shard too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sarathi_pp.checkpoint.facts.families import Family
from sarathi_pp.checkpoint.stored_tensor import Weight
from sarathi_pp.checkpoint.tensor_file import Cut
from sarathi_pp.errors import ConfigError, UnsupportedModelError

# The last style is for training. Its modules are complete on every shard and are computed alike.
_STYLES = ("colwise", "rowwise", "packed_colwise", "moe_tp_experts", "replicated_with_grad_allreduce")
_OF_EMBEDDING = "embedding_rowwise"

# Names of the parts of an expert in the checkpoints of Mixtral and others. transformers puts them into one tensor.
_OF_ONE_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.\d+\.(\w+)$")
# The name in HY 3's checkpoints of a module that transformers calls by the name on the right.
_SHARED_EXPERTS = "mlp.shared_mlp.", "mlp.shared_experts."
_EXPERT_STYLES = {
    "w1": "colwise",
    "w3": "colwise",
    "gate_proj": "colwise",
    "up_proj": "colwise",
    "w2": "rowwise",
    "down_proj": "rowwise",
}


@dataclass(frozen=True, slots=True)
class TensorShard:
    """This rank's shard of a stage, and the function that adds up the tensors of all shards.

    Attributes:
        index: index of the shard, from 0.
        size: number of shards.
        all_reduce: returns the sum of one tensor per shard, all of one shape and dtype. It works in place if possible,
            and gives the same bits on every shard. All shards make the same calls in the same order. The order of the
            summands must not depend on the place in the tensor or on its shape. Otherwise the result of a row would
            depend on the rows computed with it. gloo's all-reduce of three or more ranks breaks this rule. Gathering
            the tensors and adding them in the order of the shards' indices keeps it.
        capturable: CUDA graphs can contain the sums.
    """

    index: int
    size: int
    all_reduce: Callable[[Tensor], Tensor]
    capturable: bool = False

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.size, f"shard {self.index} of {self.size}"


class Summed(nn.Module):
    """A module that computes a summand on each shard, and then returns the sum over all shards."""

    def __init__(self, summand: nn.Module, all_reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.summand = summand
        self._all_reduce = all_reduce

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._all_reduce(self.summand(*args, **kwargs))


class Split:
    """The division of the layers [first, end) among shards, seen from one shard.

    `take` cuts the stored tensors, and `narrow` the modules before they are loaded. Call both, in any order. When
    everything is loaded, call `join`, which adds the sums over the shards.

    Args:
        plan: the configuration's base_model_tp_plan: module names and their styles.

    Raises:
        UnsupportedModelError: the plan is empty, or splits modules in a style that is not supported here.
    """

    def __init__(
        self, plan: Mapping[str, str] | None, family: Family, layers: tuple[int, int], shard: TensorShard
    ) -> None:
        prefix = f"{family.layers}.*."
        # If the LM head is the embedding, transformers before 5.21 splits it. Here it stays complete.
        splits = {name: style for name, style in (plan or {}).items() if (name, style) != (family.embed, _OF_EMBEDDING)}
        unknown = {name: style for name, style in splits.items() if style not in _STYLES}
        unknown |= {name: style for name, style in splits.items() if not name.startswith(prefix)}
        if unknown or not splits:
            raise UnsupportedModelError(
                f"{family.architecture}: the tensor-parallel plan of this release of transformers has "
                f"{unknown or 'no entries'}; only modules of layers, in the styles {', '.join(_STYLES)}, are "
                f"supported\n  try  without --tensor-parallel-size"
            )
        self._styles = {name.removeprefix(prefix): style for name, style in splits.items()}
        self._in_layer = re.compile(rf"(?:^|\.){re.escape(family.layers)}\.\d+\.(.+)$")
        self._layers = layers
        self._shard = shard
        self._sums: list[tuple[int, str]] = []

    def take(self, tensors: Mapping[str, Weight]) -> dict[str, Weight]:
        """Return this shard's part of stored tensors, by their stored names.

        A bias of a product that is summed over the shards must be added once. So only shard 0 has it.

        Raises:
            ConfigError: a tensor cannot be divided by the number of shards.
        """
        taken = {}
        for key, tensor in tensors.items():
            style, is_bias = self._style(key)
            if style == "rowwise" and is_bias:
                if self._shard.index == 0:
                    taken[key] = tensor
            elif style in ("colwise", "rowwise", "packed_colwise"):
                taken[key] = tensor.cut(self._cut(key, style, tensor.shape))
            else:
                taken[key] = tensor
        return taken

    def narrow(self, layers: nn.ModuleList) -> None:
        """Shrink the modules of the stage's layers, which hold no weights yet, to this shard's part."""
        for index in range(*self._layers):
            for name, style in self._styles.items():
                part = _find(layers[index], name)
                if isinstance(part, nn.Parameter):
                    parent, _, leaf = name.rpartition(".")
                    setattr(layers[index].get_submodule(parent), leaf, self._narrowed(name, style, part))
                elif isinstance(part, nn.Linear):
                    self._narrow_linear(name, style, part)
                if isinstance(part, nn.Module) and style in ("rowwise", "moe_tp_experts"):
                    self._sums.append((index, name))

    def join(self, layers: nn.ModuleList) -> None:
        """Add the sum over the shards after every module that gives a summand.

        Modules are found by name. Those that were fused or packed after `narrow` have kept their names.
        """
        assert self._sums, "nothing was split"
        for index, name in self._sums:
            parent, _, leaf = name.rpartition(".")
            owner = layers[index].get_submodule(parent)
            setattr(owner, leaf, Summed(getattr(owner, leaf), self._shard.all_reduce))

    def _style(self, key: str) -> tuple[str | None, bool]:
        """Return the style in which a stored tensor is split (None: it is not split), and whether it is a bias."""
        match = self._in_layer.search(key)
        if match is None:
            return None, False
        module, _, leaf = match[1].rpartition(".")
        if leaf not in ("weight", "bias"):  # experts in one tensor
            module = match[1]
        module = module.replace(*_SHARED_EXPERTS)
        expert = _OF_ONE_EXPERT.match(module)
        if expert is not None and "mlp.experts" in self._styles:
            return _EXPERT_STYLES.get(expert[1]), leaf == "bias"
        return self._styles.get(module), leaf == "bias"

    def _cut(self, what: str, style: str, shape: tuple[int, ...]) -> Cut:
        """Return the shard's part of a tensor. Raise ConfigError if the number of shards does not divide it.

        Outputs are the tensor's last dimension but one, or the only dimension of a bias. Inputs are its last dimension.
        """
        dim = len(shape) - 1 if style == "rowwise" else max(len(shape) - 2, 0)
        blocks = 2 if style == "packed_colwise" else 1
        if shape[dim] % (blocks * self._shard.size):
            raise ConfigError(
                f"--tensor-parallel-size is {self._shard.size}; {what} has {shape[dim] // blocks} channels to split, "
                f"which is not a multiple of it\n  try  another --tensor-parallel-size, or more --stages"
            )
        return Cut(dim, blocks, self._shard.index, self._shard.size)

    def _narrow_linear(self, name: str, style: str, linear: Any) -> None:
        linear.weight = self._narrowed(name, style, linear.weight)
        linear.out_features, linear.in_features = linear.weight.shape
        if linear.bias is not None and style == "colwise":
            linear.bias = self._narrowed(name, style, linear.bias)
        elif style == "rowwise" and self._shard.index > 0:
            linear.bias = None

    def _narrowed(self, name: str, style: str, whole: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(whole.new_empty(self._cut(name, style, tuple(whole.shape)).of(tuple(whole.shape))))


def _find(layer: nn.Module, name: str) -> Any:
    """Return a layer's module or parameter by name; None if it has none, as dense layers of a model with experts."""
    found: Any = layer
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
