"""The two tensor shards of a stage as threads of one process, with a sum that waits for both."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.wire.shard_group import ShardGroup
from tests.machine import patient


class Member:
    """One thread's end of a group of two, as a communicator."""

    def __init__(self, index: int, barrier: threading.Barrier, parts: list[Tensor]) -> None:
        self._index = index
        self._barrier = barrier
        self._parts = parts

    def all_reduce(self, x: Tensor) -> None:
        self._parts[self._index] = x.clone()
        self._barrier.wait(patient(60))
        first, second = self._parts
        self._barrier.wait(patient(60))
        torch.add(first, second, out=x)


def shard_groups() -> list[ShardGroup]:
    """Return the group of the two shards of a stage, as each of them sees it."""
    barrier, parts = threading.Barrier(2), [torch.empty(0)] * 2
    return [ShardGroup(index, 2, ("the other",), Member(index, barrier, parts), SystemClock()) for index in range(2)]
