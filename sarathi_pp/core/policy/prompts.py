"""How known tokens fill a microbatch, where policies agree on it."""

from __future__ import annotations

from collections.abc import Iterable

from sarathi_pp.core.policy.view import Grant, Limits, SequenceView


def longest_prompt(limits: Limits) -> int:
    """Tokens of the longest prompt that can run at all; recomputed ones, output included, are no longer."""
    return min(limits.max_model_len, limits.num_pages * limits.page_size)


def fill(sequences: Iterable[SequenceView], budget: int) -> list[Grant]:
    """As many of their tokens as the budget holds, in the order given; the last sequence is cut.

    Those whose next token is in flight have nothing to compute and are passed over.
    """
    grants: list[Grant] = []
    for sequence in sequences:
        if budget == 0:
            break
        if sequence.remaining:
            grants.append(Grant(sequence, min(sequence.remaining, budget)))
            budget -= grants[-1].num_tokens
    return grants


def whole_prompts(sequences: Iterable[SequenceView], budget: int) -> list[Grant]:
    """As many of them as fit the budget uncut, in the order given: the first that does not fit ends it."""
    grants: list[Grant] = []
    for sequence in sequences:
        budget -= sequence.remaining
        if budget < 0:
            break
        grants.append(Grant(sequence, sequence.remaining))
    return grants
