"""Draws follow the filtered distribution exactly, and depend only on the row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from sarathi_pp.core.plan import SamplingRow
from sarathi_pp.drawing import sampling
from sarathi_pp.drawing.likeliest import NOT_FINITE, NOTHING_ALLOWED, has_pass, likeliest
from sarathi_pp.drawing.sampling import sample, uniform
from tests.thinning import examples


@dataclass(frozen=True)
class Draw:
    """The test's own row, which shows that `sample` needs no class of ours."""

    position: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


LOGITS = torch.tensor([1.0, -0.5, 2.0, 0.3, -3.0, 1.7, 0.9, -1.0])
FILTERS = [
    Draw(),
    Draw(temperature=0.6),
    Draw(temperature=2.5),
    Draw(top_k=3),
    Draw(top_p=0.75),
    Draw(min_p=0.2),
    Draw(temperature=1.5, top_k=6, top_p=0.9, min_p=0.15),
    Draw(temperature=0.7, top_k=4, top_p=0.6),
]


def filtered(logits: Tensor, row: Draw) -> Tensor:
    """Return probabilities after the logits processors of transformers, in the order of its `generate`."""
    scores = TemperatureLogitsWarper(row.temperature)(None, logits[None].double())
    if row.top_k:
        scores = TopKLogitsWarper(row.top_k)(None, scores)
    if row.top_p < 1:
        scores = TopPLogitsWarper(row.top_p)(None, scores)
    if row.min_p > 0:
        scores = MinPLogitsWarper(row.min_p)(None, scores)
    probabilities: Tensor = scores.softmax(-1)[0]
    return probabilities


def rows_at(row: Draw, positions: range, seed: int = 7) -> list[Draw]:
    return [Draw(position, row.temperature, row.top_k, row.top_p, row.min_p, seed) for position in positions]


@pytest.mark.parametrize("row", FILTERS)
def test_draws_follow_the_distribution_of_transformers(row: Draw) -> None:
    count = 3000
    tokens, failed = sample(LOGITS.expand(count, -1), rows_at(row, range(count)))
    assert not any(failed)
    expected = filtered(LOGITS, row) * count
    observed = torch.bincount(torch.tensor(tokens), minlength=len(LOGITS))
    possible = expected > 0
    assert int(observed[~possible].sum()) == 0
    statistic = float(((observed - expected)[possible] ** 2 / expected[possible]).sum())
    # 99.9 % quantiles of chi-square with 0 to 7 degrees of freedom; the seed is fixed
    assert statistic < [1e-9, 10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32][int(possible.sum()) - 1]


@settings(max_examples=100)
@given(
    scores=st.lists(st.integers(-40, 40), min_size=2, max_size=12, unique=True),
    temperature=st.floats(0.1, 5),
    top_k=st.integers(0, 15),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    position=st.integers(0, 10_000),
)
def test_only_what_transformers_keeps_is_drawn(
    scores: list[int], temperature: float, top_k: int, top_p: float, min_p: float, position: int
) -> None:
    logits = torch.tensor(scores, dtype=torch.float32) / 10
    row = Draw(position, temperature, top_k, top_p, min_p)
    (token,), (failed,) = sample(logits[None], [row])
    assert not failed
    assert filtered(logits, row)[token] > 0


def test_a_draw_inverts_the_cumulative_distribution_in_token_order() -> None:
    cumulative = LOGITS.double().softmax(-1).cumsum(0).tolist()
    rows = rows_at(Draw(), range(200))
    tokens, _ = sample(LOGITS.expand(200, -1), rows)
    expected = [next(i for i, c in enumerate(cumulative) if c > uniform(7, n)) for n in range(200)]
    assert tokens == expected


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1 - 2**-53, 3)])
def test_the_ends_of_the_range_never_draw_a_filtered_token(number: float, token: int) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 3.0, 0.0]])
    with mock.patch.object(sampling, "uniform", return_value=number):
        for row in (Draw(top_p=0.9), Draw(min_p=0.1), Draw(top_k=3)):
            assert sample(logits, [row]) == ([token], [False])


def test_batch_mates_and_their_order_change_nothing() -> None:
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(len(FILTERS) + 1, 50, generator=random)
    rows = [*FILTERS, Draw(temperature=0)]
    together, _ = sample(logits, rows)
    backwards, _ = sample(logits.flip(0), rows[::-1])
    alone = [sample(logits[i : i + 1], [row])[0][0] for i, row in enumerate(rows)]
    assert together == backwards[::-1] == alone


def test_greedy_ignores_filters_and_takes_the_first_of_equal_logits() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    rows = [Draw(temperature=0, top_k=1, min_p=0.5), Draw(temperature=0, top_p=0.1)]
    assert sample(logits, rows) == ([1, 0], [False, False])


