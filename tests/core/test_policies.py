"""The choices of each rule: golden schedules small enough to check manually, and the rules of the sources, quoted."""

from collections import deque
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sarathi_pp.core.coordinator import Coordinator
from sarathi_pp.core.policy import POLICIES, make_policy, parse_policy
from sarathi_pp.core.policy.view import Limits, View
from sarathi_pp.core.request import Request
from sarathi_pp.errors import ConfigError
from sarathi_pp.sampling_params import SamplingParams
from tests.core.driving import StandInPipeline, run_golden
from tests.thinning import examples


@dataclass(frozen=True)
class Seen:
    """A sequence as a policy sees it. If done is less than issued, part of it is in flight."""

    index: int
    done: int
    issued: int
    known: int
    num_prompt: int
    paragraph_ends: tuple[int, ...] = ()

    @property
    def order(self):
        return self.index

    @property
    def remaining(self):
        return self.known - self.issued

    @property
    def decoding(self):
        return self.issued == self.known - 1 and self.known > self.num_prompt


def prompt(index, tokens, *, issued=0, in_flight=0):
    return Seen(index, issued - in_flight, issued, tokens, tokens)


def decode(index):
    return Seen(index, 10, 10, 11, 10)


def in_flight(index):
    return Seen(index, 9, 10, 10, 10)


def chosen(spec, *, prefills=(), waiting=(), decodes=(), flying=(), **limits):
    """Return the policy's grants at this moment: tokens by sequence, in the order of the grants."""
    running = sorted((*prefills, *decodes, *flying), key=lambda sequence: sequence.index)
    view = View(
        prefills=prefills,
        waiting=waiting,
        decodes=decodes,
        running={sequence.index: sequence for sequence in running},
        limits=replace(Limits(2, 8, 6, 256, 4, 256, 2), **limits),
        num_inflight=len(flying),
        slot=0,
        free_tokens=1024,
    )
    policy = make_policy(spec)
    grants = policy.pick(view)
    assert sum(grant.num_tokens for grant in grants) <= policy.max_tokens(view.limits)
    return {grant.sequence.index: grant.num_tokens for grant in grants}


# Algorithm 3 of Sarathi-Serve, arXiv 2403.02310; the numbers below are its line numbers.


def test_sarathi_serve_packs_all_the_running_decodes_first():
    """Lines 6-8: "we first pack all the running decodes in the next batch", at any number of decodes (B would be 3)."""
    grants = chosen("sarathi-serve", decodes=[decode(i) for i in range(5)], waiting=[prompt(5, 20)])
    assert grants == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 3}


def test_sarathi_serve_completes_partial_prefills_before_it_admits():
    """Lines 9-12 before 13-20: "only after all the running requests have been accommodated, we admit new requests"."""
    started, new = prompt(7, 9, issued=4), prompt(3, 20)
    assert chosen("sarathi-serve", prefills=[started], waiting=[new]) == {7: 5, 3: 3}
    assert chosen("sarathi-serve", prefills=[started], waiting=[new], chunk_size=5) == {7: 5}


def test_sarathi_serve_gives_what_a_last_chunk_leaves_to_the_next_requests():
    """Lines 11 and 15: "the maximum chunk size that can be accommodated within the leftover token budget"."""
    waiting = [prompt(2, 2), prompt(3, 1), prompt(4, 9)]
    assert chosen("sarathi-serve", prefills=[prompt(1, 9, issued=8)], waiting=waiting) == {1: 1, 2: 2, 3: 1, 4: 4}


def test_sarathi_serve_has_one_chunk_of_a_request_in_flight():
    """A request is in one batch at a time. The budget of a prompt in flight is available to others."""
    flying = prompt(1, 30, issued=8, in_flight=8)
    assert chosen("sarathi-serve", prefills=[flying, prompt(2, 5, issued=2)], waiting=[prompt(3, 9)]) == {2: 3, 3: 5}
    assert chosen("sarathi-serve", prefills=[flying]) == {}


