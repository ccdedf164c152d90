"""Ways to fill a microbatch with known tokens, for several policies."""

from __future__ import annotations

from collections.abc import Iterable

from sarathi_pp.core.policy.view import Grant, Limits, SequenceView


def longest_prompt(limits: Limits) -> int:
    """Return the tokens of the longest prompt that can run. A recomputed prompt, output included, is not longer."""
    return min(limits.max_model_len, limits.num_pages * limits.page_size)


def fill(sequences: Iterable[SequenceView], budget: int) -> list[Grant]:
    """Grant as many tokens of the sequences as the budget holds, in the given order. The last sequence is cut.

    Sequences whose next token is in flight have nothing to compute and are skipped.
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
    """Grant as many whole prompts as fit the budget, in the given order, up to the first that does not fit."""
    grants: list[Grant] = []
    for sequence in sequences:
        budget -= sequence.remaining
        if budget < 0:
            break
        grants.append(Grant(sequence, sequence.remaining))
    return grants
