"""The coordinator: requests in, microbatches out, results back in. Pure; every driver runs this same object.

It owns the queues, the cursors and the pages. A policy only chooses which known tokens to compute next. The
stages see what it emits and nothing else, so they can never disagree with it about who holds which page.

A page may be given to another sequence while chunks that still write it are in flight: stages are first in
first out, so the old write has happened before the new owner's first write reaches the same stage, and the
new owner writes each position before reading it.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from types import MappingProxyType

from sarathi_pp.core.cost.model import CostModel, Load, Row
from sarathi_pp.core.cost.refiner import CostRefiner
from sarathi_pp.core.head_placement import HeadPlacement
from sarathi_pp.core.pages import PagePool
from sarathi_pp.core.plan import Chunk, IdleReason, MicroBatch, SampledToken, SamplingRow, StepResult
from sarathi_pp.core.policy.view import Grant, Limits, Policy, View, class_name, max_tokens_of
from sarathi_pp.core.request import Completion, ErrorCode, FinishReason, Request
from sarathi_pp.core.sequence import Sequence
from sarathi_pp.errors import PolicyError

StopRule = Callable[[Request, int], bool]


_BY_ARRIVAL = operator.attrgetter("sequence.index")
# A named tuple from its fields in order; calling its class takes twice as long.
_new = tuple.__new__
# Finished requests whose lengths policies may learn from.
_REMEMBERED = 256


def _never_stop(request: Request, token_id: int) -> bool:
    return False


class Coordinator:
    """Continuous batching over P stages.

    eos_token_ids: ids that end an output unless its request ignores them.
    stop_rule: told each new token of each request, in order; True ends the output there ("stop" strings).
    clock: read once per microbatch for `issued_s`. cost: what microbatches cost, as far as is known
    beforehand; refined with each result, so given only where the policy asks (`Policy.wants_cost`). heads: where the
    head of each microbatch goes; always to the last stage where there is none.
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
        self.pool = PagePool(limits.num_pages, limits.page_size)
        self.num_preemptions = 0
        self.idle_reason: IdleReason = "no_arrivals"
        self._policy = policy
        # Of the first limits, which sized the wire's buffers; `shrink` makes microbatches smaller, never larger.
        self._most_tokens = max_tokens_of(policy, limits)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._stop_rule = stop_rule
        self._clock = clock
        self._cost = CostRefiner(cost) if cost is not None else None
        self._heads = heads
        # Sums over the sequences, kept as they change: a step must not cost a look at all of them.
        self._waiting_tokens = 0
        self._held_tokens = 0
        self._num_past_prompt = 0
        self._tokens_past_prompt = 0
        self._finished: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        self._waiting: deque[Sequence] = deque()  # by arrival
        self._running: dict[int, Sequence] = {}
        self._running_view = MappingProxyType(self._running)  # for policies, which only choose
        self._prefills: dict[int, Sequence] = {}  # running, with prompt tokens (or recomputed ones) to issue
        self._decodes: dict[int, Sequence] = {}  # running, next token known, in the order they became ready
        self._inflight: deque[MicroBatch] = deque()
        self._rows: dict[int, Row] = {}  # of the microbatches whose times may still come
        self._freed: list[int] = []
        self._next_index = 0

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
        """Microbatches so far: the index of the next one."""
        return self._next_index

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting or self._running or self._inflight)

    @property
    def held_tokens(self) -> int:
        """KV positions in use, out of pages held x page size."""
        return self._held_tokens

    def submit(self, request: Request) -> Completion | None:
        """Queue a request; those that ask for no token are answered at once.

        The caller has refused prompts above `max_prompt_tokens`.
        """
        num_prompt = len(request.prompt_token_ids)
        assert 0 < num_prompt <= self.max_prompt_tokens, (num_prompt, self.max_prompt_tokens)
        if request.sampling.max_new_tokens == 0 or num_prompt == self.limits.max_model_len:
            return Completion(request, (), "length")
        self._waiting.append(Sequence(request))
        self._waiting_tokens += num_prompt
        return None

    def shrink(self) -> Limits:
        """Half the sequences and half the tokens a microbatch from now on; what runs goes on. The new limits."""
        limits = self.limits
        self.limits = replace(
            limits, max_num_seqs=max(1, limits.max_num_seqs // 2), chunk_size=max(1, limits.chunk_size // 2)
        )
        return self.limits

    def withdraw(self) -> list[Request]:
        """Take back what waits for its first chunk, or for its recomputation: no result of theirs is in flight."""
        withdrawn = [sequence.request for sequence in self._waiting]
        self._waiting.clear()
        self._waiting_tokens = 0
        return withdrawn

    def abort(self, sent: Iterable[MicroBatch]) -> None:
        """Forget all requests, from whatever state an exception has left; every page is free.

        Args:
            sent: the microbatches that are really in flight. Their results will be dropped. One that was issued and
                never sent gives its index back.
        """
        inflight = deque(sent)
        for lost in self._inflight:
            if all(microbatch is not lost for microbatch in inflight):
                self._freed.extend(lost.freed)
                self._next_index = min(self._next_index, lost.index)
        self._inflight = inflight
        # Stages drop the tables of sequences that they do not know, too.
        self._freed.extend(self._running)
        for queue in (self._waiting, self._running, self._prefills, self._decodes):
            queue.clear()
        self.pool = PagePool(self.limits.num_pages, self.limits.page_size)
        self._waiting_tokens = self._held_tokens = self._num_past_prompt = self._tokens_past_prompt = 0
        if self._heads is not None:
            self._heads.restart(inflight)

    @property
    def max_prompt_tokens(self) -> int:
        return min(self.limits.max_model_len, self.pool.num_tokens)

    def next_microbatch(self) -> MicroBatch | None:
        """The next microbatch to run, or None with `idle_reason` saying why there is none.

        Raises PolicyError if the policy breaks a rule of scheduling.
        """
        if len(self._inflight) >= self.limits.inflight:
            self.idle_reason = "full"
            return None
        chunks = self._choose()
        if not chunks:
            if not self._inflight and (self._running or self._waiting):
                raise self._broken("waits for a result with nothing in flight; it must grant some of what there is")
            return None
        microbatch = MicroBatch(self._next_index, chunks, tuple(self._freed), self._clock())
        if microbatch.num_tokens > self._most_tokens:
            raise self._broken(
                f"made a microbatch of {microbatch.num_tokens} tokens; its max_tokens allows {self._most_tokens}"
            )
        if self._heads is not None and self._heads.choose(microbatch):
            microbatch = MicroBatch(microbatch.index, chunks, microbatch.freed, microbatch.issued_s, head_on_first=True)
        self._next_index += 1
        self._freed = []
        self._inflight.append(microbatch)
        if self._cost is not None:
            self._rows[microbatch.index] = self._cost.row(Load.of(microbatch))
        return microbatch

    def _choose(self) -> tuple[Chunk, ...]:
        """Ask the policy, again where its whole choice was preempted for want of pages."""
        while True:
            admissible = self._admissible()
            view = View(
                prefills=tuple(self._prefills.values()),
                waiting=admissible,
                decodes=tuple(self._decodes.values()),
                running=self._running_view,
                limits=self.limits,
                num_inflight=len(self._inflight),
                slot=self._next_index % self.limits.num_stages,
                free_tokens=self.pool.num_free * self.pool.page_size,
                waiting_tokens=self._waiting_tokens,
                num_past_prompt=self._num_past_prompt,
                tokens_past_prompt=self._tokens_past_prompt,
                finished=self._finished,
                cost=self._cost.model if self._cost is not None else None,
            )
            preempted_before = self.num_preemptions
            chunks = self._apply(self._policy.pick(view), admissible)
            if chunks or self.num_preemptions == preempted_before:
                self.idle_reason = self._why_idle(admissible)
                return chunks

    def complete(self, result: StepResult, head_s: float = 0.0) -> list[Completion]:
        """Take in the oldest microbatch's result; returns the requests that it finished.

        head_s: seconds that the first stage took for its head, where that went there.
        Results of sequences that were preempted meanwhile are stale by their epoch and are dropped.
        """
        microbatch = self._inflight.popleft()
        assert result.index == microbatch.index, f"result {result.index} came where {microbatch.index} was due"
        for index, epoch, start, num_tokens, _, _, _, _ in microbatch.chunks:
            sequence = self._current(index, epoch)
            if sequence is not None:
                sequence.done = start + num_tokens
        if self._heads is not None:
            self._heads.observe(microbatch, result.stage_times, head_s)
        if self._cost is not None:
            # The last stage skipped the LM head here, so its time must not train a cost model that includes it.
            times = result.stage_times[:-1] if microbatch.head_on_first else result.stage_times
            for stage, time in enumerate(times):
                if time.microbatch in self._rows:
                    self._cost.observe(stage, self._rows[time.microbatch], time.seconds)
            self._rows.pop(microbatch.index - self.limits.inflight, None)
        completions = []
        for token in result.tokens:
            sequence = self._current(token.sequence, token.epoch)
            if sequence is None:
                continue
            if (completion := self._take(sequence, token)) is not None:
                completions.append(completion)
        return completions

    def _current(self, index: int, epoch: int) -> Sequence | None:
        sequence = self._running.get(index)
        return sequence if sequence is not None and sequence.epoch == epoch else None

    def _take(self, sequence: Sequence, token: SampledToken) -> Completion | None:
        """Take in a sequence's next token; returns its completion if that was the last.

        Its answer must not depend on how large the KV cache is: an output that the cache cannot hold is an error, not a
        shorter answer.
        """
        if token.failed:
            return self._finish(sequence, "error", "non_finite_logits", token.first_bad)
        reason = self._append(sequence, token)
        if reason is not None:
            return self._finish(sequence, reason)
        if len(sequence.tokens) > self.pool.num_tokens:
            return self._finish(sequence, "error", "kv_cache_exhausted")
        self._decodes[sequence.index] = sequence
        return None

    def _append(self, sequence: Sequence, token: SampledToken) -> FinishReason | None:
        tokens = sequence.tokens
        tokens.append(token.token_id)
        self._tokens_past_prompt += 1
        request = sequence.request
        stopped = self._stop_rule(request, token.token_id)
        if stopped or (token.token_id in self._eos_token_ids and not request.sampling.ignore_eos):
            return "stop"
        known = len(tokens)
        if known - sequence.num_prompt >= request.sampling.max_new_tokens or known >= self.limits.max_model_len:
            return "length"
        return None

    def _finish(
        self, sequence: Sequence, reason: FinishReason, error_code: ErrorCode | None = None, first_bad: int = -1
    ) -> Completion:
        self._leave(sequence)
        output = tuple(sequence.tokens[sequence.num_prompt :])
        self._finished.append((sequence.num_prompt, len(output)))
        return Completion(sequence.request, output, reason, sequence.epoch, first_bad, error_code)

    def _leave(self, sequence: Sequence) -> None:
        """Out of the running ones; its pages are free."""
        del self._running[sequence.index]
        self._held_tokens -= sequence.issued
        if sequence.past_prompt:
            self._num_past_prompt -= 1
            self._tokens_past_prompt -= sequence.known
        self.pool.give_back(sequence.pages)
        self._freed.append(sequence.index)

    def _admissible(self) -> tuple[Sequence, ...]:
        """The head of the waiting queue that fits: a sequence each, and pages for all their known tokens.

        Pages that running prefills will still take are counted as gone, else two prompts that are let in by
        halves could each wait for the other's pages.
        """
        pool, page_size = self.pool, self.pool.page_size
        free = pool.num_free - sum(pool.pages_for(s.known) - len(s.pages) for s in self._prefills.values())
        seats = self.limits.max_num_seqs - len(self._running)
        admissible: list[Sequence] = []
        for sequence in self._waiting:
            free -= -(-len(sequence.tokens) // page_size)
            if len(admissible) >= seats or free < 0:
                break
            admissible.append(sequence)
        return tuple(admissible)

    def _apply(self, grants: list[Grant], admissible: tuple[Sequence, ...]) -> tuple[Chunk, ...]:
        """Turn grants into chunks; pages go to the oldest request first, prefills stand before decodes.

        Once somebody was preempted nobody starts: the pages left are the older requests', who wait again.
        Raises PolicyError for a grant that is not legal.
        """
        running, page_size = self._running, self.pool.page_size
        preempted_before = self.num_preemptions
        prefills: list[Chunk] = []
        decodes: list[Chunk] = []
        before: Sequence | None = None
        # Not by order: rows of a lost replica come back behind later ones.
        admitted = set(map(id, admissible))
        for sequence, num_tokens, overlap in self._by_arrival(grants):
            if sequence is before:
                raise self._broken(f"granted tokens of {sequence} twice; legal is one grant in a microbatch")
            is_running = running.get(sequence.index) is sequence
            if not is_running and self.num_preemptions > preempted_before:
                continue
            if not is_running and id(sequence) not in admitted:
                raise self._broken(f"granted tokens of {sequence}; legal are sequences of the view that it was given")
            assert isinstance(sequence, Sequence)
            before = sequence
            issued, known = sequence.issued, len(sequence.tokens)
            # `overlap and` spares decodes, most of what is ever granted, the look at its type.
            if not (isinstance(num_tokens, int) and 1 <= num_tokens <= known - issued) or (
                overlap and not (isinstance(overlap, int) and 0 <= overlap <= issued)
            ):
                raise self._broken(
                    f"granted {num_tokens!r} tokens of {sequence} with an overlap of {overlap!r}; it has "
                    f"{known - issued} to grant and {issued} to repeat, and takes integers"
                )
            new_pages: tuple[int, ...] = ()
            if issued + num_tokens > len(sequence.pages) * page_size:
                if not self._make_room(sequence, issued + num_tokens):
                    continue
                new_pages = self._take_pages(sequence, issued + num_tokens)
            if issued == known - 1 and issued >= sequence.num_prompt:
                if overlap:
                    raise self._broken(f"granted a decode of {sequence} an overlap of {overlap}; a decode is one token")
                decodes.append(self._issue_decode(sequence, new_pages))
            else:
                prefills.append(self._issue_chunk(sequence, num_tokens, overlap, new_pages))
        return (*prefills, *decodes)

    def _by_arrival(self, grants: list[Grant]) -> list[Grant]:
        try:
            return sorted(grants, key=_BY_ARRIVAL)
        except (AttributeError, TypeError):
            raise self._broken(f"returned {grants!r:.200}; it must be a list of Grants") from None

    def _broken(self, rule: str) -> PolicyError:
        return PolicyError(f"the policy {class_name(type(self._policy))} {rule}")

    def _make_room(self, sequence: Sequence, end: int) -> bool:
        """Free pages until positions [0, end) of the sequence fit, newest request first.

        A request that is not running yet preempts nobody; a running one with none newer gives up its own
        pages, so that the oldest request always gets on and nobody waits for himself.
        """
        need = -(-end // self.pool.page_size) - len(sequence.pages)
        while self.pool.num_free < need:
            if sequence.index not in self._running:
                return False
            victim = max(self._running.values(), key=lambda running: running.index)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Recomputation: drop the KV, requeue by arrival with all tokens known so far as the new prompt."""
        self._prefills.pop(victim.index, None)
        self._decodes.pop(victim.index, None)
        self._leave(victim)
        victim.restart()
        self.num_preemptions += 1
        self._waiting_tokens += victim.known
        place = sum(1 for waiting in self._waiting if waiting.index < victim.index)
        self._waiting.insert(place, victim)

    def _issue_decode(self, sequence: Sequence, new_pages: tuple[int, ...]) -> Chunk:
        """Most of what is ever issued, so it takes a way of its own: one token, the last that is known."""
        index, start = sequence.index, sequence.issued
        sequence.issued = start + 1
        self._held_tokens += 1
        # A preempted sequence may end its second prefill with this token.
        if self._decodes.pop(index, None) is None:
            self._prefills.pop(index, None)
        sampling = _new(SamplingRow, (start + 1, *sequence.draw))
        tokens = (sequence.tokens[start],)
        return _new(Chunk, (index, sequence.epoch, start, 1, True, tokens, new_pages, sampling))

    def _take_pages(self, sequence: Sequence, end: int) -> tuple[int, ...]:
        """The pages that positions [0, end) lack, which are there."""
        new_pages = self.pool.take(-(-end // self.pool.page_size) - len(sequence.pages))
        sequence.pages.extend(new_pages)
        return new_pages

    def _issue_chunk(self, sequence: Sequence, num_tokens: int, overlap: int, new_pages: tuple[int, ...]) -> Chunk:
        start, end, known = sequence.issued, sequence.issued + num_tokens, sequence.known
        if start == 0:
            sequence.start()
            self._waiting.remove(sequence)
            self._waiting_tokens -= known
            self._running[sequence.index] = sequence
        sequence.issued = end
        self._held_tokens += num_tokens
        if start < sequence.num_prompt <= end:
            self._num_past_prompt += 1
            self._tokens_past_prompt += known
        if end < known:
            self._prefills[sequence.index] = sequence
        else:
            self._prefills.pop(sequence.index, None)
        return Chunk(
            sequence=sequence.index,
            epoch=sequence.epoch,
            start=start - overlap,
            num_tokens=num_tokens + overlap,
            token_ids=tuple(sequence.tokens[start - overlap : end]),
            new_pages=new_pages,
            sampling=SamplingRow(known, *sequence.draw) if end == known else None,
        )

    def _why_idle(self, admissible: tuple[Sequence, ...]) -> IdleReason:
        if not self._running and not self._waiting:
            return "no_arrivals"
        if len(self._inflight) >= self.limits.num_stages and (self._decodes or self._prefills or admissible):
            return "held"
        if self._waiting and not admissible and len(self._running) < self.limits.max_num_seqs:
            return "no_kv"
        return "tokens_in_flight"
