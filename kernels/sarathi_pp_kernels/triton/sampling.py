"""Token ids drawn on the device: the likeliest token (greedy), or a random one after temperature and filters.

A random token is the first one, by id, at which the cumulative probability exceeds a random number. There are three
launches, each with one program per row of logits. Nothing comes to the host between them:

    _find_peaks     largest logit and its lowest id, or -1 if a logit is NaN or infinite       enough for greedy rows
    _weigh          weight exp((logit - peak) / temperature) of each token, 0 outside of top-k
    _invert         the lightest weight that top-p and min-p leave, then the cumulative weights in token id order

No filter sorts. A filter keeps all values from its edge on. The edge is the smallest value such that the values above
it come to less than the limit: a number of tokens for top-k, a sum of weights for top-p. It is found by bisection over
the bits of the values, which are ordered like the values. The two bounds move to values that occur, so the search ends
as soon as they meet. That takes about as many passes over the logits as are needed to distinguish neighbouring values.
Weights and sums are float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Indices of the columns of a row's sampling parameters.
TEMPERATURE, TOP_K, TOP_P, MIN_P, UNIFORM = range(5)
NUM_PARAMETERS = 5

_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _UNIFORM, _COLUMNS = map(tl.constexpr, range(6))
_NONE = tl.constexpr(-1)
_LONGEST_BLOCK = 4096


def greedy_tokens(logits: Tensor) -> Tensor:
    """Return the token ids (n,) int64 of the largest logit in each row of (n, vocab) logits.

    If several logits are the largest, it is the lowest id. It is -1 if a logit of the row is NaN or infinite.
    """
    return _find(logits.contiguous())[0]


def drawn_tokens(logits: Tensor, parameters: Tensor) -> Tensor:
    """Return token ids (n,) int64 drawn from (n, vocab) logits; -1 for a row with a logit that is NaN or infinite.

    Args:
        parameters: (n, 5) float64 on the device of the logits: temperature, top_k, top_p, min_p and the random number
            of each row. temperature 0 is greedy. top_k 0, or at least vocab, top_p 1 and min_p 0 keep every token. The
            random number is in [0, 1).
    """
    num_rows, vocab = logits.shape
    assert parameters.shape == (num_rows, NUM_PARAMETERS) and parameters.dtype == torch.float64, parameters.shape
    logits, parameters = logits.contiguous(), parameters.contiguous()
    tokens, peaks = _find(logits)
    weights = torch.empty((num_rows, vocab), dtype=torch.float64, device=logits.device)
    if num_rows:
        _weigh[(num_rows,)](logits, peaks, tokens, parameters, weights, VOCAB=vocab, BLOCK=_block(vocab), num_warps=8)
        _invert[(num_rows,)](weights, tokens, parameters, VOCAB=vocab, BLOCK=_block(vocab), num_warps=8)
    return tokens


def reference_drawn_tokens(logits: Tensor, parameters: Tensor) -> Tensor:
    """Return the tokens that `drawn_tokens` returns, computed in plain torch by sorting. Tests compare the two."""
    found = [_reference_row(row, *one) for row, one in zip(logits.double(), parameters.tolist(), strict=True)]
    return torch.tensor(found, dtype=torch.int64)


def _reference_row(row: Tensor, temperature: float, top_k: float, top_p: float, min_p: float, uniform: float) -> int:
    if not bool(row.isfinite().all()):
        return -1
    peak = row.max()
    if temperature == 0:
        return int((row == peak).nonzero()[0])
    scores = (row - peak) / temperature
    weights = scores.exp()
    if 0 < top_k < len(row):
        weights[scores < scores.sort(descending=True).values[int(top_k) - 1]] = 0
    if top_p < 1:
        descending = weights.sort(descending=True).values
        above = descending.cumsum(0) - descending
        weights[weights < descending[above < top_p * descending.sum()][-1]] = 0
    weights[weights < min_p] = 0
    cumulative = weights.cumsum(0)
    target = torch.minimum(uniform * cumulative[-1], cumulative[-1].nextafter(cumulative.new_zeros(())))
    return int((cumulative > target).nonzero()[0])


def _block(vocab: int) -> int:
    return min(int(triton.next_power_of_2(vocab)), _LONGEST_BLOCK)


def _find(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token ids that `greedy_tokens` returns, and the largest logit of each row, (n,) float32."""
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    peaks = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        _find_peaks[(num_rows,)](logits, tokens, peaks, VOCAB=vocab, BLOCK=_block(vocab), num_warps=8)
    return tokens, peaks


