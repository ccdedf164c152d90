"""Ways to fill a microbatch with known tokens, for several policies."""

from __future__ import annotations

from collections.abc import Iterable

from sarathi_pp.core.policy.view import Grant, Limits, SequenceView


def longest_prompt(limits: Limits) -> int:
    """Return the number of tokens of the longest prompt that can run.

    A preempted sequence, whose prompt and output are computed again, has no more tokens.
    """
    return min(limits.max_model_len, limits.num_pages * limits.page_size)


def fill(sequences: Iterable[SequenceView], budget: int) -> list[Grant]:
    """Grant up to `budget` tokens of the sequences, in the given order. The last grant is cut to fit the budget.

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
    """Grant whole prompts in the given order, until the next one would exceed `budget` tokens in total."""
    grants: list[Grant] = []
    for sequence in sequences:
        budget -= sequence.remaining
        if budget < 0:
            break
        grants.append(Grant(sequence, sequence.remaining))
    return grants
