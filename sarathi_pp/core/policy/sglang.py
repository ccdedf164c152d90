"""SGLang's pipeline parallelism: P slots, each with requests of its own. A microbatch is prefill or decode.

The event loop visits the slots in turn, one per stage (managers/scheduler_pp_mixin.py). A slot's microbatch is either
prompts, up to the chunk size C, or one token for each of its own decodes. Prompts come first. So consecutive
microbatches may differ in time by an order of magnitude. One prompt at a time runs in chunks. They go to slot after
slot, and the slot of the last chunk keeps the sequence.

With `dynamic` the chunks of a long prompt shrink as its context L grows (scheduler_components/dynamic_chunk_sizer.py).
Let f(l) = a*l^2 + b*l be the time of a prompt of l tokens. A chunk of x tokens takes as long as the first one if
f(L + x) - f(L) = f(C) - f(0). The chunk size goes 0.75 of the way from C to x, so at least C/4 is left. It is rounded
down to a multiple of 64, or of the page size if that is larger. It does not count decodes, nor a second prompt in the
same microbatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.core.policy.parameter import parameter
from sarathi_pp.core.policy.view import Grant, Limits, Policy, View

# Share of the way from C to x, and tokens of which the result is a multiple.
_SMOOTHING = 0.75
_ALIGNMENT = 64


@dataclass(slots=True)
class SGLang(Policy):
    """SGLang's scheduler.

    Attributes:
        dynamic: 1 shrinks the chunks of a long prompt, if a cost model of the stages is known. 0 keeps C tokens.
    """

    wants_cost: ClassVar[bool] = True

    dynamic: int = parameter(0, least=0, most=1)
    _slots: dict[int, int] = field(default_factory=dict, init=False)  # slot, by running sequence
    _prefill_turns: dict[int, int] = field(default_factory=dict, init=False)  # prefills since the last decodes, by slot

    def pick(self, view: View) -> list[Grant]:
        """Return the microbatch of the next slot. Slots that have nothing to compute are skipped."""
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
        # SGLang itself has no such limit. Without it, requests that end with their first token could come one after the
        # other, and decodes would wait forever.
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
    """Return the size of the next chunk with `dynamic`: see the module docstring. The slowest stage gives a and b.

    Args:
        context: tokens of the prompt before the chunk.
    """
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
