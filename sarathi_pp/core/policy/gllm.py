"""gLLM: token throttling (arXiv 2504.14775, sections 3.1 and 3.2; gllm/pp_scheduler.py).

Prefill tokens of a microbatch follow the prompts that wait and the KV cache that is free, decodes their number:

    #P = max(min(#WP / #T, #MaxP * (KV_free - KV_thresh) / (1 - KV_thresh)), #MinP)
    #D = #RD / #PP_depth

#WP: tokens of prompts not issued yet; #T: microbatches that they are spread over; KV_free: share of the cache
that is free, below KV_thresh of it no prompt goes on; #RD: running decodes, those in flight included. Each is
balanced by itself, so their sum differs between microbatches, and decodes weigh the same whatever their context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sarathi_pp.core.policy.parameter import parameter
from sarathi_pp.core.policy.prompts import fill
from sarathi_pp.core.policy.view import Grant, Limits, Policy, View


@dataclass(frozen=True, slots=True)
class GLLM(Policy):
    """iterp: #T. maxp, minp: #MaxP and #MinP. kvthresh: KV_thresh in percent."""

    uses_chunk_size: ClassVar[bool] = False

    iterp: int = parameter(8, least=1)
    maxp: int = parameter(2048, least=1)
    minp: int = parameter(32, least=1)
    kvthresh: int = parameter(5, least=0, most=99)

    def pick(self, view: View) -> list[Grant]:
        grants = [Grant(s, 1) for s in view.decodes[: self.num_decodes(view)]]
        budget = self.prefill_tokens(view)
        if not budget and not grants and not view.num_inflight:
            # One prompt holds nearly all of the cache: nobody else is there to free any.
            budget = self.minp
        return grants + fill((*view.prefills, *view.waiting), budget)

    def prefill_tokens(self, view: View) -> int:
        """#P, 0 where prefill is suspended."""
        free = view.free_tokens / (view.limits.num_pages * view.limits.page_size)
        threshold = self.kvthresh / 100
        if free < threshold:
            return 0
        waiting = view.waiting_tokens + sum(s.remaining for s in view.prefills)
        room = self.maxp * (free - threshold) / (1 - threshold)
        return max(int(min(waiting / self.iterp, room)), self.minp)

    def num_decodes(self, view: View) -> int:
        """#D, rounded up: rounded down, some decodes would never fit into a round of the pipeline."""
        running = len(view.running) - len(view.prefills)
        return -(-running // view.limits.num_stages)

    def max_tokens(self, limits: Limits) -> int:
        return min(max(self.maxp, self.minp), limits.num_pages * limits.page_size) + limits.max_decodes
