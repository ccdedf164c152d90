"""Changes of scores by the rules of requests, before a token is drawn."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sarathi_pp.drawing.grammar import Mask
from sarathi_pp.drawing.history import Edit
from sarathi_pp.drawing.likeliest import Bits

# Score of a banned token. It is finite, since an infinite score shows a broken model. No other token has it.
BANNED = torch.finfo(torch.float32).min
_ALL = np.uint32(0xFFFFFFFF)


def edited_scores(logits: Tensor, edits: Mapping[int, Edit]) -> Tensor:
    """Return the scores of rows whose requests have rules, (n, vocab) float32. See DrawRules for the order.

    If a row's logits have NaN or infinity, so do its scores.

    Args:
        logits: (m, vocab), not changed.
        edits: the changes of n rows, by the index of the row.
    """
    scores, changes = _copied(logits, list(edits)), list(edits.values())
    # A NaN is both the least and the largest of its row.
    finite = scores.amin(-1).isfinite() & scores.amax(-1).isfinite()
    _change(scores, changes)
    bits = [allowed_bits(edit, scores.shape[1]) for edit in changes]
    if any(of_row is not None for of_row in bits):
        torch.minimum(scores, _caps(bits, scores), out=scores)
    scores[:, 0].masked_fill_(~finite, torch.nan)  # one is enough, and takes less time
    return scores


def changed_scores(logits: Tensor, edits: Mapping[int, Edit]) -> Tensor:
    """Return what `edited_scores` returns without bans: banned tokens keep their scores."""
    scores = _copied(logits, list(edits))
    _change(scores, list(edits.values()))
    return scores


def allowed_bits(edit: Edit, width: int) -> Bits | None:
    """Return the tokens that the rules of a row allow; None if they allow all. It may be the grammar's own mask.

    Args:
        width: number of tokens of the vocabulary.
    """
    num_words, bits = -(-width // 32), None
    if edit.mask is not None:
        bits = _fitted(edit.mask.value, num_words)
    if edit.allowed is not None:
        flags = np.zeros(32 * num_words, np.bool_)
        flags[edit.allowed] = True
        allowed = np.packbits(flags, bitorder="little").view(np.uint32)
        bits = allowed if bits is None else bits & allowed
    if len(edit.banned):
        bits = np.full(num_words, _ALL) if bits is None else bits.copy()
        np.bitwise_and.at(bits, edit.banned >> 5, ~(np.uint32(1) << (edit.banned & 31).astype(np.uint32)))
    return bits


def _fitted(mask: Mask, num_words: int) -> Bits:
    """Return the bits of a mask. Tokens above it may not be drawn."""
    if mask is not None and len(mask) >= num_words:
        return mask[:num_words]
    bits = np.zeros(num_words, np.uint32)
    if mask is not None:
        bits[: len(mask)] = mask
    return bits


def _caps(bits: Sequence[Bits | None], scores: Tensor) -> Tensor:
    """Return the most that each score may be, like `scores`: infinity for allowed tokens, BANNED for the others."""
    table = np.full((len(bits), -(-scores.shape[1] // 32)), _ALL)
    for row, of_row in zip(table, bits, strict=True):
        if of_row is not None:
            row[:] = of_row
    of_bytes = torch.from_numpy(table.view(np.uint8)).to(scores.device, non_blocking=True)
    caps = functional.embedding(of_bytes.int(), _caps_of_bytes(scores.device))
    return caps.view(len(table), -1)[:, : scores.shape[1]]


@functools.cache
def _caps_of_bytes(device: torch.device) -> Tensor:
    """Return eight caps for every byte of bits, (256, 8) float32."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.where(torch.from_numpy(bits).bool(), torch.inf, BANNED).to(device)


def _copied(logits: Tensor, rows: list[int]) -> Tensor:
    """Return some rows in float32, in memory of their own."""
    if rows == list(range(len(logits))):  # copying in one piece takes a quarter of the time
        return logits.to(torch.float32, copy=True)
    return logits[rows].float()


def _change(scores: Tensor, edits: Sequence[Edit]) -> None:
    _add_biases(scores, edits)
    _subtract_penalties(scores, edits)


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
