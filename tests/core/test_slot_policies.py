"""sglang, gllm, distserve and chunkllm: their formulas, small schedules, and the duties of every policy."""

from collections import deque
from itertools import count
from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_pp.core.coordinator import Coordinator
from sarathi_pp.core.cost.model import CostModel, StageCost
from sarathi_pp.core.policy import make_policy
from sarathi_pp.core.policy.chunkllm import ChunkLLM
from sarathi_pp.core.policy.gllm import GLLM
from sarathi_pp.core.policy.sglang import SGLang, dynamic_chunk_size
from sarathi_pp.core.policy.view import Grant, Limits, Policy, View
from sarathi_pp.core.request import Request
from sarathi_pp.core.sequence import Sequence
from sarathi_pp.errors import PolicyError
from sarathi_pp.sampling_params import SamplingParams
from tests.core.driving import EOS, StandInPipeline, check_answer, drive, run_golden
from tests.thinning import examples

POLICIES = ("chunkllm", "distserve", "gllm", "sglang")


def request(index: int, prompt: int, new: int = 4, ends: tuple[int, ...] = ()) -> Request:
    return Request(index, (1,) * prompt, SamplingParams(max_new_tokens=new, seed=0), paragraph_ends=ends)


def sequence(index: int, prompt: int, issued: int = 0) -> Sequence:
    made = Sequence(request(index, prompt), index)
    made.issued = issued
    return made


def view(limits, *, prefills=(), waiting=(), decodes=(), running=None, free=1.0, **rest) -> View:
    """Make a view of the sequences; `free` is the free share of the KV pool."""
    running = {s.index: s for s in (*prefills, *decodes)} if running is None else running
    free_tokens = round(free * limits.num_pages * limits.page_size)
    return View(prefills, waiting, decodes, running, limits, rest.pop("num_inflight", 0), 0, free_tokens, **rest)


# gllm. 4 stages, 1000 pages of 16.
WIDE = Limits(4, 256, 64, 1024, 16, 1000, 4)


def prefill_tokens(waiting: int, free: float, **parameters: int) -> int:
    return GLLM(**parameters).prefill_tokens(view(WIDE, waiting_tokens=waiting, free=free))


def test_gllm_prefill_follows_the_paper():
    """#P = max(min(#WP / #T, #MaxP * (KV_free - KV_thresh) / (1 - KV_thresh)), #MinP), with 8, 2048, 5 % and 32."""
    assert prefill_tokens(8000, free=1.0) == 8000 // 8
    assert prefill_tokens(80_000, free=1.0) == 2048
    assert prefill_tokens(80_000, free=0.525) == 1024  # (0.525 - 0.05) / 0.95 is a half
    assert prefill_tokens(4000, free=0.525) == 500
    assert prefill_tokens(80, free=1.0) == 32
    assert prefill_tokens(80_000, free=0.05) == 32


def test_gllm_parameters_are_the_paper_s_symbols():
    assert prefill_tokens(8000, free=1.0, iterp=4) == 2000
    assert prefill_tokens(80_000, free=1.0, maxp=100) == 100
    assert prefill_tokens(1, free=1.0, minp=7) == 7
    assert prefill_tokens(80_000, free=0.75, kvthresh=50) == 1024


def test_gllm_counts_the_rest_of_started_prompts_as_waiting():
    started = (sequence(0, 1000, issued=200),)
    assert GLLM().prefill_tokens(view(WIDE, prefills=started, waiting_tokens=800)) == (800 + 800) // 8


def test_gllm_suspends_prefill_below_the_threshold():
    """Prefill is suspended when the KV idle rate < KV_thresh, unless no running request could raise it."""
    waiting, decodes = (sequence(1, 500),), (sequence(0, 9, issued=9),)
    assert prefill_tokens(80_000, free=0.049) == 0

    def granted(**moment):
        return [(g.sequence.index, g.num_tokens) for g in GLLM().pick(view(WIDE, free=0.04, **moment))]

    assert granted(waiting=waiting, decodes=decodes) == [(0, 1)]
    assert granted(waiting=waiting, num_inflight=1) == []
    assert granted(prefills=waiting) == [(1, 32)]


