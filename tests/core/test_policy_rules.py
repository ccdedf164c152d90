"""A policy that breaks the rules of scheduling is refused. The error says its name, its action and the legal ones.

A run continues under a legal policy for some steps; then its next choice is spoilt in one way.
"""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_pp.core.coordinator import Coordinator
from sarathi_pp.core.plan import MicroBatch, StepResult
from sarathi_pp.core.policy import Grant, Limits, Policy, make_policy
from sarathi_pp.core.request import Request
from sarathi_pp.core.sequence import Sequence
from sarathi_pp.errors import PolicyError
from sarathi_pp.sampling_params import SamplingParams
from tests.core.driving import StandInPipeline
from tests.thinning import examples

LIMITS = Limits(num_stages=2, chunk_size=8, max_num_seqs=3, max_model_len=64, page_size=4, num_pages=40, inflight=2)
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True, seed=0)


def first(grants, **changed):
    """Replace values of the first grant, and keep the others after it."""
    return [grants[0]._replace(**changed), *grants[1:]]


# Name: (the spoilt choice, from the legal one and the view; the error's message).
SPOILT = {
    "none": (lambda grants, view: None, "returned None; it must be a list of Grants"),
    "plain tuples": (lambda grants, view: [tuple(grant) for grant in grants], "it must be a list of Grants"),
    "no tokens": (lambda grants, view: first(grants, num_tokens=0), "granted 0 tokens of"),
    "fewer": (lambda grants, view: first(grants, num_tokens=-1), "granted -1 tokens of"),
    "more than known": (
        lambda grants, view: first(grants, num_tokens=grants[0].sequence.remaining + 1),
        r"granted \d+ tokens of .*; .* has \d+ tokens to grant and",
    ),
    "half a token": (lambda grants, view: first(grants, num_tokens=0.5), "granted 0.5 tokens of .*must be integers"),
    "a real number": (lambda grants, view: first(grants, num_tokens=1.0), "granted 1.0 tokens of"),
    "an overlap too long": (
        lambda grants, view: first(grants, overlap=grants[0].sequence.issued + 1),
        r"with an overlap of \d+; .* \d+ to repeat",
    ),
    "an overlap below zero": (lambda grants, view: first(grants, overlap=-1), "with an overlap of -1"),
    "twice": (lambda grants, view: [*grants, grants[0]._replace(num_tokens=1)], "twice; a sequence has one grant"),
    "a stranger": (
        lambda grants, view: [Grant(Sequence(Request(99, (1,) * 5, PARAMS), 99), 1)],
        "it may grant only sequences of its view",
    ),
    "a copy": (
        lambda grants, view: [Grant(Sequence(Request(grants[0].sequence.index, (1,) * 5, PARAMS), 0), 1)],
        "it may grant only sequences of its view",
    ),
}


@dataclass
class Spoilt(Policy):
    """A policy that chooses as sarathi until `at` microbatches are issued, and then lets `spoil` change the choice."""

    spoil: object
    at: int
    most: int = 64
    left: int = field(default=0, init=False)

    def pick(self, view):
        legal = make_policy("sarathi").pick(view)
        if not legal:
            return legal
        self.left += 1
        return self.spoil(legal, view) if self.left > self.at else legal

    def max_tokens(self, limits):
        return self.most


def run(policy: Policy, prompts: list[int]) -> tuple[Coordinator, deque[MicroBatch]]:
    """Run until the policy is refused. Return the coordinator in its state then, and the microbatches in flight."""
    coordinator, pipeline, inflight = Coordinator(LIMITS, policy), StandInPipeline(LIMITS), deque()
    for index, length in enumerate(prompts):
        coordinator.submit(Request(index, (1,) * length, PARAMS))
    try:
        while coordinator.unfinished:
            if (microbatch := coordinator.next_microbatch()) is not None:
                inflight.append(microbatch)
            else:
                coordinator.complete(pipeline.run(inflight.popleft()))
    except PolicyError as error:
        error.args = (*error.args, coordinator, inflight)
        raise
    raise AssertionError("the run ended before the choice was spoilt")


@settings(max_examples=examples(150))
@given(
    name=st.sampled_from(sorted(SPOILT)),
    at=st.integers(0, 5),
    prompts=st.lists(st.integers(3, 30), min_size=2, max_size=5),
)
def test_an_illegal_choice_is_refused_whenever_it_comes(name, at, prompts):
    spoil, says = SPOILT[name]
    with pytest.raises(PolicyError, match=f"the policy {__name__}:Spoilt .*{says}") as refused:
        run(Spoilt(spoil, at), prompts)
    _, coordinator, inflight = refused.value.args
    coordinator.abort(inflight)  # as the engine does; the next call works
    assert coordinator.pool.num_free == LIMITS.num_pages and not coordinator.num_running


def test_a_microbatch_above_what_the_policy_said_is_refused():
    """The wire's buffers have that size."""
    with pytest.raises(PolicyError, match="made a microbatch of 8 tokens; its max_tokens allows 7"):
        run(Spoilt(lambda legal, view: legal, at=99, most=7), [20])


def test_a_policy_that_waits_for_nothing_is_refused():
    with pytest.raises(PolicyError, match="waits for a result with nothing in flight"):
        run(Spoilt(lambda legal, view: [], at=0), [20])


def test_a_sequence_that_has_no_seat_is_none_to_grant():
    """Four requests, three seats: the fourth is in no view, and a policy that remembers it is refused."""
    known = {}

    class Remembers(Policy):
        def pick(self, view):
            known.update({s.index: s for s in view.waiting})
            return [Grant(known[0], 1)] if view.running else [Grant(s, s.remaining) for s in view.waiting]

        def max_tokens(self, limits):
            return 64

    coordinator = Coordinator(LIMITS, Remembers())
    for index in range(4):
        coordinator.submit(Request(index, (1,) * 5, PARAMS))
    assert str(coordinator.next_microbatch()) == "m0[s0:0+5 s1:0+5 s2:0+5]"
    with pytest.raises(PolicyError, match="granted 1 tokens of .*; .* has 0 tokens to grant"):
        coordinator.next_microbatch()  # its next token is in flight
    known[0] = coordinator._waiting[0]
    with pytest.raises(PolicyError, match="it may grant only sequences of its view"):
        coordinator.next_microbatch()
    coordinator.complete(StepResult(0))
