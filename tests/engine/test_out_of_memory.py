"""A microbatch without memory is retried once and later ones are smaller; or the run ends with 75."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sarathi_pp.core.coordinator import Coordinator
from sarathi_pp.core.plan import Chunk, MicroBatch
from sarathi_pp.core.policy import make_policy
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.errors import MemoryLostError
from sarathi_pp.model.memory import is_out_of_memory
from sarathi_pp.stages.runner import StageRunner
from sarathi_pp.stages.stage import StageOutput
from sarathi_pp.trace.clock import ManualClock
from sarathi_pp.trace.timer import HostTimer, Instant
from sarathi_pp.wire.channel import QueueChannel
from sarathi_pp.wire.codec import Heartbeat, MicroBatchFrame
from sarathi_pp.wire.shard_group import ShardGroup
from sarathi_pp.wire.stage_progress import StageProgress


def no_memory_on_the_host() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def no_memory_on_a_device() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def something_else() -> None:
    raise RuntimeError("shapes do not match")


class Starved:
    """A stage whose next computations run out of memory."""

    counts_cpu = True
    bytes_read = 0
    steps = 0

    def __init__(self, *, last: bool, failures: list[Callable[[], None]]) -> None:
        self._last = last
        self._failures = failures

    def prepare(self, microbatch: MicroBatch) -> Callable[[Tensor | None], StageOutput]:
        def compute(hidden: Tensor | None) -> StageOutput:
            if self._failures:
                self._failures.pop(0)()
            return StageOutput() if self._last else StageOutput(hidden=torch.zeros(microbatch.num_tokens, 1))

        return compute

    def warm_up(self, num_tokens: int, num_keys: int) -> None: ...


class NoRecorder:
    def record(self, event: object) -> None: ...


def run(*failures: Callable[[], None], last: bool = False, short: bool = False) -> tuple[bool, bool]:
    """Return for two microbatches in a row if they are reported as short of memory."""
    clock = ManualClock()
    edge: QueueChannel[Tensor] = QueueChannel(clock, 4)
    runner = StageRunner(
        Starved(last=last, failures=list(failures)), edge, NoRecorder(), clock, HostTimer(clock), index=1
    )
    told = []
    for index in range(2):
        microbatch = MicroBatch(index, (Chunk(0, 0, 3 * index, 3, False, (1, 2, 3), (), None),))
        runner.run(MicroBatchFrame(microbatch, short=short), None, Instant(0.0))
        frame = edge.receive(0).frame
        told.append(frame.short)
    return told[0], told[1]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("failure", [no_memory_on_the_host, no_memory_on_a_device])
def test_a_second_attempt_is_told(failure, last):
    assert run(failure, last=last) == (True, False)
    assert run(last=last) == (False, False)
    assert run(last=last, short=True) == (True, True)  # of an earlier stage


@pytest.mark.parametrize("failure", [no_memory_on_the_host, no_memory_on_a_device])
def test_there_is_no_third(failure):
    with pytest.raises(
        MemoryLostError, match=r"stage 1 \(rank 1\) has no memory for a microbatch of 3 tokens.*--resume"
    ):
        run(failure, failure)
    assert MemoryLostError.exit_code == 75


def test_a_rank_that_shares_its_stage_makes_no_second_attempt_and_is_not_busy_afterwards():
    """The other ranks would not know of a retry and would wait for it in a sum.

    Rank 0 may continue with other replicas.
    """
    clock = ManualClock()
    edge: QueueChannel[Tensor] = QueueChannel(clock, 4)
    stage = Starved(last=False, failures=[no_memory_on_the_host])
    progress, shards = StageProgress(stage), ShardGroup(0, 2, (), None, clock)  # type: ignore[arg-type]
    runner = StageRunner(
        stage, edge, NoRecorder(), clock, HostTimer(clock), progress=progress, index=1, shard_group=shards
    )
    microbatch = MicroBatch(0, (Chunk(0, 0, 0, 3, False, (1, 2, 3), (), None),))
    with pytest.raises(MemoryLostError, match=r"for a microbatch of 3 tokens: "):
        runner.run(MicroBatchFrame(microbatch), None, Instant(0.0))
    assert progress.heartbeat() == Heartbeat(0, False)


def test_a_stage_that_keeps_states_makes_no_second_attempt():
    """The first attempt may have applied the tokens to some of them."""
    clock = ManualClock()
    edge: QueueChannel[Tensor] = QueueChannel(clock, 4)
    stage = Starved(last=False, failures=[no_memory_on_the_host])
    runner = StageRunner(stage, edge, NoRecorder(), clock, HostTimer(clock), keeps_states=True)
    microbatch = MicroBatch(0, (Chunk(0, 0, 0, 3, False, (1, 2, 3), (), None, slot=0),))
    with pytest.raises(MemoryLostError, match=r"for a microbatch of 3 tokens: "):
        runner.run(MicroBatchFrame(microbatch), None, Instant(0.0))


def test_other_errors_are_not_tried_again():
    with pytest.raises(RuntimeError, match="shapes do not match"):
        run(something_else)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        run(no_memory_on_a_device, something_else)


def test_what_the_host_says_is_known():
    with pytest.raises(RuntimeError) as refused:
        no_memory_on_the_host()
    assert is_out_of_memory(refused.value)


def test_fewer_are_asked_for_from_then_on():
    coordinator = Coordinator(Limits(2, 64, 8, 256, 16, 64, 2), make_policy("sarathi"))
    assert [coordinator.shrink() for _ in range(5)][-1] == Limits(2, 2, 1, 256, 16, 64, 2)
    assert (coordinator.shrink().chunk_size, coordinator.shrink().max_num_seqs) == (1, 1)
