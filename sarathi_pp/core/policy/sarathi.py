"""SARATHI: chunked prefills with decodes riding along (arXiv 2308.16369, sections 4.2 to 4.4).

"Decode-maximal batching: a single prefill chunk and the rest decodes". The decodes that ride along shrink the chunk. So
chunk + decodes is the same number of tokens C in every microbatch (section 4.4, tile sizes). If a prompt ends
inside the budget, the first chunk of the next prompt fills it up.
"""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_pp.core.policy.parameter import parameter
from sarathi_pp.core.policy.view import Grant, Limits, Policy, SequenceView, View


@dataclass(frozen=True, slots=True)
class Sarathi(Policy):
    """SARATHI's scheduler.

    Attributes:
        even: 1 splits each prompt into chunks of equal size, none above C. 0 fills C and leaves a short last chunk.
    """

    even: int = parameter(0, least=0, most=1)

    def pick(self, view: View) -> list[Grant]:
        limits = view.limits
        grants = [Grant(s, 1) for s in view.decodes[: min(limits.max_decodes, limits.chunk_size)]]
        budget = limits.chunk_size - len(grants)
        for sequence in (*view.prefills, *view.waiting):
            if budget == 0:
                break
            num_tokens = min(sequence.remaining, budget, self._chunk_limit(sequence, limits))
            grants.append(Grant(sequence, num_tokens))
            budget -= num_tokens
        return grants

    def _chunk_limit(self, sequence: SequenceView, limits: Limits) -> int:
        if not self.even:
            return limits.chunk_size
        num_chunks = -(-sequence.known // limits.chunk_size)
        return -(-sequence.known // num_chunks)

    def max_tokens(self, limits: Limits) -> int:
        return limits.chunk_size
