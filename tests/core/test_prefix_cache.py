"""Sequences that share pages. A model of the KV cache checks that each one reads what belongs to its own tokens."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sarathi_pp.core.coordinator import Coordinator
from sarathi_pp.core.cost.model import CostModel, StageCost
from sarathi_pp.core.draw_rules import DrawRules, Failure, split_first_bytes
from sarathi_pp.core.pages import KVUse, PagePool, extend_digests
from sarathi_pp.core.plan import Chunk, ChunkLogprobs, MicroBatch, SampledToken, StageTime, StepResult
from sarathi_pp.core.policy import POLICIES, make_policy, parse_policy
from sarathi_pp.core.policy.sarathi import Sarathi
from sarathi_pp.core.policy.view import Grant, Limits, View
from sarathi_pp.core.request import Completion, Request
from sarathi_pp.core.sequence import EXPECTED, Sequence
from sarathi_pp.sampling_params import SamplingParams
from tests.thinning import examples

SPECS = [*sorted(POLICIES), "sarathi:even=1", "chunkllm:threshold=7,overlap=0.2"]
EOS = 0
# What a place of a page holds: the tokens up to its own, the factors that were used, and whether a decode wrote it.
Written = tuple[tuple[int, ...], bool, bool]


@dataclass
class Work:
    """Requests that begin alike in groups, a pool of pages that is often too small for them, and a policy."""

    seed: int
    limits: Limits = field(init=False)
    spec: str = field(init=False)
    requests: list[Request] = field(init=False)
    broken: int = field(init=False)  # index of a request whose logits are not finite; -1 for none

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        page_size, stages, longest = draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4]), draw.choice([24, 40, 64])
        pages = -(-longest // page_size) + draw.randrange(3 * longest // page_size + 2)
        chunk_size, seqs = draw.choice([4, 9, 16, 40]), draw.choice([1, 3, 8, 16])
        self.limits = Limits(stages, chunk_size, seqs, longest, page_size, pages, stages + draw.choice([0, 1]))
        if draw.random() < 0.2:
            self.limits = replace(self.limits, longrope_after=longest // 2)
        if draw.random() < 0.3:
            self.limits = replace(self.limits, most_idle_pages=draw.randrange(pages))
        # From numbers of its own, so that every seed keeps its other choices.
        ahead = self.limits.inflight == 1 and random.Random(f"ahead {self.seed}").random() < 0.7
        self.limits = replace(self.limits, issues_ahead=ahead)
        self.spec = draw.choice(SPECS)
        begins = [[draw.randrange(1, 5) for _ in range(longest)] for _ in range(3)]
        self.requests = [self._request(index, draw, begins) for index in range(draw.randrange(5, 40))]
        self.broken = draw.randrange(40) if draw.random() < 0.2 else -1

    def _request(self, index: int, draw: random.Random, begins: list[list[int]]) -> Request:
        length = draw.randrange(1, min(self.limits.max_model_len, self.limits.num_pages * self.limits.page_size) + 1)
        shared = draw.randrange(length + 1)
        tokens = draw.choice(begins)[:shared] + [draw.randrange(1, 4) for _ in range(length - shared)]
        params = SamplingParams(max_new_tokens=draw.randrange(1, 20), seed=index, ignore_eos=draw.random() < 0.5)
        if draw.random() < 0.1:
            params = replace(params, prompt_logprobs=0, logprobs_from=draw.randrange(length))
        rules = DrawRules(num_prompt=length, repetition_penalty=1.1) if draw.random() < 0.1 else None
        salt = "other" if draw.random() < 0.1 else ""
        return Request(index, tokens, params, rules=rules, cache_salt=salt)


class Shadow:
    """The pages of a stage that writes down what each place holds, and drives a coordinator."""

    def __init__(self, work: Work, mode: str) -> None:
        self.work, self.mode = work, mode
        stages = work.limits.num_stages
        cost = CostModel(1, tuple(StageCost((at, at + 1), 1.0, 0.1, 1e-4, 1e-3, 0.01) for at in range(stages)))
        policy = parse_policy(work.spec)
        self.coordinator = Coordinator(
            replace(work.limits, prefix_cache=mode),  # type: ignore[arg-type]
            make_policy(work.spec),
            cost=cost if policy.kind.wants_cost else None,
            eos_token_ids=(EOS,),
        )
        self.written: dict[tuple[int, int], Written] = {}
        self.salts: dict[int, str] = {}  # of the sequence that last wrote a page
        self.tables: dict[int, list[int]] = {}
        self.sequences: dict[int, Sequence] = {}
        self.tokens: dict[int, list[int]] = {}  # of each sequence, also those that only the stage knows
        self.answers: dict[int, Completion] = {}
        self.inflight: deque[MicroBatch] = deque()

    def run(self) -> dict[int, Completion]:
        draw, todo, coordinator, idle = (
            random.Random(self.work.seed + 1),
            deque(self.work.requests),
            self.coordinator,
            0,
        )
        while todo or coordinator.unfinished:
            for _ in range(draw.randrange(4)):
                if todo:
                    self._submit(todo.popleft())
            todo.extend(self._disturb(draw))
            shared = self.shared_pages()
            microbatch = coordinator.next_microbatch() if draw.random() < 0.8 or not self.inflight else None
            if microbatch is not None:
                self._write(microbatch, shared & self.shared_pages())
                self.inflight.append(microbatch)
            if self.inflight and (microbatch is None or draw.random() < 0.4):
                self._complete(self.inflight.popleft())
                idle = 0
            idle += microbatch is None and not self.inflight
            assert idle < 50, f"stuck: {coordinator.idle_reason}"
            self.check_books()
        assert coordinator.pool.num_free == coordinator.pool.num_pages and not coordinator.prefixes._coming
        sums = "_num_past_prompt", "_tokens_past_prompt", "_waiting_tokens", "_held_tokens"
        assert [getattr(coordinator, name) for name in sums] == [0] * 4
        return self.answers

    def shared_pages(self) -> set[int]:
        return {page for page, holders in enumerate(self.coordinator.pool._holders) if holders > 1}

    def _disturb(self, draw: random.Random) -> list[Request]:
        """Sometimes withdraw the waiting requests, abort all, or halve the limits. Return those to submit again.

        A request is not submitted again while results of it are in flight, since they would count for the new one.
        """
        coordinator, chance = self.coordinator, draw.random()
        if chance < 0.004:
            busy = {chunk.sequence for microbatch in self.inflight for chunk in microbatch.chunks}
            return [request for request in coordinator.withdraw() if request.index not in busy]
        if chance < 0.005:
            coordinator.abort(self.inflight)
        if chance < 0.008:
            coordinator.shrink()
        return []

    def _submit(self, request: Request) -> None:
        completion = self.coordinator.submit(request)
        if completion is not None:
            self.answers[request.index] = completion
        else:
            self.sequences[request.index] = self.coordinator._waiting[-1]
            self.tokens[request.index] = list(request.prompt_token_ids)

    def _write(self, microbatch: MicroBatch, shared: set[int]) -> None:
        """Check what the chunks read, which earlier microbatches must have written. Then write what they write.

        Args:
            shared: the pages that several sequences held before this microbatch, and hold after it.
        """
        size = self.work.limits.page_size
        for index in microbatch.freed:
            self.tables.pop(index, None)
        new: dict[tuple[int, int], Written] = {}
        for chunk in microbatch.chunks:
            table, sequence = self.tables.setdefault(chunk.sequence, []), self.sequences[chunk.sequence]
            assert table or not chunk.decode, "a sequence begins with a decode"
            begins = not table
            table.extend(chunk.new_pages)
            tokens = tuple(self.tokens[chunk.sequence])
            assert bool(chunk.rules) == (begins and sequence.request.rules is not None)
            if chunk.rules:
                assert split_first_bytes(chunk.rules)[1] == tokens[: chunk.start]
            if self.work.limits.issues_ahead and chunk.token_ids == (EXPECTED,):
                assert chunk.decode and sequence.request.rules is None
            else:
                assert tokens[chunk.start : chunk.end] == chunk.token_ids
            assert len(table) == -(-chunk.end // size)
            if chunk.decode:  # the output goes on after its token, as far as it is known
                longest = sequence.num_prompt + sequence.request.sampling.max_new_tokens
                assert chunk.end < min(longest, self.work.limits.max_model_len)
            for position in range(chunk.start):
                found, is_long, decoded = self.written[table[position // size], position % size]
                assert found == tokens[: position + 1] and is_long == chunk.long_factors, f"{chunk} reads {position}"
                if position < sequence.num_cached and sequence.epoch == 0:
                    assert not (decoded and self.mode == "prompts"), "a shared page was written by a decode"
                    assert self.salts[table[position // size]] == sequence.request.cache_salt
            for position in range(chunk.start, chunk.end):
                place = table[position // size], position % size
                assert place not in new, "two tokens are written to one place"
                new[place] = tokens[: position + 1], chunk.long_factors, chunk.decode
                self.salts[place[0]] = sequence.request.cache_salt
                assert place[0] not in shared, "a page of two sequences is written again"
                assert position >= len(sequence.found) * size, "a page that was found is written again"
            if chunk.sampling is not None:
                self.tokens[chunk.sequence][chunk.end :] = [hash(tokens[: chunk.end]) % 5]
        self.written |= new

    def _complete(self, microbatch: MicroBatch) -> None:
        tokens = [self._drawn(chunk) for chunk in microbatch.chunks if chunk.sampling is not None]
        scores = [_scores(chunk) for chunk in microbatch.chunks if chunk.scored is not None]
        times = tuple(StageTime(microbatch.index, 1.0) for _ in range(self.work.limits.num_stages))
        result = StepResult(microbatch.index, tuple(tokens), times, prompt_logprobs=tuple(scores))
        for completion in self.coordinator.complete(result):
            self.answers[completion.request.index] = completion

    def _drawn(self, chunk: Chunk) -> SampledToken:
        if chunk.sequence == self.work.broken:
            return SampledToken(chunk.sequence, chunk.epoch, 0, failure=Failure.NOT_FINITE)
        return SampledToken(chunk.sequence, chunk.epoch, self.tokens[chunk.sequence][chunk.end])

    def check_books(self) -> None:
        """Check the pool's books against the tables, and the two rules of the index."""
        coordinator, pool, size = self.coordinator, self.coordinator.pool, self.work.limits.page_size
        running = list(coordinator._running.values())
        holders = [0] * pool.num_pages
        for page in (page for sequence in running for page in sequence.pages):
            holders[page] += 1
        assert holders == list(pool._holders)
        unheld = [page for page, count in enumerate(holders) if count == 0]
        assert sorted([*pool._free, *pool._idle]) == unheld and all(pool._digests[page] is None for page in pool._free)
        assert {digest: page for page, digest in enumerate(pool._digests) if digest is not None} == pool._index
        filled = {(page, min(size, one.issued - at * size)) for one in running for at, page in enumerate(one.pages)}
        assert coordinator.held_tokens == sum(count for _, count in filled)
        for one in coordinator._waiting:
            if one.found and pool.has(one.found[-1], one.entry):
                assert one.found == [pool._index[digest] for digest in one.digests[: len(one.found)]]
        assert all(one.enters for one in coordinator.prefixes._coming.values())
        age = {page: at for at, page in enumerate(pool._idle)}
        for sequence in self.sequences.values():
            for before, digest in zip(sequence.digests, sequence.digests[1:], strict=False):
                if digest in pool._index:
                    assert before in pool._index, "a page is in the index without the one before it"
                    pages = pool._index[before], pool._index[digest]
                    assert not all(page in age for page in pages) or age[pages[0]] > age[pages[1]]


