"""The promise of `balanced`: equal time, by the cost model it is given. The tests of all policies check its tokens."""

from dataclasses import replace
from random import Random

import pytest

from sarathi_pp.core.coordinator import Coordinator
from sarathi_pp.core.cost.model import CostModel, Load, StageCost
from sarathi_pp.core.policy import make_policy
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.request import Request
from sarathi_pp.sampling_params import SamplingParams
from tests.core.driving import StandInPipeline, drive


def coordinator(cost, *, stages=2, chunk_size=512, max_num_seqs=8, num_pages=4000, inflight=None, spec="balanced"):
    limits = Limits(stages, chunk_size, max_num_seqs, 8192, 16, num_pages, inflight or stages)
    return Coordinator(limits, make_policy(spec), cost=cost)


def model(tile, stages=2, **values):
    coefficients = dict(a0=1e-3, a1=1e-3, a2=0.0, a3=0.0, a4=0.0) | values
    return CostModel(tile, tuple(StageCost((i, i + 1), **coefficients) for i in range(stages)))


def requests(count, prompt, output):
    return [Request(i, (1,) * prompt, SamplingParams(max_new_tokens=output, seed=0)) for i in range(count)]


def schedule(cost, work, **limits):
    return drive(coordinator(cost, **limits), work, [0] * len(work))[1]


def test_a_ceiling_beyond_all_use_costs_neither_time_nor_a_different_schedule():
    work = requests(8, 300, 20)
    assert schedule(model(64), work, chunk_size=10**15) == schedule(model(64), work, chunk_size=4096)


def test_totals_are_whole_tiles_while_prompts_last():
    batches = schedule(model(64), requests(24, 300, 20), max_num_seqs=64)
    backlog = [m for m in batches if m.num_prefill_tokens][:-6]
    assert len(backlog) > 8
    assert {m.num_tokens % 64 for m in backlog} == {0}


