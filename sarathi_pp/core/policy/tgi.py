"""tgi: Hugging Face's text-generation-inference 3. It decodes, and interrupts that for prompts when enough wait.

In its source (backends/v3/src/backend.rs), `batching_task` runs one step after the other. Each step is a decode of all
running requests. Between two steps it asks the queue for new requests (backends/v3/src/queue.rs, `next_batch`). It runs
their prompts whole, in a step without decodes, if one of two conditions holds:

    ratio     the prompts that fit the prefill budget are at least waiting_served_ratio times the running requests
    overdue   each running request has got max_waiting_tokens tokens since the last prompts; then any number of prompts
              is enough

The prefill budget has room for the longest prompt, as TGI demands of max_batch_prefill_tokens.

A higher ratio interrupts running requests less often, but others wait longer for their start. The price on a pipeline:
microbatches of prompts are next to microbatches of decodes, which take less time (the bubble PB2 of arXiv 2308.16369).
If prompts wait but are too few for the ratio, stages are idle that could run them. This is the rule for models that TGI
runs without chunks.
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
        ratio: TGI's waiting_served_ratio, in percent.
        max_waiting_tokens: tokens that each running request gets before prompts run in any case.
    """

    uses_chunk_size: ClassVar[bool] = False

    ratio: int = parameter(30, least=0)
    max_waiting_tokens: int = parameter(20, least=0)
    _decoded: int = field(default=0, init=False)  # tokens of all requests since the last prompts

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
