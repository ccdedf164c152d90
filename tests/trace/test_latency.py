from __future__ import annotations

from collections import Counter
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.trace.events import RequestFinished
from sarathi_pp.trace.latency import RequestLatency, Spread, latency_series, latency_spreads, percentile

THREE_TOKENS = RequestFinished(0, 1.0, 1.5, 3.0, 7.0, 10, 3, "stop", 0, (1_000_000, 3_000_000))
ONE_TOKEN = RequestFinished(1, 2.0, 2.0, 4.0, 4.0, 10, 1, "length")
NO_TOKEN = RequestFinished(2, 0.0, None, None, 0.5, 10, 0, "length")
FAILED = RequestFinished(3, 0.0, 0.0, 100.0, 100.0, 10, 1, "error")


def test_definitions() -> None:
    assert RequestLatency.of(THREE_TOKENS) == RequestLatency(0.5, 2.0, 2.0, 6.0)
    assert RequestLatency.of(ONE_TOKEN) == RequestLatency(0.0, 2.0, None, 2.0)
    assert RequestLatency.of(NO_TOKEN) == RequestLatency(None, None, None, 0.5)


def test_failures_and_what_is_undefined_are_left_out() -> None:
    series = latency_series([THREE_TOKENS, ONE_TOKEN, NO_TOKEN, FAILED])
    assert series == {"ttft_s": [2.0, 2.0], "tpot_s": [2.0], "itl_s": [1.0, 3.0], "e2el_s": [6.0, 2.0, 0.5]}
    assert astuple(Spread.of(series["itl_s"])) == pytest.approx((2.0, 2.0, 2.8, 2.98))
    spreads = latency_spreads([THREE_TOKENS, ONE_TOKEN, NO_TOKEN, FAILED])
    assert spreads.keys() == series.keys()
    assert all(astuple(spreads[name]) == pytest.approx(astuple(Spread.of(series[name]))) for name in series)


@given(st.lists(st.integers(0, 30), max_size=200), st.sampled_from([1.0, 1e-6]))
def test_counted_numbers_have_the_spread_of_their_series(numbers: list[int], unit: float) -> None:
    expected = Spread.of([unit * number for number in numbers])
    found = Spread.of_counts(Counter(numbers), unit)
    assert found == expected if not numbers else astuple(found) == pytest.approx(astuple(expected))


def test_no_request_has_null_figures() -> None:
    assert all(values == [] for values in latency_series([]).values())
    assert Spread.of([]) == Spread(None, None, None, None)


def test_percentiles_are_linear_between_members() -> None:
    assert astuple(Spread.of([4, 1, 3, 2])) == pytest.approx((2.5, 2.5, 3.7, 3.97))


@given(st.lists(st.integers(-1000, 1000), min_size=1).map(sorted), st.floats(0, 100))
def test_percentile_is_within_the_series_and_grows(ordered: list[int], percent: float) -> None:
    value = percentile(ordered, percent)
    assert ordered[0] <= value <= ordered[-1]
    assert percentile(ordered, 0) == ordered[0]
    assert percentile(ordered, 100) == ordered[-1]
    assert percentile(ordered, percent / 2) <= value + 1e-9
