"""Causal convolutions of one channel each (depthwise), whose latest inputs are kept in state slots.

    slot                 rows of a span              output
    x[-3] x[-2] x[-1]    x[0]  x[1]  x[2] ...    ->  y[0] = w[0] x[-3] + w[1] x[-2] + w[2] x[-1] + w[3] x[0]

A span that starts at position 0 has zeros before it, and does not read its slot. A row's output depends only on its own
inputs, so its bits do not depend on how the sequence was cut into spans. Nor do they depend on the processor.

Arrays are given by address. Spans are (num_spans, 4) int64: first row, number of rows, position of the first row, slot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sarathi_pp_kernels.cpu.simd.compile import compiled
from sarathi_pp_kernels.cpu.simd.memory import load_index, load_word, store_index, store_word
from sarathi_pp_kernels.cpu.simd.state import convolve_row
from sarathi_pp_kernels.cpu.threads import run_parallel, scratch_of_thread, split_range

Kernel = Callable[..., None]

_WORD_BYTES = 4


def convolve(
    x: Tensor, weights: Tensor, bias: Tensor, latest: Tensor, spans: NDArray[np.int64], *, silu: bool
) -> Tensor:
    """Return the (T, channels) outputs of rows, and keep their latest inputs. Threads divide the channels.

    Args:
        x: (T, channels) float32 or bfloat16, with any step between rows.
        weights: (taps, channels) float32.
        bias: (channels,) float32.
        latest: (num_slots, taps - 1, channels), the latest inputs of each slot's sequence, the oldest first.
        silu: apply SiLU to the outputs.
    """
    taps, channels = weights.shape
    # The kernel takes addresses, so it would not notice wrong shapes.
    assert x.shape[1] == channels == len(bias) and x.stride(1) == 1 and weights.is_contiguous()
    assert latest.shape[1:] == (taps - 1, channels) and latest.dtype == x.dtype and latest.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    kernel = compile_kernel(x.itemsize, taps, int(silu))

    def compute(piece: range) -> None:
        kernel(
            *(x.data_ptr(), x.stride(0), spans.ctypes.data, len(spans), latest.data_ptr()),
            *(weights.data_ptr(), bias.data_ptr(), channels, piece.start, piece.stop),
            *(scratch_of_thread(2 * taps).data_ptr(), out.data_ptr()),
        )

    run_parallel([partial(compute, piece) for piece in split_range(channels, 16)])
    return out


@functools.cache
def compile_kernel(size: int, taps: int, silu: int) -> Kernel:
    """Return the kernel for a type and a number of taps.

    Args:
        size: bytes of a value, 2 for bfloat16 and 4 for float32.
        taps: number of inputs of an output, at least 2.
        silu: 1 to apply SiLU to the outputs, otherwise 0.
    """
    kept = taps - 1

    @compiled(fastmath=False)
    def convolve_channels(  # type: ignore[no-untyped-def]
        x, x_step, spans, num_spans, states, weights, bias, channels, first, end, sources, to
    ):
        """Compute the channels [first, end) of all rows, and keep their latest inputs in the slots.

        Args:
            x: rows of inputs, `x_step` values from one row to the next.
            states: (num_slots, taps - 1, channels), the latest inputs, the oldest first.
            weights: (taps, channels) float32.
            bias: (channels,) float32.
            channels: number of channels, a multiple of 16, as `first` and `end` are.
            sources: memory for `taps` int64.
            to: (T, channels) outputs.
        """
        row_bytes, begin, num_words = channels * size, first * size, (end - first) * size // _WORD_BYTES
        for span in range(num_spans):
            rows = x + load_index(spans, 4 * span) * x_step * size + begin
            count = load_index(spans, 4 * span + 1)
            out = to + load_index(spans, 4 * span) * row_bytes + begin
            state = states + load_index(spans, 4 * span + 3) * kept * row_bytes + begin
            if load_index(spans, 4 * span + 2) == 0:
                for tap in range(kept):
                    for word in range(num_words):
                        store_word(state + tap * row_bytes, word, 0)
            for row in range(count):
                for tap in range(taps):
                    at = row + tap - kept
                    source = rows + at * x_step * size if at >= 0 else state + (at + kept) * row_bytes
                    store_index(sources, tap, source)
                convolve_row(
                    size, taps, silu, sources, weights + first * 4, channels, bias + first * 4, out + row * row_bytes,
                    (end - first) // 16,
                )  # fmt: skip
            for tap in range(kept):
                at = count + tap - kept
                source = rows + at * x_step * size if at >= 0 else state + (at + kept) * row_bytes
                for word in range(num_words):
                    store_word(state + tap * row_bytes, word, load_word(source, word))

    return convolve_channels  # type: ignore[no-any-return]
