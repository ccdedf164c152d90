"""balanced: microbatches of equal time on the slowest stage, for any mix of prompts and outputs.

Stages wait for each other if one microbatch takes longer than the next. So the policy decides (P stages, P:D prompt
tokens per output token):

    size      All microbatches of a cycle have the same number of tokens, in whole tiles. A cycle has P microbatches, or
              one more if all prompts then end with it.
              In a steady state, prompts are computed as fast as outputs end. So b decodes go with b * P:D prompt
              tokens, and a microbatch has n = b * (1 + P:D) tokens. That is SARATHI's P:D = C / (B - 1) (arXiv
              2308.16369, section 5.1.3), solved for the size. b is the number of requests that can run at once, less
              the one whose prompt is computed, divided by the microbatches in flight. P:D is that of finished requests.
              Of the sizes up to n, the policy takes the one with the most tokens per second. It takes at least the
              ridge, up to which tokens take no time. If the prompts at hand end within the cycle, they are divided
              evenly over its microbatches, also below the ridge.
              If all waiting requests can start, there is no steady state. Then a second size is computed, and the
              larger of the two is used. It is the size that completes the oldest prompt earliest. If most requests
              still have prompts to compute, it is the size that completes all these prompts earliest.
    decodes   Divided by time, not by count: each microbatch takes an equal part of the time of all decodes, which
              includes the keys that they read.
    prefill   The other tokens of n, from the oldest prompts. Several chunks of one prompt may be in flight.
    tbt_slo   A bound on the seconds between two tokens of a request. If it is given, it limits the prompt tokens. In
              the time between two tokens, a stage computes as many microbatches as are in flight, or P if that is more.
              So a microbatch may take at most tbt_slo divided by this number on each stage.
    in flight One microbatch more than stages while there are prompts, so that a stage that is done early finds the
              next one. There is no such spare microbatch in three cases. Only outputs are left. One stage is so slow
              that its next microbatch is there in time anyway. Requests wait for room to run, and the tokens per
              second would fall: with a spare one, the same decodes are divided among more microbatches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import ClassVar, NamedTuple

from sarathi_pp.core.cost.model import CostModel, Load, StageCost
from sarathi_pp.core.policy.parameter import parameter
from sarathi_pp.core.policy.prompts import fill
from sarathi_pp.core.policy.view import Grant, Limits, Policy, SequenceView, View

# The cost model if nothing is known about the stages: time grows with tokens, and a little with the keys read.
_UNKNOWN = CostModel(1, (StageCost((0, 1), a0=16.0, a1=1.0, a2=1e-4, a3=1e-3, a4=0.0),))
# Sizes are tried in steps of one tile. If the tile is smaller than this number of tokens, it is the step.
_LEAST_STEP = 16
# The slowest stage depends on the size of a microbatch. Before the first cycle, this number of tokens is assumed.
_FIRST_SIZE = 256
# A larger size must give this many times the tokens per second, because it costs latency.
_WORTHWHILE = 1.005
# The spare microbatch may cost this share of the tokens per second by the model. Shorter waits of the stages, which the
# model does not have, make up for it.
_SPARE_COST = 0.03
# One stage sets the pace if all others are faster by the share _AHEAD of its time, and together by _SLACK of a
# microbatch. Then its next microbatch is there without a spare. Stages of more equal speed wait for each other in turn.
_AHEAD, _SLACK = 0.05, 0.5
# By the model, prompts may be computed later by this share than with the fastest size. Decodes then ride along for a
# longer time. And a stage that computes many tokens hides some of a microbatch's fixed cost.
_NEAR_ENOUGH = 0.01
# Microbatches are planned for this share of tbt_slo. The other part is a reserve: a ready decode may have to wait for
# the next microbatch, because each one takes only an equal share of the decodes.
_SLO_SHARE = 0.9
# Number of running requests whose prompts are computed at the same time.
_PROMPTS_AT_A_TIME = 1
# Prompt tokens per output token, until a request has finished, or a running one has a lower ratio so far.
_PRIOR_RATIO = 8.0


@dataclass(slots=True)
class Balanced(Policy):
    """The policy `balanced`.

    Attributes:
        tbt_slo: most seconds between two tokens of a request; 0 means no bound.
    """

    chooses_chunk_size: ClassVar[bool] = True
    default_chunk_size: ClassVar[int] = 2048
    # Other policies lose throughput with a spare microbatch.
    spare_microbatches: ClassVar[int] = 1
    wants_cost: ClassVar[bool] = True

    tbt_slo: float = parameter(0.0, 0.0)
    _cycle: _Cycle | None = field(default=None, init=False)
    _left_in_cycle: int = field(default=0, init=False)

    def pick(self, view: View) -> list[Grant]:
        prompts = bool(view.prefills or view.waiting)
        cost = view.cost or _UNKNOWN
        slowest = _slowest(cost, view, self._cycle.size if self._cycle else _FIRST_SIZE)
        decoding = _Decoding.of(view, slowest.stage, cost.tile)
        cycle = self._cycle
        if cycle is None or self._left_in_cycle == 0 or (prompts and not cycle.prompts):
            cycle = _choose_cycle(view, slowest, cost, decoding, cycle)
        inflight = cycle.inflight if prompts else _fewest(view.limits)
        if view.num_inflight >= inflight:
            return []
        decodes = _share(view, decoding, inflight)
        budget = cycle.size - len(decodes)
        if self.tbt_slo:
            # A token passes every stage, and waits for the microbatches in flight before it.
            turns = max(inflight, view.limits.num_stages)
            budget = _within(view, cost, decodes, _SLO_SHARE * self.tbt_slo / turns, budget)
        grants = [*_chunks(view, budget), *decodes]
        if grants:
            # Only issued microbatches advance a cycle. The schedule must not depend on how often `pick` is called.
            self._left_in_cycle = (self._left_in_cycle if cycle is self._cycle else cycle.length) - 1
            self._cycle = cycle if prompts or not cycle.prompts else replace(cycle, prompts=False)
        return grants

    def max_tokens(self, limits: Limits) -> int:
        return limits.chunk_size


@dataclass(frozen=True, slots=True)
class _Cycle:
    """The decisions that hold for the microbatches of one cycle.

    Attributes:
        size: tokens per microbatch.
        length: microbatches in the cycle.
        inflight: most microbatches in flight while there are prompts.
        prompts: there were prompts during the whole cycle.
        burst: the burst of prompts that is under way; None if there is none.
    """

    size: int
    length: int
    inflight: int
    prompts: bool
    burst: _Burst | None = None


class _Burst(NamedTuple):
    """Many prompts that are computed at the same time.

    Attributes:
        tokens: prompt tokens that were left to compute when the burst was largest.
        last: order of the last sequence that belongs to it.
    """

    tokens: int
    last: int


@dataclass(frozen=True, slots=True)
class _Decoding:
    """The running sequences whose prompt is issued, and the seconds that their decodes take on one stage.

    Attributes:
        count: number of these sequences, those whose token is in flight included.
        total_s: time of one decode of each of them, added up.
        row_s: time of one decode, without reading its context.
        token_s: the part of row_s that linear layers take.
        key_s: time to read one token of context.
    """

    count: int
    total_s: float
    row_s: float
    token_s: float
    key_s: float

    @classmethod
    def of(cls, view: View, stage: StageCost, tile: int) -> _Decoding:
        count, keys = view.num_past_prompt, view.tokens_past_prompt
        token_s = stage.a1 / tile
        row_s = token_s + stage.a4 + stage.head_s
        return cls(count, row_s * count + stage.a3 * keys, row_s, token_s, stage.a3)

    def seconds(self, sequence: SequenceView) -> float:
        return self.row_s + self.key_s * sequence.known


def _share(view: View, decoding: _Decoding, inflight: int) -> list[Grant]:
    """Return the decodes of the next microbatch, from those that are ready.

    They take an equal part of the time of all decodes, rounded to whole decodes: one part per microbatch in flight.
    """
    room_s = decoding.total_s / inflight
    decodes: list[Grant] = []
    for sequence in islice(view.decodes, view.limits.chunk_size):
        cost_s = decoding.seconds(sequence)
        if decodes and room_s < cost_s / 2:
            break
        room_s -= cost_s
        decodes.append(Grant(sequence, 1))
    return decodes


def _choose_cycle(view: View, slowest: _Slowest, cost: CostModel, decoding: _Decoding, before: _Cycle | None) -> _Cycle:
    """Return the decisions for the next cycle, which follows the cycle `before`."""
    limits, stage = view.limits, slowest.stage
    step = max(cost.tile, _LEAST_STEP)
    inflight, fewest = limits.inflight, _fewest(limits)
    if slowest.sets_the_pace(limits.num_stages):
        inflight = fewest
    at_hand = sum(s.remaining for s in chain(view.prefills, view.waiting))
    decodes = decoding.count / inflight
    if not at_hand and not view.waiting_tokens and decodes < limits.chunk_size // step * step:
        # Only outputs are left, and all fit. The code below would give the same result.
        return _Cycle(max(1, step * math.ceil(decodes / step)), fewest, inflight, prompts=False)
    # The policy sees at most max_num_seqs waiting requests in advance. If that many wait, there may be more.
    may_be_more = len(view.waiting) >= limits.max_num_seqs
    all_can_start = not may_be_more and view.waiting_tokens <= sum(s.remaining for s in view.waiting)
    ratio = _prompt_to_output(view)
    size, rate = _sustained(view, stage, cost, decoding, ratio, inflight)
    if not all_can_start and inflight != fewest:
        size_of_fewest, rate_of_fewest = _sustained(view, stage, cost, decoding, ratio, fewest)
        if rate < (1 - _SPARE_COST) * rate_of_fewest:
            size, inflight = size_of_fewest, fewest
    burst = _burst(view, at_hand, before) if all_can_start else None
    if all_can_start:
        oldest = next((s.remaining for s in chain(view.prefills, view.waiting)), 0)
        size = max(size, step * math.ceil(_quickest(burst.tokens if burst else oldest, stage, cost, limits) / step))
    size, length = min(size, limits.chunk_size), limits.num_stages
    decodes = decoding.count / inflight
    full = at_hand / (size - decodes) if size > decodes else math.inf
    if full <= inflight:
        length = max(fewest, math.ceil(full))
        size = min(size, step * math.ceil((at_hand / length + decodes) / step))
    return _Cycle(max(1, size), length, inflight, at_hand > 0, burst)


def _burst(view: View, at_hand: int, before: _Cycle | None) -> _Burst | None:
    """Return the burst of prompts that is under way, or None.

    A burst starts when most requests still have their prompts to compute, and lasts until those prompts are computed.
    Its microbatches keep the size that was best at its start. Large microbatches have a cost at the start, because the
    pipeline takes longer to fill, but that time is already spent. They have a cost at the change to smaller ones,
    because stages then wait for the last large one. That wait is as long now as later.
    """
    prompts = [*view.prefills, *view.waiting]
    if not prompts:
        return None
    burst = before.burst if before is not None and before.prompts else None
    if burst is not None and prompts[0].order > burst.last:
        burst = None
    if len(prompts) >= view.num_past_prompt:
        return _Burst(max(at_hand, burst.tokens if burst else 0), prompts[-1].order)
    return burst


def _sustained(
    view: View, stage: StageCost, cost: CostModel, decoding: _Decoding, ratio: float, inflight: int
) -> tuple[int, float]:
    """Return the best size for a steady state of all requests that can run, and its tokens per second.

    Let b be the decodes per microbatch. A request keeps its seat (room to run) while its prompt is computed, size - b
    tokens per microbatch. Then it keeps the seat for its output: each token takes as many microbatches as are in
    flight. By Little's law, one seat is taken by the prompt that is computed, and b * inflight seats by requests that
    decode. If there were prompt tokens for one more decode, all seats would decode in the end. Prompts could then not
    start, and stages would wait for each other after microbatches with only decodes.

    The size has two lower limits. The ridge is one: fewer tokens take as long, and a prompt that is computed sooner has
    its first token sooner. With the other, the present decodes leave prompts as many tokens as ending decodes make room
    for, up to one prompt token per decode. Without it, no size would be too small if a microbatch has no fixed cost.
    """
    chunk_size = view.limits.chunk_size
    decodes = decoding.count / inflight
    seats = len(view.running) + len(view.waiting)
    sustained = max(1, seats - _PROMPTS_AT_A_TIME) / inflight * (1 + ratio)
    decode_s = decoding.total_s / decoding.count - decoding.token_s if decoding.count else 0.0
    step = min(max(cost.tile, _LEAST_STEP), chunk_size)
    least = max(cost.ridge, decodes * (1 + min(1.0, ratio)), 1)
    least = min(chunk_size // step, math.ceil(least / step)) * step
    best, best_rate = least, 0.0
    most = max(least, min(chunk_size, math.ceil(sustained / step) * step))  # beyond this only the time grows
    for size in range(least, most + 1, step):
        tokens = min(size, sustained)
        seconds = stage.a0 + stage.a1 * cost.tiles(size) + decode_s * tokens / (1 + ratio)
        rate = tokens / seconds if seconds > 0 else math.inf
        if rate > best_rate * _WORTHWHILE:
            best, best_rate = size, rate
    return best, best_rate


def _fewest(limits: Limits) -> int:
    """Return the most microbatches in flight if there is no spare one."""
    return max(limits.inflight - 1, min(limits.inflight, limits.num_stages))


def _within(view: View, cost: CostModel, decodes: list[Grant], room_s: float, most: int) -> int:
    """Return the prompt tokens, at most `most`, with which every stage computes the microbatch within `room_s`.

    The result is at least the tokens that cost nothing: those that fill the tile in which the decodes end, or those up
    to the ridge. If there are none, it is at least one step. So prompts advance even if the bound cannot be kept.
    """
    step = max(cost.tile, _LEAST_STEP)
    num_decodes, keys = len(decodes), sum(grant.sequence.known for grant in decodes)
    least = max(-num_decodes % cost.tile or step, cost.ridge - num_decodes)
    for total in range((most + num_decodes) // step * step, num_decodes + least, -step):
        tokens = total - num_decodes
        row = cost.row(Load(tokens, _attention(_chunks(view, tokens)), num_decodes, keys))
        if max(stage.seconds(row) for stage in cost.stages) <= room_s:
            return tokens
    return min(least, most)


def _quickest(at_hand: int, stage: StageCost, cost: CostModel, limits: Limits) -> float:
    """Return the size with which `at_hand` prompt tokens are computed earliest, if no more prompts follow.

    With large microbatches there are fewer of them, so their fixed times add up to less. But the pipeline takes longer
    to fill. The best size n makes (at_hand / n + P - 1) * (a0 + a1 * n / tile) least. The curve is flat there, and
    larger microbatches are less even. So the result is the smallest n that is within _NEAR_ENOUGH of the least time.

    If f tokens take as long as a0, the time in tokens is at_hand * f / n + (P - 1) * n + terms that do not depend on n.
    """
    ramp = max(1, limits.num_stages - 1)
    fixed = stage.a0 * cost.tile / stage.a1 if stage.a1 > 0 else 0.0
    least = 2 * math.sqrt(at_hand * fixed * ramp)
    enough = least + _NEAR_ENOUGH * (least + at_hand + ramp * fixed)
    return max(cost.ridge, (enough - math.sqrt(enough * enough - least * least)) / (2 * ramp))


def _prompt_to_output(view: View) -> float:
    """Return P:D (prompt tokens per output token) of the latest finished requests.

    Before a request has finished, return _PRIOR_RATIO, or the least ratio of a running request if that is lower.
    """
    outputs = sum(num_output for _, num_output in view.finished)
    if outputs:
        return sum(num_prompt for num_prompt, _ in view.finished) / outputs
    return min(_PRIOR_RATIO, _least_ratio_so_far(view))


def _least_ratio_so_far(view: View) -> float:
    running = (s for s in view.running.values() if s.known > s.num_prompt)
    return min((max(0, s.num_prompt - s.num_found) / (s.known - s.num_prompt) for s in running), default=_PRIOR_RATIO)


def _chunks(view: View, budget: int) -> list[Grant]:
    return fill(chain(view.prefills, view.waiting), max(0, budget))


def _attention(chunks: list[Grant]) -> float:
    """Return the number of query-key scores that attention computes for these chunks."""
    return sum(grant.num_tokens * (grant.sequence.issued + grant.num_tokens / 2) for grant in chunks)


class _Slowest(NamedTuple):
    """The stage that takes longest.

    Attributes:
        ahead: share of its time by which the next slowest stage is faster.
    """

    stage: StageCost
    ahead: float

    def sets_the_pace(self, num_stages: int) -> bool:
        """Return whether this stage is so slow that its next microbatch is there in time without a spare one."""
        return self.ahead >= _AHEAD and (num_stages - 1) * self.ahead >= _SLACK


def _slowest(cost: CostModel, view: View, size: int) -> _Slowest:
    """Return the slowest stage for a microbatch of `size` tokens with its share of the decodes."""
    num_stages = view.limits.num_stages
    decodes, keys = view.num_past_prompt // num_stages, view.tokens_past_prompt // num_stages
    row = cost.row(Load(max(0, size - decodes), 0.0, decodes, keys))
    seconds = [stage.seconds(row) for stage in cost.stages]
    longest_s = max(seconds)
    slowest = seconds.index(longest_s)
    next_s = max(chain(seconds[:slowest], seconds[slowest + 1 :]), default=longest_s)
    return _Slowest(cost.stages[slowest], 1 - next_s / longest_s if longest_s > 0 else 0.0)
