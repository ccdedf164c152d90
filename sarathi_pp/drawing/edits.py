"""Changes of scores by the rules of requests, before a token is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from sarathi_pp.drawing.grammar import Mask
from sarathi_pp.drawing.history import Edit

# Score of a banned token. It is finite, since an infinite score shows a broken model. No other token has it.
BANNED = torch.finfo(torch.float32).min


def edited_scores(logits: Tensor, edits: Mapping[int, Edit]) -> Tensor:
    """Return the scores of rows whose requests have rules, (n, vocab) float32. See DrawRules for the order.

    If a row's logits have NaN or infinity, so do its scores.

    Args:
        logits: (m, vocab), not changed.
        edits: the changes of n rows, by the index of the row.
    """
    return _edited(_copied(logits, list(edits)), list(edits.values()))


def _copied(logits: Tensor, rows: list[int]) -> Tensor:
    """Return some rows in float32, in memory of their own."""
    if rows == list(range(len(logits))):  # copying in one piece takes a quarter of the time
        return logits.to(torch.float32, copy=True)
    return logits[rows].float()


def _edited(scores: Tensor, edits: Sequence[Edit]) -> Tensor:
    # A NaN is both the least and the largest of its row.
    finite = scores.amin(-1).isfinite() & scores.amax(-1).isfinite()
    _add_biases(scores, edits)
    _subtract_penalties(scores, edits)
    for score, edit in zip(scores, edits, strict=True):
        if edit.rules.allowed_token_ids is not None:
            allowed = torch.tensor(edit.rules.allowed_token_ids, device=score.device)
            kept = score[allowed]
            score.fill_(BANNED)
            score[allowed] = kept
        if edit.mask is not None:
            _mask(score, edit.mask.result())
    rows = np.repeat(np.arange(len(edits)), [len(edit.banned) for edit in edits])
    if len(rows):
        banned = np.concatenate([edit.banned for edit in edits])
        scores[_to(rows, scores), _to(banned, scores)] = BANNED
    scores[:, 0].masked_fill_(~finite, torch.nan)  # one is enough, and takes less time
    return scores


def _mask(score: Tensor, mask: Mask) -> None:
    """Ban the tokens of one row that its grammar does not allow."""
    if mask is None:
        score.fill_(BANNED)
        return
    kept = mask[: len(score)]
    score[len(kept) :] = BANNED
    score[: len(kept)].masked_fill_(_to(~kept, score), BANNED)


def has_a_token(scores: Tensor) -> list[bool]:
    """Return for each row of `edited_scores` whether its rules allow a token."""
    found: list[bool] = (scores.amax(-1) != BANNED).tolist()
    return found


def _add_biases(scores: Tensor, edits: Sequence[Edit]) -> None:
    pairs = [(row, *pair) for row, edit in enumerate(edits) for pair in edit.rules.logit_bias]
    if pairs:
        rows, ids, biases = zip(*pairs, strict=True)
        at = torch.tensor(rows, device=scores.device), torch.tensor(ids, device=scores.device)
        scores[at] += torch.tensor(biases, dtype=torch.float32, device=scores.device)


def _subtract_penalties(scores: Tensor, edits: Sequence[Edit]) -> None:
    lengths = [len(edit.seen) for edit in edits]
    if not any(lengths):
        return
    rules = [edit.rules for edit in edits]
    counts = np.concatenate([edit.counts for edit in edits])
    repetition, frequency, presence = (
        np.repeat(np.array(values), lengths)
        for values in (
            [rule.repetition_penalty for rule in rules],
            [rule.frequency_penalty for rule in rules],
            [rule.presence_penalty for rule in rules],
        )
    )
    at = (
        _to(np.repeat(np.arange(len(edits)), lengths), scores),
        _to(np.concatenate([edit.seen for edit in edits]), scores),
    )
    factor = _to(repetition.astype(np.float32), scores)
    found = scores[at]
    found = torch.where(found < 0, found * factor, found / factor)
    scores[at] = found - _to((frequency * counts + presence * (counts > 0)).astype(np.float32), scores)


def _to(numbers: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(numbers).to(like.device, non_blocking=True)
