"""vLLM V1: one token budget over the running requests, then the waiting ones (vllm/v1/core/sched/scheduler.py).

"There's no decoding phase nor prefill phase in the scheduler": each request catches up with its known tokens. The
running ones come first, in the order of arrival, decodes and prompts alike. Each gets all its known tokens, or what is
left of the budget. Then come the waiting ones. A request whose token is in flight has nothing to compute and is
skipped. Several chunks of one prompt may be in flight.

The oldest request always continues, and a lone prompt keeps all stages busy. The price: requests whose prompts ended in
the same microbatch decode together from then on (a cohort), and nothing makes the cohorts equal. A decode counts as
much in the budget as a prompt token, although it may take longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_pp.core.policy.prompts import fill
from sarathi_pp.core.policy.view import Grant, Limits, Policy, View


@dataclass(frozen=True, slots=True)
class VLLM(Policy):
    def pick(self, view: View) -> list[Grant]:
        in_order = sorted((*view.prefills, *view.decodes), key=lambda sequence: sequence.order)
        return fill((*in_order, *view.waiting), view.limits.chunk_size)

    def max_tokens(self, limits: Limits) -> int:
        return limits.chunk_size
