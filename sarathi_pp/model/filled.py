"""Products on CPU in float32 whose rows depend on nothing but the row.

The library behind them sums a row's products in another order where few rows are left for a thread, and so the last
bits of a request's logits would tell how many rows ran beside it. A sampled token can hang on them: a run that is
interrupted and goes on would not always draw what an undisturbed one draws. Rows are therefore filled up to a multiple
of a step, 4 on a Zen 4: no library says which, it is found by trying.
"""

from __future__ import annotations

import functools
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


def steady_rows(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Inside, products of (..., rows, inputs) float32 with a matrix fill their rows up.

    For other dtypes and devices nothing changes: bfloat16 has products of its own (packed.py).
    """
    return _FilledRows() if dtype == torch.float32 and device.type == "cpu" else nullcontext()


@functools.cache
def row_step(num_threads: int) -> int:
    """The smallest step with which that many threads, as many as torch computes with now, give a row the same bits."""
    random = torch.Generator().manual_seed(0)
    inputs, outputs = _SIZES
    x, weight = (torch.randn(rows, inputs, generator=random) for rows in (_MOST_ROWS, outputs))
    whole = functional.linear(x, weight)
    for step in _STEPS:
        counts = range(step, _MOST_ROWS, step)
        if all(functional.linear(x[:count], weight).equal(whole[:count]) for count in counts):
            return step
    return _STEPS[-1]


class _FilledRows(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        at = _PRODUCTS.get(func)
        if at is None or not _is_float_product(args[at:]):
            return func(*args, **(kwargs or {}))
        x = args[at].reshape(-1, args[at].shape[-1])
        missing = -x.shape[0] % row_step(torch.get_num_threads())
        filled = functional.pad(x, (0, 0, 0, missing)) if missing else x
        y = func(*args[:at], filled, *args[at + 1 :], **(kwargs or {}))
        return y[: x.shape[0]].view(*args[at].shape[:-1], y.shape[-1])


def _is_float_product(factors: Sequence[Any]) -> bool:
    """Of rows with a matrix, both given by position."""
    if len(factors) < 2:
        return False
    x: Tensor = factors[0]
    weight: Tensor = factors[1]
    return x.dtype == torch.float32 and x.is_cpu and x.dim() >= 2 and weight.dim() == 2
