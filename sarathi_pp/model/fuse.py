"""Rewrites of a loaded stage that make it faster and change no result. Applied from outside: no model knows of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

# oneDNN builds kernels for each new number of rows, 10 to 20 ms for each shape of weights, and takes up to 40 % longer
# where they are no multiple of 16. So rows are multiplied in blocks of so many, which is also what a packed layout is
# tuned for, and what is left over is filled up to a multiple of the step: no more than 16 numbers of rows in all.
_BLOCK_ROWS = 256
_ROW_STEP = 16


def pack_linears(module: nn.Module) -> int:
    """Lay the weights of bfloat16 linear layers on CPU out as oneDNN's products read them; returns how many.

    A plain linear repacks its weight at every call, which doubles the time of a product with few rows, that is
    of a decode. One weight at a time is held twice. Weights that another module shares (tied embeddings) stay
    as they are, since packing would copy them. Does nothing where this torch or processor has no such kernel.
    """
    if not _can_pack():
        return 0
    owners: dict[int, int] = {}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    # Places, not modules: nothing here may keep a weight alive that has been packed.
    places = [
        (parent, name)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and _is_packable(child) and owners[id(child.weight)] == 1
    ]
    for parent, name in places:
        setattr(parent, name, PackedLinear(getattr(parent, name)))
    return len(places)


def warm_linears(module: nn.Module, most_rows: int) -> None:
    """Build the kernels that microbatches of up to that many rows will need; they would stop a stage one by one."""
    shapes = {
        (child.in_features, child.out_features, child.bias is None): child
        for child in module.modules()
        if isinstance(child, PackedLinear)
    }
    for rows in range(_ROW_STEP, min(most_rows + _ROW_STEP, _BLOCK_ROWS + 1), _ROW_STEP):
        for linear in shapes.values():
            linear(torch.zeros(rows, linear.in_features, dtype=torch.bfloat16))


class PackedLinear(nn.Module):
    """x @ weight.T + bias for bfloat16 x (..., in_features), bit for bit what nn.Linear gives."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # Not a buffer: the opaque layout can neither be moved nor saved.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _BLOCK_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        blocks = [self._multiply(block) for block in torch.split(x.reshape(-1, self.in_features), _BLOCK_ROWS)]
        y = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        return y.view(*x.shape[:-1], self.out_features)

    def _multiply(self, x: Tensor) -> Tensor:
        """x: (rows, in_features), at most a block."""
        num_rows = x.shape[0]
        if num_rows == 0:
            return x.new_empty(0, self.out_features)
        if num_rows % _ROW_STEP:
            x = functional.pad(x, (0, 0, 0, -num_rows % _ROW_STEP))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return y[:num_rows]


def _is_packable(linear: nn.Linear) -> bool:
    return linear.weight.dtype == torch.bfloat16 and linear.weight.device.type == "cpu"


def _can_pack() -> bool:
    """These operators are not public: where a torch release lacks them, plain linears do."""
    operators = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    present = all(hasattr(torch.ops.mkldnn, name) for name in operators)
    return bool(present and torch.ops.mkldnn._is_mkldnn_bf16_supported())
