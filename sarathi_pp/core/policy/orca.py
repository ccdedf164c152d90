"""Orca: iteration-level scheduling with whole prompts (Yu et al., OSDI 2022, Algorithm 1).

SARATHI compares with this form as "Orca best case" (arXiv 2308.16369, section 5.1): the full prefill of at most one
request overlaps the ongoing decodes of the others. Prompts are never cut, so the chunk size is not used. A microbatch
takes as long as its prompt, so microbatches take unequal times (the bubbles PB1 and PB2). Orca reserves memory for the
longest output of each request. Here a request takes pages when it needs them, which is the best case too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sarathi_pp.core.policy.prompts import longest_prompt
from sarathi_pp.core.policy.view import Grant, Limits, Policy, View


@dataclass(frozen=True, slots=True)
class Orca(Policy):
    uses_chunk_size: ClassVar[bool] = False

    def pick(self, view: View) -> list[Grant]:
        grants = [Grant(s, 1) for s in view.decodes[: view.limits.max_decodes]]
        if len(grants) < view.limits.max_decodes:
            grants += [Grant(s, s.remaining) for s in (*view.prefills, *view.waiting)[:1]]
        return grants

    def max_tokens(self, limits: Limits) -> int:
        return longest_prompt(limits) + limits.max_decodes
