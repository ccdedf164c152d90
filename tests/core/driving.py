"""A coordinator driven by a simulated pipeline whose tokens depend only on (request, position).

The output of each request must be the same for every policy, page pool and set of arrival times.
This proves the scheduling half of exactness without a model.
"""

from collections import deque

from sarathi_pp.core.coordinator import Coordinator
from sarathi_pp.core.plan import SampledToken, StepResult
from sarathi_pp.core.policy import make_policy
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.request import Completion, Request
from sarathi_pp.core.sequence import EXPECTED
from sarathi_pp.sampling_params import SamplingParams

EOS = 7


def drawn_token(index: int, position: int) -> int:
    return (index * 31 + position * 17) % 23


def check_answer(completion: Completion, limits: Limits) -> None:
    """Assert that an answer equals that of an unlimited KV cache.

    Otherwise it must be the error that this cache cannot hold it.
    """
    request = completion.request
    output, reason = expected_output(request, limits.max_model_len)
    # The last token is never an input, so it needs no place.
    room = limits.num_pages * limits.page_size - len(request.prompt_token_ids) + 1
    if len(output) <= room:
        assert (completion.token_ids, completion.finish_reason, completion.error_code) == (output, reason, None)
    else:
        assert (completion.finish_reason, completion.error_code) == ("error", "kv_cache_exhausted")
        assert completion.token_ids == output[:room]


def expected_output(request: Request, limit: int) -> tuple[tuple[int, ...], str]:
    output: list[int] = []
    prompt = len(request.prompt_token_ids)
    if request.sampling.max_new_tokens == 0 or prompt == limit:
        return (), "length"
    while True:
        output.append(drawn_token(request.index, prompt + len(output)))
        if output[-1] == EOS and not request.sampling.ignore_eos:
            return tuple(output), "stop"
        if len(output) == request.sampling.max_new_tokens or prompt + len(output) == limit:
            return tuple(output), "length"


class StandInPipeline:
    """Stages that check what real ones rely on: contiguous KV, pages for every position, one owner per page.

    If a token comes without its id, it must be one that the microbatch before has drawn.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.tables: dict[int, list[int]] = {}
        self.written: dict[int, int] = {}
        self.long_factors: dict[int, bool] = {}
        self.drawn: dict[int, int] = {}  # position of the token that the microbatch before drew, by sequence

    def run(self, microbatch) -> StepResult:
        for index in microbatch.freed:
            self.tables.pop(index, None)
            self.written.pop(index, None)
        tokens = []
        for chunk in microbatch.chunks:
            table = self.tables.setdefault(chunk.sequence, [])
            table.extend(chunk.new_pages)
            assert chunk.start <= self.written.get(chunk.sequence, 0)
            self.written[chunk.sequence] = chunk.end
            if chunk.start == 0:
                self.long_factors[chunk.sequence] = chunk.long_factors
            assert self.long_factors[chunk.sequence] == chunk.long_factors, "two sets of factors in one sequence"
            assert len(chunk.token_ids) == chunk.num_tokens
            if EXPECTED in chunk.token_ids:
                assert self.limits.issues_ahead and chunk.decode and self.drawn[chunk.sequence] == chunk.start
            assert len(table) == -(-chunk.end // self.limits.page_size)
            if chunk.sampling is not None:
                assert chunk.sampling.position == chunk.end
                after = self.limits.longrope_after
                assert chunk.long_factors == (after is not None and chunk.end > after)
                tokens.append(SampledToken(chunk.sequence, chunk.epoch, drawn_token(chunk.sequence, chunk.end)))
        self.drawn = {chunk.sequence: chunk.end for chunk in microbatch.chunks if chunk.sampling is not None}
        held = [page for table in self.tables.values() for page in table]
        assert len(held) == len(set(held)), "a page with two owners"
        assert len({chunk.sequence for chunk in microbatch.chunks}) == len(microbatch.chunks)
        return StepResult(microbatch.index, tuple(tokens))


def drive(coordinator, requests, arrivals):
    """Run to the end; request i arrives before step arrivals[i]. Returns completions and all microbatches."""
    pipeline = StandInPipeline(coordinator.limits)
    due = deque(sorted(zip(arrivals, requests, strict=True), key=lambda pair: (pair[0], pair[1].index)))
    inflight, done, schedule, step = deque(), {}, [], 0

    def finished(completions):
        for completion in completions:
            assert completion.request.index not in done, "answered twice"
            done[completion.request.index] = completion

    while due or coordinator.unfinished:
        while due and due[0][0] <= step:
            immediate = coordinator.submit(due.popleft()[1])
            finished([immediate] if immediate else [])
        step += 1
        microbatch = coordinator.next_microbatch()
        if microbatch is not None:
            schedule.append(microbatch)
            inflight.append(microbatch)
        elif inflight:
            finished(coordinator.complete(pipeline.run(inflight.popleft())))
        else:
            # A policy may wait for a result, but only if one is in flight. With none in flight, any ready work must
            # run.
            assert not coordinator.unfinished, f"stuck: {coordinator.idle_reason}"
        for sequence in coordinator._running.values():
            assert 0 <= sequence.done <= sequence.issued <= sequence.known
        check_sums(coordinator)
        assert step < 100_000
    return done, schedule


def check_sums(coordinator):
    """Compare the coordinator's running totals with a full count."""
    running, waiting = coordinator._running.values(), coordinator._waiting
    past = [s.known for s in running if s.issued >= s.num_prompt]
    assert coordinator.held_tokens == sum(s.issued for s in running)
    assert coordinator._waiting_tokens == sum(s.known for s in waiting)
    assert (coordinator._num_past_prompt, coordinator._tokens_past_prompt) == (len(past), sum(past))


def run_golden(
    spec, *, stages, chunk_size, prompts, outputs, arrivals=None, max_num_seqs=4, num_pages=64, page_size=16
):
    """Return the schedule of one small workload as text.

    All requests arrive at the start unless `arrivals` is given.
    """
    limits = Limits(stages, chunk_size, max_num_seqs, 256, page_size, num_pages, stages)
    coordinator = Coordinator(limits, make_policy(spec))
    requests = [
        Request(i, (1,) * prompt, SamplingParams(max_new_tokens=new, seed=0))
        for i, (prompt, new) in enumerate(zip(prompts, outputs, strict=True))
    ]
    _, schedule = drive(coordinator, requests, arrivals or [0] * len(requests))
    return [str(microbatch) for microbatch in schedule]
