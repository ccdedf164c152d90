"""vLLM before chunked prefill: prompts first (vllm/core/scheduler.py, `_schedule_default`; arXiv 2309.06180).

"It batches as many prefill requests as possible. And it schedules decodes": a microbatch holds whole prompts, up to the
token budget, or every decode that is ready, never both. The budget has room for the longest prompt, as vLLM demands of
max_num_batched_tokens if prompts are not cut.

New requests start at once and decode together in large microbatches. The price: each prompt that arrives pauses the
decodes (the "generation stalls" of arXiv 2403.02310, section 3.2). A prompt's microbatch next to one of decodes makes
the bubble PB2 (arXiv 2308.16369, section 3.2), since the two take unequal time.

vLLM itself has one scheduler per stage, each with a part of the requests. Here all requests share one queue, as in the
comparison of arXiv 2403.02310. So requests that started in the same microbatch stay together.

If requests end with their first token, new ones start at once, and their prompts could pause the decodes forever.
Therefore decodes have a turn after max_num_seqs prompts in a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sarathi_pp.core.policy.prompts import fill, longest_prompt, whole_prompts
from sarathi_pp.core.policy.view import Grant, Limits, Policy, View


@dataclass(slots=True)
class VLLMv0(Policy):
    uses_chunk_size: ClassVar[bool] = False

    _started: int = field(default=0, init=False)  # requests that started since the last decodes

    def pick(self, view: View) -> list[Grant]:
        budget = self.max_tokens(view.limits)
        if not view.decodes or self._started < view.limits.max_num_seqs:
            prompts = whole_prompts(view.waiting, budget)
            self._started += len(prompts)
            if prompts:
                return prompts
        self._started = 0
        return fill(view.decodes, budget)

    def max_tokens(self, limits: Limits) -> int:
        return max(limits.chunk_size, longest_prompt(limits))