@pytest.mark.parametrize(("running", "taken"), [(1, 1), (4, 1), (5, 2), (8, 2), (10, 3)])
def test_gllm_decodes_are_shared_out_by_their_number(running, taken):
    """#D = #RD / #PP_depth, rounded up; decodes in flight count."""
    everyone = {index: sequence(index, 9, issued=9) for index in range(running)}
    ready = tuple(everyone.values())[-taken:]
    moment = view(WIDE, decodes=ready, running=everyone)
    assert GLLM().num_decodes(moment) == taken
    assert [grant.sequence for grant in GLLM().pick(moment)] == list(ready)


def test_golden_gllm_spreads_prompts_and_keeps_the_least():
    """#T = 2: 21 tokens wait, so 10; then 11, so 5; then 6, which is 3, but #MinP is 4."""
    assert run_golden("gllm:iterp=2,maxp=16,minp=4", stages=2, chunk_size=8, prompts=[12, 9], outputs=[3, 2]) == [
        "m0[s0:0+10]",
        "m1[s0:10+2 s1:0+3]",
        "m2[s1:3+4]",
        "m3[s1:7+2 | d s0:12]",
        "m4[d s1:9]",
        "m5[d s0:13]",
    ]


def test_golden_gllm_lets_no_prompt_in_while_the_cache_is_short():
    """16 positions. s0 holds 12. The free quarter is below the threshold of a half, although s1 would fit."""
    spec = "gllm:kvthresh=50,iterp=1"
    assert run_golden(spec, stages=1, chunk_size=8, prompts=[9, 4], outputs=[3, 1], num_pages=4, page_size=4) == [
        "m0[s0:0+9 s1:0+4]",
        "m1[d s0:9]",
        "m2[d s0:10]",
    ]
    late = run_golden(
        spec, stages=1, chunk_size=8, prompts=[9, 4], outputs=[3, 1], num_pages=4, page_size=4, arrivals=[0, 1]
    )
    assert late == ["m0[s0:0+9]", "m1[d s0:9]", "m2[d s0:10]", "m3[s1:0+4]"]


def test_golden_gllm_a_lone_prompt_goes_on_below_the_threshold():
    """14 of 16 positions: 8 = #MaxP, then #MinP = 2 at the threshold. Then 2 each because no other request runs."""
    spec = "gllm:kvthresh=50,iterp=1,maxp=8,minp=2"
    assert run_golden(spec, stages=1, chunk_size=1, prompts=[14], outputs=[1], num_pages=4, page_size=4) == [
        "m0[s0:0+8]",
        "m1[s0:8+2]",
        "m2[s0:10+2]",
        "m3[s0:12+2]",
    ]


# sglang


def test_golden_sglang_slots_are_prefill_or_decode_prefill_first_and_sticky():
    """P = 2, two seats per slot. s4 gets s1's seat in slot 0; s0 waits for its prompt, and does not join slot 1."""
    assert run_golden("sglang", stages=2, chunk_size=8, prompts=[2] * 5, outputs=[3, 2, 3, 2, 2]) == [
        "m0[s0:0+2 s1:0+2]",
        "m1[s2:0+2 s3:0+2]",
        "m2[d s0:2 s1:2]",
        "m3[d s2:2 s3:2]",
        "m4[s4:0+2]",
        "m5[d s2:3]",
        "m6[d s0:3 s4:2]",
    ]


def test_golden_sglang_the_last_chunk_s_slot_keeps_the_sequence():
    """One prompt is in chunks, and the next joins its last one. Both then decode in slot 1, and slot 0 is empty."""
    assert run_golden("sglang", stages=2, chunk_size=8, prompts=[14, 2], outputs=[2, 3]) == [
        "m0[s0:0+8]",
        "m1[s0:8+6 s1:0+2]",
        "m2[d s0:14 s1:2]",
        "m3[d s1:3]",
    ]


def test_golden_sglang_a_full_slot_decodes_while_another_one_continues_the_prompt():
    """One seat per slot: s0 has slot 0, so s1's chunks keep to slot 1."""
    schedule = run_golden("sglang", stages=2, chunk_size=4, prompts=[4, 10], outputs=[4, 1], max_num_seqs=2)
    assert schedule == [
        "m0[s0:0+4]",
        "m1[s1:0+4]",
        "m2[d s0:4]",
        "m3[s1:4+4]",
        "m4[d s0:5]",
        "m5[s1:8+2]",
        "m6[d s0:6]",
    ]