def test_sarathi_serve_leaves_prompts_nothing_where_decodes_exceed_the_budget():
    """tau - n_t is negative in the authors' code then; all decodes still run."""
    grants = chosen("sarathi-serve", decodes=[decode(i) for i in range(5)], waiting=[prompt(5, 20)], chunk_size=3)
    assert grants == dict.fromkeys(range(5), 1)


def test_golden_sarathi_serve_a_lone_prompt_waits_for_its_own_chunks():
    """C = 8, P = 2: s0's second chunk follows the result of its first. Meanwhile s1 runs in cohorts of its own."""
    assert run_golden("sarathi-serve", stages=2, chunk_size=8, prompts=[20, 3], outputs=[2, 3]) == [
        "m0[s0:0+8]",
        "m1[s1:0+3]",
        "m2[s0:8+8]",
        "m3[d s1:3]",
        "m4[s0:16+4]",
        "m5[d s1:4]",
        "m6[d s0:20]",
    ]


def test_vllm_takes_the_running_requests_in_the_order_they_arrived():
    """As "there's no decoding phase nor prefill phase", an older prompt comes before a younger decode."""
    grants = chosen("vllm", prefills=[prompt(1, 9, issued=4)], decodes=[decode(0), decode(2)], waiting=[prompt(3, 9)])
    assert list(grants.items()) == [(0, 1), (1, 5), (2, 1), (3, 1)]
    assert chosen("vllm", prefills=[prompt(1, 9)], decodes=[decode(2)], waiting=[prompt(3, 9)]) == {1: 8}


def test_golden_vllm_shares_one_budget():
    """C = 4, P = 1."""
    assert run_golden("vllm", stages=1, chunk_size=4, prompts=[2, 6, 2], outputs=[3, 2, 1]) == [
        "m0[s0:0+2 s1:0+2]",
        "m1[s1:2+3 | d s0:2]",
        "m2[s1:5+1 s2:0+2 | d s0:3]",
        "m3[d s1:6]",
    ]


def test_golden_vllm_streams_the_chunks_of_one_prompt():
    """P = 3: s0 fills the pipeline alone. s1 waits although m1 and m2 have no result of s0 to build on."""
    assert run_golden("vllm", stages=3, chunk_size=8, prompts=[20, 10], outputs=[2, 2]) == [
        "m0[s0:0+8]",
        "m1[s0:8+8]",
        "m2[s0:16+4 s1:0+4]",
        "m3[s1:4+6]",
        "m4[d s0:20]",
        "m5[d s1:10]",
    ]


def test_golden_vllm_v0_pauses_decodes_while_prompts_run():
    """s2 arrives while m1 runs, and s0 and s1 wait for its prompt."""
    schedule = run_golden("vllm-v0", stages=1, chunk_size=4, prompts=[4, 5, 3], outputs=[3, 3, 2], arrivals=[0, 0, 3])
    assert schedule == [
        "m0[s0:0+4 s1:0+5]",
        "m1[d s0:4 s1:5]",
        "m2[s2:0+3]",
        "m3[d s0:5 s1:6 s2:3]",
    ]


def test_golden_vllm_v0_lets_decodes_have_a_turn_after_as_many_prompts_as_there_are_seats():
    """Two seats; s1 and s2 end with their first token, so that s3 could start before s0 continues."""
    schedule = run_golden("vllm-v0", stages=1, chunk_size=4, prompts=[200] * 4, outputs=[2, 1, 1, 1], max_num_seqs=2)
    assert schedule == ["m0[s0:0+200]", "m1[s1:0+200]", "m2[d s0:200]", "m3[s2:0+200]", "m4[s3:0+200]"]


def test_golden_vllm_v0_runs_as_many_whole_prompts_as_the_longest_has_tokens():
    """256 is the longest; s0 and s1 together exceed it, and s1 and s2 fit exactly."""
    assert run_golden("vllm-v0", stages=2, chunk_size=4, prompts=[150, 156, 100], outputs=[1, 2, 2]) == [
        "m0[s0:0+150]",
        "m1[s1:0+156 s2:0+100]",
        "m2[d s1:156 s2:100]",
    ]


