"""balanced: microbatches of equal time on the slowest stage, whatever the mix of prompts and outputs.

A pipeline waits where one microbatch takes longer than the next. So:

    size      One total n of tokens, whole tiles, for a cycle of P microbatches. In a steady state prompts are
              computed as fast as outputs end: b decodes go with b * P:D prompt tokens, n = b * (1 + P:D). That is
              SARATHI's P:D = C / (B - 1) (arXiv 2308.16369, section 5.1.3) read backwards, with b what may run at
              once, less the one whose prompt is computed, and P:D what finished requests had. The tile around it with
              the most tokens a second is taken, and no more than prompts at hand fill evenly over a cycle that ends
              with them. Where all that wait can start, there is no such state: then what computes the oldest prompt
              soonest, if that is more, or where most have their prompts still to be computed, what computes all of
              these soonest.
    decodes   Shared by time, not by count: each microbatch takes its part of the keys that all decodes read.
    prefill   The rest of n, from the oldest prompts; several chunks of one prompt may be in flight.
    tbt_slo   Where it is given: no more prompt tokens than let a microbatch pass each stage in that time divided by
              those in flight or, if more, the stages: a sequence's next token comes when they all have.
    in flight One microbatch more than stages while there are prompts: a stage that is done early finds the next one
              there. Not while outputs alone are left, not where one stage is so much slower that it finds it there
              without, and not where seats are short and the tokens a second would fall: every cohort that decodes are
              cut into more costs a microbatch.
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

# Where nothing is known of the stages: time goes with tokens, and a little with what they read.
_UNKNOWN = CostModel(1, (StageCost((0, 1), a0=16.0, a1=1.0, a2=1e-4, a3=1e-3, a4=0.0),))
# Without tiles, sizes are still tried in steps.
_LEAST_STEP = 16
# The size by which the slowest stage is told before there is one.
_FIRST_SIZE = 256
# A larger size must bring this much more tokens a second: it costs latency.
_WORTHWHILE = 1.005
# One microbatch more in flight may cost this share of the tokens a second: what stages no longer wait makes up for it.
_SPARE_COST = 0.03
# One stage sets the pace where all others are done sooner by this share of its time, and by that much of a microbatch
# together: then its next one is there without a spare. Stages nearer to each other wait for one another by turns.
_AHEAD, _SLACK = 0.05, 0.5
# Prompts may be computed by this share later than with the size that computes them soonest, by the model: decodes ride
# along the longer, and a stage that computes many tokens hides some of what a microbatch costs by itself.
_NEAR_ENOUGH = 0.01
# Of a bound on the time between tokens: the rest is for the turns that a decode waits for an equal share.
_SLO_SHARE = 0.9
# Requests whose prompt is being computed, of those that run.
_PROMPTS_AT_A_TIME = 1
# Prompt to output tokens, until a request has finished or run for longer than that.
_PRIOR_RATIO = 8.0


@dataclass(slots=True)
class Balanced(Policy):
    """tbt_slo: most seconds between two tokens of a request, 0 for no bound."""

    chooses_chunk_size: ClassVar[bool] = True
    default_chunk_size: ClassVar[int] = 2048
    # For others a microbatch to spare costs throughput.
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
            # A token passes every stage, and those in flight before it.
            turns = max(inflight, view.limits.num_stages)
            budget = _within(view, cost, decodes, _SLO_SHARE * self.tbt_slo / turns, budget)
        grants = [*_chunks(view, budget), *decodes]
        if grants:
            # Only what is issued moves a cycle on: how often somebody asks must not show in the schedule.
            self._left_in_cycle = (self._left_in_cycle if cycle is self._cycle else cycle.length) - 1
            self._cycle = cycle if prompts or not cycle.prompts else replace(cycle, prompts=False)
        return grants

    def max_tokens(self, limits: Limits) -> int:
        return limits.chunk_size


@dataclass(frozen=True, slots=True)
class _Cycle:
    """What holds for so many microbatches: tokens of each, and most of them in flight while there are prompts.

    length: of the cycle. prompts: whether there have been any all the time.
    """

    size: int
    length: int
    inflight: int
    prompts: bool
    burst: _Burst | None = None


class _Burst(NamedTuple):
    """Many prompts at once: their tokens when it began, and the index of the last one."""

    tokens: int
    last: int


@dataclass(frozen=True, slots=True)
class _Decoding:
    """The sequences past their prompt, those in flight included, and what a decode of each costs.

    row_s: whatever its context, token_s of it as one of the microbatch's tokens. total_s: of a decode of all of them.
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
    """This microbatch's part of the decodes' time, to the nearest decode, of those that are ready."""
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
    limits, stage = view.limits, slowest.stage
    step = max(cost.tile, _LEAST_STEP)
    inflight, fewest = limits.inflight, _fewest(limits)
    if slowest.sets_the_pace(limits.num_stages):
        inflight = fewest
    at_hand = sum(s.remaining for s in chain(view.prefills, view.waiting))
    decodes = decoding.count / inflight
    if not at_hand and not view.waiting_tokens and decodes < limits.chunk_size // step * step:
        # Outputs alone are left, and all fit: what follows would come to the same.
        return _Cycle(max(1, step * math.ceil(decodes / step)), fewest, inflight, prompts=False)
    # No more than so many are ever told of ahead of time: where that many wait, there may be others.
    may_be_more = len(view.waiting) >= limits.max_num_seqs
    all_can_start = not may_be_more and view.waiting_tokens <= sum(s.known for s in view.waiting)
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
    """It begins where most have their prompts still to be computed, and lasts until those prompts are.

    Its microbatches keep the size of its beginning: that filling the pipeline takes longer with larger ones is paid for
    by then, and a stage waits for the last large one before a smaller one as long now as later.
    """
    prompts = [*view.prefills, *view.waiting]
    if not prompts:
        return None
    burst = before.burst if before is not None and before.prompts else None
    if burst is not None and prompts[0].index > burst.last:
        burst = None
    if len(prompts) >= view.num_past_prompt:
        return _Burst(max(at_hand, burst.tokens if burst else 0), prompts[-1].index)
    return burst