def stage_cost(quadratic: float, linear: float, tile: int = 1) -> StageCost:
    """Return the cost f(l) = quadratic * l^2 + linear * l."""
    return StageCost((0, 1), a0=0.0, a1=linear * tile, a2=2 * quadratic, a3=0.0, a4=0.0)


def chunk_limits(chunk_size: int, page_size: int = 16) -> Limits:
    return Limits(2, chunk_size, 8, 10**6, page_size, 10**5, 2)


def test_sglang_dynamic_chunk_takes_as_long_as_the_first():
    """f(L + x) - f(L) = f(C) - f(0). With f = l^2: L = 960, C = 1280 give x = 1600 - 960 = 640.

    0.75 of the way there from 1280 is 800, which is 768 in whole multiples of 64.
    """
    cost = CostModel(1, (stage_cost(1.0, 0.0),))
    assert dynamic_chunk_size(cost, 960, chunk_limits(1280)) == 768
    assert dynamic_chunk_size(cost, 960, chunk_limits(1280, page_size=512)) == 512
    assert dynamic_chunk_size(cost, 0, chunk_limits(1280)) == 1280


@pytest.mark.parametrize("context", [500, 3000, 20_000])
def test_sglang_dynamic_chunk_solves_its_equation_with_a_linear_term(context):
    a, b, whole = 1e-6, 3e-2, 4096
    exact = (sqrt((2 * a * context + b) ** 2 + 4 * a * (a * whole**2 + b * whole)) - 2 * a * context - b) / (2 * a)
    assert a * (exact**2 + 2 * exact * context) + b * exact == pytest.approx(a * whole**2 + b * whole)
    size = dynamic_chunk_size(CostModel(128, (stage_cost(a, b, 128),)), context, chunk_limits(whole))
    assert size % 64 == 0 and size <= whole + 0.75 * (exact - whole) < size + 64


def test_sglang_dynamic_chunk_has_bounds():
    steep = CostModel(1, (stage_cost(1.0, 0.0),))
    assert dynamic_chunk_size(steep, 10**6, chunk_limits(1280)) == 1280 // 4
    assert dynamic_chunk_size(steep, 10**6, chunk_limits(100)) == 64
    assert dynamic_chunk_size(steep, 10**6, chunk_limits(7)) == 7
    assert dynamic_chunk_size(CostModel(1, (stage_cost(0.0, 1.0),)), 10**6, chunk_limits(1280)) == 1280


def test_sglang_dynamic_chunk_is_that_of_the_slowest_stage():
    fast, slow = stage_cost(0.0, 1.0), stage_cost(1.0, 0.0)
    for stages in [(fast, slow), (slow, fast)]:
        assert dynamic_chunk_size(CostModel(1, stages), 960, chunk_limits(1280)) == 768


def test_sglang_dynamic_chunk_needs_to_be_asked_for_and_a_cost():
    limits, started = chunk_limits(1280), (sequence(0, 5000, issued=960),)
    cost = CostModel(1, (stage_cost(1.0, 0.0),))

    def chunk(policy: SGLang, cost: CostModel | None) -> int:
        (grant,) = policy.pick(view(limits, prefills=started, cost=cost))
        return grant.num_tokens

    assert chunk(SGLang(dynamic=1), cost) == 768
    assert chunk(SGLang(dynamic=0), cost) == chunk(SGLang(dynamic=1), None) == 1280


# distserve


def test_golden_distserve_runs_phases_apart():
    """Three seats.

    Whole prompts run, 8 tokens together or one longer prompt. Then half of the running requests decode (2 and 1), until
    1 of 3 is left. Then the waiting prompt runs, although a token of s1 was ready before.
    """
    assert run_golden(
        "distserve", stages=2, chunk_size=8, prompts=[5, 3, 9, 4], outputs=[3, 4, 2, 2], max_num_seqs=3
    ) == [
        "m0[s0:0+5 s1:0+3]",
        "m1[s2:0+9]",
        "m2[d s0:5 s1:3]",
        "m3[d s2:9]",
        "m4[d s0:6 s1:4]",
        "m5[s3:0+4]",
        "m6[d s1:5]",
        "m7[d s3:4]",
    ]