def test_prompt_tokens_go_with_decodes_as_prompts_to_outputs():
    """n = b * (1 + P:D), b = (8 sequences - 1) / 2 in flight, P:D = 15: 56 tokens, after requests have finished."""
    batches = schedule(model(16, a1=1e-4), requests(60, 150, 10))
    middle = batches[len(batches) // 3 : 2 * len(batches) // 3]
    assert 48 <= sum(m.num_tokens for m in middle) / len(middle) <= 80


def test_one_seat_is_for_the_prompt_that_is_computed():
    """If prompt tokens were computed for a decode in every seat, decodes would repeatedly take all seats."""
    prompts = [Random(i).randrange(80, 240) for i in range(400)]
    work = [replace(requests(1, prompt, prompt // 20)[0], index=i) for i, prompt in enumerate(prompts)]
    batches = schedule(model(1, a0=5e-3, a1=5e-4), work, num_pages=10_000)
    while not batches[-1].num_prefill_tokens:
        batches.pop()
    assert sum(m.num_prefill_tokens == 0 for m in batches) < 0.04 * len(batches)


def test_decodes_are_shared_by_the_keys_they_read_not_by_count():
    """With four long sequences and four short ones, the times of decoding cohorts differ less than their sizes."""
    cost = model(16, a3=1e-5)
    long, short = requests(4, 900, 60), requests(8, 60, 60)[4:]
    batches = schedule(cost, [*long, *short])
    tail = [m for m in batches if m.num_prefill_tokens == 0 and m.num_decodes][4:24]
    seconds = [cost.seconds(0, Load.of(m)) for m in tail]
    assert max(seconds) / min(seconds) < 1.5
    assert len(tail) == 20


def test_decodes_are_shared_by_what_they_cost_the_slowest_stage():
    """The same holds if reading more keys takes time only on the second, slower stage."""
    cost = model(16, a3=1e-5)
    cost = CostModel(16, (replace(cost.stages[0], a3=0.0), replace(cost.stages[1], a0=2e-3)))
    long, short = requests(4, 900, 60), requests(8, 60, 60)[4:]
    tail = [m for m in schedule(cost, [*long, *short]) if m.num_prefill_tokens == 0 and m.num_decodes][4:24]
    seconds = [cost.seconds(1, Load.of(m)) for m in tail]
    assert max(seconds) / min(seconds) < 1.5


def issued(run, polls=0):
    """Yield each microbatch when it is issued, with the number in flight then. If there is none, ask again."""
    pipeline, inflight = StandInPipeline(run.limits), []
    while run.unfinished:
        microbatch = run.next_microbatch()
        if microbatch is not None:
            inflight.append(microbatch)
            yield microbatch, len(inflight)
            continue
        assert not any(run.next_microbatch() for _ in range(polls))
        inflight, result = inflight[1:], pipeline.run(inflight[0])
        run.complete(result)


@pytest.mark.parametrize("polls", [1, 3])
def test_the_schedule_does_not_depend_on_how_often_it_is_asked(polls):
    """Extra calls are made without work, while prompts are awaited and while results are awaited."""

    def batches(polls):
        run = coordinator(model(16, a0=1e-4), stages=4, inflight=5)
        for group in (requests(3, 200, 5), requests(9, 150, 3)[3:]):
            assert not any(run.next_microbatch() for _ in range(polls))
            for request in group:
                run.submit(request)
            yield from (str(microbatch) for microbatch, _ in issued(run, polls))

    assert list(batches(polls)) == list(batches(0))


def test_prompts_get_on_where_decodes_alone_would_fill_the_size():
    """Microbatches have no fixed cost, so the smallest are as good as any. 64 requests decode for long."""
    batches = schedule(model(1, a0=0.0), requests(64, 64, 200), max_num_seqs=64)
    assert all(m.num_prefill_tokens for m in batches[:100])
    assert sum(m.num_prefill_tokens for m in batches[: len(batches) // 2]) == 64 * 64


def inflight_counts(cost, work, **limits):
    """Return microbatches in flight and waiting prompts after each microbatch.

    The run has 2 stages and may have 3 in flight.
    """
    run = coordinator(cost, inflight=3, **limits)
    for request in work:
        run.submit(request)
    seen = [(count, run.num_waiting) for _, count in issued(run)]
    return seen[len(seen) // 4 :]


def test_one_microbatch_more_is_in_flight_while_prompts_last():
    work = requests(40, 600, 15)
    seen = inflight_counts(model(16, a1=1e-4), work, max_num_seqs=16, chunk_size=128)
    assert max(count for count, waiting in seen if waiting) == 3


def test_none_more_where_only_outputs_are_left():
    """The decodes of the last requests are cut into one cohort per stage."""
    seen = inflight_counts(model(16), requests(8, 60, 60), max_num_seqs=16)
    assert {waiting for _, waiting in seen} == {0}
    assert max(count for count, _ in seen) == 2


@pytest.mark.parametrize("a0, most", [(0.1, 2), (1e-5, 3)])
def test_none_more_where_seats_are_short_and_microbatches_dear(a0, most):
    """Three cohorts of decodes instead of two cost half as many a0 again, for the same tokens."""
    seen = inflight_counts(model(1, a0=a0), requests(60, 100, 25), max_num_seqs=12)
    assert max(count for count, waiting in seen if waiting > 12) == most


@pytest.mark.parametrize("slower, most", [(2.1, 2), (1.9, 3)])
def test_none_more_where_one_stage_sets_the_pace_by_half_a_microbatch(slower, most):
    """The faster of two stages ends a microbatch sooner by 1 - 1 / slower of the slow one's time."""
    cost = model(16, a1=1e-4)
    cost = replace(cost, stages=(cost.stages[0], cost.stages[1].scaled(slower)))
    seen = inflight_counts(cost, requests(40, 600, 15), max_num_seqs=16, chunk_size=128)
    assert max(count for count, waiting in seen if waiting) == most


@pytest.mark.parametrize("slow, most", [((3,), 8), ((2, 5), 9)])
def test_a_stage_sets_the_pace_only_where_no_other_is_as_slow(slow, most):
    """Two equally slow stages of eight wait for each other."""
    cost = model(16, a1=1e-4, stages=8)
    cost = replace(cost, stages=tuple(s.scaled(1.2) if i in slow else s for i, s in enumerate(cost.stages)))
    run = coordinator(cost, stages=8, inflight=9, max_num_seqs=64, chunk_size=128)
    for request in requests(150, 600, 15):
        run.submit(request)
    seen = [(count, run.num_waiting) for _, count in issued(run)]
    assert max(count for count, waiting in seen[len(seen) // 4 :] if waiting) == most


def test_a_bound_on_the_time_between_tokens_is_kept():
    """The bound leaves room for four tiles of 16 per cohort. Without a bound there are more."""
    cost, work = model(16), requests(30, 400, 20)

    def slowest(spec):
        batches = schedule(cost, work, max_num_seqs=16, spec=spec)
        return max(cost.seconds(0, Load.of(m)) for m in batches if m.num_decodes)

    assert slowest("balanced") > 6e-3
    assert slowest(f"balanced:tbt_slo={2 * 5e-3 / 0.9 + 1e-9}") == pytest.approx(5e-3)


@pytest.mark.parametrize("costs", [dict(a2=2e-6), dict(a3=1e-5), dict(a4=3e-4), dict(a2=1e-6, a3=5e-6, a4=1e-4)])
def test_whatever_costs_time_counts_against_the_bound(costs):
    """Each of two in flight gets its share, less the tenth in reserve. Filling the decodes' last tile is free."""
    cost, work, share_s = model(16, **costs), requests(20, 300, 12), 0.9 * 0.02 / 2

    def free(m):
        return -m.num_decodes % 16 if m.num_decodes else 16

    def seconds(spec):
        batches = schedule(cost, work, max_num_seqs=16, spec=spec)
        return [cost.seconds(0, Load.of(m)) for m in batches if m.num_prefill_tokens > free(m)]

    assert max(seconds("balanced")) > 1.2 * share_s
    assert 0.8 * share_s < max(seconds("balanced:tbt_slo=0.02")) <= share_s


def test_a_bound_that_no_microbatch_meets_starves_nobody():
    batches = schedule(model(16), requests(30, 400, 20), max_num_seqs=16, spec="balanced:tbt_slo=1e-9")
    assert sum(m.num_prefill_tokens for m in batches) == 30 * 400
    assert max(m.num_tokens for m in batches) == 16


def test_a_bound_leaves_what_the_ridge_makes_free():
    cost, spec = replace(model(1), ridge=100), "balanced:tbt_slo=1e-9"
    batches = schedule(cost, requests(30, 400, 20), max_num_seqs=16, spec=spec)
    assert max(m.num_tokens for m in batches) == 100


@pytest.mark.parametrize("tile", [1, 16])
def test_a_bound_that_decodes_alone_break_starves_nobody(tile):
    """The decodes fill whole tiles, and prompts still progress."""
    batches = schedule(model(tile), requests(64, 64, 100), max_num_seqs=64, spec="balanced:tbt_slo=1e-4")
    assert all(m.num_prefill_tokens for m in batches[:200])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("room_s", [0.0625, 0.18])
def test_a_bound_is_kept_on_every_stage(order, room_s):
    """One of two stages is slower up to 33 tokens, the other above. The bound applies to each in turn."""
    unequal = (StageCost((0, 1), 0.06, 1e-4, 0.0, 0.0, 0.0), StageCost((1, 2), 0.03, 1e-3, 0.0, 0.0, 0.0))
    cost = CostModel(1, tuple(unequal[stage] for stage in order))
    batches = schedule(cost, requests(30, 400, 5), max_num_seqs=16, spec=f"balanced:tbt_slo={2 * room_s / 0.9}")
    slowest = max(cost.seconds(stage, Load.of(m)) for m in batches for stage in (0, 1))
    assert 0.9 * room_s < slowest <= room_s


@pytest.mark.parametrize("inflight", [1, 2, 4])
def test_a_bound_counts_every_stage_that_a_token_passes_however_few_are_in_flight(inflight):
    """With four stages, a microbatch may take a quarter of the bound on each, also if fewer are in flight."""
    cost = model(1, stages=4, a0=0.01, a1=1e-3)
    bound_s = 4 * 0.05 / 0.9
    work = requests(12, 400, 5)
    batches = schedule(cost, work, stages=4, max_num_seqs=8, inflight=inflight, spec=f"balanced:tbt_slo={bound_s}")
    assert 0.04 < max(cost.seconds(0, Load.of(m)) for m in batches) <= 0.05


def test_stages_that_seem_to_cost_nothing_are_no_reason_to_stop():
    """A profile may show zero cost. So may costs fitted to spans that attention alone explains."""
    assert len(schedule(model(16, a0=0.0, a1=0.0), requests(4, 50, 3))) > 3


def test_with_one_decode_left_the_run_ends():
    batches = schedule(model(16), requests(1, 5, 4))
    assert [str(m) for m in batches] == ["m0[s0:0+5]", "m1[d s0:5]", "m2[d s0:6]", "m3[d s0:7]"]


@pytest.mark.parametrize("chunk_size", [1, 3, 16])
def test_a_small_ceiling_is_kept(chunk_size):
    batches = schedule(model(64), requests(6, 40, 5), chunk_size=chunk_size)
    assert max(m.num_tokens for m in batches) == chunk_size


def test_a_larger_size_must_pay():
    """If a microbatch has no fixed cost, larger ones gain nothing and add latency."""
    batches = schedule(model(16, a0=0.0), requests(30, 400, 4))
    assert max(m.num_tokens for m in batches) == 16


@pytest.mark.parametrize("count", [1, 30])
def test_no_size_is_below_the_ridge(count):
    """Tokens up to the ridge cost nothing, for a single prompt and in a steady state."""
    batches = schedule(replace(model(1, a0=0.0), ridge=64), requests(count, 400, 4))
    prompts = [m.num_tokens for m in batches if m.num_prefill_tokens]
    assert prompts[len(prompts) // 2] == max(prompts) == 64


def test_what_the_ridge_makes_free_is_used_even_if_few_seats_need_less():
    """Eight seats with P:D 3 need 14 tokens per microbatch. Up to 512 take the same time.

    So each prompt is divided over the two microbatches of a cycle, and no further.
    """
    batches = schedule(replace(model(1), ridge=512), requests(60, 300, 100))
    assert 60 <= sum(not chunk.decode for m in batches for chunk in m.chunks) <= 2 * 60


def test_prompts_that_can_all_start_end_nearly_as_soon_as_they_can():
    """Fewer microbatches are traded against a longer ramp.

    The time is within 3 % of the best, with a size well below it.
    """
    batches = schedule(model(1, a0=0.1), requests(32, 640, 2), max_num_seqs=64, chunk_size=4096)
    ends = {size: (32 * 640 / size + 1) * (0.1 + 1e-3 * size) for size in range(16, 4096, 16)}
    best = min(ends, key=lambda size: ends[size])
    chosen = batches[0].num_tokens
    assert ends[chosen] < 1.03 * ends[best]
    assert chosen < 0.7 * best


def test_a_burst_keeps_the_size_that_it_began_with():
    """Smaller microbatches would cost a stage the same wait now or at the end, when the remaining tokens are spread."""
    batches = schedule(model(1, a0=0.1), requests(32, 640, 200), max_num_seqs=64, chunk_size=4096)
    sizes = [m.num_tokens for m in batches if m.num_prefill_tokens]
    assert len(set(sizes[:-4])) == 1 and len(sizes) > 16


class Stepped:
    """A coordinator whose microbatches return at once."""

    def __init__(self):
        self.run = coordinator(model(1, a0=0.1), max_num_seqs=64, chunk_size=4096)
        self.pipeline = StandInPipeline(self.run.limits)
        self.submitted = 0

    def submit(self, count, prompt):
        for request in requests(self.submitted + count, prompt, 2000)[self.submitted :]:
            self.run.submit(request)
        self.submitted += count

    def step(self):
        microbatch = self.run.next_microbatch()
        self.run.complete(self.pipeline.run(microbatch))
        return microbatch


def test_prompts_that_come_while_most_decode_are_no_burst():
    """If 20 come to 20 that decode, all end as early as possible.

    If 19 come, the oldest ends first and the others ride along.
    """

    def size_with(num_prompts):
        stepped = Stepped()
        stepped.submit(20, 16)
        while stepped.step().num_prefill_tokens:
            pass
        stepped.submit(num_prompts, 640)
        return max(stepped.step().num_tokens for _ in range(4))

    assert size_with(20) > 2.5 * size_with(19)


def test_a_burst_ends_with_its_own_prompts_though_others_keep_coming():
    stepped = Stepped()
    stepped.submit(32, 640)
    large = stepped.step().num_tokens
    sizes = []
    while stepped.submitted < 60:
        sizes.append(stepped.step().num_tokens)
        if len(sizes) % 2:
            stepped.submit(1, 640)
    assert max(sizes[:10]) >= large and max(sizes[-10:]) < 0.5 * large


def test_the_size_that_ends_soonest_is_not_for_a_queue_that_may_go_on():
    """If all seats have a waiting request, the policy cannot see any further requests."""
    first = [schedule(model(1, a0=0.1), requests(n, 640, 2), max_num_seqs=64, chunk_size=4096)[0] for n in (63, 64)]
    assert first[0].num_tokens > 2 * first[1].num_tokens


def test_one_microbatch_more_where_all_can_start_however_dear():
    seen = inflight_counts(model(1, a0=0.1), requests(12, 600, 60), max_num_seqs=16, chunk_size=128)
    assert max(count for count, waiting in seen if waiting) == 3


def test_what_is_left_is_cut_evenly_over_a_cycle():
    """Microbatches are expensive, so one of 160 tokens would end first if there were no other stages."""
    batches = schedule(model(16, a0=1.0), requests(1, 160, 1), stages=3)
    assert [m.num_prefill_tokens for m in batches] == [64, 64, 32]


def test_prompts_that_come_to_a_cycle_of_decodes_do_not_wait_for_its_end():
    run = coordinator(model(16, a0=0.1), stages=8, inflight=9, max_num_seqs=64)
    pipeline = StandInPipeline(run.limits)
    run.submit(requests(1, 64, 50)[0])
    for _ in range(12):
        run.complete(pipeline.run(run.next_microbatch()))
    for request in requests(9, 600, 4)[1:]:
        run.submit(request)
    assert run.next_microbatch().num_prefill_tokens > 100


def test_it_runs_without_a_cost_model():
    batches = schedule(None, requests(10, 100, 10))
    assert sum(m.num_prefill_tokens for m in batches) == 1000