@triton.jit
def _find_peaks(logits, tokens, peaks, VOCAB: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_at = tl.zeros((BLOCK,), tl.int64)
    bad = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, VOCAB, BLOCK):
        inside = first + at < VOCAB
        logit = tl.load(logits + row * VOCAB + first + at, mask=inside, other=0.0).to(tl.float32)
        bad |= (tl.abs(logit) < float("inf")).to(tl.int32) ^ 1  # not below infinity: NaN too
        better = inside & (logit > best)
        best, best_at = tl.where(better, logit, best), tl.where(better, first + at, best_at)
    peak = tl.max(best, 0)
    token = tl.min(tl.where(best == peak, best_at, VOCAB), 0)
    tl.store(tokens + row, tl.where(tl.max(bad, 0) > 0, _NONE, token))
    tl.store(peaks + row, peak)


@triton.jit
def _weigh(logits, peaks, tokens, parameters, weights, VOCAB: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(parameters + row * _COLUMNS + _TEMPERATURE)
    if (temperature > 0) & (tl.load(tokens + row) != _NONE):
        logits += row * VOCAB
        peak = tl.load(peaks + row)
        edge = tl.full((), float("-inf"), tl.float64)
        top_k = tl.load(parameters + row * _COLUMNS + _TOP_K)
        if (top_k > 0) & (top_k < VOCAB):
            low = tl.full((), -(2**31), tl.int64)
            key = _edge(logits, VOCAB, low, _ordered(peak), top_k, True, BLOCK)
            edge = _score(_logit_of(key), peak, temperature)
        at = tl.arange(0, BLOCK)
        for first in range(0, VOCAB, BLOCK):
            inside = first + at < VOCAB
            logit = tl.load(logits + first + at, mask=inside, other=0.0).to(tl.float32)
            score = _score(logit, peak, temperature)
            # Scores and not logits are compared, because logits that division makes equal are a tie.
            tl.store(weights + row * VOCAB + first + at, tl.where(score < edge, 0.0, tl.exp(score)), mask=inside)


@triton.jit
def _invert(weights, tokens, parameters, VOCAB: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    parameters += row * _COLUMNS
    if (tl.load(parameters + _TEMPERATURE) > 0) & (tl.load(tokens + row) != _NONE):
        weights += row * VOCAB
        lightest = tl.load(parameters + _MIN_P)
        top_p = tl.load(parameters + _TOP_P)
        if top_p < 1:
            total, smallest = _extent(weights, VOCAB, BLOCK)
            one = tl.full((), 1.0, tl.float64).to(tl.int64, bitcast=True)  # weight of the likeliest token
            bits = _edge(weights, VOCAB, smallest, one, top_p * total, False, BLOCK)
            lightest = tl.maximum(lightest, bits.to(tl.float64, bitcast=True))
        total = _sum_up(weights, VOCAB, lightest, BLOCK)
        # Stay below the total even if the product rounds up to it: the last token with weight is a legal draw.
        below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
        target = tl.minimum(tl.load(parameters + _UNIFORM) * total, below)
        tl.store(tokens + row, _first_beyond(weights, VOCAB, lightest, target, BLOCK))


@triton.jit
def _edge(source, VOCAB: tl.constexpr, low, high, most, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a filter's edge: the smallest value such that the values above it come to less than `most`.

    Values are compared as int64 numbers. The edge is one of these, in [low, high].

    Args:
        most: number of tokens if COUNT, otherwise a sum of weights.
        COUNT: if true, values are logits, numbered by `_ordered`, and each adds 1. Otherwise they are weights, numbered
            by their bits, and each adds itself.
    """
    at = tl.arange(0, BLOCK)
    while low < high:
        middle = low + ((high - low) >> 1)
        above = tl.zeros((BLOCK,), tl.float64)
        next_above = tl.zeros((BLOCK,), tl.int64) + high
        next_below = tl.zeros((BLOCK,), tl.int64) + low
        for first in range(0, VOCAB, BLOCK):
            inside = first + at < VOCAB
            value = tl.load(source + first + at, mask=inside, other=0.0)
            if COUNT:
                share = tl.full((BLOCK,), 1.0, tl.float64)
                order = _ordered(value.to(tl.float32))
            else:
                share = value
                order = value.to(tl.int64, bitcast=True)
            is_above = inside & (order > middle)
            above += tl.where(is_above, share, 0.0)
            next_above = tl.where(is_above, tl.minimum(next_above, order), next_above)
            next_below = tl.where(inside & (order <= middle), tl.maximum(next_below, order), next_below)
        enough = tl.sum(above, 0) < most
        low = tl.where(enough, low, tl.min(next_above, 0))
        high = tl.where(enough, tl.max(next_below, 0), high)
    return high


@triton.jit
def _extent(weights, VOCAB: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sum of the weights, in the order in which _edge sums, and the bits of the smallest one above 0."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    smallest = tl.full((BLOCK,), 1.0, tl.float64)
    for first in range(0, VOCAB, BLOCK):
        weight = tl.load(weights + first + at, mask=first + at < VOCAB, other=0.0)
        total += weight
        smallest = tl.where(weight > 0, tl.minimum(smallest, weight), smallest)
    return tl.sum(total, 0), tl.min(smallest, 0).to(tl.int64, bitcast=True)


@triton.jit
def _kept(weights, first, VOCAB: tl.constexpr, lightest, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = first + tl.arange(0, BLOCK)
    weight = tl.load(weights + at, mask=at < VOCAB, other=0.0)
    return tl.where(weight < lightest, 0.0, weight)


@triton.jit
def _sum_up(weights, VOCAB: tl.constexpr, lightest, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sum of the weights that are at least `lightest`, in the order in which _first_beyond sums."""
    total = tl.zeros((), tl.float64)
    for first in range(0, VOCAB, BLOCK):
        total += tl.sum(_kept(weights, first, VOCAB, lightest, BLOCK), 0)
    return total


@triton.jit
def _first_beyond(weights, VOCAB: tl.constexpr, lightest, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first token with a weight above 0 at which the cumulative weight exceeds the target.

    The target is below the total weight.
    """
    token = tl.full((), -1, tl.int64)
    heavy = tl.full((), -1, tl.int64)
    before = tl.zeros((), tl.float64)
    for first in range(0, VOCAB, BLOCK):
        weight = _kept(weights, first, VOCAB, lightest, BLOCK)
        after = before + tl.sum(weight, 0)
        at = first + tl.arange(0, BLOCK).to(tl.int64)
        heavy = tl.maximum(heavy, tl.max(tl.where(weight > 0, at, -1), 0))
        if (token < 0) & (after > target):
            # cumsum adds in another order than sum, so it may stay below the target. Then take the block's last token.
            beyond = (weight > 0) & (before + tl.cumsum(weight, 0) > target)
            last = tl.max(tl.where(weight > 0, at, -1), 0)
            token = tl.min(tl.where(beyond, at, last), 0)
        before = after
    return tl.where(token < 0, heavy, token)  # rounding may leave all sums below the target


@triton.jit
def _score(logit, peak, temperature):  # type: ignore[no-untyped-def]
    return (logit.to(tl.float64) - peak.to(tl.float64)) / temperature


@triton.jit
def _ordered(logit):  # type: ignore[no-untyped-def]
    """Return int64 numbers in the order of float32 logits: for negative logits, all bits but the sign are inverted."""
    bits = logit.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _logit_of(order):  # type: ignore[no-untyped-def]
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
