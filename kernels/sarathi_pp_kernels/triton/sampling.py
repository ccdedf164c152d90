"""Token ids drawn on the device: the likeliest token (greedy), or a random one after temperature and filters.

A random token is the first one, by id, at which the cumulative probability exceeds a random number. A row of logits is
cut into blocks, and each block has a program of its own. So a single row occupies many processors. Programs write the
sums of their block to places of their own, and the next launch adds them up in a fixed order. So the token depends
neither on the number of processors nor on the order of programs. Nothing comes to the host between the launches:

    _find_block_peaks   blocks   largest logit and its lowest id, or -1 if a logit is NaN or infinite
    _find_peaks         rows     the same of all blocks                                      enough for greedy rows
    _narrow             blocks   one digit of the edge of top-k or of top-p                  once per digit and filter
    _weigh_blocks       blocks   sum of the weights that all filters leave
    _invert             rows     the block in which the cumulative weight exceeds the number, then the token

No filter sorts. A filter keeps all logits from its edge on. The edge is the smallest number such that the logits above
it come to less than the limit: a number of tokens for top-k, a sum of weights for top-p. Logits are compared as
integers of the same order. The edge is found digit by digit, the highest first, with 4 bits per digit (radix select):

    digit         0  1  2 ... 15    sums of all logits from (known digits, this digit, 0, 0, ...) on
    sums          9  9  7 ...  0    the digit is the largest whose sum reaches the limit

That takes 4 passes over logits of 16 bits and 8 over float32. A weight is exp((logit - peak) / temperature). Weights
and sums are float64. Each pass computes the weights again: on an H100 that takes about as long as reading them.
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
# Bits of a digit of a filter's edge, and number of digits of that many bits.
_DIGIT_BITS = 4
_BITS, _PARTS = tl.constexpr(_DIGIT_BITS), tl.constexpr(1 << _DIGIT_BITS)
# Least length of vectors with a place for each block. Shorter ones are not worth a compilation of their own.
_LEAST_BLOCKS = 16
_BYTE_BITS = 8


def greedy_tokens(logits: Tensor) -> Tensor:
    """Return the token ids (n,) int64 of the largest logit in each row of (n, vocab) logits.

    If several logits are the largest, it is the lowest id. It is -1 if a logit of the row is NaN or infinite.
    """
    return _find(logits.contiguous())[0]


def drawn_tokens(logits: Tensor, parameters: Tensor, *, has_top_k: bool = True, has_top_p: bool = True) -> Tensor:
    """Return token ids (n,) int64 drawn from (n, vocab) logits; -1 for a row with a logit that is NaN or infinite.

    Args:
        logits: float32, bfloat16 or float16.
        parameters: (n, 5) float64 on the device of the logits: temperature, top_k, top_p, min_p and the random number
            of each row. temperature 0 is greedy. top_k 0, or at least vocab, top_p 1 and min_p 0 keep every token. The
            random number is in [0, 1).
        has_top_k: False if no row with a temperature above 0 has a top_k. Then its launches are left out.
        has_top_p: likewise.
    """
    num_rows, vocab = logits.shape
    assert parameters.shape == (num_rows, NUM_PARAMETERS) and parameters.dtype == torch.float64, parameters.shape
    assert logits.element_size() in (2, 4), logits.dtype
    logits, parameters = logits.contiguous(), parameters.contiguous()
    tokens, peaks = _find(logits)
    if not num_rows:
        return tokens
    shape = _shape(vocab)
    num_blocks, digits = shape["BLOCKS"], logits.element_size() * _BYTE_BITS // _DIGIT_BITS
    shape["DIGITS"] = digits
    grid = (num_blocks, num_rows)
    # For each digit of both edges: the edge's known digits, and sums of each block for all values of the digit.
    lows = torch.empty((num_rows, 2, digits), dtype=torch.int32, device=logits.device)
    counts = torch.empty((num_rows, digits, num_blocks, _PARTS.value), dtype=torch.int32, device=logits.device)
    masses = torch.empty(counts.shape, dtype=torch.float64, device=logits.device)
    given = (logits, peaks, tokens, parameters, lows, counts, masses)
    for by_count, wanted in ((True, has_top_k), (False, has_top_p)):
        for digit in range(digits if wanted else 0):
            _narrow[grid](*given, digit, BY_COUNT=by_count, **shape, num_warps=8)
    sums = torch.empty((num_rows, num_blocks), dtype=torch.float64, device=logits.device)
    bounds = torch.empty((num_rows, 2), dtype=torch.float64, device=logits.device)
    _weigh_blocks[grid](*given, sums, bounds, **shape, num_warps=8)
    _invert[(num_rows,)](logits, peaks, tokens, parameters, sums, bounds, **_shape(vocab), num_warps=8)
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


def _shape(vocab: int) -> dict[str, int]:
    """Return the constants of kernels that depend on the vocabulary: blocks, and the length of vectors over them."""
    block = min(int(triton.next_power_of_2(vocab)), _LONGEST_BLOCK)
    num_blocks = -(-vocab // block)
    padded = max(int(triton.next_power_of_2(num_blocks)), _LEAST_BLOCKS)
    return {"VOCAB": vocab, "BLOCK": block, "BLOCKS": num_blocks, "PADDED": padded}


def _find(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token ids that `greedy_tokens` returns, and the largest logit of each row, (n,) float32."""
    num_rows, vocab = logits.shape
    shape = _shape(vocab)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    peaks = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    block_tokens = torch.empty((num_rows, shape["BLOCKS"]), dtype=torch.int32, device=logits.device)
    block_peaks = torch.empty((num_rows, shape["BLOCKS"]), dtype=torch.float32, device=logits.device)
    if num_rows:
        grid = (shape["BLOCKS"], num_rows)
        _find_block_peaks[grid](logits, block_tokens, block_peaks, **shape, num_warps=8)
        _find_peaks[(num_rows,)](block_tokens, block_peaks, tokens, peaks, **shape, num_warps=1)
    return tokens, peaks


