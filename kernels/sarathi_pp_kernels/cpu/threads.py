"""A thread pool for kernels that do not hold the interpreter's lock, and scratch memory for its threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor

_of_thread = threading.local()
_team = threading.Lock()


def run_parallel(pieces: Sequence[Callable[[], None]]) -> None:
    """Run functions in parallel, the first in the calling thread, and wait for all. Raise the error of one of them."""
    if len(pieces) == 1:
        pieces[0]()
        return
    waiting = [_thread_pool(torch.get_num_threads()).submit(piece) for piece in pieces[1:]]
    pieces[0]()
    for piece in waiting:
        piece.result()


def run_team(pieces: Sequence[Callable[[], None]], give_up: Callable[[], object]) -> None:
    """Run functions that wait for each other, as `run_parallel` does. Only one team runs at a time.

    With two teams, some members could wait for others that find no free thread.

    Args:
        give_up: lets all members go on. It is called if one of them will not come, for example because no thread could
            be started. Otherwise the others would wait for it for ever.
    """
    with _team if len(pieces) > 1 else nullcontext():
        try:
            run_parallel(pieces)
        except BaseException:
            give_up()
            raise


def split_range(count: int, step: int = 1) -> list[range]:
    """Split range(count) into consecutive ranges of about the same length, at most one per thread of torch.

    Each range begins at a multiple of `step`.
    """
    threads = min(torch.get_num_threads(), max(count // step, 1))
    if threads == 1:
        return [range(count)]
    ends = [count // step * thread // threads * step for thread in range(threads)] + [count]
    return [range(begin, end) for begin, end in zip(ends, ends[1:], strict=False)]


@functools.cache
def _thread_pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="kernels")


def scratch_of_thread(num_words: int) -> Tensor:
    """Return memory of at least num_words int32, which the calling thread may use until its next call.

    Each thread keeps its memory, because new memory would cost page faults.
    """
    held: Tensor | None = getattr(_of_thread, "scratch", None)
    if held is None or held.shape[0] < num_words:
        held = _of_thread.scratch = torch.empty(num_words, dtype=torch.int32)
    return held