def _scores(chunk: Chunk) -> ChunkLogprobs:
    scored = chunk.scored
    assert scored is not None
    count = scored.stop - scored.first
    return ChunkLogprobs(chunk.sequence, chunk.epoch, scored.first, scored.num_top, (0.0,) * count)


@settings(max_examples=examples(240), deadline=None)
@example(
    seed=778
)  # a page is taken and filled with the same tokens, in the microbatch in which another one had found it
@given(seed=st.integers(0, 2**32))
def test_every_answer_is_that_without_a_cache(seed: int) -> None:
    work = Work(seed)
    plain = Shadow(work, "off").run()
    for mode in ("all", "prompts"):
        for index, completion in Shadow(work, mode).run().items():
            expected = plain.get(index, completion)  # one of the two may have been aborted
            assert (completion.token_ids, completion.finish_reason, completion.error_code) == (
                expected.token_ids, expected.finish_reason, expected.error_code
            )  # fmt: skip


# Schedules that can be checked manually: pages of four tokens.


class Small:
    """A coordinator with pages of four tokens, whose microbatches complete at once unless a test holds them back."""

    def __init__(self, spec: str = "sarathi", mode: str = "all", num_pages: int = 32, **limits: object) -> None:
        given = {
            "num_stages": 1,
            "chunk_size": 8,
            "max_num_seqs": 8,
            "max_model_len": 64,
            "page_size": 4,
            "inflight": 2,
        }
        made = Limits(**{**given, "num_pages": num_pages, "prefix_cache": mode, **limits})  # type: ignore[arg-type]
        self.coordinator = Coordinator(made, make_policy(spec))
        self.count = 0

    def submit(self, *tokens: int, outputs: int = 1, **fields: object) -> None:
        params = SamplingParams(max_new_tokens=outputs, seed=0, ignore_eos=True)
        self.coordinator.submit(Request(self.count, tokens, params, **fields))  # type: ignore[arg-type]
        self.count += 1

    def issue(self) -> str:
        """Return the chunks of the next microbatch."""
        microbatch = self.coordinator.next_microbatch()
        return "" if microbatch is None else " ".join(map(str, microbatch.chunks))

    def complete(self, token: int = 9, failure: Failure = Failure.NONE) -> list[Completion]:
        microbatch = self.coordinator._inflight[0]
        drawn = [
            SampledToken(chunk.sequence, chunk.epoch, token, failure) for chunk in microbatch.chunks if chunk.sampling
        ]
        return self.coordinator.complete(
            StepResult(microbatch.index, tuple(drawn), (StageTime(microbatch.index, 0.0),))
        )

    def step(self) -> str:
        issued = self.issue()
        self.complete()
        return issued


