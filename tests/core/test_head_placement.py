"""The stage that computes the head: the end that makes the times of both ends equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from sarathi_pp.core.cost.model import CostModel, StageCost
from sarathi_pp.core.head_placement import HeadPlacement, moves_head
from sarathi_pp.core.plan import Chunk, MicroBatch, SamplingRow, StageTime

ROW = SamplingRow(1, 0.0, 0, 1.0, 0.0, 0)
FIRST = StageCost((0, 8), a0=0.010, a1=0.001, a2=0.0, a3=0.0, a4=0.0)
HEAD_S = 0.0005


def cost(first: StageCost = FIRST, layers_of_last: int = 8, num_stages: int = 2) -> CostModel:
    last = StageCost((8, 8 + layers_of_last), first.a0, first.a1, first.a2, first.a3, first.a4, head_s=HEAD_S)
    return CostModel(1, (first, *[first] * (num_stages - 2), last))


def decodes(index: int, count: int) -> MicroBatch:
    return MicroBatch(index, tuple(Chunk(s, 0, 100, 1, True, (5,), (), ROW) for s in range(count)))


def prompt(index: int, num_tokens: int, *, ends: bool = False) -> MicroBatch:
    return MicroBatch(index, (Chunk(0, 0, 0, num_tokens, False, (5,) * num_tokens, (), ROW if ends else None),))


Seconds = Callable[[MicroBatch], float]


def places(
    placement: HeadPlacement, microbatches: list[MicroBatch], first: Seconds, bare: Seconds, head: Seconds
) -> Iterator[str]:
    """Return F for a head on the first stage and L for the last. Each result is known two microbatches later."""
    told: list[tuple[MicroBatch, bool]] = []
    for microbatch in microbatches:
        on_first = placement.choose(microbatch)
        told.append((MicroBatch(microbatch.index, microbatch.chunks, head_on_first=on_first), on_first))
        yield "F" if on_first else "L"
        if len(told) == 2:
            done, there = told.pop(0)
            last_s = bare(done) + (0.0 if there else head(done))
            times = [StageTime(done.index, first(done)), StageTime(done.index, last_s)]
            placement.observe(done, times, head(done) if there else 0.0)


def steady(seconds: float) -> Seconds:
    return lambda microbatch: seconds


def test_equal_stages_take_turns() -> None:
    work = [decodes(index, 16) for index in range(60)]
    found = "".join(places(HeadPlacement(cost()), work, steady(0.026), steady(0.026), steady(0.006)))
    assert found == "LF" * 30


@pytest.mark.parametrize("slower", [1.0, 1.03, 0.97, 1.1])
def test_less_than_half_a_head_turns_no_turn(slower: float) -> None:
    """If a pair of microbatches both have their heads on one stage, both have a gap."""
    work = [decodes(index, 16) for index in range(200)]
    found = "".join(places(HeadPlacement(cost()), work, steady(0.026), steady(0.026 * slower), steady(0.006)))
    assert found == "LF" * 100


def test_where_the_last_stage_is_slower_by_more_than_a_head_the_first_one_computes_all() -> None:
    work = [decodes(index, 16) for index in range(80)]
    found = "".join(places(HeadPlacement(cost()), work, steady(0.020), steady(0.030), steady(0.006)))
    assert found[-40:] == "F" * 40


def test_where_the_first_stage_is_slower_by_more_than_a_head_the_last_one_computes_all() -> None:
    work = [decodes(index, 16) for index in range(80)]
    found = "".join(places(HeadPlacement(cost()), work, steady(0.030), steady(0.020), steady(0.006)))
    assert found[-40:] == "L" * 40


def test_three_quarters_of_a_head_between_the_stages_are_seven_of_eight() -> None:
    work = [decodes(index, 16) for index in range(400)]
    found = "".join(places(HeadPlacement(cost()), work, steady(0.020), steady(0.026), steady(0.008)))
    assert found[200:].count("F") == pytest.approx(175, abs=4)


def test_fewer_layers_of_the_last_stage_count_before_anything_is_measured() -> None:
    """The last stage has seven of eight layers, and a head of two. It gets the head if it has less to do without it."""
    placement = HeadPlacement(cost(layers_of_last=6))
    assert not any(placement.choose(decodes(index, 1)) for index in range(5))


@pytest.mark.parametrize("last_s, share", [(0.030, 1.0), (0.020, 0.5)])
def test_a_stage_that_was_slow_for_a_while_gets_no_worse_for_it(last_s: float, share: float) -> None:
    """Another process used the first stage's core for a hundred microbatches, and its times tripled."""

    def first(microbatch: MicroBatch) -> float:
        return 0.060 if 100 <= microbatch.index < 200 else 0.020

    work = [decodes(index, 16) for index in range(400)]
    found = "".join(places(HeadPlacement(cost()), work, first, steady(last_s), steady(0.006)))
    assert found[150:200] == "L" * 50
    assert found[-100:].count("F") == pytest.approx(100 * share, abs=1)


def test_few_layers_on_a_slow_machine_give_their_heads_away() -> None:
    """The last stage has half of the first stage's layers and takes twice as long. This was not known before."""
    work = [decodes(index, 16) for index in range(200)]
    found = "".join(places(HeadPlacement(cost(layers_of_last=4)), work, steady(0.02), steady(0.04), steady(0.006)))
    assert found[-100:] == "F" * 100


def test_what_draws_nothing_has_no_head_to_move() -> None:
    placement = HeadPlacement(cost(layers_of_last=12))
    assert [placement.choose(prompt(index, 64)) for index in range(6)] == [False] * 6
    assert placement.choose(prompt(6, 64, ends=True)), "the first that draws finds the last stage far behind"


def test_late_times_of_other_microbatches_are_not_taken_for_this_one() -> None:
    placement = HeadPlacement(cost())
    for index in range(40):
        placement.choose(decodes(index, 16))
        placement.observe(decodes(index, 16), [StageTime(index - 1, 9.0), StageTime(index - 1, 9.0)], 0.0)
    assert placement._first.model.stages == (FIRST,)


@pytest.mark.parametrize(
    "head, device, stages, shards, moves",
    [
        ("auto", "cpu", 2, 1, True),
        ("auto", "cpu", 8, 1, True),
        ("last", "cpu", 2, 1, False),
        ("auto", "cuda", 2, 1, False),
        ("auto", "cpu", 1, 1, False),
        ("auto", "cpu", 2, 2, False),
    ],
)
def test_where_heads_move(head: str, device: str, stages: int, shards: int, moves: bool) -> None:
    assert moves_head(head, device, stages, shards) == moves
