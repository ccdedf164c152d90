"""The calibration policy: a timetable that covers the terms of the cost model, and that the coordinator can keep."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import correlation

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sarathi_pp.core.coordinator import Coordinator
from sarathi_pp.core.cost.model import Load
from sarathi_pp.core.draw_rules import Failure
from sarathi_pp.core.policy import POLICIES, make_policy
from sarathi_pp.core.policy.calibration import Calibration, Timetable, make_timetable
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.request import Request
from sarathi_pp.sampling_params import SamplingParams
from tests.core.driving import StandInPipeline, drive
from tests.thinning import examples

AMPLE = Limits(2, 2048, 128, 4096, 16, 32768, 2)


def requests_of(timetable: Timetable) -> list[Request]:
    return [
        Request(index, (1,) * prompt, SamplingParams(max_new_tokens=output, ignore_eos=True, seed=index))
        for index, (prompt, output) in enumerate(zip(timetable.prompts, timetable.outputs, strict=True))
    ]


def as_steps(schedule):
    """Return the issued microbatches in the timetable's form."""
    return [
        (
            tuple((chunk.sequence, chunk.num_tokens) for chunk in microbatch.chunks if not chunk.decode),
            {chunk.sequence for chunk in microbatch.chunks if chunk.decode},
        )
        for microbatch in schedule
    ]


def limits_strategy():
    return st.builds(
        lambda stages, extra, chunk, seqs, length, page, pages: Limits(
            stages, chunk, seqs, length, page, pages, stages + extra
        ),
        st.integers(1, 4),
        st.integers(0, 1),
        st.sampled_from([1, 3, 16, 64]),
        st.integers(1, 24),
        st.integers(2, 200),
        st.sampled_from([1, 4, 16]),
        st.integers(2, 200),
    )


@settings(max_examples=examples(120))
@given(limits=limits_strategy(), seed=st.integers(0, 3))
@example(limits=Limits(2, 100, 21, 38, 4, 79, 3), seed=2)  # the last steps started a prompt and did not end it
def test_the_coordinator_keeps_the_timetable_to_the_letter(limits: Limits, seed: int) -> None:
    """This holds for all limits: every request ends with its last step, without preemption or leftovers."""
    timetable = make_timetable(limits, seed)
    coordinator = Coordinator(limits, make_policy(f"calibration:seed={seed}"))
    requests = requests_of(timetable)
    done, schedule = drive(coordinator, requests, [0] * len(requests))
    assert as_steps(schedule) == [(step.chunks, set(step.decodes)) for step in timetable.steps]
    assert tuple(len(done[index].token_ids) for index in range(len(requests))) == timetable.outputs
    assert coordinator.num_preemptions == 0
    assert all(microbatch.num_decodes <= limits.max_decodes for microbatch in schedule)
    assert all(microbatch.num_tokens <= Calibration().max_tokens(limits) for microbatch in schedule)


def test_the_pipeline_is_never_left_waiting_where_there_is_room() -> None:
    timetable = make_timetable(AMPLE)
    coordinator = Coordinator(AMPLE, make_policy("calibration"))
    pipeline, inflight = StandInPipeline(AMPLE), []
    for request in requests_of(timetable):
        coordinator.submit(request)
    issued = 0
    while issued < len(timetable.steps):
        microbatch = coordinator.next_microbatch()
        if microbatch is None:
            assert coordinator.idle_reason == "full"
            coordinator.complete(pipeline.run(inflight.pop(0)))
        else:
            inflight.append(microbatch)
            issued += 1


def measured(limits: Limits = AMPLE):
    timetable = make_timetable(limits)
    coordinator = Coordinator(limits, make_policy("calibration"))
    requests = requests_of(timetable)
    return drive(coordinator, requests, [0] * len(requests))[1][timetable.warm_up :]


def test_everything_that_a_cost_depends_on_varies() -> None:
    microbatches = measured()
    prefills = [m for m in microbatches if m.num_prefill_tokens and not m.num_decodes]
    decodes = [m for m in microbatches if m.num_decodes and not m.num_prefill_tokens]
    mixed = [m for m in microbatches if m.num_decodes and m.num_prefill_tokens]
    sizes = [m.num_tokens for m in prefills]
    assert {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048} <= set(sizes) and len(set(sizes)) > 30
    depths = [chunk.start for m in prefills for chunk in m.chunks]
    assert min(depths) == 0 and max(depths) > 2000 and sum(500 < depth < 2000 for depth in depths) > 10
    counts = [m.num_decodes for m in decodes]
    assert {1, 2, 4, 8, 16, 32, 64} <= set(counts) and max(counts) == AMPLE.max_decodes
    for count in (1, 8, 64):
        contexts = [Load.of(m).decode_context / count for m in decodes if m.num_decodes == count]
        assert max(contexts) > 3 * min(contexts)
    assert len(mixed) > 30 and {1, 64} <= {m.num_decodes for m in mixed}


def test_sizes_come_in_no_order() -> None:
    """Neither the prefills nor the decodes only grow or only shrink over the run."""
    microbatches = measured()
    for kind in ("num_prefill_tokens", "num_decodes"):
        sizes = [getattr(m, kind) for m in microbatches if getattr(m, kind) == m.num_tokens]
        assert len(sizes) > 50
        ranks = {size: rank for rank, size in enumerate(sorted(set(sizes)))}
        assert abs(correlation([ranks[size] for size in sizes], range(len(sizes)))) < 0.3


def test_the_order_depends_on_the_seed_and_on_nothing_else() -> None:
    make_timetable.cache_clear()
    random.seed(5)
    before = make_timetable(AMPLE, 1)
    make_timetable.cache_clear()
    assert make_timetable(AMPLE, 1) == before != make_timetable(AMPLE, 2)


def test_it_takes_a_few_ten_thousand_tokens() -> None:
    """This bounds the run to minutes on a model of 300M parameters."""
    timetable = make_timetable(AMPLE)
    assert sum(timetable.prompts) + sum(timetable.outputs) < 40_000 and len(timetable.steps) < 400


def test_it_is_found_and_not_offered() -> None:
    assert make_policy("calibration:seed=3") == Calibration(seed=3)
    assert "calibration" not in POLICIES


def test_a_sequence_that_fails_does_not_hold_the_others_up() -> None:
    limits = replace(AMPLE, chunk_size=64, max_num_seqs=8, max_model_len=200)
    coordinator = Coordinator(limits, make_policy("calibration"))
    pipeline, inflight, done = StandInPipeline(limits), [], []
    requests = requests_of(make_timetable(limits))
    for request in requests:
        coordinator.submit(request)
    while coordinator.unfinished:
        microbatch = coordinator.next_microbatch()
        if microbatch is not None:
            inflight.append(microbatch)
            continue
        result = pipeline.run(inflight.pop(0))
        tokens = tuple(
            token._replace(failure=Failure.NOT_FINITE if token.sequence in (1, 4) else Failure.NONE)
            for token in result.tokens
        )
        done += coordinator.complete(replace(result, tokens=tokens))
    assert {completion.request.index for completion in done} == set(range(len(requests)))
    assert [c.request.index for c in done if c.finish_reason == "error"] == [1, 4]


def test_other_requests_than_its_own_are_answered_too() -> None:
    limits = Limits(2, 32, 4, 128, 16, 64, 2)
    requests = [Request(i, (1,) * (10 + 7 * i), SamplingParams(max_new_tokens=6, seed=0)) for i in range(9)]
    done, _ = drive(Coordinator(limits, make_policy("calibration")), requests, [0] * 9)
    assert all(len(done[index].token_ids) == 6 for index in range(9))