def test_golden_fastertransformer_lets_nobody_join_a_batch():
    """P = 2, two requests per batch. s4 waits for a batch to end although s0's seat is free from m2 on."""
    prompts, outputs = [3, 5, 2, 4, 6], [1, 4, 2, 2, 1]
    assert run_golden("fastertransformer", stages=2, chunk_size=4, prompts=prompts, outputs=outputs) == [
        "m0[s0:0+3 s1:0+5]",
        "m1[s2:0+2 s3:0+4]",
        "m2[d s1:5]",
        "m3[d s2:2 s3:4]",
        "m4[d s1:6]",
        "m5[s4:0+6]",
        "m6[d s1:7]",
    ]


def test_golden_fastertransformer_runs_all_prompts_of_a_batch_before_its_decodes():
    """The longest prompt may have 256 tokens, so s0 to s2 need two microbatches. s3 is the other batch."""
    shapes = {"prompts": [150, 150, 2, 5], "outputs": [3, 2, 2, 1]}
    assert run_golden("fastertransformer", stages=2, chunk_size=4, max_num_seqs=6, **shapes) == [
        "m0[s0:0+150]",
        "m1[s3:0+5]",
        "m2[s1:0+150 s2:0+2]",
        "m3[d s0:150 s1:150 s2:2]",
        "m4[d s0:151]",
    ]


def test_golden_fastertransformer_a_request_that_lost_its_pages_starts_anew():
    """Two pages of 4 and one batch of two: s0's fifth token takes the page of s1, which waits for s0's end."""
    pages = {"num_pages": 2, "page_size": 4, "max_num_seqs": 2}
    assert run_golden("fastertransformer", stages=1, chunk_size=4, prompts=[3, 3], outputs=[3, 3], **pages) == [
        "m0[s0:0+3 s1:0+3]",
        "m1[d s0:3 s1:3]",
        "m2[d s0:4]",
        "m3[s1.1:0+5]",
    ]


def test_golden_splitfuse_composes_the_exact_count():
    """C = 8, P = 1: s2 is cut to fill what s0 and s1 leave."""
    assert run_golden("splitfuse", stages=1, chunk_size=8, prompts=[3, 4, 9], outputs=[2, 2, 1]) == [
        "m0[s0:0+3 s1:0+4 s2:0+1]",
        "m1[s2:1+6 | d s0:3 s1:4]",
        "m2[s2:7+2]",
    ]


def test_splitfuse_puts_next_tokens_before_prompts():
    grants = chosen("splitfuse", prefills=[prompt(1, 9)], decodes=[decode(2), decode(0)], waiting=[prompt(3, 9)])
    assert list(grants.items()) == [(2, 1), (0, 1), (1, 6)]


@given(
    lengths=st.lists(st.integers(1, 20), max_size=8),
    num_decodes=st.integers(0, 12),
    chunk_size=st.integers(1, 40),
)
@settings(max_examples=examples(25))
def test_splitfuse_is_exact_whenever_enough_tokens_are_there(lengths, num_decodes, chunk_size):
    """The source: "even short prompts may be decomposed to ensure the budget is precisely met"."""
    decodes = [decode(100 + i) for i in range(num_decodes)]
    waiting = [prompt(i, tokens) for i, tokens in enumerate(lengths)]
    grants = chosen("splitfuse", decodes=decodes, waiting=waiting, chunk_size=chunk_size)
    assert sum(grants.values()) == min(chunk_size, num_decodes + sum(lengths))


PAGES_OF_4 = {"stages": 1, "chunk_size": 10, "prompts": [20, 3, 9], "outputs": [1, 1, 1], "page_size": 4}


def test_golden_tensorrt_llm_first_come_first_served():
    """A budget of 10 is two pages of s0 while it is cut; the two remaining tokens hold no page of s2."""
    assert run_golden("tensorrt-llm", **PAGES_OF_4) == [
        "m0[s0:0+8]",
        "m1[s0:8+8]",
        "m2[s0:16+4 s1:0+3]",
        "m3[s2:0+9]",
    ]