@triton.jit
def _find_block_peaks(  # type: ignore[no-untyped-def]
    logits,
    block_tokens,
    block_peaks,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < VOCAB
    logit = tl.load(logits + row * VOCAB + at, mask=inside, other=0.0).to(tl.float32)
    finite = tl.abs(logit) < float("inf")  # not if NaN
    value = tl.where(inside & finite, logit, float("-inf"))
    peak = tl.max(value, 0)
    token = tl.min(tl.where(value == peak, at, VOCAB), 0)
    tl.store(block_tokens + row * BLOCKS + block, tl.where(tl.min(finite.to(tl.int32), 0) == 0, _NONE, token))
    tl.store(block_peaks + row * BLOCKS + block, peak)


@triton.jit
def _find_peaks(  # type: ignore[no-untyped-def]
    block_tokens,
    block_peaks,
    tokens,
    peaks,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    token = tl.load(block_tokens + row * BLOCKS + block, mask=block < BLOCKS, other=VOCAB)
    value = tl.load(block_peaks + row * BLOCKS + block, mask=block < BLOCKS, other=float("-inf"))
    peak = tl.max(value, 0)
    best = tl.min(tl.where(value == peak, token, VOCAB), 0)
    tl.store(tokens + row, tl.where(tl.min(token, 0) == _NONE, _NONE, best).to(tl.int64))
    tl.store(peaks + row, peak)


# All digits use the same compiled kernel.
@triton.jit(do_not_specialize=["digit"])
def _narrow(  # type: ignore[no-untyped-def]
    logits,
    peaks,
    tokens,
    parameters,
    lows,
    counts,
    masses,
    digit,
    BY_COUNT: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """Sum up a block's logits for each value of a digit of the edge: of top-k if BY_COUNT, otherwise of top-p."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(parameters + row * _COLUMNS + _TEMPERATURE)
    limit = tl.load(parameters + row * _COLUMNS + (_TOP_K if BY_COUNT else _TOP_P))
    filters = (limit > 0) & (limit < VOCAB) if BY_COUNT else limit < 1
    if filters & (temperature > 0) & (tl.load(tokens + row) != _NONE):
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < VOCAB
        logit = tl.load(logits + row * VOCAB + at, mask=inside, other=0.0)
        if BY_COUNT:
            sums = counts
            share = inside.to(tl.int32)
        else:
            sums = masses
            peak = tl.load(peaks + row)
            edge = _top_k_edge(logits, parameters, peak, lows, counts, row, VOCAB, BLOCKS, PADDED, DIGITS)
            share = _weights(logit, inside, peak, temperature, edge)
        low_place = lows + (row * 2 + (0 if BY_COUNT else 1)) * DIGITS
        low = _low(low_place, sums, row, digit, limit, BY_COUNT, BLOCKS, PADDED, DIGITS)
        if block == 0:
            tl.store(low_place + digit, low)
        place = sums + ((row * DIGITS + digit) * BLOCKS + block) * _PARTS
        order = _ordered(logit, DIGITS)
        step = tl.full((), 1, tl.int32) << (_BITS * (DIGITS - 1 - digit))
        for part in tl.static_range(_PARTS):
            if part > 0:
                low += step
            tl.store(place + part, tl.sum(tl.where(order >= low, share, 0), 0))


@triton.jit
def _weigh_blocks(  # type: ignore[no-untyped-def]
    logits,
    peaks,
    tokens,
    parameters,
    lows,
    counts,
    masses,
    sums,
    bounds,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """Sum up the weights of a block that all filters leave. Store the lowest score and the lightest weight kept."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(parameters + row * _COLUMNS + _TEMPERATURE)
    if (temperature > 0) & (tl.load(tokens + row) != _NONE):
        peak = tl.load(peaks + row)
        edge = _top_k_edge(logits, parameters, peak, lows, counts, row, VOCAB, BLOCKS, PADDED, DIGITS)
        lightest = tl.load(parameters + row * _COLUMNS + _MIN_P)
        top_p = tl.load(parameters + row * _COLUMNS + _TOP_P)
        if top_p < 1:
            low_place = lows + (row * 2 + 1) * DIGITS
            order = _low(low_place, masses, row, DIGITS, top_p, False, BLOCKS, PADDED, DIGITS)
            lightest = tl.maximum(lightest, tl.exp(_score(_logit_of(order, logits, DIGITS), peak, temperature)))
        weight = _kept(logits, row, block, peak, temperature, edge, lightest, VOCAB, BLOCK)
        tl.store(sums + row * BLOCKS + block, tl.sum(weight, 0))
        if block == 0:
            tl.store(bounds + row * 2, edge)
            tl.store(bounds + row * 2 + 1, lightest)


@triton.jit
def _invert(  # type: ignore[no-untyped-def]
    logits,
    peaks,
    tokens,
    parameters,
    sums,
    bounds,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Store the first token with a weight above 0 at which the cumulative weight exceeds the random number's share."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(parameters + row * _COLUMNS + _TEMPERATURE)
    if (temperature > 0) & (tl.load(tokens + row) != _NONE):
        block = tl.arange(0, PADDED)
        held = tl.load(sums + row * BLOCKS + block, mask=block < BLOCKS, other=0.0)
        after = tl.cumsum(held, 0)
        total = tl.max(tl.where(held > 0, after, 0.0), 0)
        # Stay below the total even if the product rounds up to it: the last token with weight is a legal draw.
        below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
        target = tl.minimum(tl.load(parameters + row * _COLUMNS + _UNIFORM) * total, below)
        chosen = tl.min(tl.where((held > 0) & (after > target), block, BLOCKS), 0)
        before = tl.max(tl.where(block < chosen, after, 0.0), 0)
        edge, lightest = tl.load(bounds + row * 2), tl.load(bounds + row * 2 + 1)
        weight = _kept(logits, row, chosen, tl.load(peaks + row), temperature, edge, lightest, VOCAB, BLOCK)
        at = chosen * BLOCK + tl.arange(0, BLOCK)
        # cumsum adds in another order than sum, so it may stay below the target. Then take the block's last token.
        beyond = (weight > 0) & (before + tl.cumsum(weight, 0) > target)
        last = tl.max(tl.where(weight > 0, at, -1), 0)
        tl.store(tokens + row, tl.min(tl.where(beyond, at, last), 0).to(tl.int64))


@triton.jit
def _top_k_edge(  # type: ignore[no-untyped-def]
    logits,
    parameters,
    peak,
    lows,
    counts,
    row,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """Return the lowest score that top-k keeps."""
    edge = tl.full((), float("-inf"), tl.float64)
    top_k = tl.load(parameters + row * _COLUMNS + _TOP_K)
    if (top_k > 0) & (top_k < VOCAB):
        order = _low(lows + row * 2 * DIGITS, counts, row, DIGITS, top_k, True, BLOCKS, PADDED, DIGITS)
        temperature = tl.load(parameters + row * _COLUMNS + _TEMPERATURE)
        edge = _score(_logit_of(order, logits, DIGITS), peak, temperature)
    return edge


@triton.jit
def _low(  # type: ignore[no-untyped-def]
    low_place,
    sums,
    row,
    digit,
    limit,
    BY_COUNT: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """Return the edge's digits before `digit`, as an int32 number whose other digits are 0.

    Args:
        low_place: address of this number without the last of these digits.
        sums: sums of each block for each value of each digit.
        limit: number of tokens if BY_COUNT, otherwise a share of the sum of all weights.
    """
    low = tl.full((), -(2**15) if DIGITS * _BITS == 16 else -(2**31), tl.int64)
    if digit > 0:
        part = tl.arange(0, _PARTS)
        reached = _sums_of(sums, row, digit - 1, BLOCKS, PADDED, DIGITS)
        if not BY_COUNT:
            # The first digit's sum from 0 on is the sum of all weights.
            limit *= tl.sum(tl.where(part == 0, _sums_of(sums, row, 0, BLOCKS, PADDED, DIGITS), 0.0), 0)
        found = tl.sum(((part > 0) & (reached >= limit)).to(tl.int64), 0)
        low = tl.load(low_place + digit - 1).to(tl.int64) + (found << (_BITS * (DIGITS - digit)))
    return low.to(tl.int32)


@triton.jit
def _sums_of(sums, row, digit, BLOCKS: tl.constexpr, PADDED: tl.constexpr, DIGITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (_PARTS,) float64: the sums over all blocks of a row, for each value of a digit."""
    block = tl.arange(0, PADDED)[:, None]
    place = ((row * DIGITS + digit) * BLOCKS + block) * _PARTS + tl.arange(0, _PARTS)[None, :]
    return tl.sum(tl.load(sums + place, mask=block < BLOCKS, other=0).to(tl.float64), 0)


@triton.jit
def _kept(  # type: ignore[no-untyped-def]
    logits, row, block, peak, temperature, edge, lightest, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the weights of a block; 0 for tokens that a filter drops."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * VOCAB + at, mask=at < VOCAB, other=0.0)
    weight = _weights(logit, at < VOCAB, peak, temperature, edge)
    return tl.where(weight < lightest, 0.0, weight)


@triton.jit
def _weights(logit, inside, peak, temperature, edge):  # type: ignore[no-untyped-def]
    """Return weights; 0 below top-k's edge. Scores and not logits are compared: division can make logits equal."""
    score = _score(logit.to(tl.float32), peak, temperature)
    return tl.where(inside & (score >= edge), tl.exp(score), 0.0)


@triton.jit
def _score(logit, peak, temperature):  # type: ignore[no-untyped-def]
    return (logit.to(tl.float64) - peak.to(tl.float64)) / temperature


@triton.jit
def _ordered(logit, DIGITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return int32 numbers in the order of the logits: for negative logits, all bits but the sign are inverted."""
    if DIGITS * _BITS == 16:
        bits = logit.to(tl.int16, bitcast=True).to(tl.int32)
        order = bits ^ ((bits >> 31) & 0x7FFF)
    else:
        bits = logit.to(tl.int32, bitcast=True)
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return order


@triton.jit
def _logit_of(order, logits, DIGITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the float32 logit with a number of `_ordered`. The pointer `logits` has its type."""
    if DIGITS * _BITS == 16:
        bits = (order ^ ((order >> 31) & 0x7FFF)).to(tl.int16)
    else:
        bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    return bits.to(logits.dtype.element_ty, bitcast=True).to(tl.float32)
