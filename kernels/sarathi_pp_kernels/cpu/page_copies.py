"""Copies of pages whose keys or values are in FP8 (float8_e4m3fn), in a float type that attention computes in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sarathi_pp_kernels.cpu.simd.compile import compiled, inlined
from sarathi_pp_kernels.cpu.simd.memory import load_float8, load_index, store_bf16, store_float, store_fp16
from sarathi_pp_kernels.cpu.threads import run_parallel, split_range

_FLOAT32, _BFLOAT16, _FLOAT16 = 0, 1, 2
_KINDS = {torch.float32: _FLOAT32, torch.bfloat16: _BFLOAT16, torch.float16: _FLOAT16}


def copy_pages(codes: Tensor, pages: Tensor, out: Tensor) -> None:
    """Write the exact values of some pages, on as many threads as torch computes with.

    Args:
        codes: (num_pages, ...) float8_e4m3fn, contiguous.
        pages: (n,) int64, ids of the pages.
        out: (n, ...) float32, bfloat16 or float16, contiguous. Entry i is written with page pages[i].
    """
    # The kernel takes addresses and would not notice wrong shapes.
    assert codes.dtype == torch.float8_e4m3fn and codes.is_contiguous() and out.is_contiguous()
    assert out.shape == (len(pages), *codes.shape[1:]), f"{tuple(out.shape)} for {len(pages)} of {tuple(codes.shape)}"
    assert pages.dtype == torch.int64 and pages.is_contiguous()
    kernel, num_values = _compile_kernel(_KINDS[out.dtype]), codes[0].numel()
    places = codes.data_ptr(), pages.data_ptr(), out.data_ptr(), num_values
    run_parallel([partial(kernel, *places, part.start, part.stop) for part in split_range(len(pages))])


@inlined
def _store(kind, array, index, value):  # type: ignore[no-untyped-def]
    if kind == _BFLOAT16:
        store_bf16(array, index, value)
    elif kind == _FLOAT16:
        store_fp16(array, index, value)
    else:
        store_float(array, index, value)


@functools.cache
def _compile_kernel(kind: int) -> Callable[..., None]:
    size = 4 if kind == _FLOAT32 else 2

    def copy(codes, pages, out, num_values, first, end):  # type: ignore[no-untyped-def]
        """Write entries [first, end). Arrays are given by address."""
        for place in range(first, end):
            source, to = codes + load_index(pages, place) * num_values, out + place * num_values * size
            for at in range(num_values):
                _store(kind, to, at, load_float8(source, at))

    kernel: Callable[..., None] = compiled(fastmath=False)(copy)
    return kernel
