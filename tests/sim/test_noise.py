"""The factors on virtual stages' times have the requested spread and memory."""

from __future__ import annotations

from statistics import fmean, pstdev

import pytest

from sarathi_pp.core.cost.profile import Drift
from sarathi_pp.sim.noise import Noise


def correlation(xs: list[float], ys: list[float]) -> float:
    mean_x, mean_y = fmean(xs), fmean(ys)
    together = fmean((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return together / (pstdev(xs) * pstdev(ys))


def test_without_noise_nothing_changes() -> None:
    noise = Noise(2)
    assert noise.quiet and [noise.factor(1, at_s) for at_s in range(3)] == [1.0] * 3
    assert not Noise(2, 0.1).quiet and not Noise(2, drift=Drift(0.1)).quiet


def test_jitter_has_no_memory() -> None:
    noise = Noise(1, 0.1, seed=3)
    factors = [noise.factor(0, 0.01 * i) for i in range(4000)]
    assert (fmean(factors), pstdev(factors)) == (pytest.approx(1, abs=0.01), pytest.approx(0.1, rel=0.1))
    assert abs(correlation(factors[:-1], factors[1:])) < 0.05


def test_drift_is_forgotten_with_time_and_not_with_microbatches() -> None:
    for step_s, expected in ((0.2, 0.905), (2.0, 0.368)):  # exp(-step / 2)
        noise = Noise(1, drift=Drift(0.1, 2.0), seed=3)
        factors = [noise.factor(0, step_s * i) for i in range(8000)]
        assert (fmean(factors), pstdev(factors)) == (pytest.approx(1, abs=0.02), pytest.approx(0.1, rel=0.15))
        assert correlation(factors[:-1], factors[1:]) == pytest.approx(expected, abs=0.04)


def test_stages_drift_each_for_itself() -> None:
    noise = Noise(2, drift=Drift(0.1, 0.5), seed=3)
    pairs = [(noise.factor(0, float(i)), noise.factor(1, float(i))) for i in range(2000)]
    assert abs(correlation([a for a, _ in pairs], [b for _, b in pairs])) < 0.1


def test_the_jitter_of_a_seed_does_not_depend_on_the_drift() -> None:
    """The drift ends before it is seen, so only the jitter is left, in the same order."""
    alone, both = Noise(1, 0.1, seed=5), Noise(1, 0.1, Drift(1e-12, 1.0), seed=5)
    assert [alone.factor(0, float(i)) for i in range(9)] == pytest.approx([both.factor(0, float(i)) for i in range(9)])


def test_no_microbatch_is_faster_than_half_its_time() -> None:
    noise = Noise(1, 0.5, Drift(0.5, 1.0), seed=1)
    factors = [noise.factor(0, float(i)) for i in range(1000)]
    assert min(factors) == 0.5 and max(factors) > 2
