"""SARATHI: chunked prefills with decodes riding along (arXiv 2308.16369, sections 4.2 to 4.4).

"Decode-maximal batching: a single prefill chunk and the rest decodes". With more decodes the chunk is smaller. So chunk
and decodes together have the same number of tokens in every microbatch, the chunk size C (section 4.4, tile sizes). If
a prompt ends before that, the first chunk of the next prompt fills the microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_pp.core.policy.parameter import parameter
from sarathi_pp.core.policy.view import Grant, Limits, Policy, SequenceView, View


@dataclass(frozen=True, slots=True)
class Sarathi(Policy):
    """SARATHI's scheduler.

    Attributes:
        even: 1 splits each prompt into chunks of equal size, none above C tokens. 0 fills each microbatch up to C, so
            the last chunk of a prompt may be short.
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
        tokens = sequence.known - sequence.num_found
        num_chunks = -(-tokens // limits.chunk_size)
        return -(-tokens // num_chunks)

    def max_tokens(self, limits: Limits) -> int:
        return limits.chunk_size
