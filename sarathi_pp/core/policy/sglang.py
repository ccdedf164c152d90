"""SGLang's pipeline parallelism: P slots with a batch each, prefill or decode, prefill first.

The event loop visits the slots in turn (managers/scheduler_pp_mixin.py). A slot's microbatch is either prompts, up to
the chunk size C, or one token for each of its own decodes. So neighbours may differ in time by an order of magnitude.
One prompt at a time is in chunks. They go to slot after slot, and the slot of the last chunk keeps the sequence.

With `dynamic` the chunks of a long prompt shrink as its context L grows (scheduler_components/dynamic_chunk_sizer.py).
The next chunk x solves f(L + x) - f(L) = f(C) - f(0) with f(l) = a*l^2 + b*l. The chunk size goes 0.75 of the way from
C to x, which leaves at least C/4. It is rounded down to whole pages and to a multiple of 64. It ignores decodes and a
second prompt in the chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.core.policy.parameter import parameter
from sarathi_pp.core.policy.view import Grant, Limits, Policy, View

_SMOOTHING = 0.75
_ALIGNMENT = 64


@dataclass(slots=True)
class SGLang(Policy):
    """SGLang's scheduler.

    Attributes:
        dynamic: 1 shrinks chunks as above if the stages' cost is known. 0 keeps C.
    """

    wants_cost: ClassVar[bool] = True

    dynamic: int = parameter(0, least=0, most=1)
    _slots: dict[int, int] = field(default_factory=dict, init=False)  # of each running sequence
    _prefill_turns: dict[int, int] = field(default_factory=dict, init=False)  # of each slot since its last decodes

    def pick(self, view: View) -> list[Grant]:
        """Return the next slot's microbatch. A slot without one is skipped."""
        num_slots = view.limits.num_stages
        self._slots = {index: slot for index, slot in self._slots.items() if index in view.running}
        for slot in range(view.slot, view.slot + num_slots):
            grants = self._visit(slot % num_slots, view)
            if grants:
                return grants
        return []

    def _visit(self, slot: int, view: View) -> list[Grant]:
        decodes = [Grant(s, 1) for s in view.decodes if self._slots[s.index] == slot]
        turns = self._prefill_turns.get(slot, 0)
        # SGLang itself has no such limit. Prompts that end with their first token could keep decodes waiting forever.
        if not decodes or turns < view.limits.max_num_seqs:
            prefills = self._prefills(slot, view)
            if prefills:
                self._prefill_turns[slot] = turns + 1
                return prefills
        self._prefill_turns[slot] = 0
        return decodes

    def _prefills(self, slot: int, view: View) -> list[Grant]:
        others = sum(taken == slot for taken in self._slots.values())
        seats = max(1, view.limits.max_num_seqs // view.limits.num_stages) - others
        budget = self._chunk_size(view)
        grants: list[Grant] = []
        for sequence in (*view.prefills, *view.waiting):
            comes = self._slots.get(sequence.index) != slot
            if budget == 0 or (comes and seats <= 0):
                break
            seats -= comes
            self._slots[sequence.index] = slot
            num_tokens = min(sequence.remaining, budget)
            grants.append(Grant(sequence, num_tokens))
            budget -= num_tokens
        return grants

    def _chunk_size(self, view: View) -> int:
        if not (self.dynamic and view.cost and view.prefills):
            return view.limits.chunk_size
        return dynamic_chunk_size(view.cost, view.prefills[0].issued, view.limits)

    def max_tokens(self, limits: Limits) -> int:
        return max(limits.chunk_size, limits.max_decodes)


def dynamic_chunk_size(cost: CostModel, context: int, limits: Limits) -> int:
    """Return the tokens that take as long after `context` tokens as C takes at the start, on the slowest stage."""
    whole = limits.chunk_size
    quadratic, linear = max(
        ((stage.a2 / 2, stage.a1 / cost.tile) for stage in cost.stages),
        key=lambda fit: fit[0] * whole**2 + fit[1] * whole,
    )
    if quadratic == 0:
        return whole
    slope = 2 * quadratic * context + linear
    target = quadratic * whole**2 + linear * whole
    exact = (math.sqrt(slope**2 + 4 * quadratic * target) - slope) / (2 * quadratic)
    smooth = int(whole + _SMOOTHING * (exact - whole))
    step = max(limits.page_size, _ALIGNMENT)
    return min(whole, max(step, smooth // step * step))
