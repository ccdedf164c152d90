"""The device and the host draw the same token, for every filter, ties and bad logits included."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sarathi_pp_kernels.triton import sampling
from sarathi_pp_kernels.triton.sampling import drawn_tokens, reference_drawn_tokens
from triton.runtime.interpreter import InterpreterBuilder

from sarathi_pp.drawing.sampling import sample
from tests.kernels.triton.bounds import checked_addresses
from tests.thinning import examples


@dataclass(frozen=True)
class Draw:
    position: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


DRAWS = st.builds(
    Draw,
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    st.sampled_from([0, 1, 3, 20, 10**9]),
    st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.integers(-(2**63), 2**63 - 1),
)


@settings(max_examples=examples(200, part=8))
@given(
    st.lists(DRAWS, min_size=1, max_size=3),
    st.sampled_from([5, 17, 64, 300, 3000]),
    st.sampled_from([0.1, 1.0, 5.0]),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_the_kernels_draw_what_the_host_draws(
    rows: list[Draw], vocab: int, scale: float, ties: bool, seed: int
) -> None:
    logits = scale * torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed))
    if ties:
        logits = (4 * logits).round() / 4  # -0.0 and 0.0 among them
    assert sample(logits, rows, by_kernels=True) == sample(logits, rows)


@pytest.mark.full
def test_thousands_of_rows() -> None:
    chance = random.Random(0)
    torch.manual_seed(0)
    for _ in range(500):
        rows = [
            Draw(
                chance.randrange(10**6),
                chance.choice([0.3, 0.8, 1.0, 1.7]),
                chance.choice([0, 0, 1, 3, 20, 200]),
                chance.choice([1.0, chance.random() + 1e-3]),
                chance.choice([0.0, chance.random()]),
            )
            for _ in range(8)
        ]
        logits = chance.choice([0.1, 1.0, 5.0]) * torch.randn(8, chance.randint(5, 3000))
        assert sample(logits, rows, by_kernels=True) == sample(logits, rows)


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        *((4095, torch.bfloat16), (4096, torch.float32), (4097, torch.bfloat16), (9000, torch.float32)),
        *(pytest.param(vocab, torch.float32, marks=pytest.mark.full) for vocab in (4095, 4097)),
        *(pytest.param(vocab, torch.bfloat16, marks=pytest.mark.full) for vocab in (4096, 9000)),
    ],
)
def test_vocabularies_of_several_blocks(vocab: int, dtype: torch.dtype) -> None:
    """In bfloat16 there are ties in all blocks."""
    rows = [Draw(), Draw(top_k=50), Draw(top_p=0.7), Draw(temperature=0), Draw(position=3, min_p=0.01)]
    rows += [Draw(top_k=200, top_p=0.8), Draw(temperature=9.0, top_k=4000, top_p=0.99, min_p=0.1)]
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(vocab))
    logits[3, [vocab // 2, min(vocab // 2 + 4096, vocab - 1)]] = 99.0  # the same place of two blocks
    logits = logits.to(dtype)
    assert sample(logits, rows, by_kernels=True) == sample(logits.float(), rows)


@pytest.mark.parametrize("lowest", [-80.0, -1e-30, 0.0, 7.0])
def test_logits_of_one_sign_and_of_tiny_differences(lowest: float) -> None:
    """Their numbers begin with any digit, and may differ in the last one alone."""
    logits = torch.tensor(lowest).repeat(3, 5000)
    for place in range(3):
        logits[:, 1700 * place] = logits[:, 0].nextafter(torch.tensor(math.inf))
    rows = [Draw(top_k=2, seed=1), Draw(top_p=1e-5, seed=2), Draw(top_k=4, top_p=0.5, seed=3)]
    tokens, failed = sample(logits, rows, by_kernels=True)
    assert (tokens, failed) == sample(logits, rows) and not any(failed)


class Launches:
    """A kernel that records the number of programs of its launches."""

    def __init__(self, kernel: Any, found: list[tuple[str, int]]) -> None:
        self.kernel = kernel
        self.found = found

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.found.append((self.kernel.fn.__name__, math.prod(grid)))
        return self.kernel[grid]


@pytest.mark.parametrize(
    ("dtype", "rows", "digits"),
    [
        (torch.float32, [Draw(temperature=0)], None),
        (torch.float32, [Draw(temperature=0, top_k=3, top_p=0.5), Draw(min_p=0.1)], 0),
        (torch.bfloat16, [Draw(), Draw(top_k=3)], 4),
        (torch.bfloat16, [Draw(top_k=3, top_p=0.9)], 8),
        (torch.float32, [Draw(top_k=3), Draw(top_p=0.9)], 16),
    ],
)
def test_a_row_is_computed_by_a_program_for_each_block(
    dtype: torch.dtype, rows: list[Draw], digits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are as few launches as the filters of the rows need."""
    found: list[tuple[str, int]] = []
    for name in ("_find_block_peaks", "_find_peaks", "_narrow", "_weigh_blocks", "_invert"):
        monkeypatch.setattr(sampling, name, Launches(getattr(sampling, name), found))
    sample(torch.randn(len(rows), 9000).to(dtype), rows, by_kernels=True)
    blocks = 3 * len(rows)
    expected = [("_find_block_peaks", blocks), ("_find_peaks", len(rows))]
    if digits is not None:
        expected += [("_narrow", blocks)] * digits + [("_weigh_blocks", blocks), ("_invert", len(rows))]
    assert found == expected


