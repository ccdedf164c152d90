"""FasterTransformer: request-level batching (arXiv 2403.02310, section 2.5, Algorithm 1).

"They pick a batch of requests and execute it until all requests in the batch complete". A batch first runs its prompts,
whole. Then all its requests decode in the same microbatches, and no other request joins. With P stages, P batches are
under way, of at most ceil(max_num_seqs / P) requests each. FasterTransformer also divides its batch into smaller ones
for the stages, partly by tokens (`getLocalBatchSize` in fastertransformer/utils/nccl_utils.cc). No microbatch has more
prompt tokens than the longest prompt, so the prompts of a batch may need several microbatches.

No decode waits for a new prompt in its batch, since no request joins. The price: a batch shrinks as outputs end, down
to one decode. For this one token, a stage reads all its weights, while other requests wait.

FasterTransformer reserves memory for the longest output of each request. Here a request takes pages when it needs them.
A request that loses its pages starts again: in its batch if that is possible at once, otherwise in a later one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from sarathi_pp.core.policy.prompts import longest_prompt, whole_prompts
from sarathi_pp.core.policy.view import Grant, Limits, Policy, View


@dataclass(slots=True)
class FasterTransformer(Policy):
    uses_chunk_size: ClassVar[bool] = False
    # A batch is filled once, so a sequence that is left out of it waits until all its requests are complete.
    holds_sequences: ClassVar[bool] = False

    _batches: list[list[int]] = field(default_factory=list, init=False)  # requests by index, one batch per stage

    def pick(self, view: View) -> list[Grant]:
        waiting = {sequence.index: sequence for sequence in view.waiting}
        ready = {sequence.index: sequence for sequence in view.decodes}
        for batch in self._in_turn(view, waiting.keys()):
            if prompts := [waiting[index] for index in batch if index in waiting]:
                return whole_prompts(prompts, longest_prompt(view.limits))
            if batch and all(index in ready for index in batch):
                return [Grant(ready[index], 1) for index in batch]
        return []

    def _in_turn(self, view: View, waiting: Collection[int]) -> Iterator[list[int]]:
        """Yield the batches, from that of the next slot on, without requests that have ended.

        An empty batch is filled with new requests from `waiting`.
        """
        num_batches = view.limits.num_stages
        batches = self._batches or [[] for _ in range(num_batches)]
        self._batches = batches
        taken = {index for batch in batches for index in batch}
        for slot in range(view.slot, view.slot + num_batches):
            slot %= num_batches
            batches[slot] = [index for index in batches[slot] if index in view.running or index in waiting]
            if not batches[slot]:
                batches[slot] = [index for index in waiting if index not in taken][: view.limits.max_decodes]
            yield batches[slot]

    def max_tokens(self, limits: Limits) -> int:
        return max(longest_prompt(limits), limits.max_decodes)
