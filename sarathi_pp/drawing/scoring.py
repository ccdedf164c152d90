"""Log probabilities of prompt tokens, from the rows of the microbatch that holds them.

    row of token p   -> LM head -> logits -> log probability of token p + 1

The LM head runs on a few rows at a time. All logits of a chunk together would take 512 x 131,072 numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from torch import Tensor

from sarathi_pp.core.draw_rules import Failure
from sarathi_pp.core.plan import Chunk, ChunkLogprobs, MicroBatch, SampledToken, TokenLogprobs
from sarathi_pp.drawing.logprobs import token_logprobs
from sarathi_pp.model.stage_model import LMHead

# Rows whose logits are in memory at the same time.
SLICE_ROWS = 64


def scored_rows(microbatch: MicroBatch) -> list[int]:
    """Return the rows of a microbatch that give log probabilities of prompt tokens, in ascending order."""
    rows: list[int] = []
    begin = 0
    for chunk in microbatch.chunks:
        if chunk.scored is not None:
            before = begin - chunk.start - 1  # the row of the token before position p is p + before
            rows.extend(range(chunk.scored.first + before, chunk.scored.stop + before))
        begin += chunk.num_tokens
    return rows


def score(
    head: LMHead, rows: Tensor, microbatch: MicroBatch
) -> tuple[tuple[ChunkLogprobs, ...], tuple[SampledToken, ...]]:
    """Return the log probabilities of a microbatch's scored tokens, and a failed token for each chunk with bad logits.

    Args:
        rows: (n, size) inputs of the LM head, those of `scored_rows`.
    """
    scores, failed = [], []
    logits = _one_by_one(head, rows)
    for chunk in microbatch.chunks:
        if chunk.scored is None:
            continue
        found = _of_chunk(chunk, logits)
        if any(one is None for one in found):
            failed.append(SampledToken(chunk.sequence, chunk.epoch, 0, Failure.NOT_FINITE))
            continue
        kept = [one for one in found if one is not None]
        pairs = [pair for one in kept for pair in one.top]
        scores.append(
            ChunkLogprobs(
                chunk.sequence,
                chunk.epoch,
                chunk.scored.first,
                chunk.scored.num_top,
                tuple(one.logprob for one in kept),
                tuple(token_id for token_id, _ in pairs),
                tuple(logprob for _, logprob in pairs),
            )
        )
    return tuple(scores), tuple(failed)


def _of_chunk(chunk: Chunk, logits: Iterator[Tensor]) -> list[TokenLogprobs | None]:
    """Return the log probabilities of a chunk's scored tokens; None for a row with NaN or infinity.

    Args:
        logits: the next rows of logits, of which one per scored token is taken.
    """
    assert chunk.scored is not None
    first, stop, num_top, following = chunk.scored
    targets = (*chunk.token_ids, following)[first - chunk.start : stop - chunk.start]
    return [
        token_logprobs(row, target, num_top) if bool(row.isfinite().all()) else None
        for row, target in zip(islice(logits, len(targets)), targets, strict=True)
    ]


def _one_by_one(head: LMHead, rows: Tensor) -> Iterator[Tensor]:
    """Yield the (vocab,) logits of each row. Those of at most SLICE_ROWS rows are in memory."""
    for first in range(0, len(rows), SLICE_ROWS):
        yield from head.forward(rows[first : first + SLICE_ROWS])
