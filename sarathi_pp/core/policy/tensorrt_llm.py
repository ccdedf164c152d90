"""TensorRT-LLM: in-flight batching with chunked context (cpp/tensorrt_llm/batch_manager/microBatchScheduler.cpp).

TensorRT-LLM's capacity scheduler decides which requests fit the KV cache. Here the coordinator does that: if pages are
short, it takes those of a request and computes it again later, like the mode MAX_UTILIZATION. The other mode,
GUARANTEED_NO_EVICT, needs the length of each output in advance, which no policy knows.

Each microbatch takes at most max_num_seqs / P requests (P stages), in the order of arrival. It takes them from the
requests that run or may start and have nothing in flight. Their decodes come first in the token budget. Prompts share
what is left of it in chunks of whole KV pages, except a prompt's last chunk:

    FIRST_COME_FIRST_SERVED   each prompt in turn takes all that it can, so only one is cut
    EQUAL_PROGRESS            each prompt in turn takes one page, again and again

Attention kernels read the KV cache in pages, so chunks of whole pages suit them. The price: up to a page of each
microbatch's budget stays unused. A prompt has one chunk in flight at a time, so a lone prompt keeps only one of the P
stages busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sarathi_pp.core.policy.parameter import parameter
from sarathi_pp.core.policy.view import Grant, Limits, Policy, View


@dataclass(frozen=True, slots=True)
class TensorRTLLM(Policy):
    """TensorRT-LLM's scheduler.

    Attributes:
        equal: 1 is EQUAL_PROGRESS, 0 is FIRST_COME_FIRST_SERVED.
    """

    equal: int = parameter(0, least=0, most=1)

    def pick(self, view: View) -> list[Grant]:
        paused = [sequence for sequence in view.prefills if sequence.done == sequence.issued]
        chosen = sorted((*view.decodes, *paused, *view.waiting), key=lambda sequence: sequence.order)[
            : view.limits.max_decodes
        ]
        budget = self.max_tokens(view.limits)
        decodes = [Grant(sequence, 1) for sequence in chosen if sequence.decoding][:budget]
        prompts = [sequence for sequence in chosen if not sequence.decoding]
        share = _equal_progress if self.equal else _first_come_first_served
        sizes = share([s.remaining for s in prompts], budget - len(decodes), view.limits.page_size)
        if not any(sizes[:1]):
            return decodes  # no page of the oldest prompt fits: shorter ones could keep it out forever
        return [*decodes, *(Grant(s, size) for s, size in zip(prompts, sizes, strict=True) if size)]

    def max_tokens(self, limits: Limits) -> int:
        """Return the chunk size, but at least the tokens of one page. With a smaller budget no prompt could start."""
        return max(limits.chunk_size, limits.page_size)


def _first_come_first_served(remaining: Sequence[int], budget: int, page_size: int) -> list[int]:
    sizes = []
    for tokens in remaining:
        size = tokens if tokens <= budget else budget // page_size * page_size
        sizes.append(size)
        budget -= size
    return sizes


def _equal_progress(remaining: Sequence[int], budget: int, page_size: int) -> list[int]:
    sizes = [0] * len(remaining)
    moved = True
    while moved:
        moved = False
        for place, tokens in enumerate(remaining):
            step = min(page_size, tokens - sizes[place])
            if 0 < step <= budget:
                sizes[place] += step
                budget -= step
                moved = True
    return sizes
