"""vLLM V1: one token budget over the running requests, then the waiting ones (vllm/v1/core/sched/scheduler.py).

"There's no decoding phase nor prefill phase in the scheduler": each request catches up with its known tokens. The
running ones come first, in the order of arrival, decodes and prompts alike. Each gets all its known tokens, or what is
left of the budget. Then come the waiting ones. A request whose token is in flight has nothing to compute and is
skipped. Further chunks of a prompt may follow those in flight.

The oldest request always continues, and a lone prompt fills the pipeline. The price: decodes stay in the cohorts in
which their prompts ended, and nothing balances these. One more decode replaces one prompt token, whatever it costs.
"""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_pp.core.policy.prompts import fill
from sarathi_pp.core.policy.view import Grant, Limits, Policy, View


@dataclass(frozen=True, slots=True)
class VLLM(Policy):
    def pick(self, view: View) -> list[Grant]:
        in_order = sorted((*view.prefills, *view.decodes), key=lambda sequence: sequence.index)
        return fill((*in_order, *view.waiting), view.limits.chunk_size)

    def max_tokens(self, limits: Limits) -> int:
        return limits.chunk_size