@pytest.mark.parametrize(
    ("low", "third"),
    [(0, "m5[s2:0+1]"), (49, "m5[s2:0+1]"), (50, "m3[s2:0+1]"), (100, "m2[s2:0+1]")],
)
def test_distserve_the_share_that_is_left_decides_when_prompts_are_let_in(low, third):
    """s0 ends after one decode, s1 after three. s2 comes in the decode phase; at 100 % it is admitted at once."""
    schedule = run_golden(
        f"distserve:low={low}",
        stages=1,
        chunk_size=8,
        prompts=[1, 1, 1],
        outputs=[3, 5, 1],
        max_num_seqs=3,
        arrivals=[0, 0, 3],
    )
    assert schedule[int(third[1])] == third, schedule


def test_golden_distserve_the_share_is_of_those_that_ran_when_the_phase_began():
    """Two of four end while no request waits. s4 then comes: a half is left, so it is admitted at once."""
    schedule = run_golden(
        "distserve",
        stages=1,
        chunk_size=8,
        prompts=[1] * 5,
        outputs=[2, 2, 4, 4, 1],
        max_num_seqs=5,
        arrivals=[0, 0, 0, 0, 5],
    )
    assert schedule == [
        "m0[s0:0+1 s1:0+1 s2:0+1 s3:0+1]",
        "m1[d s0:1 s1:1 s2:1 s3:1]",
        "m2[d s2:2 s3:2]",
        "m3[s4:0+1]",
        "m4[d s2:3 s3:3]",
    ]


def test_distserve_leaves_a_tenth_of_the_cache_to_decodes():
    """20 pages of 1: the prompt of 19 leaves fewer than 2 free, so the one of 1 is not admitted with it."""
    schedule = run_golden(
        "distserve", stages=1, chunk_size=64, prompts=[19, 1], outputs=[2, 1], num_pages=20, page_size=1
    )
    assert schedule == ["m0[s0:0+19]", "m1[d s0:19]", "m2[s1:0+1]"]


# chunkllm


def chunks_of(spec: str, prompts: list[tuple[int, tuple[int, ...]]], *, max_model_len: int = 256) -> list[str]:
    """Return the schedule of prompts with their paragraph ends. Each is answered with one token, on one stage."""
    limits = Limits(1, 1, 16, max_model_len, 16, 64, 1)
    requests = [request(index, prompt, 1, ends) for index, (prompt, ends) in enumerate(prompts)]
    _, schedule = drive(Coordinator(limits, make_policy(spec)), requests, [0] * len(requests))
    return [str(microbatch) for microbatch in schedule]


SHORT = [(3, ())] * 3


def test_golden_chunkllm_cuts_above_the_threshold_only():
    assert chunks_of("chunkllm:threshold=10", [(10, (4,)), (24, ()), *SHORT]) == [
        "m0[s0:0+10]",
        "m1[s1:0+10]",
        "m2[s1:10+10]",
        "m3[s1:20+4]",
        "m4[s2:0+3]",
        "m5[s3:0+3]",
        "m6[s4:0+3]",
    ]


def test_golden_chunkllm_the_threshold_is_a_quarter_of_the_longest_sequence():
    schedule = chunks_of("chunkllm", [(24, ()), *SHORT], max_model_len=32)
    assert schedule[:3] == ["m0[s0:0+8]", "m1[s0:8+8]", "m2[s0:16+8]"]


def test_golden_chunkllm_cuts_at_the_last_paragraph_end_in_reach():
    """The ends 4 and 9 are within 10, and 9 is the last. The next at 19 is just in reach; 32 is not, so 29 is taken."""
    schedule = chunks_of("chunkllm:threshold=10", [(33, (4, 9, 19, 32)), *SHORT])
    assert schedule[:4] == ["m0[s0:0+9]", "m1[s0:9+10]", "m2[s0:19+10]", "m3[s0:29+4]"]


def test_golden_chunkllm_overlap_is_part_of_the_chunk():
    """A fifth of 10 is computed again and 8 are new. If only 6 are new, only 1 earlier token is repeated."""
    schedule = chunks_of("chunkllm:threshold=10,overlap=0.2", [(24, ()), *SHORT])
    assert schedule[:3] == ["m0[s0:0+10]", "m1[s0:8+10]", "m2[s0:17+7]"]