def test_golden_tensorrt_llm_equal_progress():
    """The requests get one page each in turn, while the budget of 10 holds one. In m2, s2 ends with a partial page."""
    assert run_golden("tensorrt-llm:equal=1", **PAGES_OF_4) == [
        "m0[s0:0+4 s1:0+3]",
        "m1[s0:4+4 s2:0+4]",
        "m2[s0:8+4 s2:4+5]",
        "m3[s0:12+8]",
    ]


def test_tensorrt_llm_takes_its_share_of_requests_in_the_order_of_arrival():
    """Three of six run on two stages, prompts and decodes alike. Requests in flight are left out."""
    flying = prompt(0, 30, issued=8, in_flight=8)
    grants = chosen(
        "tensorrt-llm",
        prefills=[flying, prompt(2, 9)],
        decodes=[decode(3), decode(1), decode(4)],
        flying=[in_flight(5)],
        waiting=[prompt(6, 4)],
    )
    assert grants == {1: 1, 3: 1, 2: 4}


def test_tensorrt_llm_starts_no_prompt_where_no_page_of_the_oldest_fits():
    """Two tokens are left over after the decodes.

    s2 alone would fit, but similar requests could then block s1 forever.
    """
    short = {"prefills": [prompt(1, 9)], "waiting": [prompt(2, 2)], "max_num_seqs": 10, "chunk_size": 4}
    assert chosen("tensorrt-llm", decodes=[decode(3), decode(4)], **short) == {3: 1, 4: 1}
    assert chosen("tensorrt-llm:equal=1", decodes=[decode(3), decode(4)], **short) == {3: 1, 4: 1}


def test_tensorrt_llm_runs_a_page_where_the_budget_is_smaller():
    assert chosen("tensorrt-llm", waiting=[prompt(0, 9)], chunk_size=3) == {0: 4}


def test_golden_tgi_decodes_until_enough_wait():
    """Ratio 1, and two run. s2 alone is not enough. When s3 comes, both prompts run after the current decode step."""
    schedule = run_golden(
        "tgi:ratio=100", stages=1, chunk_size=4, prompts=[4, 5, 3, 2], outputs=[4, 4, 1, 1], arrivals=[0, 0, 2, 5]
    )
    assert schedule == [
        "m0[s0:0+4 s1:0+5]",
        "m1[d s0:4 s1:5]",
        "m2[d s0:5 s1:6]",
        "m3[s2:0+3 s3:0+2]",
        "m4[d s0:6 s1:7]",
    ]


def test_golden_tgi_admits_fewer_once_they_have_waited_long_enough():
    """After two tokens per running request, s2 is admitted alone."""
    spec = "tgi:ratio=100,max_waiting_tokens=2"
    schedule = run_golden(spec, stages=1, chunk_size=4, prompts=[4, 5, 3], outputs=[4, 4, 1], arrivals=[0, 0, 2])
    assert schedule == [
        "m0[s0:0+4 s1:0+5]",
        "m1[d s0:4 s1:5]",
        "m2[d s0:5 s1:6]",
        "m3[s2:0+3]",
        "m4[d s0:6 s1:7]",
    ]


def test_golden_tgi_a_step_of_decodes_stands_between_two_of_prompts():
    """All wait at once and the ratio asks for none. Only one of their prompts fits the budget of 256."""
    assert run_golden("tgi:ratio=0", stages=1, chunk_size=4, prompts=[200, 200, 200], outputs=[2, 2, 1]) == [
        "m0[s0:0+200]",
        "m1[d s0:200]",
        "m2[s1:0+200]",
        "m3[d s1:200]",
        "m4[s2:0+200]",
    ]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("tgi:ratio=-1", "an integer of at least 0"),
        ("tgi:max_waiting_tokens=x", "an integer of at least 0"),
        ("tgi:_decoded=1", "it takes: max_waiting_tokens, ratio"),
        ("tensorrt-llm:equal=2", "an integer from 0 to 1"),
        ("fastertransformer:_batches=1", "it takes: none"),
    ],
)
def test_parameters_out_of_range_and_private_state_are_refused(spec, says):
    with pytest.raises(ConfigError, match=says):
        make_policy(spec)