SHARED = range(100, 108)


def test_a_prompt_begins_behind_the_pages_that_are_there() -> None:
    small = Small()
    small.submit(*SHARED, 1)
    assert [small.step(), small.step()] == ["s0:0+8", "s0:8+1"]
    small.submit(*SHARED, 2, 3)
    assert small.issue() == "s1:8+2"
    assert [completion.cached_tokens for completion in small.complete()] == [8]
    assert (small.coordinator.prefixes.prompt_tokens, small.coordinator.prefixes.cached_tokens) == (19, 8)


def test_at_least_one_token_is_computed() -> None:
    """The whole prompt is there. Its last page is computed again, into a page of its own."""
    small = Small()
    small.submit(*SHARED)
    small.step()
    small.submit(*SHARED)
    assert small.issue() == "s1:4+4"


def test_a_page_is_found_as_soon_as_its_chunk_is_issued_but_not_in_the_same_microbatch() -> None:
    small = Small()
    small.submit(*SHARED, 1)
    small.submit(*SHARED, 2)
    assert small.issue() == "s0:0+8", "the second one waits for the first one's pages"
    assert small.issue() == "s0:8+1 s1:8+1", "and they are there before any result is"


def test_a_sequence_of_other_tokens_does_not_wait_for_one_that_is_held() -> None:
    small = Small(chunk_size=12)
    small.submit(*SHARED, 1)
    small.submit(*SHARED, 2)
    small.submit(50, 51, 52)
    assert small.issue() == "s0:0+9 s2:0+3"
    assert small.issue() == "s1:8+1"


