"""State slots. A model of the stages checks that each chunk finds the state of exactly its own earlier tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_pp.core.plan import MicroBatch
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.request import Completion, Request
from sarathi_pp.core.state_slots import SlotPool
from tests.core.test_prefix_cache import Shadow, Small, Work
from tests.thinning import examples


def test_fresh_slots_are_taken_lowest_first_and_used_ones_before_them() -> None:
    pool = SlotPool(4)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    pool.give_back(0)
    pool.give_back(2)
    assert pool.num_free == 3
    assert [pool.take() for _ in range(3)] == [2, 0, 3]


def test_the_books_of_the_pool_are_kept() -> None:
    pool = SlotPool(1)
    slot = pool.take()
    with pytest.raises(AssertionError, match="all 1 state slots are taken"):
        pool.take()
    pool.give_back(slot)
    with pytest.raises(AssertionError, match="state slot 0 is free already"):
        pool.give_back(slot)


def test_without_states_there_is_no_slot() -> None:
    pool = SlotPool(0)
    assert (pool.take(), pool.take(), pool.num_free) == (-1, -1, 0)
    pool.give_back(-1)


class State(NamedTuple):
    """The content of a slot: the tokens of one sequence that were applied to it, in order."""

    sequence: int
    epoch: int
    tokens: tuple[int, ...]


class StageShadow:
    """A stage that keeps the slot of each sequence and the state in each slot, as ModelStage does."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_done = 0  # microbatches
        self.slots: dict[int, int] = {}
        self.states: dict[int, State] = {}

    def run(self, microbatch: MicroBatch) -> None:
        for index in microbatch.freed:
            self.slots.pop(index, None)
        for chunk in microbatch.chunks:
            assert (chunk.slot >= 0) == (chunk.start == 0), "a slot comes with the first chunk of an epoch"
            if chunk.slot >= 0:
                assert chunk.sequence not in self.slots and chunk.slot < self.num_slots
                self.slots[chunk.sequence] = chunk.slot
            slot = self.slots[chunk.sequence]
            # The first row does not read its slot.
            state = self.states[slot] if chunk.start else State(chunk.sequence, chunk.epoch, ())
            assert state[:2] == (chunk.sequence, chunk.epoch) and len(state.tokens) == chunk.start, f"{chunk}: {state}"
            self.states[slot] = state._replace(tokens=state.tokens + chunk.token_ids)
        assert len(set(self.slots.values())) == len(self.slots), "two sequences have one slot"
        self.num_done += 1


class StateShadow(Shadow):
    """Stages that do not keep up with each other, and results that come late.

    A microbatch may be issued and never sent.
    """

    def __init__(self, work: Work) -> None:
        limits = replace(work.limits, num_slots=work.limits.max_num_seqs, longrope_after=None)
        work.limits = limits
        super().__init__(work, "off")
        self.draw = random.Random(work.seed + 2)
        self.stages = [StageShadow(limits.num_slots) for _ in range(limits.num_stages)]
        self.sent: list[MicroBatch] = []
        self.num_completed = 0

    def run(self) -> dict[int, Completion]:
        answers = super().run()
        assert self.coordinator._slots.num_free == self.work.limits.num_slots
        return answers

    def _write(self, microbatch: MicroBatch, shared: set[int]) -> None:
        super()._write(microbatch, shared)
        self.sent.append(microbatch)

    def _advance(self, lag: int) -> None:
        """Let each stage compute, up to `lag` microbatches fewer than the stage before it."""
        ahead = len(self.sent)
        for stage in self.stages:
            while stage.num_done < ahead - self.draw.randint(0, lag):
                stage.run(self.sent[stage.num_done])
            ahead = stage.num_done

    def _complete(self, microbatch: MicroBatch) -> None:
        self.num_completed += 1
        for stage in self.stages:
            while stage.num_done < self.num_completed:
                stage.run(self.sent[stage.num_done])
        super()._complete(microbatch)

    def _disturb(self, draw: random.Random) -> list[Request]:
        if draw.random() < 0.004:
            self.coordinator.next_microbatch()  # lost: it is not sent
            self.coordinator.abort(self.inflight)
        return super()._disturb(draw)

    def check_books(self) -> None:
        super().check_books()
        self._advance(lag=3)
        running, limits = self.coordinator._running.values(), self.work.limits
        slots = [sequence.slot for sequence in running]
        assert len(set(slots)) == len(slots) <= limits.num_slots == self.coordinator.limits.num_slots
        assert not slots or 0 <= min(slots) <= max(slots) < limits.num_slots
        assert self.coordinator._slots.num_free == limits.num_slots - len(slots)
        assert all(sequence.slot == -1 for sequence in self.coordinator._waiting)


