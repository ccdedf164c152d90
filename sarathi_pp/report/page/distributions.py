"""Distributions of latencies and microbatches on a page, each as a plot above a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from sarathi_pp.report import formats
from sarathi_pp.report.page.document import table
from sarathi_pp.report.page.part import PagePart
from sarathi_pp.report.page.plots import Curve, curves_of, plot
from sarathi_pp.report.page.series import distributions, request_bubble_cdf
from sarathi_pp.report.vocabulary import LATENCIES, name_of

_LOG_SECONDS = "seconds (log scale)"


class _Plot(NamedTuple):
    """The labels of a plot."""

    name: str
    x_label: str
    y_label: str


_PLOTS = {
    **{
        key: _Plot(f"{name_of(key)}: {meaning}", _LOG_SECONDS, "share of requests")
        for key, meaning in LATENCIES.items()
    },
    "itl_s": _Plot(f"itl: {LATENCIES['itl_s']}", _LOG_SECONDS, "share of gaps"),
    "microbatch_tokens": _Plot("tokens in a microbatch", "tokens", "share of microbatches"),
    "microbatch_s": _Plot("microbatch time on the slowest stage", _LOG_SECONDS, "share of microbatches"),
}
_REQUEST_BUBBLE = _Plot("request bubble: gaps before its microbatches", "seconds", "share of requests up to")


def distribution_figures(parts: Sequence[PagePart]) -> str:
    """Return the HTML of all distributions: plots with one curve per part, each above a table."""
    found = distributions([(part.timeline, part.bubbles) for part in parts])
    figures = []
    for key, labels in _PLOTS.items():
        marks = [part.report[key] if key in LATENCIES else {} for part in parts]
        drawn = _drawn(labels, curves_of(found[key], marks), log=found[key]["log"])
        figures.append(_figure(labels.name, drawn, _spreads(parts, key) if key in LATENCIES else ""))
    cdfs = [request_bubble_cdf(part.bubbles) for part in parts]
    marks = [part.report["request_bubble_s"] for part in parts]
    curves = [Curve(cdf["seconds"], cdf["shares"], mark) for cdf, mark in zip(cdfs, marks, strict=True)]
    drawn = _drawn(_REQUEST_BUBBLE, curves, log=False)
    figures.append(_figure(_REQUEST_BUBBLE.name, drawn, _spreads(parts, "request_bubble_s", ("p50", "p90", "p99"))))
    hint = '<p class="hint">Dashed: the median (p50). Dotted: the 99th percentile (p99).</p>'
    return f'<div class="grid">{"".join(figures)}</div>{hint}'


def run_legend(parts: Sequence[PagePart]) -> str:
    """Return the legend with the colour of each part; empty for a single part."""
    if len(parts) == 1:
        return ""
    names = (
        f'<span><i class="swatch" style="background:var(--run-{number % 6})"></i>{escape(part.title)}</span>'
        for number, part in enumerate(parts)
    )
    return f'<p class="legend">{"".join(names)}</p>'


def _drawn(labels: _Plot, curves: Sequence[Curve], *, log: bool) -> str:
    return plot(curves, name=labels.name, x_label=labels.x_label, y_label=labels.y_label, log=log)


def _figure(name: str, drawn: str, spreads: str) -> str:
    return f"<figure><figcaption>{name}</figcaption>{drawn}{spreads}</figure>"


def _spreads(parts: Sequence[PagePart], key: str, columns: Iterable[str] = ("mean", "p50", "p90", "p99")) -> str:
    columns = list(columns)
    heads = [f"{column} s" for column in columns]
    rows = [[formats.milliseconds_kept(part.report[key][column]) for column in columns] for part in parts]
    if len(parts) == 1:
        return table(heads, rows)
    named = [(escape(part.title), *row) for part, row in zip(parts, rows, strict=True)]
    return table(["run", *heads], named, kind="runs")
