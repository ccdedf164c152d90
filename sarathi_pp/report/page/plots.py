"""Distributions as SVG: steps of one line per run, over an axis that names its unit and scale.

    share |      __            dashed: the median of a run
          |   __|  |_  |       dotted: its 99th percentile
          |__|  |    |_|__
          +-------------------
            seconds (log scale)

Colours are variables of page.css, so the plots follow the colour scheme without a script.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

_WIDTH, _HEIGHT = 330, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 44
_TICKS = 4
# Multiples of each power of ten that may have a tick on a logarithmic axis. The first row with enough ticks is used.
_LOG_STEPS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7))
_DASHES = {"p50": "5 3", "p99": "1.5 3"}


@dataclass(frozen=True, slots=True)
class Curve:
    """Steps of one run.

    Attributes:
        xs: left ends of the steps.
        ys: heights of the steps: ys[i] holds from xs[i] to xs[i + 1].
        marks: positions on the x axis, by name: `p50` and `p99`.
    """

    xs: Sequence[float]
    ys: Sequence[float]
    marks: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis of a plot, from `low` to `high`.

    Attributes:
        log: the axis is logarithmic.
    """

    low: float
    high: float
    log: bool

    def position(self, value: float) -> float:
        """Return the share of the axis that is below a value, from 0 to 1."""
        low, high, at = map(math.log, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return min(1.0, max(0.0, (at - low) / (high - low)))

    def ticks(self) -> list[float]:
        return self._log_ticks() if self.log else list(linear_ticks(self.low, self.high))

    def _log_ticks(self) -> list[float]:
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found: list[float] = []
        for steps in _LOG_STEPS:
            found = [step * 10.0**power for power in powers for step in steps]
            found = [value for value in found if self.low <= value <= self.high]
            if len(found) >= _TICKS - 1:
                break
        return found[:: math.ceil(len(found) / (_TICKS + 1))] if found else []


def linear_ticks(low: float, high: float) -> Iterator[float]:
    """Yield round values from low to high, at most about five."""
    step = 10.0 ** math.floor(math.log10(max(high - low, 1e-12) / _TICKS))
    step *= next(times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= _TICKS + 1)
    first = math.ceil(low / step - 1e-9)
    yield from (number * step for number in range(first, math.floor(high / step + 1e-9) + 1))


def plot(curves: Sequence[Curve], *, name: str, x_label: str, y_label: str, log: bool) -> str:
    """Return an SVG element with one line per curve, in the colours of the runs; a note if no curve has a value.

    Args:
        name: name of the plot, for screen readers.
        log: the x axis is logarithmic.
    """
    drawn = [curve for curve in curves if curve.xs]
    if not drawn:
        return '<p class="hint">No value in this run.</p>'
    xs = [x for curve in drawn for x in curve.xs]
    across = _axis(min(xs), max(xs), log)
    up = _axis(0.0, max(max(curve.ys) for curve in drawn), False)
    parts = [*_grid(across, up, x_label, y_label)]
    for number, curve in enumerate(curves):
        if curve.xs:
            parts += _lines(curve, across, up, number, filled=len(curves) == 1)
    label = escape(f"{name}: {y_label} by {x_label}", quote=True)
    return f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _axis(low: float, high: float, log: bool) -> _Axis:
    if high > low:
        return _Axis(low, high, log)
    return _Axis(low, low * 2 if log else low + max(abs(low), 1.0), log)


def _x(axis: _Axis, value: float) -> str:
    return f"{_LEFT + axis.position(value) * (_WIDTH - _LEFT - _RIGHT):.1f}"


def _y(axis: _Axis, value: float) -> str:
    return f"{_HEIGHT - _BOTTOM - axis.position(value) * (_HEIGHT - _TOP - _BOTTOM):.1f}"


def _grid(across: _Axis, up: _Axis, x_label: str, y_label: str) -> Iterator[str]:
    bottom, right, middle = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT, (_TOP + _HEIGHT - _BOTTOM) / 2
    for value in up.ticks():
        y = _y(up, value)
        yield f'<path class="grid" d="M{_LEFT} {y}H{right}"/>'
        yield f'<text x="{_LEFT - 5}" y="{y}" dy=".32em" text-anchor="end">{value:.3g}</text>'
    for value in across.ticks():
        x = _x(across, value)
        yield f'<path class="grid" d="M{x} {bottom}v4"/>'
        yield f'<text x="{x}" y="{bottom + 15}" text-anchor="middle">{_tick(value)}</text>'
    yield f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>'
    yield f'<text class="label" x="{(_LEFT + right) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{x_label}</text>'
    yield f'<text class="label" transform="translate(11 {middle}) rotate(-90)" text-anchor="middle">{y_label}</text>'


def _tick(value: float) -> str:
    text = f"{value:.3g}"
    return f"{value:,.0f}" if "e+" in text or value >= 1000 else text if "e" not in text else f"{value:.6f}".rstrip("0")


def _lines(curve: Curve, across: _Axis, up: _Axis, number: int, *, filled: bool) -> Iterator[str]:
    color = f"var(--run-{number % 6})"
    path = f"M{_x(across, curve.xs[0])} {_y(up, curve.ys[0])}"
    for (_, x), y in zip(pairwise(curve.xs), curve.ys[1:], strict=True):
        path += f"H{_x(across, x)}V{_y(up, y)}"
    if filled:
        base = _HEIGHT - _BOTTOM
        yield f'<path d="{path}V{base}H{_x(across, curve.xs[0])}Z" fill="{color}" fill-opacity=".22"/>'
    yield f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>'
    for mark, dash in _DASHES.items():
        at = curve.marks.get(mark)
        if at is not None and (at > 0 or not across.log):
            line = f"M{_x(across, at)} {_TOP}V{_HEIGHT - _BOTTOM}"
            tone = "var(--text)" if filled else color
            yield f'<path d="{line}" stroke="{tone}" stroke-dasharray="{dash}" fill="none"/>'


def curves_of(distribution: Mapping[str, Any], marks: Sequence[Mapping[str, float | None]]) -> list[Curve]:
    """Return one curve per run, from one of the distributions of `series.distributions`.

    Args:
        marks: for each run, positions of the p50 and the p99.
    """
    edges = distribution["edges"]
    return [
        Curve(edges, [*shares, shares[-1]], mark) if shares else Curve((), (), mark)
        for shares, mark in zip(distribution["shares"], marks, strict=True)
    ]
