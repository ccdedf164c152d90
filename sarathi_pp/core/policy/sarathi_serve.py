"""Sarathi-Serve: stall-free batching (arXiv 2403.02310, section 4.2, Algorithm 3).

"We first pack all the running decodes in the next batch (lines 6-8). After that, we include any partially completed
prefill (lines 9-12). Only after all the running requests have been accommodated, we admit new requests (lines
13-20)", each with the largest chunk that the leftover budget holds. So decodes never wait for a prompt. The last chunk
of a prompt is smaller, and what it leaves goes to the next request.

As in the authors' system, the number of decodes in a microbatch is not limited, and a request has one chunk in flight
at a time. The price on a pipeline: a lone prompt keeps only one stage busy. Decodes that meet in one microbatch stay
together from then on, so other microbatches have no decodes. If decodes alone exceed the budget, prompts get no tokens.
The authors' code then grants prompts a negative number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_pp.core.policy.prompts import fill
from sarathi_pp.core.policy.view import Grant, Limits, Policy, View


@dataclass(frozen=True, slots=True)
class SarathiServe(Policy):
    def pick(self, view: View) -> list[Grant]:
        decodes = [Grant(sequence, 1) for sequence in view.decodes]
        budget = max(0, view.limits.chunk_size - len(decodes))
        # If a chunk of a prompt is in flight, its next chunk must wait for the result.
        paused = [sequence for sequence in view.prefills if sequence.done == sequence.issued]
        return [*decodes, *fill((*paused, *view.waiting), budget)]

    def max_tokens(self, limits: Limits) -> int:
        return max(limits.chunk_size, limits.max_num_seqs)