def some_logits(num_rows: int, width: int, dtype: torch.dtype, kind: str, seed: int) -> Tensor:
    """Values are few, with ties, signed zeros and some that are not finite. Others are random bits or finite."""
    random = torch.Generator().manual_seed(seed)
    if kind == "few":
        values = torch.tensor([-1.0, -0.0, 0.0, 0.0, -0.0, 1.0, -3e38, torch.inf, -torch.inf, torch.nan, -torch.nan])
        last = 5 if seed % 3 else 7 + seed % 5
        return values[torch.randint(0, last, (num_rows, width), generator=random)].to(dtype)
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    bits = torch.randint(-(2**31), 2**31, (num_rows, width), generator=random).to(whole)
    logits = bits.view(dtype)
    return logits.nan_to_num() if kind == "finite" else logits


@pytest.mark.skipif(not has_pass(torch.device("cpu")), reason="numba is not here")
@given(
    st.integers(1, 4),
    st.integers(1, 700),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(["few", "any", "finite"]),
    st.sampled_from([None, 0.0, 0.01, 0.5]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=examples(400))
def test_one_pass_finds_what_torch_does(
    num_rows: int, width: int, dtype: torch.dtype, kind: str, share: float | None, seed: int
) -> None:
    logits = some_logits(num_rows, width, dtype, kind, seed)
    assert likeliest(logits) == sampling._largest(logits)
    if share is None:
        return
    draw = np.random.default_rng(seed)
    rows = draw.integers(0, num_rows, 3).tolist()
    flags = draw.random((3, -(-width // 32) * 32)) < share
    flags[0] = True  # a row without bans has no bits
    allowed = [None, *np.packbits(flags[1:], axis=1, bitorder="little").view(np.uint32)]
    expected = []
    for row, kept in zip(rows, flags[:, :width], strict=True):
        values = logits[row].double().numpy()
        if not np.isfinite(values).all():
            expected.append(NOT_FINITE)
        else:
            expected.append(int(np.where(kept, values, -np.inf).argmax()) if kept.any() else NOTHING_ALLOWED)
    assert likeliest(logits, rows, allowed) == expected


def test_seed_and_position_both_matter_and_nothing_global_does() -> None:
    logits = torch.zeros(64, 1000)
    first, _ = sample(logits, rows_at(Draw(), range(64)))
    torch.manual_seed(123)
    assert sample(logits, rows_at(Draw(), range(64)))[0] == first
    assert sample(logits, rows_at(Draw(), range(64), seed=8))[0] != first
    assert len(set(first)) > 50


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_every_64_bit_seed_gives_a_number_below_one(seed: int) -> None:
    assert 0 <= uniform(seed, 0) < 1


def test_the_hash_is_pinned_so_that_a_resumed_run_draws_the_same() -> None:
    assert [uniform(7, 0), uniform(7, 1), uniform(-1, 12)] == [
        0.7283479541790344,
        0.8033384902111143,
        0.23986590093322802,
    ]


@pytest.mark.parametrize("row", [Draw(top_k=2), Draw(top_p=0.3), Draw(min_p=0.9)])
def test_tokens_that_tie_at_a_filters_edge_stay_together(row: Draw) -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0, 1.0])
    tokens, _ = sample(logits.expand(200, -1), rows_at(row, range(200)))
    assert set(tokens) == {1, 2, 3}


@pytest.mark.parametrize(
    "row",
    [
        Draw(top_p=1e-12),
        Draw(min_p=1.0),
        Draw(top_k=1),
        Draw(temperature=1e-300),
        Draw(temperature=1e-6, top_p=0.5, min_p=1.0, top_k=1),
    ],
)
def test_the_likeliest_token_always_stays(row: Draw) -> None:
    tokens, failed = sample(LOGITS.expand(50, -1), rows_at(row, range(50)))
    assert (set(tokens), any(failed)) == ({2}, False)


def test_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    rows, all_rows = rows_at(Draw(top_k=10**9), range(50)), rows_at(Draw(), range(50))
    logits = LOGITS.expand(50, -1)
    assert sample(logits, rows) == sample(logits, all_rows)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_row_only(bad: float, temperature: float) -> None:
    row = Draw(temperature=temperature, top_k=3, top_p=0.9)
    logits = LOGITS.repeat(3, 1)
    clean, _ = sample(logits, [row] * 3)
    logits[1, 6] = bad
    tokens, failed = sample(logits, [row] * 3)
    assert failed == [False, True, False]
    assert (tokens[0], tokens[2]) == (clean[0], clean[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_draw_like_their_float32_copies(dtype: torch.dtype) -> None:
    logits = LOGITS.to(dtype).expand(20, -1)
    for row in FILTERS:
        rows = rows_at(row, range(20))
        assert sample(logits, rows) == sample(logits.float(), rows)


def test_the_sampling_row_of_the_plan_fits() -> None:
    row = SamplingRow(position=3, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
    assert sample(LOGITS[None], [row]) == ([2], [False])


def test_no_rows_no_tokens() -> None:
    assert sample(torch.empty(0, 8), []) == ([], [])
