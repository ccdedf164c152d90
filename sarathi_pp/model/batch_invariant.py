"""Batch-invariant operations on CPU in float32: the result of a row depends on nothing but the row.

With torch's operations alone, the last bits of a row depend on how many rows are computed with it. A sampled token can
depend on those bits. So a run that is interrupted and resumed would not always draw the tokens of an undisturbed run.

    products       sum in another order if few rows are left for a thread, or on some processors at another place among
                   the rows. So our own product computes them (fuse/float_linear.py). Without numba, rows are padded to
                   a multiple of a step, 4 on a Zen 4. No library documents the step, so it is found by trying.
    exp, cos, ...  are computed for a whole SIMD register of numbers at once. Numbers that do not fill a register, at
                   the end of a thread's part, are computed one by one, which gives other last bits. So the numbers are
                   padded to whole registers, and computed in pieces that are small enough for one thread.
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

from sarathi_pp.model.fuse.float_linear import float_product, has_float_gemm

# Steps that row_step tries, the number of rows for the trial, and the numbers of inputs and outputs.
_STEPS = (1, 2, 4, 8, 16, 32)
_MOST_ROWS = 96
_SIZES = 512, 192

# Position of the argument that holds the rows: (..., rows, inputs). The weight is the next argument.
_PRODUCTS: dict[Callable[..., Any], int] = {
    functional.linear: 0,
    torch.addmm: 1,
    torch.matmul: 0,
    Tensor.matmul: 0,
    Tensor.__matmul__: 0,
}

# Functions that compute each number of their first argument separately.
_CURVES: frozenset[Callable[..., Any]] = frozenset(
    (
        *(functional.silu, functional.gelu, functional.sigmoid, functional.tanh),
        *(torch.sigmoid, torch.tanh, torch.exp, torch.expm1, torch.cos, torch.sin, torch.erf),
        *(Tensor.sigmoid, Tensor.tanh, Tensor.exp, Tensor.cos, Tensor.sin, Tensor.erf),
    )
)
# _PIECE numbers are computed by one thread: torch splits only more than 32768, and for gelu more than 16384. _REGISTER
# is a multiple of the numbers that fill a register.
_PIECE = 16384
_REGISTER = 64


def batch_invariant_mode(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which the bits of a float32 row on CPU do not depend on the number of rows.

    It changes nothing for other dtypes and devices. bfloat16 has its own products (packed_linear.py).
    """
    return _BatchInvariantMode() if dtype == torch.float32 and device.type == "cpu" else nullcontext()


def has_equal_decodes(dtype: torch.dtype, attention: str, products: str) -> bool:
    """Return whether a decode writes the same keys and values as a prompt chunk would, to the last bit.

    Args:
        attention: name of the attention backend.
        products: name of what computes linear layers.
    """
    return dtype == torch.float32 and attention == products == "numba"


@functools.cache
def row_step(num_threads: int) -> int:
    """Return the step to whose multiples rows are padded, found by trial.

    A row of a float32 product has the same bits for every number of rows that is a multiple of the step. If no step
    has this property, warn and return the largest one.

    Args:
        num_threads: number of threads that torch computes with now. The step depends on it.
    """
    random = torch.Generator().manual_seed(0)
    inputs, outputs = _SIZES
    x, weight = (torch.randn(rows, inputs, generator=random) for rows in (_MOST_ROWS, outputs))
    whole = functional.linear(x, weight)

    def is_invariant(first: int, count: int) -> bool:
        return functional.linear(x[first : first + count].clone(), weight).equal(whole[first : first + count])

    for step in _STEPS:
        counts = range(step, _MOST_ROWS, step)
        if all(is_invariant(0, count) and is_invariant(_MOST_ROWS - count - 1, count) for count in counts):
            return step
    warnings.warn(
        "on this machine, the last bits of float32 products depend on the number of rows: sampled tokens may change",
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
    if has_float_gemm():
        weight = args[at + 1]
        bias = args[0] if at else args[2] if len(args) > 2 else None
        return float_product(args[at], weight if func is functional.linear else weight.T, bias)
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
    """Return whether a call multiplies float32 rows with a matrix and adds at most a vector.

    Args:
        args: arguments of the call, all given by position.
        at: index in `args` of the rows.
    """
    if len(args) < at + 2 or (at and args[0].dim() != 1):
        return False
    weight: Tensor = args[at + 1]
    return _is_float(args[at]) and args[at].dim() >= 2 and weight.dim() == 2


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float32 and x.is_cpu