@pytest.mark.parametrize(("others", "tokens", "overlap"), [(3, 7, 3), (2, 30, 0)])
def test_chunkllm_runs_the_rest_of_a_prompt_whole_when_fewer_than_four_could_run(others, tokens, overlap):
    started = (sequence(0, 40, issued=10),)
    waiting = tuple(sequence(index, 3) for index in range(1, 1 + others))
    (grant,) = ChunkLLM(threshold=10, overlap=0.3).pick(view(WIDE, prefills=started, waiting=waiting))
    assert (grant.num_tokens, grant.overlap) == (tokens, overlap)


def test_chunkllm_counts_those_whose_next_token_is_in_flight_among_what_runs():
    started = sequence(0, 40, issued=10)
    running = {0: started, **{index: sequence(index, 5, issued=5) for index in range(1, 4)}}
    (grant,) = ChunkLLM(threshold=10).pick(view(WIDE, prefills=(started,), running=running))
    assert grant.num_tokens == 10


def test_golden_chunkllm_runs_whole_prompts_when_fewer_than_four_could_run():
    assert chunks_of("chunkllm:threshold=10", [(24, ()), (24, ()), (3, ())]) == [
        "m0[s0:0+24]",
        "m1[s1:0+24]",
        "m2[s2:0+3]",
    ]


def test_chunkllm_decodes_ride_along_up_to_their_share():
    """Orca's rule: four seats on two stages are two decodes per microbatch, and a full one takes no prompt."""
    limits = Limits(2, 1, 4, 256, 16, 64, 2)
    ready = tuple(sequence(index, 9, issued=9) for index in range(3))
    waiting = (sequence(3, 5), sequence(4, 5))

    def granted(decodes):
        return [grant.sequence.index for grant in ChunkLLM().pick(view(limits, decodes=decodes, waiting=waiting))]

    assert granted(ready) == [0, 1]
    assert granted(ready[:1]) == [0, 3]
    assert granted(()) == [3]


class RepeatsEverything(Policy):
    """A policy that grants all available work, with an overlap of one token if possible."""

    def pick(self, moment: View) -> list[Grant]:
        everyone = (*moment.prefills, *moment.waiting, *moment.decodes)
        return [Grant(s, min(s.remaining, 4), min(s.issued, 1)) for s in everyone]

    def max_tokens(self, limits: Limits) -> int:
        return 64


def test_the_coordinator_takes_overlap_for_prompts_and_none_for_decodes():
    limits = Limits(1, 1, 16, 256, 16, 64, 1)
    coordinator, pipeline = Coordinator(limits, RepeatsEverything()), StandInPipeline(limits)
    coordinator.submit(request(0, 6))
    for expected in ("m0[s0:0+4]", "m1[s0:3+3]"):
        microbatch = coordinator.next_microbatch()
        assert str(microbatch) == expected
        coordinator.complete(pipeline.run(microbatch))
    with pytest.raises(PolicyError, match="a decode is one token"):
        coordinator.next_microbatch()


def test_chunkllm_a_decode_never_overlaps():
    """After preemption a sequence may have only its last known token left: that is a decode."""
    limits = Limits(1, 1, 16, 256, 16, 64, 1)
    preempted = sequence(0, 20, issued=20)
    preempted.tokens.append(1)
    assert preempted.decoding
    others = tuple(sequence(index, 5) for index in range(1, 4))
    (grant,) = ChunkLLM(threshold=10, overlap=0.3).pick(view(limits, prefills=(preempted,), waiting=others))
    assert (grant.num_tokens, grant.overlap) == (1, 0)


@given(st.integers(1, 60), st.floats(0, 0.3), st.sets(st.integers(1, 200)), st.integers(0, 199))
@settings(max_examples=examples(40))
def test_chunkllm_chunks_stay_within_the_threshold_and_the_overlap_within_its_share(threshold, overlap, ends, issued):
    made = Sequence(request(0, 200, ends=tuple(sorted(ends))), 0)
    made.issued = issued
    grant = ChunkLLM(threshold=threshold, overlap=overlap)._chunk(made, WIDE)
    assert 1 <= grant.num_tokens <= made.remaining and 0 <= grant.overlap <= issued
    assert grant.overlap + grant.num_tokens <= threshold
    assert grant.overlap <= overlap * (grant.overlap + grant.num_tokens) + 1e-9
    end = issued + grant.num_tokens
    reach = min(200, issued + threshold - min(issued, int(overlap * threshold)))
    assert end == max((e for e in ends if issued < e <= reach), default=reach) or end == reach == 200


