"""The comparison notices what a wrong kernel does."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from tests.gpu.comparison import DEVICE, F32, Pairs, compare, normal


def test_memory_that_is_not_written() -> None:
    def half_written() -> Pairs:
        expected = normal(64, 64)
        found = torch.empty_like(expected)
        found[:32] = expected[:32]
        return {"rows": (found, expected)}

    with pytest.raises(AssertionError, match="rows.* are NaN on one side only"):
        compare(half_written, 1.0)


def test_a_row_that_is_wrong() -> None:
    def one_wrong() -> Pairs:
        expected = torch.ones(1000, 8, device=DEVICE)
        found = expected.clone()
        found[7] = 1.1
        return {"rows": (found, expected)}

    with pytest.raises(AssertionError, match="a row's error is 1.00e-01"):
        compare(one_wrong, 5e-3)


def test_tokens_that_differ() -> None:
    tokens = torch.arange(5, device=DEVICE)
    with pytest.raises(AssertionError, match="the error is inf"):
        compare(lambda: {"tokens": (tokens, tokens + (tokens == 3))}, 0.0)


def test_two_runs_that_differ() -> None:
    """Each is right within the limit."""
    numbers = count()

    def racing() -> Pairs:
        expected = torch.ones(4, 4, dtype=F32, device=DEVICE)
        return {"rows": (expected * (1 + 1e-6 * next(numbers)), expected)}

    with pytest.raises(AssertionError, match="two runs differ, so there is a race"):
        compare(racing, 1e-5)
