"""ChunkLLM: prompts above a threshold run in chunks that end with a paragraph and may overlap.

The rule is from an article on ChunkLLM for engineers. There is no paper. A chunk has at most `chunk_token_threshold`
tokens. It ends at the last paragraph end within them, if there is one. A share of the chunk, `overlap_rate`, repeats
the tokens before it. The article repeats them so that a chunk has its context. But a chunk here reads the keys and
values of all tokens before it anyway, so the repetition changes no answer and only takes time. In a model whose
layers keep states, nothing is repeated (Grant.overlap).

With fewer than 4 sequences to run, the article advises against chunks, so prompts then run whole. Otherwise the policy
works like Orca: one prompt per microbatch, with the decodes that are ready.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import ClassVar

from sarathi_pp.core.policy.parameter import parameter
from sarathi_pp.core.policy.prompts import longest_prompt
from sarathi_pp.core.policy.view import Grant, Limits, Policy, SequenceView, View

_LEAST_BATCH = 4


@dataclass(frozen=True, slots=True)
class ChunkLLM(Policy):
    """ChunkLLM's scheduler.

    Attributes:
        threshold: most tokens of a chunk. 0 means a quarter of max_model_len.
        overlap: share of a chunk's tokens that are computed a second time.
    """

    uses_chunk_size: ClassVar[bool] = False
    wants_paragraphs: ClassVar[bool] = True

    threshold: int = parameter(0, least=0)
    overlap: float = parameter(0.0, least=0, most=0.3)

    def pick(self, view: View) -> list[Grant]:
        limits = view.limits
        grants = [Grant(s, 1) for s in view.decodes[: limits.max_decodes]]
        prompts = (*view.prefills, *view.waiting)
        if prompts and len(grants) < limits.max_decodes:
            alone = len(view.running) + len(view.waiting) < _LEAST_BATCH
            grants.append(Grant(prompts[0], prompts[0].remaining) if alone else self._chunk(prompts[0], limits))
        return grants

    def _chunk(self, sequence: SequenceView, limits: Limits) -> Grant:
        threshold = self.threshold or max(1, limits.max_model_len // 4)
        overlap = min(sequence.issued, int(self.overlap * threshold))
        room = threshold - overlap
        num_tokens = min(sequence.remaining, room)
        if num_tokens < sequence.remaining:
            ends = sequence.paragraph_ends
            reached = bisect_right(ends, sequence.issued + num_tokens)
            if reached and ends[reached - 1] > sequence.issued:
                num_tokens = ends[reached - 1] - sequence.issued
        # With fewer new tokens, fewer are repeated. With one new token none are, so a decode stays one token.
        return Grant(sequence, num_tokens, overlap * num_tokens // room)

    def max_tokens(self, limits: Limits) -> int:
        return longest_prompt(limits) + limits.max_decodes
