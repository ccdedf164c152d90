"""Threads for kernels that hold no lock, as many in all as torch computes with; and their scratch."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_of_thread = threading.local()


def share_out(pieces: Sequence[Callable[[], None]]) -> None:
    """Runs all of them, the first in the calling thread; returns when the last is done. Raises what one of them did."""
    if len(pieces) == 1:
        pieces[0]()
        return
    waiting = [_crew(torch.get_num_threads()).submit(piece) for piece in pieces[1:]]
    pieces[0]()
    for piece in waiting:
        piece.result()


def shares(count: int, step: int = 1) -> list[range]:
    """`count` cut into consecutive ranges, one a thread and of like length, that begin at multiples of `step`."""
    threads = min(torch.get_num_threads(), max(count // step, 1))
    if threads == 1:
        return [range(count)]
    ends = [count // step * thread // threads * step for thread in range(threads)] + [count]
    return [range(begin, end) for begin, end in zip(ends, ends[1:], strict=False)]


@functools.cache
def _crew(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="kernels")


def scratch_of_thread(num_words: int) -> Tensor:
    """int32, the calling thread's until it asks again; fresh memory at every call would be page faults."""
    held: Tensor | None = getattr(_of_thread, "scratch", None)
    if held is None or held.shape[0] < num_words:
        held = _of_thread.scratch = torch.empty(num_words, dtype=torch.int32)
    return held
