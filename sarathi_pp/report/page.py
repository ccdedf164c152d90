"""One or several runs as one HTML page that needs nothing but itself: no network, no fonts, no second file.

    render_page --> head     policy that forbids the network and every script but these two
                    text     headline figures, tables, advice: printed here, from the report
                    data     JSON for the charts (report/charts.py)
                    scripts  plotly.js, then page.js, which draws the charts from the data

Every number in the text is one of the report, so what people read is what programs read. What comes from a run
(titles, notes, ids) is escaped, and the page's own policy refuses any script that it did not start out with.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

from plotly.offline import get_plotlyjs

from sarathi_pp.analysis.bubbles import Bubbles
from sarathi_pp.analysis.timeline import Timeline
from sarathi_pp.report import formats
from sarathi_pp.report.advice import APART
from sarathi_pp.report.charts import distributions, request_bubble_cdf, spans

_STATES = {
    "compute_s": "compute s",
    "recv_wait_s": "recv wait s",
    "send_wait_s": "send wait s",
    "host_s": "host s",
    "no_work_s": "no work s",
}
_CAUSES = {
    "ramp_s": ("ramp", "the pipeline fills and drains"),
    "prefill_variance_s": ("prefill variance", "prompt chunks of unequal time follow each other"),
    "prefill_decode_s": ("prefill and decode", "microbatches with and without prompt chunks follow each other"),
    "decode_context_s": ("decode context", "decodes read KV of unequal length"),
    "stage_imbalance_s": ("stage imbalance", "stages take unequal time for the same microbatch"),
    "communication_s": ("communication", "activations and tokens travel"),
    "host_s": ("host", "inputs wait for the host to start them"),
    "starvation_s": ("starvation", "nothing can be issued"),
    "unexplained_s": ("unexplained", "measured beyond what the model of the run accounts for"),
}
_LATENCIES = {
    "ttft_s": "time to first token (TTFT)",
    "tpot_s": "time per output token (TPOT)",
    "itl_s": "between tokens (ITL)",
    "e2el_s": "end to end (E2EL)",
}
_DISTRIBUTIONS = {
    **_LATENCIES,
    "microbatch_tokens": "tokens in a microbatch",
    "microbatch_s": "microbatch time, slowest stage",
}


@dataclass(frozen=True, slots=True)
class PageRun:
    """One run of a page. report: what `summarise_timeline` makes of the other two, further keys allowed."""

    title: str
    timeline: Timeline
    bubbles: Bubbles
    report: Mapping[str, Any]


def render_page(runs: Sequence[PageRun], remarks: Sequence[str] = ()) -> str:
    """The page as one HTML document; several runs share its time scale. Raises ValueError for no run at all.

    remarks: what is to be said of all runs together.
    """
    if not runs:
        raise ValueError("a page shows at least one run; got none")
    scripts = (get_plotlyjs(), _own("page.js"))
    title = escape(" | ".join(run.title for run in runs))
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{title}: bubbles</title>\n<style>{_own('page.css')}</style>\n</head>\n<body>",
            f"<header><h1>{title}</h1></header>\n<main>",
            *(f'<p class="note">{escape(remark)}</p>' for remark in remarks),
            *_sections(runs),
            '<noscript><p class="note">The charts need JavaScript; the tables above do not.</p></noscript>\n</main>',
            f'<script type="application/json" id="page-data">{_json(_data(runs))}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body>\n</html>\n",
        )
    )


def _own(name: str) -> str:
    return (files("sarathi_pp.report") / name).read_text(encoding="utf-8")


def _policy(scripts: Iterable[str]) -> str:
    hashes = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"


def _json(data: object) -> str:
    """JSON in which nothing can end the script element that holds it."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _data(runs: Sequence[PageRun]) -> dict[str, Any]:
    return {
        "runs": [
            {
                "title": run.title,
                "caption": _caption(run),
                "causes": run.report.get("causes"),
                "marks": {key: run.report[key] for key in (*_LATENCIES, "request_bubble_s")},
                "request_bubble": request_bubble_cdf(run.bubbles),
                **spans(run.timeline, run.bubbles),
            }
            for run in runs
        ],
        "causes": list(_CAUSES),
        "distributions": distributions([(run.timeline, run.bubbles) for run in runs]),
    }