def _sustained(
    view: View, stage: StageCost, cost: CostModel, decoding: _Decoding, ratio: float, inflight: int
) -> tuple[int, float]:
    """The size for a steady state of what could run, and its tokens a second.

    A request keeps its seat while its prompt is computed, size - b tokens a microbatch, and then for a turn of those in
    flight per output token: by Little's law as many seats are taken as prompts are computed at a time, one, and
    b * inflight that decode. With prompt tokens for one decode more, all seats decode in the end, prompts cannot start,
    and stages wait for one another behind microbatches of decodes alone.

    Not so small that the decodes there are leave prompts less than those of them that end make room for, up to one
    prompt token for each: where a microbatch costs nothing by itself, no size would be too small.
    """
    chunk_size = view.limits.chunk_size
    decodes = decoding.count / inflight
    seats = len(view.running) + len(view.waiting)
    sustained = max(1, seats - _PROMPTS_AT_A_TIME) / inflight * (1 + ratio)
    decode_s = decoding.total_s / decoding.count - decoding.token_s if decoding.count else 0.0
    step = min(max(cost.tile, _LEAST_STEP), chunk_size)
    least = min(chunk_size // step, max(1, math.ceil(decodes * (1 + min(1.0, ratio)) / step))) * step
    best, best_rate = least, 0.0
    most = max(least, min(chunk_size, math.ceil(sustained / step) * step))  # beyond, only the time grows
    for size in range(least, most + 1, step):
        tokens = min(size, sustained)
        seconds = stage.a0 + stage.a1 * cost.tiles(size) + decode_s * tokens / (1 + ratio)
        rate = tokens / seconds if seconds > 0 else math.inf
        if rate > best_rate * _WORTHWHILE:
            best, best_rate = size, rate
    return best, best_rate


def _fewest(limits: Limits) -> int:
    """Microbatches in flight without the one to spare."""
    return max(limits.inflight - 1, min(limits.inflight, limits.num_stages))


def _within(view: View, cost: CostModel, decodes: list[Grant], room_s: float, most: int) -> int:
    """Prompt tokens, at most `most`, with which every stage takes the microbatch in that time.

    At least what fills up the tile that the decodes have begun, or the ridge, which costs nothing, or else one step: a
    bound that cannot be kept must not starve prompts.
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
    """The size that computes prompts soonest when no more are to follow: fewer microbatches against a longer ramp.

    n that makes (at_hand / n + P - 1) * (a0 + a1 * n / tile) least, or rather the smallest n that comes near enough:
    the curve is flat there, and what is uneven between microbatches grows with them. In tokens, with f those that
    take as long as a0: at_hand * f / n + (P - 1) * n + what does not depend on n.
    """
    ramp = max(1, limits.num_stages - 1)
    fixed = stage.a0 * cost.tile / stage.a1 if stage.a1 > 0 else 0.0
    least = 2 * math.sqrt(at_hand * fixed * ramp)
    enough = least + _NEAR_ENOUGH * (least + at_hand + ramp * fixed)
    return max(cost.ridge, (enough - math.sqrt(enough * enough - least * least)) / (2 * ramp))


def _prompt_to_output(view: View) -> float:
    """P:D of finished requests; before there are any, what the outputs that are longest so far allow."""
    outputs = sum(num_output for _, num_output in view.finished)
    if outputs:
        return sum(num_prompt for num_prompt, _ in view.finished) / outputs
    return min(_PRIOR_RATIO, _least_ratio_so_far(view))


def _least_ratio_so_far(view: View) -> float:
    running = (s for s in view.running.values() if s.known > s.num_prompt)
    return min((s.num_prompt / (s.known - s.num_prompt) for s in running), default=_PRIOR_RATIO)


def _chunks(view: View, budget: int) -> list[Grant]:
    return fill(chain(view.prefills, view.waiting), max(0, budget))


def _attention(chunks: list[Grant]) -> float:
    """Score entries that the chunks' attention computes."""
    return sum(grant.num_tokens * (grant.sequence.issued + grant.num_tokens / 2) for grant in chunks)


class _Slowest(NamedTuple):
    """The stage that takes longest, and by which share of its time every other one is done sooner."""

    stage: StageCost
    ahead: float

    def sets_the_pace(self, num_stages: int) -> bool:
        """Whether a microbatch is back well before P of them are through this stage."""
        return self.ahead >= _AHEAD and (num_stages - 1) * self.ahead >= _SLACK


def _slowest(cost: CostModel, view: View, size: int) -> _Slowest:
    """By a microbatch of `size` tokens with its share of the decodes."""
    num_stages = view.limits.num_stages
    decodes, keys = view.num_past_prompt // num_stages, view.tokens_past_prompt // num_stages
    row = cost.row(Load(max(0, size - decodes), 0.0, decodes, keys))
    seconds = [stage.seconds(row) for stage in cost.stages]
    longest_s = max(seconds)
    slowest = seconds.index(longest_s)
    next_s = max(chain(seconds[:slowest], seconds[slowest + 1 :]), default=longest_s)
    return _Slowest(cost.stages[slowest], 1 - next_s / longest_s if longest_s > 0 else 0.0)
