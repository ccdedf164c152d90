"""The report of one run as an HTML page: its result, the advice, and then the reasons.

Every number in the text is in the report or is a ratio of two of its numbers. So people and programs read the same
figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from sarathi_pp.report import formats
from sarathi_pp.report.page.bars import cause_bars, stage_bars, stage_name
from sarathi_pp.report.page.distributions import distribution_figures, run_legend
from sarathi_pp.report.page.document import notes, render_document, section, table
from sarathi_pp.report.page.figures import details, tiles
from sarathi_pp.report.page.headline import advice_list, best_advice, best_command, headline, provenance
from sarathi_pp.report.page.part import PagePart
from sarathi_pp.report.page.series import IDLE_STATES, spans
from sarathi_pp.report.page.timeline_view import TIMELINE
from sarathi_pp.report.vocabulary import STATES, doubt, name_of


def render_page(title: str, report: Mapping[str, Any], parts: Sequence[PagePart]) -> str:
    """Return the page of a run as one HTML document.

    Args:
        title: name of the run.
        report: figures of the whole run.
        parts: the pipelines of the run: the run itself, or each of its replicas.
    """
    return render_document(title, _sections(title, report, parts), page_data(parts))


def page_data(parts: Sequence[PagePart]) -> dict[str, Any]:
    """Return the JSON document from which page.js draws the timelines."""
    states = [state.replace("_", " ") for state in IDLE_STATES]
    runs = [{"title": one.title, "caption": _caption(one), **spans(one.timeline, one.bubbles)} for one in parts]
    return {"states": states, "runs": runs}


def _caption(part: PagePart) -> str:
    rate, ratio = part.report["total_tokens_per_s"], part.report["bubble_ratio"]
    wall = formats.seconds(part.report["wall_s"])
    return f"{part.title}: bubble {formats.share(ratio)}, {formats.count(rate)} tokens/s, {wall} s"


def _sections(title: str, report: Mapping[str, Any], parts: Sequence[PagePart]) -> Iterator[str]:
    yield f'<header>\n<p class="run">{escape(title)}</p>\n<h1>{headline(report)}</h1>\n{best_command(report)}'
    yield f"{provenance(report)}\n</header>"
    yield f'<dl class="tiles">{tiles(report)}</dl>\n{notes(report.get("notes", ()))}\n{details(report)}'
    if advice := advice_list(report, without=best_advice(report)):
        yield section("advice", "What to change", advice)
    yield section("timeline", "Timeline", TIMELINE)
    yield section("causes", "Causes of the bubble", _causes(report))
    yield section(
        "stages", "Stages", f'<div class="split">{_stage_table(report)}{stage_bars(report)}</div>{_links(report)}'
    )
    yield section("distributions", "Distributions", run_legend(parts) + distribution_figures(parts))


def _causes(report: Mapping[str, Any]) -> str:
    if not report.get("causes"):
        return '<p class="hint">The causes of this bubble were not computed.</p>'
    hint = f"Seconds, summed over stages. They add up to the measured bubble. {doubt(report)}"
    return f'{cause_bars([report["causes"]])}<p class="hint">{hint.strip()}</p>'


def _stage_table(report: Mapping[str, Any]) -> str:
    several = len({stage["host"] for stage in report["per_stage"]}) > 1
    rows = []
    for stage in report["per_stage"]:
        first, end = stage["layers"]
        rows.append(
            (
                stage_name(stage),
                *([escape(stage["host"])] if several else ()),
                f"{first}-{end - 1}" if end > first else "none",
                formats.share(stage["bubble_ratio"]),
                formats.share(stage["bubble_ratio_steady"]),
                *(formats.seconds(stage[state]) for state in STATES),
                formats.gib(stage.get("peak_rss_bytes")),
            )
        )
    states = (f"{name_of(state)} s" for state in STATES)
    return table(
        ("stage", *(["host"] if several else ()), "layers", "bubble", "steady bubble", *states, "peak GiB"), rows
    )


def _links(report: Mapping[str, Any]) -> str:
    links = [link for link in report["links"] if link["between_hosts"]]
    if not links:
        return ""
    return f'<p class="hint">Median transfer between hosts: {", ".join(map(_transfer, links))}.</p>'


def _transfer(link: Mapping[str, Any]) -> str:
    here, there = (stage_name({**link, "stage": stage}) for stage in link["stages"])
    return f"{formats.microseconds(link['transfer_s']['p50'])} \N{MICRO SIGN}s from {here} to {there}"
