"""Batch-invariant operations on CPU in float32: a row's result depends on nothing but the row.

With the libraries alone, the last bits of a row depend on how many rows are computed with it, and a sampled token can
depend on those bits: a run that is interrupted and resumed would not always draw the tokens of an undisturbed one.

    products       sum in another order if few rows are left for a thread. So rows are padded to a multiple of a step,
                   4 on a Zen 4. No library documents the step; it is found by trying.
    exp, cos, ...  give other last bits in registers than one by one, which happens if the numbers, or a thread's part
                   of them, do not fill a register. So they are padded, and computed in pieces of one thread each.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# What is tried, with how many rows, and with how many inputs and outputs.
_STEPS = (1, 2, 4, 8, 16, 32)
_MOST_ROWS = 96
_SIZES = 512, 192

# Which argument has the rows: (..., rows, inputs). The weight is the next one.
_PRODUCTS: dict[Callable[..., Any], int] = {
    functional.linear: 0,
    torch.addmm: 1,
    torch.matmul: 0,
    Tensor.matmul: 0,
    Tensor.__matmul__: 0,
}

# Number by number, of their first argument.
_CURVES: frozenset[Callable[..., Any]] = frozenset(
    (
        *(functional.silu, functional.gelu, functional.sigmoid, functional.tanh),
        *(torch.sigmoid, torch.tanh, torch.exp, torch.cos, torch.sin, torch.erf),
        *(Tensor.sigmoid, Tensor.tanh, Tensor.exp, Tensor.cos, Tensor.sin, Tensor.erf),
    )
)
# Numbers that torch gives to one thread (it splits more than 32768, and of gelu more than these), and a multiple of
# what fills a register.
_PIECE = 16384
_REGISTER = 64


def batch_invariant_mode(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which the bits of a float32 row on CPU do not depend on the number of rows.

    It changes nothing for other dtypes and devices: bfloat16 has products of its own (packed_linear.py).
    """
    return _BatchInvariantMode() if dtype == torch.float32 and device.type == "cpu" else nullcontext()


@functools.cache
def row_step(num_threads: int) -> int:
    """Return the smallest step whose multiples of rows give a row the same bits; the largest, with a warning, if none.

    num_threads: the number that torch computes with now.
    """
    random = torch.Generator().manual_seed(0)
    inputs, outputs = _SIZES
    x, weight = (torch.randn(rows, inputs, generator=random) for rows in (_MOST_ROWS, outputs))
    whole = functional.linear(x, weight)
    for step in _STEPS:
        counts = range(step, _MOST_ROWS, step)
        if all(functional.linear(x[:count], weight).equal(whole[:count]) for count in counts):
            return step
    warnings.warn(
        "products in float32 have other last bits beside other rows on this machine: a sampled token may hang on them",
        stacklevel=2,
    )
    return _STEPS[-1]


class _BatchInvariantMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        at = _PRODUCTS.get(func)
        if at is not None and _is_float_product(args, at) and not kwargs:
            return _product(func, args, at)
        if func in _CURVES and _is_float(args[0]) and "out" not in kwargs and not kwargs.get("inplace"):
            return _curve(lambda piece: func(piece, *args[1:], **kwargs), args[0])
        return func(*args, **kwargs)


def _product(func: Callable[..., Any], args: Sequence[Any], at: int) -> Tensor:
    x = args[at].reshape(-1, args[at].shape[-1])
    missing = -x.shape[0] % row_step(torch.get_num_threads())
    padded = functional.pad(x, (0, 0, 0, missing)) if missing else x
    y: Tensor = func(*args[:at], padded, *args[at + 1 :])
    return y[: x.shape[0]].view(*args[at].shape[:-1], y.shape[-1])


def _curve(take: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    numbers = x.reshape(-1)
    padded = functional.pad(numbers, (0, -numbers.shape[0] % _REGISTER))
    return torch.cat([take(piece) for piece in torch.split(padded, _PIECE)])[: numbers.shape[0]].view(x.shape)


def _is_float_product(args: Sequence[Any], at: int) -> bool:
    """Of rows with a matrix, plus a vector at the most, all given by position."""
    if len(args) < at + 2 or (at and args[0].dim() != 1):
        return False
    weight: Tensor = args[at + 1]
    return _is_float(args[at]) and args[at].dim() >= 2 and weight.dim() == 2


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float32 and x.is_cpu