def _caption(run: PageRun) -> str:
    rate, ratio = run.report["total_tokens_per_s"], run.report["bubble_ratio"]
    wall = formats.seconds(run.report["wall_s"])
    return f"{run.title}: bubble {formats.share(ratio)}, {formats.count(rate)} tokens/s, {wall} s"


def _sections(runs: Sequence[PageRun]) -> Iterable[str]:
    yield _section("figures", "", _per_run(runs, _headline))
    yield _section("timeline", "Timeline", _TIMELINE)
    yield _section("stages", "Stages", _per_run(runs, _stage_table))
    yield _section("causes", "Causes of the bubble", _causes(runs))
    yield _section("distributions", "Distributions", _run_legend(runs) + _distributions(runs))


def _section(name: str, heading: str, content: str) -> str:
    head = f"<h2>{heading}</h2>\n" if heading else ""
    return f'<section id="{name}">\n{head}{content}\n</section>'


def _per_run(runs: Sequence[PageRun], part: Callable[[Mapping[str, Any]], str]) -> str:
    if len(runs) == 1:
        return part(runs[0].report)
    return "\n".join(f"<h3>{escape(run.title)}</h3>\n{part(run.report)}" for run in runs)


def _headline(report: Mapping[str, Any]) -> str:
    chunk_size = report["chunk_size"]
    figures = (
        ("bubble", formats.share(report["bubble_ratio"])),
        ("bubble, steady", formats.share(report["bubble_ratio_steady"])),
        ("tokens/s", formats.count(report["total_tokens_per_s"])),
        ("output tokens/s", formats.count(report["output_tokens_per_s"])),
        ("wall s", formats.seconds(report["wall_s"])),
        ("requests ok", f"{report['completed']:,} of {report['requests']:,}"),
        ("policy", str(report["policy"])),
        ("stages", str(report["stages"])),
        ("chunk size", "-" if chunk_size is None else str(chunk_size)),
        ("microbatches", f"{report['microbatches']:,}"),
    )
    kv = report["kv"]
    further = (
        ("all stages at once", formats.share(report["overlap"])),
        ("chunks/s", formats.count(report["chunk_throughput"])),
        ("cv of microbatch time", formats.share(report["microbatch_time_cv"])),
        ("cv of their tokens", formats.share(report["microbatch_tokens_cv"])),
        ("KV pages, peak", f"{kv['peak_used']:,} of {kv['pages']:,}"),
        ("KV pages, mean", formats.count(kv["mean_used"])),
        ("KV room empty", formats.share(kv["fragmentation"])),
        ("preemptions", f"{report['preemptions']:,}"),
        ("clocks within \N{MICRO SIGN}s", formats.microseconds(report["clock_uncertainty_s"])),
        ("states within", formats.share(report["closing_error"])),
        ("costs within", formats.share(report["cost_error"])),
    )
    notes = "".join(f'<p class="note">{escape(str(note))}</p>' for note in report.get("notes", ()))
    return f'<dl>{_cards(figures)}</dl><dl class="further">{_cards(further)}</dl>{notes}'


def _cards(figures: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in figures)


_TIMELINE = """<div class="tools" role="toolbar" aria-label="Time shown">
<button type="button" data-move="in" aria-label="zoom in">+</button>
<button type="button" data-move="out" aria-label="zoom out">&minus;</button>
<button type="button" data-move="left" aria-label="earlier">&larr;</button>
<button type="button" data-move="right" aria-label="later">&rarr;</button>
<button type="button" data-move="all">whole run</button>
<span class="legend"><span>decodes only</span><i class="ramp"></i><span>prefill only</span>
<i class="idle"></i><span>idle</span><i class="steady"></i><span>steady window</span></span>
</div>
<div id="timeline-view" tabindex="0" role="application"
 aria-label="What each stage computed when. Arrow keys move, plus and minus zoom, 0 shows the whole run.">
<canvas id="timeline-canvas" aria-hidden="true"></canvas><div id="timeline-plot"></div>
<div id="timeline-tip" role="status" hidden></div></div>
<p class="hint">Wheel to zoom, drag to move; with the keyboard arrows, + and -, 0. Where microbatches are narrower
than a pixel, its colour is their mix and fades towards idle by the idle share.</p>"""


