"""The coordinator, the scheduler of one pipeline: requests in, microbatches out, results back in.

It does no input or output, so real runs, emulated runs and the simulator all use this same class.

It owns the queues of requests, the cursors of each sequence (sequence.py), the KV pages and the state slots. A policy
only chooses which known tokens to compute next. The stages see only what the coordinator emits, so they can never
disagree with it about the owner of a page or a slot.

A page may go to another sequence while chunks that still write it are in flight. Stages are first in, first out, so
the old write happens before the new owner's first write reaches the same stage. The new owner writes each position
before it reads it. For the same reason, sequences can share pages that are still to be written: see prefix_cache.py.
"""

from __future__ import annotations

import operator
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

from sarathi_pp.core.cost.model import CostModel, Load, Row
from sarathi_pp.core.cost.refiner import CostRefiner
from sarathi_pp.core.draw_rules import MOST_MICROBATCH_BYTES
from sarathi_pp.core.endings import EndRules, StopRule
from sarathi_pp.core.head_placement import HeadPlacement
from sarathi_pp.core.pages import MOST_SHARED_PAGES, KVUse, PagePool
from sarathi_pp.core.plan import Chunk, ChunkLogprobs, IdleReason, MicroBatch, SampledToken, SamplingRow, StepResult
from sarathi_pp.core.policy.view import Grant, Limits, Policy, View, class_name, max_tokens_of
from sarathi_pp.core.prefix_cache import PrefixCache
from sarathi_pp.core.request import Completion, Request
from sarathi_pp.core.sequence import Sequence
from sarathi_pp.core.state_slots import SlotPool
from sarathi_pp.errors import PolicyError

_BY_ARRIVAL = operator.attrgetter("sequence.order")
# Make a named tuple from its fields in order. Calling its class takes twice as long.
_new = tuple.__new__
# Number of latest finished requests whose lengths policies see.
_REMEMBERED = 256


class _Startable(NamedTuple):
    """The waiting sequences that may start now, by arrival.

    Attributes:
        waiting_tokens: see View.waiting_tokens.
        lacks_pages: the next sequence could start too if there were pages for it.
    """

    sequences: tuple[Sequence, ...]
    waiting_tokens: int
    lacks_pages: bool = False


def _never_stop(request: Request, token_id: int) -> bool:
    return False