def test_outputs_are_found_too_unless_only_prompts_are_wanted() -> None:
    for mode, begin in (("all", "s1:8+2"), ("prompts", "s1:4+6")):
        small = Small(mode=mode)
        small.submit(1, 2, 3, 4, outputs=6)
        for _ in range(6):
            small.step()
        small.submit(1, 2, 3, 4, 9, 9, 9, 9, 5, 6)
        assert small.issue() == begin, mode


def test_outputs_are_found_when_their_tokens_are_known_if_they_are_issued_ahead() -> None:
    small = Small(inflight=1, issues_ahead=True)
    small.submit(1, 2, 3, 4, outputs=7)
    assert [small.issue(), small.issue(), small.issue()] == ["s0:0+4", "s0:4", ""]
    for _ in range(4):
        small.complete()
        small.issue()
    assert small.coordinator._running[0].issued == 9, "the second page is full, and one more token is in flight"
    for _ in range(2):
        small.submit(1, 2, 3, 4, 9, 9, 9, 9, 5, 6)
    small.complete()
    assert small.issue() == "s1:8+2 s2:8+2 s0:9"


def test_a_sequence_that_fills_all_pages_is_not_preempted_for_a_token_that_has_no_place() -> None:
    small = Small(inflight=1, issues_ahead=True, num_pages=2)
    small.submit(1, 2, 3, 4, outputs=9)
    small.issue()
    ended: list[Completion] = []
    for _ in range(5):
        small.issue()
        ended += small.complete()
    assert (ended[0].error_code, ended[0].num_preemptions, len(ended[0].token_ids)) == ("kv_cache_exhausted", 0, 5)


