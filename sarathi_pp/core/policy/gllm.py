"""gLLM: token throttling (arXiv 2504.14775, sections 3.1 and 3.2; gllm/pp_scheduler.py).

Each microbatch has #P prefill tokens, depending on the waiting prompts and on the free KV cache, and #D decodes:

    #P = max(min(#WP / #T, #MaxP * (KV_free - KV_thresh) / (1 - KV_thresh)), #MinP)
    #D = #RD / #PP_depth

    #WP         tokens of prompts that are not issued yet
    #T          number of microbatches over which they are spread
    #MaxP       most prefill tokens of a microbatch
    #MinP       least prefill tokens of a microbatch, unless prefill is suspended
    KV_free     free share of the KV cache
    KV_thresh   if KV_free is below this share, prefill is suspended
    #RD         sequences that decode, those in flight included
    #PP_depth   number of stages

Prefill tokens and decodes are each balanced between microbatches, but their sum is not. A decode counts the same
whatever its context, although a long context takes longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sarathi_pp.core.policy.parameter import parameter
from sarathi_pp.core.policy.prompts import fill
from sarathi_pp.core.policy.view import Grant, Limits, Policy, View


@dataclass(frozen=True, slots=True)
class GLLM(Policy):
    """gLLM's scheduler.

    Attributes:
        iterp: #T, in microbatches.
        maxp: #MaxP, in tokens.
        minp: #MinP, in tokens.
        kvthresh: KV_thresh, in percent of the KV cache.
    """

    uses_chunk_size: ClassVar[bool] = False

    iterp: int = parameter(8, least=1)
    maxp: int = parameter(2048, least=1)
    minp: int = parameter(32, least=1)
    kvthresh: int = parameter(5, least=0, most=99)

    def pick(self, view: View) -> list[Grant]:
        grants = [Grant(s, 1) for s in view.decodes[: self.num_decodes(view)]]
        budget = self.prefill_tokens(view)
        if not budget and not grants and not view.num_inflight:
            # One prompt holds nearly all of the cache, and there is no other request that could free any.
            budget = self.minp
        return grants + fill((*view.prefills, *view.waiting), budget)

    def prefill_tokens(self, view: View) -> int:
        """Return #P, the prefill tokens of the next microbatch. It is 0 if prefill is suspended."""
        free = view.free_tokens / (view.limits.num_pages * view.limits.page_size)
        threshold = self.kvthresh / 100
        if free < threshold:
            return 0
        waiting = view.waiting_tokens + sum(s.remaining for s in view.prefills)
        room = self.maxp * (free - threshold) / (1 - threshold)
        return max(int(min(waiting / self.iterp, room)), self.minp)

    def num_decodes(self, view: View) -> int:
        """Return #D, the decodes of the next microbatch, rounded up.

        If it were rounded down, the microbatches of all stages together would not have room for every decode.
        """
        running = len(view.running) - len(view.prefills)
        return -(-running // view.limits.num_stages)

    def max_tokens(self, limits: Limits) -> int:
        return min(max(self.maxp, self.minp), limits.num_pages * limits.page_size) + limits.max_decodes
