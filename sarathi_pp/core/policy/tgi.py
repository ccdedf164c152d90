"""text-generation-inference 3: decodes, interrupted for prompts when enough wait (backends/v3/src/backend.rs).

`batching_task` decodes everything that runs, one step after the other. Between two steps it asks the queue for new
requests (backends/v3/src/queue.rs, `next_batch`). It runs their prompts whole, in a pass of their own, if one of two
conditions holds:

    ratio     as many prompts fit the prefill budget as waiting_served_ratio times the running requests
    overdue   since the last prompts, max_waiting_tokens tokens came for each running request; then any number runs

The budget holds the longest prompt, as TGI demands of max_batch_prefill_tokens.

The ratio trades the stall of the running requests against the wait of the others. The price on a pipeline: passes of
prompts are next to passes of decodes (the bubble PB2 of arXiv 2308.16369). Below the ratio, stages idle that could run
a prompt. This is the rule for models that TGI runs without chunking.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sarathi_pp.core.policy.parameter import parameter
from sarathi_pp.core.policy.prompts import fill, longest_prompt, whole_prompts
from sarathi_pp.core.policy.view import Grant, Limits, Policy, View


@dataclass(slots=True)
class TGI(Policy):
    """The scheduler of text-generation-inference.

    Attributes:
        ratio: waiting_served_ratio in percent.
        max_waiting_tokens: tokens per running request between prompts.
    """

    uses_chunk_size: ClassVar[bool] = False

    ratio: int = parameter(30, least=0)
    max_waiting_tokens: int = parameter(20, least=0)
    _decoded: int = field(default=0, init=False)  # tokens since the last prompts, over all requests

    def pick(self, view: View) -> list[Grant]:
        budget = self.max_tokens(view.limits)
        prompts = whole_prompts(view.waiting, budget)
        if prompts and self._admits(len(prompts), view):
            self._decoded = 0
            return prompts
        decodes = fill(view.decodes, budget)
        self._decoded += len(decodes)
        return decodes

    def _admits(self, num_prompts: int, view: View) -> bool:
        num_running = len(view.running)
        if view.decodes and not self._decoded:
            return False  # a step of decodes comes between two of prompts
        overdue = self._decoded >= self.max_waiting_tokens * num_running
        return overdue or num_prompts >= num_running * self.ratio // 100

    def max_tokens(self, limits: Limits) -> int:
        return max(limits.chunk_size, longest_prompt(limits))
