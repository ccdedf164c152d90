"""Log probabilities of prompt tokens, from the rows of the microbatch that holds them.

    row of token p   -> LM head -> logits -> log probability of token p + 1

The LM head runs on a few rows at a time. All logits of a chunk together would take 512 x 131,072 numbers. A GPU sends
the numbers of all these rows together, because the host waits for the GPU at each transfer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
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
    chunks = [chunk for chunk in microbatch.chunks if chunk.scored is not None]
    wanted = [one for chunk in chunks for one in _wanted(chunk)]
    all_found = _in_slices(head, rows, wanted)
    for chunk in chunks:
        assert chunk.scored is not None
        found = list(islice(all_found, chunk.scored.stop - chunk.scored.first))
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


def _wanted(chunk: Chunk) -> list[tuple[int, int]]:
    """Return the id of each scored token of a chunk, and the number of likeliest tokens at its position."""
    assert chunk.scored is not None
    first, stop, num_top, following = chunk.scored
    token_ids = (*chunk.token_ids, following)[first - chunk.start : stop - chunk.start]
    return [(token_id, num_top) for token_id in token_ids]


def _in_slices(head: LMHead, rows: Tensor, wanted: Sequence[tuple[int, int]]) -> Iterator[TokenLogprobs | None]:
    """Yield the log probabilities of each row's token; None for a row with NaN or infinity.

    The logits of at most SLICE_ROWS rows are in memory.

    Args:
        wanted: id of each row's token, and the number of likeliest tokens.
    """
    assert len(rows) == len(wanted), (len(rows), len(wanted))
    for first in range(0, len(rows), SLICE_ROWS):
        part = slice(first, first + SLICE_ROWS)
        # No local name has the logits. It would keep them in memory while the next ones are computed.
        yield from _of_slice(head.forward(rows[part]), wanted[part])


def _of_slice(logits: Tensor, wanted: Sequence[tuple[int, int]]) -> Iterator[TokenLogprobs | None]:
    return _on_cpu(logits, wanted) if logits.device.type == "cpu" else _on_gpu(logits, wanted)


def _on_cpu(logits: Tensor, wanted: Sequence[tuple[int, int]]) -> Iterator[TokenLogprobs | None]:
    for row, (token_id, num_top) in zip(logits, wanted, strict=True):
        yield token_logprobs(row, token_id, num_top) if bool(row.isfinite().all()) else None


def _on_gpu(logits: Tensor, wanted: Sequence[tuple[int, int]]) -> Iterator[TokenLogprobs | None]:
    """Yield what `_on_cpu` yields, after one transfer. Each row is computed alone, in float64."""
    vocab_size = logits.shape[1]
    falling = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    computed = [_numbers(row, *one, falling) for row, one in zip(logits, wanted, strict=True)]
    numbers: Iterator[float] = iter(torch.cat(computed).tolist())
    for _, num_top in wanted:
        is_finite, logprob = next(numbers), next(numbers)
        token_ids, logprobs = (list(islice(numbers, min(num_top, vocab_size))) for _ in range(2))
        top = tuple(zip(map(int, token_ids), logprobs, strict=True))
        yield TokenLogprobs(logprob, top) if is_finite else None


def _numbers(row: Tensor, token_id: int, num_top: int, falling: Tensor) -> Tensor:
    """Return the numbers of one row in float64, on its device, without waiting for them.

    Returns:
        1 if the row is finite, the token's log probability, ids of the likeliest tokens, and their log probabilities.
    """
    wide = row.double()
    scaled = wide - wide.logsumexp(0)
    parts = [row.isfinite().all().double()[None], scaled[token_id][None]]
    if num_top > 0:
        likeliest = _sort_keys(row, falling).topk(min(num_top, len(row))).indices
        parts += [likeliest.double(), scaled[likeliest]]
    return torch.cat(parts)


def _sort_keys(row: Tensor, falling: Tensor) -> Tensor:
    """Return integers in the order of a row's logits. Of equal logits, that of the lower id is larger.

    The bits of a float32 number are an integer in the order of positive numbers. Those of negative ones are inverted.

    Args:
        falling: the integers from vocab - 1 down to 0.
    """
    bits = (row.float() + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) | falling