def ages(coordinator, shapes, newcomer):
    """Yield the microbatches that each request takes after it becomes the oldest, while newcomers keep arriving."""
    pipeline, inflight = StandInPipeline(coordinator.limits), deque()
    finished, age, next_index = set(), 0, 0
    for oldest in range(len(shapes)):
        while oldest not in finished:
            while coordinator.num_waiting < 3:
                tokens, new = shapes[next_index] if next_index < len(shapes) else newcomer
                params = SamplingParams(max_new_tokens=new, ignore_eos=True, seed=0)
                coordinator.submit(Request(next_index, (1,) * tokens, params))
                next_index += 1
            microbatch = coordinator.next_microbatch()
            if microbatch is None:
                completions = coordinator.complete(pipeline.run(inflight.popleft()))
                finished |= {completion.request.index for completion in completions}
            else:
                inflight.append(microbatch)
                age += 1
            assert age < 1000, f"request {oldest} starves"
        yield age
        age = 0


@pytest.mark.parametrize("spec", POLICIES)
def test_the_chunk_size_matters_to_those_that_are_said_to_use_it(spec):
    small, large = (
        run_golden(spec, stages=2, chunk_size=size, prompts=(40, 9), outputs=(3, 3), page_size=4) for size in (8, 64)
    )
    assert (small != large) == parse_policy(spec).kind.uses_chunk_size


SHAPES = st.tuples(st.integers(1, 12), st.integers(1, 6))  # prompt and output


@pytest.mark.parametrize("spec", [*POLICIES, "balanced:tbt_slo=0.01"])
@settings(max_examples=examples(6))
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=4),
    newcomer=st.one_of(st.tuples(st.integers(1, 12), st.just(1)), SHAPES),
    stages=st.integers(1, 3),
    chunk_size=st.sampled_from([1, 4, 16]),
    max_num_seqs=st.integers(1, 6),
    num_pages=st.integers(5, 20),
)
# Newcomers that end with their first token never fill the seats. Short ones fit when no page of an older one does.
@example(shapes=[(12, 6)], newcomer=(4, 1), stages=1, chunk_size=4, max_num_seqs=3, num_pages=20)
@example(shapes=[(3, 2), (12, 2)], newcomer=(3, 2), stages=1, chunk_size=4, max_num_seqs=6, num_pages=20)
def test_with_endless_newcomers_the_oldest_request_finishes_within_a_bound(
    spec, shapes, newcomer, stages, chunk_size, max_num_seqs, num_pages
):
    coordinator = Coordinator(Limits(stages, chunk_size, max_num_seqs, 20, 4, num_pages, stages), make_policy(spec))
    # Each of its tokens may wait at most one turn of every seat of the pipeline.
    tokens = max(prompt + output for prompt, output in (*shapes, newcomer))
    bound = tokens * stages * (1 + max_num_seqs)
    assert all(age <= bound for age in ages(coordinator, shapes, newcomer))


# Their batches end only with their longest request: ORCA was designed against this.
WHOLE_BATCHES = ("fastertransformer",)


@pytest.mark.parametrize("spec", [spec for spec in (*POLICIES, "balanced:tbt_slo=0.01") if spec not in WHOLE_BATCHES])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_one_endless_request_holds_up_no_other(spec, stages):
    """Short requests that come while it runs end long before it does."""
    coordinator = Coordinator(Limits(stages, 16, 4, 1000, 4, 400, stages), make_policy(spec))
    shapes = [(8, 600), *[(5, 3)] * 20]
    for index, (tokens, new) in enumerate(shapes):
        params = SamplingParams(max_new_tokens=new, ignore_eos=True, seed=0)
        coordinator.submit(Request(index, (1,) * tokens, params))
    pipeline, inflight, finished, issued = StandInPipeline(coordinator.limits), deque(), [], 0
    while len(finished) < len(shapes):
        microbatch = coordinator.next_microbatch()
        if microbatch is None:
            finished += [done.request.index for done in coordinator.complete(pipeline.run(inflight.popleft()))]
            continue
        inflight.append(microbatch)
        issued += 1
        assert issued < 200 or len(finished) == len(shapes) - 1, f"{len(finished)} done after {issued} microbatches"
    assert finished[-1] == 0
