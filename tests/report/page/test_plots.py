from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.report.page.plots import Curve, linear_ticks, plot

LABELS = {"name": "ttft", "x_label": "seconds (log scale)", "y_label": "share"}


@given(
    st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=20, unique=True).map(sorted),
    st.booleans(),
)
def test_a_plot_is_well_formed_and_inside_its_box(xs: list[float], log: bool) -> None:
    drawn = plot([Curve(xs, [0.5] * len(xs), {"p50": xs[0], "p99": 0.0})], log=log, **LABELS)
    ElementTree.fromstring(drawn)
    numbers = map(float, re.findall(r"[MHV](-?[\d.]+)", drawn))
    assert all(0 <= number <= 330 for number in numbers)


def test_axes_are_labelled_and_a_run_without_values_says_so() -> None:
    drawn = plot([Curve([0.01, 0.1, 1.0], [0.2, 0.8, 0.8], {})], log=True, **LABELS)
    assert ">seconds (log scale)</text>" in drawn and ">share</text>" in drawn
    assert ">0.01</text>" in drawn and ">1</text>" in drawn
    assert plot([Curve((), (), {})], log=True, **LABELS) == '<p class="hint">No value in this run.</p>'


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0.0, 0.3, [0, 0.1, 0.2, 0.3]), (-5, 95, [0, 20, 40, 60, 80])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert list(linear_ticks(low, high)) == pytest.approx(expected)