def test_a_prompt_is_divided_evenly_after_the_pages_that_were_found() -> None:
    small = Small("sarathi:even=1")
    small.submit(*SHARED, 1)
    small.step(), small.step()
    small.submit(*SHARED, *range(10))
    assert [small.step(), small.step()] == ["s1:8+5", "s1:13+5"]


def test_a_resumed_prompt_is_divided_evenly_although_its_pages_are_gone() -> None:
    resumed = Sequence(Request(0, tuple(range(100)), SamplingParams(max_new_tokens=1, seed=0)), 0)
    resumed.num_cached, resumed.num_found = 96, 0
    limits = Limits(1, 40, 8, 128, 4, 99, 1)
    view = View(
        prefills=(), waiting=(resumed,), decodes=(), running={}, limits=limits, num_inflight=0, slot=0, free_tokens=99
    )
    assert Sarathi(even=1).pick(view) == [Grant(resumed, 34)]


def test_a_policy_may_refuse_to_hold_sequences() -> None:
    small = Small("fastertransformer", chunk_size=64)
    small.submit(*SHARED, 1)
    small.submit(*SHARED, 2)
    assert small.issue() == "s0:0+9 s1:0+9"


def test_a_policy_sees_the_waiting_tokens_that_will_be_computed() -> None:
    seen: list[int] = []

    class Watching(Sarathi):
        def pick(self, view: View) -> list[Grant]:
            seen.append(view.waiting_tokens)
            return super().pick(view)

    small = Small(max_num_seqs=1)
    small.coordinator._policy = Watching()
    small.submit(*SHARED, 1)
    small.issue(), small.issue()
    for last in range(3):
        small.submit(*SHARED, last)
    small.complete(), small.complete(), small.issue()
    # One of nine tokens is left of the sequence that may start. Nothing was found so far, so all count of the others.
    assert seen == [9, 0, 1 + 18]
    small.complete(), small.issue()
    assert seen[-1] == 1 + 9 * 10 // 18, "so far, 10 of 18 tokens were computed"


def test_other_salts_and_other_factors_share_nothing() -> None:
    small = Small(longrope_after=9)
    for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}):
        small.submit(*SHARED, 1, **fields)
        assert small.step().startswith(f"s{small.count - 1}:0+8")
        small.step()
    small.submit(*SHARED, 1, 2, 3)
    assert small.issue() == "s3:0+8", "longer than nine tokens"
    small.submit(*SHARED, 1, cache_salt="a")
    assert small.issue() == "s3:8+3 s4:8+1"


def test_the_rules_of_a_request_bring_the_tokens_that_no_chunk_brings() -> None:
    """The stage that draws has to know them."""
    small = Small()
    small.submit(*SHARED, 1)
    small.step(), small.step()
    rules = DrawRules(num_prompt=9, repetition_penalty=1.5)
    small.submit(*SHARED, 2, rules=rules)
    assert small.issue() == "s1:8+1"
    (chunk,) = small.coordinator._inflight[-1].chunks
    assert split_first_bytes(chunk.rules) == (rules, tuple(SHARED))