def _stage_table(report: Mapping[str, Any]) -> str:
    several = len({stage["host"] for stage in report["per_stage"]}) > 1
    rows = []
    for stage in report["per_stage"]:
        first, end = stage["layers"]
        rows.append(
            (
                str(stage["stage"]),
                *([escape(stage["host"])] if several else ()),
                f"{first}-{end - 1}" if end > first else "none",
                formats.share(stage["bubble_ratio"]),
                formats.share(stage["bubble_ratio_steady"]),
                *(formats.seconds(stage[state]) for state in _STATES),
                formats.gib(stage.get("peak_rss_bytes")),
            )
        )
    heads = ("stage", *(["host"] if several else ()), "layers", "bubble", "steady", *_STATES.values(), "peak GiB")
    return _table(heads, rows) + _links(report)


def _links(report: Mapping[str, Any]) -> str:
    links = [link for link in report["links"] if link["between_hosts"]]
    if not links:
        return ""
    transfers = ", ".join(map(_transfer, links))
    return f'\n<p class="hint">Median transfer between hosts: {transfers}.</p>'


def _transfer(link: Mapping[str, Any]) -> str:
    here, there = link["stages"]
    return f"{formats.microseconds(link['transfer_s']['p50'])} \N{MICRO SIGN}s from {here} to {there}"


def _causes(runs: Sequence[PageRun]) -> str:
    explained = [run for run in runs if run.report.get("causes")]
    advice = [_advice(run, named=len(runs) > 1) for run in runs]
    if not explained:
        return "\n".join(['<p class="hint">The causes of this bubble were not computed.</p>', *advice])
    missing = [run.title for run in runs if not run.report.get("causes")]
    rows = []
    for key, (name, meaning) in _CAUSES.items():
        label = f'<i class="swatch" style="background:var(--{key})"></i>{name}<small>{meaning}</small>'
        rows.append((label, *(formats.milliseconds_kept(run.report["causes"].get(key)) for run in explained)))
    heads = [escape(run.title) for run in explained] if len(runs) > 1 else ["seconds"]
    parts = ['<div id="causes-plot" class="plot"></div>', _table(("cause", *heads), rows, "causes")]
    parts += [f'<p class="hint">Not computed for {escape(title)}.</p>' for title in missing]
    parts.append('<p class="hint">Seconds, summed over stages; they add up to the measured bubble.</p>')
    return "\n".join([*parts, *advice])


def _advice(run: PageRun, *, named: bool) -> str:
    texts = [str(advice["text"]) for advice in run.report.get("advice") or ()]
    if not texts:
        return ""
    whose = f"<h3>{escape(run.title)}</h3>" if named else ""
    apart = f'<p class="hint">{APART}</p>' if len(texts) > 1 else ""
    return whose + '<ul class="advice">' + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>" + apart


def _run_legend(runs: Sequence[PageRun]) -> str:
    if len(runs) == 1:
        return ""
    names = "".join(
        f'<span><i class="swatch" data-run="{i}"></i>{escape(run.title)}</span>' for i, run in enumerate(runs)
    )
    return f'<p class="legend">{names}</p>'


def _distributions(runs: Sequence[PageRun]) -> str:
    figures = []
    for key, name in _DISTRIBUTIONS.items():
        table = _spreads(runs, key, ("mean", "p50", "p90", "p99")) if key in _LATENCIES else ""
        figures.append(_figure(key, name, table))
    figures.append(
        _figure(
            "request_bubble_s", "bubble of a request (CDF)", _spreads(runs, "request_bubble_s", ("p50", "p90", "p99"))
        )
    )
    marks = '<p class="hint">Dashed: the median, dotted: the 99th percentile.</p>'
    return f'<div class="grid">{"".join(figures)}</div>{marks}'


def _figure(key: str, name: str, table: str) -> str:
    plot = f'<div class="plot" data-chart="{key}" role="img" aria-label="{name}"></div>'
    return f"<figure><figcaption>{name}</figcaption>{plot}{table}</figure>"


def _spreads(runs: Sequence[PageRun], key: str, columns: Sequence[str]) -> str:
    heads = [f"{column} s" for column in columns]
    rows = [[formats.milliseconds_kept(run.report[key][column]) for column in columns] for run in runs]
    if len(runs) == 1:
        return _table(heads, rows)
    named = [(escape(run.title), *row) for run, row in zip(runs, rows, strict=True)]
    return _table(["run", *heads], named, "runs")


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "figures") -> str:
    """Of HTML that is already escaped. It scrolls by itself where the page is too narrow for it."""
    head = "".join(f'<th scope="col">{cell}</th>' for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