def test_the_order_of_programs_and_earlier_memory_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of a launch run in reverse, and all memory of the kernels holds large numbers before."""
    rows = [Draw(position=place, top_k=300, top_p=0.9, temperature=2.0) for place in range(2)] + [Draw(min_p=0.01)]
    logits = torch.randn(3, 9000, generator=torch.Generator().manual_seed(4))
    expected = sample(logits, rows)
    set_index, empty = InterpreterBuilder.set_grid_idx, torch.empty

    def reverse(self: Any, *index: int) -> None:
        set_index(self, *(size - 1 - one for size, one in zip(self.grid_dim, index, strict=True)))

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", reverse)
    monkeypatch.setattr(sampling.torch, "empty", lambda *shape, **kind: empty(*shape, **kind).fill_(1 << 30))
    with checked_addresses():
        assert sample(logits, rows, by_kernels=True) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_row_only(bad: float, temperature: float) -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    logits[1, 6] = bad
    rows = [Draw(temperature=temperature, top_k=3, top_p=0.9)] * 3
    tokens, failed = sample(logits, rows, by_kernels=True)
    assert failed == [False, True, False] and (tokens, failed) == sample(logits, rows)


def test_equal_logits_greedy_alone_and_beside_draws() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-3.0, -2.0, -1.0, -1.0]])
    greedy = Draw(temperature=0, top_k=1, min_p=0.5)
    assert sample(logits, [greedy] * 3, by_kernels=True) == ([1, 0, 2], [False] * 3)
    assert sample(logits, [greedy, Draw(top_k=1), greedy], by_kernels=True)[0][::2] == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_draw_like_their_float32_copies(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(2)).to(dtype)
    rows = [Draw(top_k=7), Draw(top_p=0.5), Draw(min_p=0.2), Draw(temperature=0)]
    assert sample(logits, rows, by_kernels=True) == sample(logits.float(), rows)


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("filters", [(0, 0.9, 0.0), (0, 1.0, 0.1), (3, 1.0, 0.0), (2, 0.9, 0.3)])
def test_the_ends_of_the_range_never_draw_a_filtered_token(filters: tuple[float, ...], number: float) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 3.0, 0.0]])
    parameters = torch.tensor([[1.0, *filters, number]], dtype=torch.float64)
    token = drawn_tokens(logits, parameters)
    assert token.tolist() == [3 if number else 1] == reference_drawn_tokens(logits, parameters).tolist()


def test_the_reference_draws_what_the_host_draws() -> None:
    chance = random.Random(3)
    logits = torch.randn(examples(100), 40, generator=torch.Generator().manual_seed(3)).mul(4).round().div(4)
    for row in logits:
        numbers = [chance.choice([0, 0.5, 1.3]), chance.choice([0, 2, 9]), chance.random() + 1e-3, chance.random()]
        parameters = torch.tensor([[*numbers, chance.random()]], dtype=torch.float64)
        assert drawn_tokens(row[None], parameters).tolist() == reference_drawn_tokens(row[None], parameters).tolist()


def test_no_rows() -> None:
    assert drawn_tokens(torch.empty(0, 8), torch.empty(0, 5, dtype=torch.float64)).shape == (0,)