def test_messages_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request starts with at most as many pages as a message may bring, and so do those of one microbatch."""
    monkeypatch.setattr("sarathi_pp.core.prefix_cache.MOST_SHARED_PAGES", 3)
    monkeypatch.setattr("sarathi_pp.core.coordinator.MOST_SHARED_PAGES", 3)
    monkeypatch.setattr("sarathi_pp.core.prefix_cache._MOST_TOKENS_WITH_RULES", 5)
    small = Small(chunk_size=32)
    small.submit(*range(100, 120))
    small.step()
    small.submit(*range(100, 120))
    small.submit(*SHARED, rules=DrawRules(num_prompt=8, presence_penalty=1.0))
    assert small.step() == "s1:12+8"
    assert small.step() == "s2:4+4"


def test_a_preempted_sequence_goes_on_from_its_own_pages() -> None:
    """The older one takes a page of it, the last one of its chain. The first one is still there."""
    small = Small(num_pages=4, chunk_size=16, max_model_len=16)
    small.submit(1, 2, 3, 4, 5, 6, outputs=5)
    small.submit(11, 12, 13, 14, 15, 16, outputs=4)
    assert [small.step() for _ in range(3)] == ["s0:0+6 s1:0+6", "s0:6 s1:6", "s0:7 s1:7"]
    assert small.step() == "s0:8" and small.coordinator.num_preemptions == 1
    assert small.step() == "s0:9"
    assert small.step() == "s1.1:4+5"


def test_idle_pages_are_taken_last_of_a_chain_first() -> None:
    small = Small(num_pages=4, max_model_len=16)
    small.submit(*range(1, 13))
    small.step(), small.step()
    pool = small.coordinator.pool
    assert (pool.num_free, pool.num_idle, pool.evictions) == (4, 3, 0)
    small.submit(*range(20, 28))
    small.step()
    assert pool.evictions == 1, "of two pages, one was free"
    small.submit(*range(1, 13))
    assert small.issue() == "s2:8+4"


def test_after_logits_that_are_not_finite_nothing_is_found() -> None:
    small = Small()
    small.submit(*SHARED, 1)
    small.issue(), small.issue()
    small.complete()
    small.submit(*SHARED, 2, 3, 4, 5, outputs=3)
    assert small.issue() == "s1:8+4"
    (broken,) = small.complete(failure=Failure.NOT_FINITE)
    assert broken.error_code == "non_finite_logits"
    small.complete()
    small.submit(*SHARED, 6)
    assert "s2:0+7" in small.issue(), "neither the broken pages nor those that shared them"


def test_pages_that_came_back_to_the_index_at_other_places_are_found_there() -> None:
    """The last page of the chain is the same one as before, under the same digest, and the first one is another."""
    pool, digests = PagePool(3, 1), [b"a", b"b"]
    first, second, other = pool.take(3)
    assert pool.enter(first, b"a") and pool.enter(second, b"b")
    pool.give_back([first, second])
    found: list[int] = []
    entry = pool.match(digests, 2, found, 0)
    assert found == [first, second] and pool.has(second, entry)
    assert sorted(pool.take(2)) == [first, second]
    assert pool.enter(other, b"a") and pool.enter(second, b"b")
    assert not pool.has(second, entry)
    assert pool.has(second, pool.match(digests, 2, found, entry)) and found == [other, second]
    pool.forget()
    assert pool.match(digests, 2, found, entry) == 0 and found == []


def test_no_sequence_waits_for_pages_that_will_not_be_entered() -> None:
    """The second page is filled by a decode, and only pages of prompts are shared."""
    small = Small(mode="prompts", chunk_size=7)
    small.submit(1, 2, 3, 4, 5, outputs=8)
    small.step()
    small.step()
    (sequence,) = small.coordinator._running.values()
    small.coordinator.prefixes.forget([sequence])
    small.coordinator._preempt(sequence)
    assert small.step() == "s0.1:0+7"
    small.submit(1, 2, 3, 4, 5, 9, 9, 9, 6)
    assert "s1:4+" in " ".join(small.step() for _ in range(3))


def test_only_so_many_pages_are_kept() -> None:
    pool = PagePool(8, 1, most_idle=2)
    digests: list[bytes] = []
    extend_digests(digests, Request(0, range(5), SamplingParams(seed=0)).prompt_token_ids, 1)  # type: ignore[arg-type]
    pages = pool.take(5)
    assert all(map(pool.enter, pages, digests))
    assert pool.give_back(pages) == 5
    found: list[int] = []
    pool.match(digests, 5, found, 0)
    assert (found, pool.num_free, pool.num_idle, pool.evictions) == ([*pages[:2]], 8, 2, 3)


def test_a_page_that_two_sequences_have_computed_is_entered_once() -> None:
    pool = PagePool(4, 1)
    first, second = pool.take(2)
    assert pool.enter(first, b"a") and not pool.enter(second, b"a")
    assert pool.give_back([second]) == 1 and pool.num_idle == 0
    with pytest.raises(AssertionError, match="free already"):
        pool.give_back([second])


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_digests_tell_all_tokens_up_to_the_end_of_a_page(page_size: int) -> None:
    def chain(*tokens: int, salt: bytes = b"") -> list[bytes]:
        digests: list[bytes] = []
        request = Request(0, tokens, SamplingParams(seed=0))
        extend_digests(digests, request.prompt_token_ids, page_size, salt)  # type: ignore[arg-type]
        return digests

    tokens = [*range(50)]
    whole = chain(*tokens)
    assert len(whole) == 50 // page_size == len({*whole})
    assert chain(*tokens[:20]) == whole[: 20 // page_size]
    assert not {*chain(99, *tokens[1:])} & {*whole} and not {*chain(*tokens, salt=b"a")} & {*whole}
    extended = chain(*tokens[:20])
    extend_digests(extended, Request(0, tokens, SamplingParams(seed=0)).prompt_token_ids, page_size)  # type: ignore[arg-type]
    assert extended == whole


def test_each_microbatch_has_the_counts_since_the_one_before() -> None:
    small = Small(num_pages=4, max_num_seqs=1)
    small.submit(*SHARED, 1)
    small.submit(*SHARED, 2)
    small.submit(*range(50, 66))
    uses = []
    while issued := small.issue():
        uses.append((issued, *small.coordinator.take_kv_use()))
        small.complete()
    assert uses == [
        ("s0:0+8", 2, 8, 0, 0, 0, 0),
        ("s0:8+1", 3, 9, 0, 0, 0, 0),
        ("s1:8+1", 3, 9, 0, 8, 0, 0),
        ("s2:0+8", 2, 8, 2, 0, 0, 0),
        ("s2:8+8", 4, 16, 0, 0, 0, 2),
    ]


def test_tokens_that_a_preempted_request_finds_count_separately() -> None:
    small = Small()
    small.submit(*SHARED, 1, 2)
    small.step()
    small.coordinator.take_kv_use()
    (sequence,) = small.coordinator._running.values()
    small.coordinator._preempt(sequence)
    assert small.issue() == "s0.1:8+2"
    use = small.coordinator.take_kv_use()
    assert (use.cached_tokens, use.resumed_tokens) == (0, 8)
    assert [completion.cached_tokens for completion in small.complete()] == [0]
    prefixes = small.coordinator.prefixes
    assert (prefixes.prompt_tokens, prefixes.cached_tokens, prefixes.resumed_tokens) == (10, 0, 8)
    small.submit(*SHARED, 3)
    small.issue()
    small.coordinator.abort([])
    assert small.coordinator.prefixes.resumed_tokens == 8 and small.coordinator.prefixes.cached_tokens == 8


def test_without_a_cache_no_prompt_is_looked_up() -> None:
    small = Small(mode="off")
    small.submit(*SHARED)
    small.step()
    small.submit(*SHARED)
    small.step()
    assert small.coordinator.take_kv_use() == KVUse(0, 0)
    assert small.coordinator.prefixes.prompt_tokens == 0