class Coordinator:
    """The scheduler of one pipeline. With continuous batching, requests may start and end at any microbatch.

    Args:
        eos_token_ids: ids that end an output unless its request ignores them.
        stop_rule: called with each new token of each request, in order. True ends the output there ("stop" strings).
        clock: gives the time in seconds. It is read once per microbatch, for `issued_s`.
        cost: cost model of the stages before the run. Each result refines it, which takes time. So it is given only if
            the policy needs it (`Policy.wants_cost`).
        heads: chooses the stage for the LM head of each microbatch. None: always the last stage.
    """

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        *,
        eos_token_ids: Collection[int] = (),
        stop_rule: StopRule = _never_stop,
        clock: Callable[[], float] = lambda: 0.0,
        cost: CostModel | None = None,
        heads: HeadPlacement | None = None,
    ) -> None:
        self.limits = limits
        self.num_preemptions = 0
        self.idle_reason: IdleReason = "no_arrivals"
        self._policy = policy
        self.pool, self.prefixes = self._new_pages()
        self._slots = SlotPool(limits.num_slots)
        # The buffers for messages between stages have this size. It is from the limits at the start: `shrink` makes
        # microbatches smaller, never larger.
        self._most_tokens = max_tokens_of(policy, limits)
        self._longrope_after = limits.longrope_after or sys.maxsize
        self._ends = EndRules(limits.max_model_len, self.pool.num_tokens, frozenset(eos_token_ids), stop_rule)
        self._clock = clock
        self._cost = CostRefiner(cost) if cost is not None else None
        self._heads = heads
        # Sums over the sequences, updated at each change, so that no step has to visit all of them.
        self._waiting_tokens = 0
        self._held_tokens = 0
        self._num_past_prompt = 0
        self._tokens_past_prompt = 0
        self._finished: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        self._waiting: deque[Sequence] = deque()  # by arrival
        self._running: dict[int, Sequence] = {}
        self._running_view = MappingProxyType(self._running)  # for policies, which only choose
        self._prefills: dict[int, Sequence] = {}  # running, with prompt tokens (or recomputed ones) to issue
        self._decodes: dict[int, Sequence] = {}  # running, next token known or expected, in the order they became ready
        self._inflight: deque[MicroBatch] = deque()
        self._rows: dict[int, Row] = {}  # of the microbatches whose times may still come
        self._freed: list[int] = []
        self._next_index = 0
        self._num_submitted = 0
        self._counted = (0, 0, 0)  # the counts of the prefix cache that earlier calls of `take_kv_use` have returned

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Known tokens of the waiting sequences."""
        return self._waiting_tokens

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    @property
    def num_issued(self) -> int:
        """Number of microbatches so far, which is the index of the next one."""
        return self._next_index

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting or self._running or self._inflight)

    @property
    def held_tokens(self) -> int:
        """Number of tokens stored in the KV pages that are in use."""
        return self._held_tokens

    def take_kv_use(self) -> KVUse:
        """Return the use of the KV pages now. Call it once per microbatch, right after it was issued.

        The counts of the prefix cache are those since the call before.
        """
        pool, prefixes = self.pool, self.prefixes
        counts = (prefixes.cached_tokens, prefixes.resumed_tokens, pool.evictions)
        cached, resumed, evictions = map(operator.sub, counts, self._counted)
        self._counted = counts
        return KVUse(pool.num_pages - pool.num_free, self._held_tokens, pool.num_idle, cached, resumed, evictions)

    def submit(self, request: Request) -> Completion | None:
        """Queue a request. Return its completion at once if it gets no output, otherwise None.

        A request gets no output if it asks for no token, or if its prompt fills `max_model_len`. If it wants log
        probabilities of its prompt, the prompt is computed nevertheless. The caller must refuse prompts of more than
        `max_prompt_tokens` tokens before.
        """
        num_prompt = len(request.prompt_token_ids)
        assert 0 < num_prompt <= self.max_prompt_tokens, (num_prompt, self.max_prompt_tokens)
        if self._ends.gets_no_output(request) and request.sampling.prompt_logprobs is None:
            return Completion(request, (), "length")
        sequence = Sequence(request, self._num_submitted)
        self.prefixes.digest(sequence)
        self._waiting.append(sequence)
        self._num_submitted += 1
        self._waiting_tokens += num_prompt
        return None

    def shrink(self) -> Limits:
        """Halve two limits, because a stage ran out of memory: running sequences, and tokens per microbatch.

        Each stays at least 1. Sequences that already run continue, even if they are more than the new limit.

        Returns:
            The new limits.
        """
        limits = self.limits
        self.limits = replace(
            limits, max_num_seqs=max(1, limits.max_num_seqs // 2), chunk_size=max(1, limits.chunk_size // 2)
        )
        return self.limits

    def withdraw(self) -> list[Request]:
        """Remove the waiting requests and return them: those that have not started, and those that were preempted.

        Results of preempted ones may still be in flight. They will be dropped. A request that only waits because it has
        outgrown the short factors stays (Limits.longrope_after).
        """
        kept = [sequence for sequence in self._waiting if sequence.epoch > sequence.num_preemptions]
        withdrawn = [sequence.request for sequence in self._waiting if sequence.epoch == sequence.num_preemptions]
        self._waiting = deque(kept)
        self._waiting_tokens = sum(sequence.known for sequence in kept)
        return withdrawn

    def abort(self, sent: Iterable[MicroBatch]) -> None:
        """Forget all requests and free all pages and slots, after an exception at any point.

        Args:
            sent: the issued microbatches that were really sent and have no result yet. Their results will be dropped.
                The index of a microbatch that was issued but not sent is used again.
        """
        inflight = deque(sent)
        for lost in self._inflight:
            if all(microbatch is not lost for microbatch in inflight):
                self._freed.extend(lost.freed)
                self._next_index = min(self._next_index, lost.index)
        self._inflight = inflight
        # Some of these sequences may be unknown to the stages, which ignore them.
        self._freed.extend(self._running)
        for queue in (self._waiting, self._running, self._prefills, self._decodes):
            queue.clear()
        evictions, before = self.pool.evictions, self.prefixes
        self.pool, self.prefixes = self._new_pages()
        self._slots = SlotPool(self.limits.num_slots)
        self.pool.evictions = evictions
        self.prefixes.prompt_tokens, self.prefixes.cached_tokens = before.prompt_tokens, before.cached_tokens
        self.prefixes.resumed_tokens = before.resumed_tokens
        self._waiting_tokens = self._held_tokens = self._num_past_prompt = self._tokens_past_prompt = 0
        if self._heads is not None:
            self._heads.restart(inflight)

    def _new_pages(self) -> tuple[PagePool, PrefixCache]:
        limits = self.limits
        pool = PagePool(limits.num_pages, limits.page_size, limits.most_idle_pages)
        holds = self._policy.holds_sequences
        return pool, PrefixCache(pool, limits.prefix_cache, limits.longrope_after, holds=holds)

    @property
    def max_prompt_tokens(self) -> int:
        return min(self.limits.max_model_len, self.pool.num_tokens)

    def next_microbatch(self) -> MicroBatch | None:
        """Issue the next microbatch and return it. If there is none now, return None and set `idle_reason`.

        Raises:
            PolicyError: a grant is not legal, the microbatch is too large, or the policy waits with nothing in flight.
        """
        if len(self._inflight) >= self.limits.most_inflight:
            self.idle_reason = "full"
            return None
        chunks = self._choose()
        if not chunks:
            if not self._inflight and (self._running or self._waiting):
                raise self._broken("waits for a result with nothing in flight; its pick must then return a Grant")
            return None
        microbatch = MicroBatch(self._next_index, chunks, tuple(self._freed), self._clock())
        if microbatch.num_tokens > self._most_tokens:
            raise self._broken(
                f"made a microbatch of {microbatch.num_tokens} tokens; its max_tokens allows {self._most_tokens}. "
                f"Grant fewer tokens, or return a larger number from max_tokens"
            )
        if self._heads is not None and self._heads.choose(microbatch):
            microbatch = MicroBatch(microbatch.index, chunks, microbatch.freed, microbatch.issued_s, head_on_first=True)
        self._next_index += 1
        self._freed = []
        self._inflight.append(microbatch)
        if self.limits.issues_ahead:
            self._mark_done(microbatch)  # policies do not see it in flight
        if self._cost is not None:
            self._rows[microbatch.index] = self._cost.row(Load.of(microbatch))
        return microbatch

    def _choose(self) -> tuple[Chunk, ...]:
        """Return the chunks that the policy chooses for the next microbatch, none if it chooses none.

        If sequences were preempted and no chunk was made, ask the policy again.
        """
        while True:
            startable = self._startable()
            view = View(
                prefills=tuple(self._prefills.values()),
                waiting=startable.sequences,
                decodes=tuple(self._decodes.values()),
                running=self._running_view,
                limits=self.limits,
                num_inflight=max(0, len(self._inflight) - self.limits.issues_ahead),
                slot=self._next_index % self.limits.num_stages,
                free_tokens=self.pool.num_free * self.pool.page_size,
                waiting_tokens=startable.waiting_tokens,
                num_past_prompt=self._num_past_prompt,
                tokens_past_prompt=self._tokens_past_prompt,
                finished=self._finished,
                cost=self._cost.model if self._cost is not None else None,
            )
            preempted_before = self.num_preemptions
            chunks = self._apply(self._policy.pick(view), startable.sequences)
            if chunks or self.num_preemptions == preempted_before:
                self.idle_reason = self._why_idle(startable)
                return chunks

    def complete(self, result: StepResult, head_s: float = 0.0) -> list[Completion]:
        """Take in the result of the oldest microbatch in flight. Return the completions of the requests that end.

        Results of sequences that were preempted meanwhile have an earlier epoch and are dropped.

        Args:
            head_s: seconds of the LM head on the first stage, if that stage computed it.
        """
        microbatch = self._inflight.popleft()
        assert result.index == microbatch.index, f"result {result.index} came instead of {microbatch.index}"
        if not self.limits.issues_ahead:
            self._mark_done(microbatch)
        if self._heads is not None:
            self._heads.observe(microbatch, result.stage_times, head_s)
        if self._cost is not None:
            # The last stage skipped the LM head here, so its time must not train a cost model that includes it.
            times = result.stage_times[:-1] if microbatch.head_on_first else result.stage_times
            for stage, time in enumerate(times):
                if time.microbatch in self._rows:
                    self._cost.observe(stage, self._rows[time.microbatch], time.seconds)
            self._rows.pop(microbatch.index - self.limits.most_inflight, None)
        self._add_prompt_logprobs(result.prompt_logprobs)
        completions = []
        for token in result.tokens:
            sequence = self._current(token.sequence, token.epoch)
            if sequence is None:
                continue
            if (completion := self._take(sequence, token)) is not None:
                completions.append(completion)
        return completions

    def _mark_done(self, microbatch: MicroBatch) -> None:
        for index, epoch, start, num_tokens, *_ in microbatch.chunks:
            sequence = self._current(index, epoch)
            if sequence is not None:
                sequence.done = start + num_tokens

    def _add_prompt_logprobs(self, chunks: Iterable[ChunkLogprobs]) -> None:
        for found in chunks:
            sequence = self._current(found.sequence, found.epoch)
            if sequence is not None and sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs.add(found)

    def _current(self, index: int, epoch: int) -> Sequence | None:
        """Return the running sequence with this index. Return None if it has ended, or was preempted after `epoch`."""
        sequence = self._running.get(index)
        return sequence if sequence is not None and sequence.epoch == epoch else None

    def _take(self, sequence: Sequence, token: SampledToken) -> Completion | None:
        """Add the drawn token to its sequence. Return the completion of the request if this token was the last."""
        known = len(sequence.tokens)
        ending = self._ends.append(sequence, token)
        self._tokens_past_prompt += len(sequence.tokens) - known
        if ending is not None:
            self._leave(sequence)
            if ending.error_code == "non_finite_logits":
                self.prefixes.forget(self._running.values())  # its pages may be broken, and others may have found them
            computed = sequence.num_prompt - sequence.num_cached
            self._finished.append((computed, sequence.known - sequence.num_prompt))
            return ending.complete(sequence)
        if sequence.num_drawn == self._longrope_after + 1:
            self._requeue(sequence)  # transformers' `generate` drops its cache at the same length
            sequence.digests.clear()  # with the long factors, all its keys are others
            return None
        if sequence.enters and self.limits.issues_ahead:
            self.prefixes.enter(sequence, decoded=True)
        if sequence.remaining:
            self._decodes[sequence.index] = sequence
        return None

    def _expect_token(self, sequence: Sequence) -> None:
        """Let the decode of the token that the last issued chunk draws be issued before its id is known.

        Not if it may not be issued: if the output ends by its length, or the sequence will wait for the long factors.
        Nor if the request has rules, for which a stage must know all tokens before its layers run.
        """
        if sequence.rules or sequence.known == self._longrope_after or not self._ends.continues_after(sequence):
            return
        sequence.expect()
        self._tokens_past_prompt += 1
        self._decodes[sequence.index] = sequence

    def _leave(self, sequence: Sequence) -> None:
        """Remove a sequence from the running ones, and free its pages and its state slot."""
        del self._running[sequence.index]
        self._prefills.pop(sequence.index, None)
        self._decodes.pop(sequence.index, None)
        if sequence.past_prompt:
            self._num_past_prompt -= 1
            self._tokens_past_prompt -= sequence.known
        sequence.forget_expected()
        # A page that is not full is never shared.
        unfilled = -sequence.issued % self.pool.page_size
        self._held_tokens -= self.pool.give_back(sequence.pages) * self.pool.page_size - unfilled
        self.prefixes.leave(sequence)
        self._slots.give_back(sequence.slot)
        self._freed.append(sequence.index)

    def _startable(self) -> _Startable:
        """Return the first waiting sequences that may start now.

        Each needs a seat (room for a running sequence) and free pages for all its known tokens. Pages that running
        prefills will still take do not count as free. Otherwise two prompts, each with a part of its pages, could wait
        for each other's pages. All rules together must fit into a message, and so must the shared pages. Those of one
        request always do. A sequence may have to wait for one that is about to compute its next page. Later ones can
        then start before it.
        """
        pool, page_size, prefixes = self.pool, self.pool.page_size, self.prefixes
        free = pool.num_free - sum(pool.pages_for(s.known) - len(s.pages) for s in self._prefills.values())
        seats = self.limits.max_num_seqs - len(self._running)
        startable: list[Sequence] = []
        rules_left, shared_left = MOST_MICROBATCH_BYTES, MOST_SHARED_PAGES
        tokens, unseen = 0, self._waiting_tokens  # to compute, and known ones of sequences that are not looked at
        next_pages: set[bytes] = set()
        find = prefixes.find if prefixes.mode != "off" else None
        # Held sequences are skipped. The limit bounds the time of a step in which most are held.
        for sequence in islice(self._waiting, 2 * self.limits.max_num_seqs):
            if len(startable) >= seats:
                break
            if find is not None:
                unseen -= len(sequence.tokens)
                if find(sequence, next_pages):
                    continue
                tokens += sequence.remaining
                shared_left -= len(sequence.found)
                free += pool.num_held(sequence.found)
            free -= -(-len(sequence.tokens) // page_size)
            if sequence.rules:
                rules_left -= sequence.most_rules_bytes
            if free < 0 or rules_left < 0 or shared_left < 0:
                return _Startable(tuple(startable), tokens + prefixes.to_compute(unseen), lacks_pages=free < 0)
            startable.append(sequence)
        return _Startable(tuple(startable), tokens + prefixes.to_compute(unseen))

    def _apply(self, grants: list[Grant], startable: tuple[Sequence, ...]) -> tuple[Chunk, ...]:
        """Turn grants into chunks, prefill chunks before decodes. The oldest request gets its pages first.

        If a request is preempted here, no waiting request starts in this microbatch. The pages that became free are for
        the preempted requests, which are older.

        Raises:
            PolicyError: a grant is not legal.
        """
        running, page_size = self._running, self.pool.page_size
        preempted_before = self.num_preemptions
        prefills: list[Chunk] = []
        decodes: list[Chunk] = []
        before: Sequence | None = None
        # Identity shows which sequences may start. Indexes do not: requests of a lost replica are submitted again,
        # after requests with larger indexes.
        may_start = set(map(id, startable))
        for sequence, num_tokens, overlap in self._by_arrival(grants):
            if sequence is before:
                raise self._broken(f"granted tokens of {sequence} twice; a sequence has one grant per microbatch")
            begins = running.get(sequence.index) is not sequence
            if begins and self.num_preemptions > preempted_before:
                continue
            if begins and id(sequence) not in may_start:
                raise self._broken(f"granted tokens of {sequence}; it may grant only sequences of its view")
            assert isinstance(sequence, Sequence)
            before = sequence
            issued, known = sequence.issued, len(sequence.tokens)
            # Most grants are decodes. `overlap and` spares them the check of its type.
            if not (isinstance(num_tokens, int) and 1 <= num_tokens <= known - issued) or (
                overlap and not (isinstance(overlap, int) and 0 <= overlap <= issued)
            ):
                raise self._broken(
                    f"granted {num_tokens!r} tokens of {sequence} with an overlap of {overlap!r}; both must be "
                    f"integers, and the sequence has {known - issued} tokens to grant and {issued} to repeat"
                )
            new_pages: tuple[int, ...] = ()
            if issued + num_tokens > len(sequence.pages) * page_size:
                given = self._give_pages(sequence, issued + num_tokens, begins=begins)
                if given is None:
                    continue
                new_pages = given
            # The first chunk of a sequence is no decode, even if only one token is left to compute.
            if issued == known - 1 and issued >= sequence.num_prompt and not begins:
                if overlap:
                    raise self._broken(f"granted a decode of {sequence} an overlap of {overlap}; a decode is one token")
                decodes.append(self._issue_decode(sequence, new_pages))
            else:
                prefills.append(self._issue_chunk(sequence, num_tokens, overlap, new_pages))
        return (*prefills, *decodes)

    def _give_pages(self, sequence: Sequence, end: int, *, begins: bool) -> tuple[int, ...] | None:
        """Return the pages that a sequence gets for its first `end` tokens. Return None if there are not enough.

        Args:
            begins: it waits. If there are enough pages, it begins, with the pages that it has found and new ones.
        """
        if not begins:
            return self._take_pages(sequence, end) if self._make_room(sequence, end) else None
        if self.prefixes.has_lost(sequence) or not self._begin(sequence, end):
            return None  # the policy is asked again for the next microbatch
        self._take_pages(sequence, end)
        return tuple(sequence.pages)

    def _begin(self, sequence: Sequence, end: int) -> bool:
        """Move a waiting sequence to the running ones, with the pages that it has found and a state slot.

        Other sequences are never preempted for it.

        Returns:
            Whether there are enough pages for its first `end` tokens.
        """
        pool = self.pool
        if pool.num_free < pool.pages_for(end) - pool.num_held(sequence.found):
            return False
        sequence.start()
        sequence.slot = self._slots.take()
        self._waiting.remove(sequence)
        self._waiting_tokens -= sequence.known
        self._running[sequence.index] = sequence
        self._held_tokens += self.prefixes.begin(sequence)
        if sequence.past_prompt:
            self._num_past_prompt += 1
            self._tokens_past_prompt += sequence.known
        return True

    def _by_arrival(self, grants: list[Grant]) -> list[Grant]:
        try:
            return sorted(grants, key=_BY_ARRIVAL)
        except (AttributeError, TypeError):
            raise self._broken(
                f"returned {grants!r:.200}; it must be a list of Grants of the view's sequences"
            ) from None

    def _broken(self, rule: str) -> PolicyError:
        return PolicyError(f"the policy {class_name(type(self._policy))} {rule}")

    def _make_room(self, sequence: Sequence, end: int) -> bool:
        """Preempt the newest requests until there are pages for the sequence's first `end` tokens. Return success.

        A request gives up its own pages if none is newer. So the oldest request always continues, and no request waits
        for itself.
        """
        need = -(-end // self.pool.page_size) - len(sequence.pages)
        while self.pool.num_free < need:
            victim = max(self._running.values(), key=lambda running: running.order)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self._requeue(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1

    def _requeue(self, sequence: Sequence) -> None:
        """Take the pages of a running sequence, and put it back into the queue, in order of arrival.

        When it starts again, its known tokens are computed again, like a prompt, as far as their pages are not found.
        """
        self._leave(sequence)
        sequence.restart()
        self._waiting_tokens += sequence.known
        place = sum(1 for waiting in self._waiting if waiting.order < sequence.order)
        self._waiting.insert(place, sequence)

    def _issue_decode(self, sequence: Sequence, new_pages: tuple[int, ...]) -> Chunk:
        """Issue the sequence's last known token as a chunk. Most chunks are decodes, so they have a fast path here."""
        index, start = sequence.index, sequence.issued
        sequence.issued = start + 1
        self._held_tokens += 1
        if sequence.enters and sequence.issued % self.pool.page_size == 0:
            self.prefixes.enter(sequence, decoded=True)
        # A preempted sequence may end its second prefill with this token.
        if self._decodes.pop(index, None) is None:
            self._prefills.pop(index, None)
        sampling = _new(SamplingRow, (start + 1, *sequence.draw))
        tokens = (sequence.tokens[start],)
        is_long = start >= self._longrope_after
        if self.limits.issues_ahead:
            self._expect_token(sequence)
        return _new(Chunk, (index, sequence.epoch, start, 1, True, tokens, new_pages, sampling, is_long, b"", None, -1))

    def _take_pages(self, sequence: Sequence, end: int) -> tuple[int, ...]:
        """Take the pages that the sequence still needs for its first `end` tokens. They must be free."""
        new_pages = self.pool.take(-(-end // self.pool.page_size) - len(sequence.pages))
        sequence.pages.extend(new_pages)
        return new_pages

    def _issue_chunk(self, sequence: Sequence, num_tokens: int, overlap: int, new_pages: tuple[int, ...]) -> Chunk:
        start, end, known = sequence.issued, sequence.issued + num_tokens, sequence.known
        if overlap:  # a page in the index is not written again, and a state gets each token once
            repeatable = start - sequence.num_entered * self.pool.page_size
            overlap = 0 if self.limits.num_slots else min(overlap, repeatable)
        sequence.issued = end
        if sequence.enters:
            self.prefixes.enter(sequence, decoded=False)
        self._held_tokens += num_tokens
        if start < sequence.num_prompt <= end:
            self._num_past_prompt += 1
            self._tokens_past_prompt += known
        if end < known:
            self._prefills[sequence.index] = sequence
        else:
            self._prefills.pop(sequence.index, None)
        chunk = Chunk(
            sequence=sequence.index,
            epoch=sequence.epoch,
            start=start - overlap,
            num_tokens=num_tokens + overlap,
            token_ids=tuple(sequence.tokens[start - overlap : end]),
            new_pages=new_pages,
            sampling=SamplingRow(known, *sequence.draw) if end == known else None,
            long_factors=known > self._longrope_after,
            rules=sequence.first_rules() if start == sequence.num_found else b"",
            scored=sequence.scored(start, end),
            slot=sequence.slot if start == sequence.num_found else -1,
        )
        if end == known and self.limits.issues_ahead:
            self._expect_token(sequence)
        return chunk

    def _why_idle(self, startable: _Startable) -> IdleReason:
        if not self._running and not self._waiting:
            return "no_arrivals"
        if len(self._inflight) >= self.limits.num_stages and (self._decodes or self._prefills or startable.sequences):
            return "held"
        if startable.lacks_pages and not startable.sequences:
            return "no_kv"
        return "tokens_in_flight"
