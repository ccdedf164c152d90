"""A stage's tensor shards in one process, each on a thread, with a sum that waits for all of them.

They compute one at a time, up to the next sum: Triton's interpreter need not be thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from sarathi_pp.checkpoint.facts.support import ModelFacts
from sarathi_pp.model.attention import choose_backend
from sarathi_pp.model.inputs import StageInputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import load_stage
from sarathi_pp.model.stage_model import StageModel
from sarathi_pp.model.tensor_parallel import TensorShard
from tests.machine import patient

CPU = torch.device("cpu")


class Sum:
    """A sum that adds up the tensors of `size` threads, in the order of their indices."""

    def __init__(self, size: int) -> None:
        self.num_calls = 0
        self.turn = threading.Lock()
        self._barrier = threading.Barrier(size)
        self._parts: list[Tensor] = [torch.empty(0)] * size

    def shard(self, index: int) -> TensorShard:
        def all_reduce(x: Tensor) -> Tensor:
            self._parts[index] = x
            self.turn.release()
            try:
                self._barrier.wait(patient(60))
                total = sum(self._parts[1:], self._parts[0].clone())
                if self._barrier.wait(patient(60)) == 0:
                    self.num_calls += 1
            finally:
                self.turn.acquire()
            return x.copy_(total)

        return TensorShard(index, len(self._parts), all_reduce)

    def abort(self) -> None:
        self._barrier.abort()


class Gang:
    """The shards of one stage; behaves like a StageModel whose shards must agree to the last bit.

    Each has its own pages: the pages passed to `forward` are not used.
    """

    def __init__(self, stages: list[StageModel], total: Sum, pages: Callable[[StageModel], KVShard]) -> None:
        self.stages = stages
        self.layers, self.has_lm_head = stages[0].layers, stages[0].has_lm_head
        self.total = total
        self._pages = [pages(stage) for stage in stages]
        self._threads = ThreadPoolExecutor(len(stages))

    def forward(self, x: Tensor, inputs: StageInputs, kv: object = None) -> Tensor:
        def run(stage: StageModel, pages: KVShard) -> Tensor:
            torch.set_num_threads(1)
            with self.total.turn:
                try:
                    return stage.forward(x.clone(), inputs, pages)
                except BaseException:
                    self.total.abort()
                    raise

        outputs = list(self._threads.map(run, self.stages, self._pages))
        assert all(torch.equal(output, outputs[0]) for output in outputs), "shards differ"
        return outputs[0]


def load_gang(
    directory: Path,
    facts: ModelFacts,
    layers: tuple[int, int],
    size: int,
    page_size: int,
    num_pages: int,
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
) -> Gang:
    total = Sum(size)

    def load(index: int) -> StageModel:
        attention = choose_backend(backend, CPU, page_size)  # each its own: it has scratch memory
        return load_stage(directory, layers, facts.num_layers, dtype, CPU, attention, shard=total.shard(index))

    stages = [load(index) for index in range(size)]
    part = facts.sharded(size)

    def pages(stage: StageModel) -> KVShard:
        return KVShard(layers, num_pages, page_size, part.caches, dtype, CPU)

    return Gang(stages, total, pages)
