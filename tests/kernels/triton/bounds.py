"""Accesses that fail on a device: an address outside of all memory that a kernel was given.

In the interpreter such a read finds other memory of the process, mostly without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


@contextmanager
def checked_addresses() -> Iterator[None]:
    """Check the addresses of every load and store that is not masked off."""
    spans: list[tuple[int, int]] = []
    prepare, load, store = (
        GridExecutor._init_args_hst,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )

    def prepared(self: Any, *given: Any) -> Any:
        found = prepare(self, *given)
        spans[:] = [_span(one) for one in found[0] if isinstance(one, torch.Tensor) and one.numel()]
        return found

    def check(pointers: Any, mask: Any) -> None:
        places, wanted = np.broadcast_arrays(pointers.data, mask.data)
        first = places[wanted.astype(bool)].astype(np.uint64)
        end = first + np.uint64(pointers.get_element_ty().primitive_bitwidth // 8)
        inside = np.zeros(first.shape, bool)
        for low, high in spans:
            inside |= (first >= low) & (end <= high)
        assert inside.all(), f"addresses outside of all arguments: {first[~inside][:4]}"

    def checked_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *others)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *others)

    GridExecutor._init_args_hst = prepared
    InterpreterBuilder.create_masked_load = checked_load
    InterpreterBuilder.create_masked_store = checked_store
    try:
        yield
    finally:
        GridExecutor._init_args_hst = prepare
        InterpreterBuilder.create_masked_load = load
        InterpreterBuilder.create_masked_store = store


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes from its first number to the end of its last one, excluding the memory around it."""
    elements = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + elements * tensor.element_size()
