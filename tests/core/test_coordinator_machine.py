"""In any order of events, a coordinator keeps its books, and every request gets its own answer once.

Rules: a request comes, a microbatch is issued, the oldest result comes back, one of its requests fails. Waiting
requests may be withdrawn, as in a run that is asked to stop. The whole coordinator may be lost, as after the kill of a
stage. A new one then gets the unanswered requests, as in a resumed run. Pools are small, so that preemption is common.
"""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sarathi_pp.core.coordinator import Coordinator
from sarathi_pp.core.draw_rules import Failure
from sarathi_pp.core.plan import StepResult
from sarathi_pp.core.policy import POLICIES, make_policy
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.request import Request
from sarathi_pp.sampling_params import SamplingParams
from tests.core.driving import EOS, StandInPipeline, check_answer, check_sums
from tests.thinning import examples

MAX_MODEL_LEN = 32
PAGE_SIZE = 4


class CoordinatorMachine(RuleBasedStateMachine):
    @initialize(
        spec=st.sampled_from([*POLICIES]),
        stages=st.integers(1, 3),
        extra=st.integers(0, 1),
        ahead=st.booleans(),
        chunk_size=st.sampled_from([1, 5, 16]),
        max_num_seqs=st.integers(1, 6),
        num_pages=st.integers(MAX_MODEL_LEN // PAGE_SIZE, 16),
    )
    def begin(self, spec, stages, extra, ahead, chunk_size, max_num_seqs, num_pages):
        sizes = stages, chunk_size, max_num_seqs, MAX_MODEL_LEN, PAGE_SIZE, num_pages, stages + extra
        self.limits = Limits(*sizes, issues_ahead=ahead and stages + extra == 1)
        self.spec = spec
        self.unanswered = {}  # by index: of this coordinator or, after withdrawal, of the next
        self.withdrawn = {}
        self.answered = {}
        self.failed = set()
        self.next_index = 0
        self.start()

    def start(self):
        self.coordinator = Coordinator(self.limits, make_policy(self.spec), eos_token_ids=[EOS])
        self.pipeline = StandInPipeline(self.limits)
        self.inflight = deque()

    def submit_to_it(self, request):
        self.unanswered[request.index] = request
        immediate = self.coordinator.submit(request)
        self.take([immediate] if immediate else [])

    def take(self, completions):
        for completion in completions:
            index = completion.request.index
            assert index not in self.answered, "answered twice"
            assert self.unanswered.pop(index) is completion.request
            self.answered[index] = completion

    @rule(prompt=st.integers(1, MAX_MODEL_LEN), output=st.integers(0, 12), ignore_eos=st.booleans())
    def submit(self, prompt, output, ignore_eos):
        sampling = SamplingParams(max_new_tokens=output, ignore_eos=ignore_eos, seed=self.next_index)
        self.submit_to_it(Request(self.next_index, (1,) * prompt, sampling))
        self.next_index += 1

    @rule()
    def issue(self):
        microbatch = self.coordinator.next_microbatch()
        if microbatch is not None:
            assert 1 <= microbatch.num_tokens <= make_policy(self.spec).max_tokens(self.limits)
            self.inflight.append(microbatch)

    @precondition(lambda self: self.inflight)
    @rule()
    def complete(self):
        self.take(self.coordinator.complete(self.pipeline.run(self.inflight.popleft())))

    @precondition(lambda self: self.inflight)
    @rule(data=st.data())
    def complete_with_a_failure(self, data):
        result = self.pipeline.run(self.inflight.popleft())
        tokens = list(result.tokens)
        if tokens:
            place = data.draw(st.integers(0, len(tokens) - 1))
            tokens[place] = tokens[place]._replace(failure=Failure.NOT_FINITE, first_bad=1)
        for completion in (done := self.coordinator.complete(StepResult(result.index, tuple(tokens)))):
            if completion.finish_reason == "error":
                assert completion.first_bad == 1
                self.failed.add(completion.request.index)
        self.take(done)

    @rule()
    def withdraw(self):
        for request in self.coordinator.withdraw():
            self.withdrawn[request.index] = self.unanswered.pop(request.index)

    @rule()
    def lose_the_coordinator(self):
        """Drop the coordinator with its results in flight. The new one has a new pool, so no old page is given back."""
        again = {**self.unanswered, **self.withdrawn}
        self.unanswered, self.withdrawn = {}, {}
        self.start()
        for index in sorted(again):
            self.submit_to_it(again[index])

    @invariant()
    def the_books_are_right(self):
        if not hasattr(self, "coordinator"):
            return
        coordinator, pool = self.coordinator, self.coordinator.pool
        check_sums(coordinator)
        held = [page for sequence in coordinator._running.values() for page in sequence.pages]
        assert len(held) == len(set(held)) == pool.num_pages - pool.num_free
        assert coordinator.num_running <= self.limits.max_num_seqs
        assert len(self.inflight) == coordinator.num_inflight <= self.limits.most_inflight
        for sequence in coordinator._running.values():
            assert 0 <= sequence.done <= sequence.issued <= sequence.known

    def teardown(self):
        """Check that every request is answered, with the answer it would get alone."""
        if not hasattr(self, "coordinator"):
            return
        while self.inflight:
            self.complete()
        for request in self.withdrawn.values():
            self.submit_to_it(request)
        for _ in range(20_000):
            before = len(self.inflight)
            self.issue()
            if len(self.inflight) == before:
                if not self.inflight:
                    break
                self.complete()
        assert not self.coordinator.unfinished and not self.unanswered
        assert self.coordinator.pool.num_free == self.limits.num_pages
        for index, completion in self.answered.items():
            if index not in self.failed:
                check_answer(completion, self.limits)


TestCoordinator = CoordinatorMachine.TestCase
TestCoordinator.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
