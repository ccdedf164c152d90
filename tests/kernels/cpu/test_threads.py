"""Work in several threads: all of it is done once, and an error in one thread is raised."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from sarathi_pp_kernels.cpu import threads
from sarathi_pp_kernels.cpu.threads import run_parallel, scratch_of_thread, split_range

from tests.machine import patient


@pytest.fixture(params=[1, 2, 5])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("step", [1, 2, 32])
def test_ranges_are_consecutive_and_of_like_length(num_threads: int, step: int) -> None:
    for count in (0, 1, 2, 7, 31, 64, 100, 333):
        found = split_range(count, step)
        assert [at for part in found for at in part] == list(range(count))
        assert 1 <= len(found) <= num_threads and all(part.start % step == 0 for part in found)
        lengths = [len(part) for part in found]
        assert max(lengths) - min(lengths) < 2 * step


def test_the_first_piece_runs_here_and_the_others_beside_it(num_threads: int) -> None:
    ran: list[str] = []
    together = threading.Barrier(num_threads, timeout=patient(30))

    def piece() -> None:
        together.wait()
        ran.append(threading.current_thread().name)

    run_parallel([piece] * num_threads)
    assert len(ran) == num_threads and ran.count(threading.current_thread().name) == 1


def test_what_one_raises_is_raised(num_threads: int) -> None:
    def fail() -> None:
        raise ValueError("a piece failed")

    with pytest.raises(ValueError, match="a piece failed"):
        run_parallel([lambda: None] * (num_threads - 1) + [fail])


def test_fewer_pieces_need_no_other_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    try:
        threads._thread_pool.cache_clear()
        for count in (2, 3, 5, 7):
            run_parallel([lambda: None] * count)
        assert threads._thread_pool.cache_info().currsize == 1
    finally:
        torch.set_num_threads(before)


def test_scratch_is_the_threads_own_and_kept() -> None:
    mine = scratch_of_thread(100)
    assert scratch_of_thread(50).data_ptr() == mine.data_ptr() and scratch_of_thread(50).shape[0] >= 50
    assert scratch_of_thread(100_000).shape[0] >= 100_000
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(scratch_of_thread(10).data_ptr()))
    thread.start()
    thread.join()
    assert others[0] != scratch_of_thread(10).data_ptr()