@settings(max_examples=examples(300), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_each_state_gets_each_token_of_its_sequence_once_and_in_order(seed: int) -> None:
    StateShadow(Work(seed)).run()


def slots_of(small: Small) -> str:
    """Return the slots that the chunks of the next microbatch bring, after the chunks."""
    microbatch = small.coordinator.next_microbatch()
    assert microbatch is not None
    return " ".join(f"{chunk}={chunk.slot}" for chunk in microbatch.chunks)


def test_a_slot_comes_with_the_first_chunk_and_goes_to_the_next_sequence() -> None:
    small = Small(mode="off", max_num_seqs=2, num_slots=2)
    small.submit(*range(1, 13), outputs=2)
    small.submit(1, 2, 3)
    small.submit(1, 2)
    assert slots_of(small) == "s0:0+8=0"
    assert slots_of(small) == "s0:8+4=-1 s1:0+3=1"
    small.complete(), small.complete()
    assert slots_of(small) == "s2:0+2=1 s0:12=-1"


def test_a_preempted_sequence_brings_its_slot_again() -> None:
    small = Small(mode="off", num_pages=4, chunk_size=16, max_model_len=16, num_slots=8)
    small.submit(1, 2, 3, 4, 5, 6, outputs=5)
    small.submit(11, 12, 13, 14, 15, 16, outputs=4)
    assert slots_of(small) == "s0:0+6=0 s1:0+6=1"
    small.complete()
    assert [small.step() for _ in range(3)] == ["s0:6 s1:6", "s0:7 s1:7", "s0:8"]
    assert small.coordinator.num_preemptions == 1 and small.coordinator._slots.num_free == 7
    small.step()
    assert slots_of(small) == "s1.1:0+9=0"


def test_no_token_is_computed_again_for_a_state() -> None:
    spec = "chunkllm:threshold=10,overlap=0.3"
    for num_slots, expected in ((0, ["s0:0+10", "s0:7+10", "s0:16+4"]), (4, ["s0:0+10", "s0:10+7", "s0:17+3"])):
        small = Small(spec, mode="off", num_slots=num_slots, max_num_seqs=4)
        small.submit(*range(1, 21))
        for _ in range(3):
            small.submit(1)
        assert [small.step().split(" ")[0] for _ in range(3)] == expected


def test_halved_limits_leave_the_slots_as_they_are() -> None:
    small = Small(mode="off", max_num_seqs=4, chunk_size=16, num_slots=4)
    for _ in range(4):
        small.submit(1, 2, outputs=3)
    small.step()
    assert small.coordinator.shrink().num_slots == 4 and small.coordinator.num_running == 4
    small.coordinator.abort([])
    assert small.coordinator._slots.num_free == 4


@pytest.mark.parametrize("changed", [{"num_slots": 3}, {"num_slots": 4, "prefix_cache": "all"}])
def test_limits_with_which_a_state_would_be_wrong_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(AssertionError, match="state"):
        Limits(1, 8, 4, 64, 4, 32, 1, **changed)  # type: ignore[arg-type]
