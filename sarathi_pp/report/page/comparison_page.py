"""Several runs on one page: ratios first, then the timelines on one time axis, then every figure in one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from sarathi_pp.report import formats
from sarathi_pp.report.comparison import Row, differences_of, sections_of
from sarathi_pp.report.page.bars import cause_bars
from sarathi_pp.report.page.distributions import distribution_figures, run_legend
from sarathi_pp.report.page.document import notes, render_document, section, table
from sarathi_pp.report.page.headline import advice_list, provenance
from sarathi_pp.report.page.part import PagePart
from sarathi_pp.report.page.run_page import page_data
from sarathi_pp.report.page.timeline_view import TIMELINE


def render_comparison_page(comparison: Mapping[str, Any], parts: Sequence[PagePart]) -> str:
    """Return the page of a comparison as one HTML document.

    Args:
        comparison: document of `comparison.compare`, with advice.
        parts: pipelines of all runs, in the order of the runs.
    """
    title = " | ".join(run["label"] for run in comparison["runs"])
    return render_document(title, _sections(comparison, parts), page_data(parts))


def _sections(comparison: Mapping[str, Any], parts: Sequence[PagePart]) -> Iterator[str]:
    runs = comparison["runs"]
    yield f"<header>\n<h1>{'<br>'.join(_headlines(comparison))}</h1>\n</header>"
    yield notes(comparison["notes"])
    yield section("timeline", "Timelines", TIMELINE)
    yield section("figures", "Figures", f'<div class="split">{_figures(comparison)}{_differences(comparison)}</div>')
    yield section("causes", "Causes of the bubble", _causes(runs))
    if advice := _advice(comparison):
        yield section("advice", "What to change", advice)
    yield section("distributions", "Distributions", run_legend(parts) + distribution_figures(parts))
    yield section("runs", "Where the runs come from", "\n".join(map(_origin, runs)))


def _headlines(comparison: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each run after the first one, which compares it with the first."""
    runs, figures = comparison["runs"], comparison["figures"]
    first = escape(runs[0]["label"])
    rates = figures.get("total_tokens_per_s", {"ratios": [None] * len(runs)})["ratios"]
    for run, ratio in zip(runs[1:], rates[1:], strict=True):
        times = "an unknown multiple of" if ratio is None else f"{ratio:.2f}x"
        before, after = (formats.share(one["bubble_ratio"]) for one in (runs[0], run))
        yield (f"{escape(run['label'])}: {times} the tokens per second of {first}, bubble {before} &rarr; {after}")


def _figures(comparison: Mapping[str, Any]) -> str:
    labels = [escape(run["label"]) for run in comparison["runs"]]
    heads = ["figure", labels[0]]
    for label in labels[1:]:
        heads += [label, "ratio"]
    sections = [list(map(_row, rows)) for rows in sections_of(comparison) if rows]
    hint = '<p class="hint">Bold: the best, or within 1 % of it. Ratios are to the first run.</p>'
    return f"<div>{table(heads, *sections, kind='compared')}{hint}</div>"


def _row(row: Row) -> list[str]:
    values = [f"<b>{value}</b>" if run in row.best else value for run, value in enumerate(row.values)]
    cells = [row.heading, values[0]]
    for value, ratio in zip(values[1:], row.ratios[1:], strict=True):
        cells += [value, ratio]
    return cells


def _differences(comparison: Mapping[str, Any]) -> str:
    differing = differences_of(comparison)
    if not differing:
        return '<p class="hint">The runs had the same settings.</p>'
    labels = [escape(run["label"]) for run in comparison["runs"]]
    rows = [(escape(name), *map(escape, values)) for name, values in differing]
    return f"<div><h3>Settings that differ</h3>{table(['setting', *labels], rows, kind='settings')}</div>"


def _causes(runs: Sequence[Mapping[str, Any]]) -> str:
    missing = [run["label"] for run in runs if not run.get("causes")]
    if missing:
        return "".join(f'<p class="hint">Not computed for {escape(label)}.</p>' for label in missing)
    hint = '<p class="hint">Seconds, summed over stages. The seconds of a run add up to its measured bubble.</p>'
    return _legend(runs) + cause_bars([run["causes"] for run in runs]) + hint


def _legend(runs: Sequence[Mapping[str, Any]]) -> str:
    names = (
        f'<span><i class="swatch" style="background:var(--run-{number % 6})"></i>{escape(run["label"])}</span>'
        for number, run in enumerate(runs)
    )
    return f'<p class="legend">{"".join(names)}</p>'


def _advice(comparison: Mapping[str, Any]) -> str:
    texts = "".join(f"<li>{escape(one['text'])}</li>" for one in comparison.get("advice", ()))
    together = f'<ul class="advice">{texts}</ul>' if texts else ""
    each = (f"<h3>{escape(run['label'])}</h3>{found}" for run in comparison["runs"] if (found := advice_list(run)))
    return together + "".join(each)


def _origin(run: Mapping[str, Any]) -> str:
    return f"<h3>{escape(run['label'])}</h3>{provenance(run)}"