# All of them

SPECS = (
    *POLICIES,
    "sglang:dynamic=1",
    "gllm:iterp=1,minp=1,maxp=9,kvthresh=50",
    "gllm:kvthresh=0,minp=40",
    "distserve:low=0",
    "distserve:low=100",
    "chunkllm:threshold=5,overlap=0.3",
    "chunkllm:threshold=1,overlap=0.3",
)
COST = CostModel(4, (stage_cost(0.1, 1.0), stage_cost(0.2, 1.0)))
SHAPES = st.tuples(st.integers(1, 40), st.integers(0, 8), st.integers(0, 20), st.frozensets(st.integers(1, 40)))


@settings(max_examples=examples(60))
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=9),
    spec=st.sampled_from(SPECS),
    stages=st.integers(1, 3),
    chunk_size=st.sampled_from([1, 7, 64, 128]),
    max_num_seqs=st.integers(1, 7),
    page_size=st.sampled_from([1, 4, 16]),
    slack=st.integers(0, 30),
)
def test_every_request_is_answered_within_the_policy_s_bound(
    shapes, spec, stages, chunk_size, max_num_seqs, page_size, slack
):
    num_pages = -(-40 // page_size) + slack // page_size
    limits = Limits(stages, chunk_size, max_num_seqs, 48, page_size, num_pages, stages)
    policy = make_policy(spec)
    coordinator = Coordinator(limits, policy, eos_token_ids=[EOS], cost=COST)
    requests = [request(index, prompt, new, tuple(sorted(ends))) for index, (prompt, new, _, ends) in enumerate(shapes)]
    done, schedule = drive(coordinator, requests, sorted(arrival for _, _, arrival, _ in shapes))
    for asked in requests:
        check_answer(done[asked.index], limits)
    assert coordinator.pool.num_free == num_pages
    assert all(1 <= microbatch.num_tokens <= policy.max_tokens(limits) for microbatch in schedule)
    assert all(chunk.num_tokens == 1 for microbatch in schedule for chunk in microbatch.chunks if chunk.decode)
    if not coordinator.num_preemptions and "overlap" not in spec:
        issued = sum(microbatch.num_tokens for microbatch in schedule)
        answers = [(len(asked.prompt_token_ids), len(done[asked.index].token_ids)) for asked in requests]
        assert issued == sum(prompt + output - 1 for prompt, output in answers if output)


@pytest.mark.parametrize("spec", ["chunkllm:threshold=8", "distserve", "gllm:maxp=1,minp=1", "sglang"])
def test_the_policy_s_bound_holds_where_decodes_are_more_than_anything_else(spec):
    """Twelve seats, no sequence of more than eight tokens, and a long prompt among the decodes."""
    limits, policy = Limits(1, 1, 12, 8, 4, 64, 1), make_policy(spec)
    requests = [*(request(index, 1, 7) for index in range(12)), request(12, 7, 1)]
    _, schedule = drive(Coordinator(limits, policy), requests, [0] * 13)
    assert 7 <= max(microbatch.num_tokens for microbatch in schedule) <= policy.max_tokens(limits)


@pytest.mark.parametrize("spec", [*POLICIES, "distserve:low=0"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_newcomers_that_end_with_their_first_token_keep_nobody_waiting(spec, stages):
    """Two requests decode while prompts arrive without end; each of these frees its seat at once."""
    limits = Limits(stages, 4, 2 * stages, 64, 4, 40, stages)
    coordinator = Coordinator(limits, make_policy(spec))
    pipeline, inflight, finished, newcomers = StandInPipeline(limits), deque(), set(), count(2)
    coordinator.submit(request(0, 3, 10))
    coordinator.submit(request(1, 5, 10))
    for _ in range(200):
        while coordinator.num_waiting < limits.max_num_seqs:
            coordinator.submit(request(next(newcomers), 6, 1))
        while (microbatch := coordinator.next_microbatch()) is not None:
            inflight.append(microbatch)
        finished |= {done.request.index for done in coordinator.complete(pipeline.run(inflight.popleft()))}
    assert {0, 1} <= finished
