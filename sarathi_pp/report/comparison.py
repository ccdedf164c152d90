"""Runs side by side: each figure of each run, its ratio to the first run, and what else differs between them.

    figure              orca         sarathi
    tokens/s     611.4  1.00x   765.5* 1.25x
    bubble       31.0%  1.00x    8.2%* 0.26x

Runs that differ in what they were asked to do are compared all the same: the notes say what differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sarathi_pp.analysis.summary import Report
from sarathi_pp.errors import InputError

SCHEMA = "sarathi-pp/comparison/1"

Better = Literal["lower", "higher"]

# Runs beside each other in 80 columns; further ones come in a table below, each beside the first run again.
_RUNS_ABREAST = 4


@dataclass(frozen=True, slots=True)
class _Figure:
    """Where a figure is in a report, under which heading it is shown, and in which direction it improves."""

    path: tuple[str, ...]
    heading: str
    better: Better | None = None
    share: bool = False

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def of(self, report: Report) -> float | None:
        value: Any = report
        for key in self.path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value if isinstance(value, int | float) else None

    def show(self, value: float | None) -> str:
        if value is None:
            return "-"
        if self.share:
            return f"{value:.1%}"
        if abs(value) >= 1_000_000:
            return f"{value:.3g}"
        if isinstance(value, int) or abs(value) >= 1000:
            return f"{value:,.0f}"
        return f"{value:.{1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3}f}"


def _spread(name: str, heading: str, keys: Sequence[str] = ("mean", "p50", "p90", "p99")) -> tuple[_Figure, ...]:
    return tuple(_Figure((name, key), f"{heading} {key} s", "lower") for key in keys)


_CAUSES = (
    "ramp",
    "prefill_variance",
    "prefill_decode",
    "decode_context",
    "stage_imbalance",
    "communication",
    "host",
    "starvation",
    "unexplained",
)

# A cause has no direction: it is in seconds, of a run that may have had more to do.
_SECTIONS: tuple[tuple[_Figure, ...], ...] = (
    (
        _Figure(("total_tokens_per_s",), "tokens/s", "higher"),
        _Figure(("output_tokens_per_s",), "output tokens/s", "higher"),
        _Figure(("chunk_throughput",), "chunks/s"),
        _Figure(("wall_s",), "wall s"),
        _Figure(("microbatches",), "microbatches"),
    ),
    (
        _Figure(("bubble_ratio",), "bubble", "lower", share=True),
        _Figure(("bubble_ratio_steady",), "steady bubble", "lower", share=True),
        _Figure(("overlap",), "all stages busy", "higher", share=True),
        *_spread("request_bubble_s", "request bubble", ("p50", "p90", "p99")),
    ),
    tuple(_Figure(("causes", f"{cause}_s"), f"{cause.replace('_', ' ')} s") for cause in _CAUSES),
    (
        *_spread("ttft_s", "ttft"),
        *_spread("tpot_s", "tpot"),
        *_spread("itl_s", "itl"),
        *_spread("e2el_s", "e2el"),
    ),
    (
        _Figure(("microbatch_time_cv",), "microbatch time cv", "lower"),
        _Figure(("microbatch_tokens_cv",), "microbatch tokens cv"),
        _Figure(("kv", "peak_used"), "KV pages, peak"),
        _Figure(("kv", "fragmentation"), "KV fragmentation", "lower", share=True),
        _Figure(("preemptions",), "preemptions", "lower"),
    ),
)
_FIGURES = {figure.name: figure for section in _SECTIONS for figure in section}

# Differences smaller than this are as likely between two runs of the same settings.
_SAME = 0.01

# What the runs were asked to do, which decides what the ratios mean, and how they were set up to do it.
_WORK = ("model", "dtype", "device", "requests", "failed", "prompt_tokens", "output_tokens")
_SETUP = ("policy", "chunk_size", "stages", "layer_split", "inflight", "max_num_seqs", "max_model_len", "attention")


def compare(reports: Sequence[tuple[str, Report]]) -> dict[str, Any]:
    """The comparison as one JSON document, from (name, report) pairs; the first run is what ratios refer to.

    A report is what summary.summarise returns; the name, a directory's, tells runs apart whose settings do not.
    `figures` holds, by dotted key of the report and only for figures that at least one run has: `values` and
    `ratios`, one a run, None where there is none; `better`, None where neither direction is; and `best`, the
    runs within 1 % of the best value, none where all are. Raises InputError for fewer than two runs.
    """
    if len(reports) < 2:
        raise InputError(f"{len(reports)} run given; a comparison needs two or more")
    labels = _labels(reports)
    runs = [{"label": label, **report} for label, (_, report) in zip(labels, reports, strict=True)]
    figures = {name: _compare_figure(figure, runs) for name, figure in _FIGURES.items()}
    return {
        "schema": SCHEMA,
        "runs": runs,
        "figures": {name: found for name, found in figures.items() if found is not None},
        "notes": _notes(runs),
    }


def render_comparison(comparison: Mapping[str, Any]) -> RenderableType:
    """A comparison as `compare` makes it, in 80 columns: figures as rows, runs as columns, the best ones marked."""
    count = len(comparison["runs"])
    parts: list[RenderableType] = []
    for first in range(1, count, _RUNS_ABREAST - 1):
        shown = [0, *range(first, min(first + _RUNS_ABREAST - 1, count))]
        parts += [_table(comparison, shown), ""]
    parts.append(Text("* the best, or within 1 % of it; x: times the first run", style="dim"))
    parts += [Text(f"advice: {advice['text']}", style="cyan") for advice in comparison.get("advice", [])]
    parts += [Text(f"note: {note}", style="yellow") for note in comparison["notes"]]
    return Group(*parts)


def _labels(reports: Sequence[tuple[str, Report]]) -> list[str]:
    """The settings in which the runs differ; where they do not tell all apart, the name, and then a number."""
    settings = [
        {
            "policy": str(report["policy"]),
            "chunk": f"chunk {report['chunk_size']}",
            "stages": f"{report['stages']} stage{'s' if report['stages'] != 1 else ''}",
        }
        for _, report in reports
    ]
    differing = [key for key in settings[0] if len({setting[key] for setting in settings}) > 1]
    labels = [", ".join(setting[key] for key in differing) for setting in settings]
    names = [name for name, _ in reports]
    if not differing:
        labels = names
    elif len(set(labels)) < len(labels):
        times = Counter(labels)
        labels = [f"{label}, {name}" if times[label] > 1 else label for label, name in zip(labels, names, strict=True)]
    times = Counter(labels)
    return [f"{label} #{number}" if times[label] > 1 else label for number, label in enumerate(labels, start=1)]


def _compare_figure(figure: _Figure, runs: Sequence[Report]) -> dict[str, Any] | None:
    values = [figure.of(run) for run in runs]
    known = [value for value in values if value is not None]
    if not known:
        return None
    first = values[0]
    ratios = [_ratio(value, first) for value in values]
    best: list[int] = []
    if figure.better is not None:
        bound = min(known) if figure.better == "lower" else max(known)
        best = [n for n, value in enumerate(values) if value is not None and abs(value - bound) <= _SAME * abs(bound)]
    if len(best) == len(known):
        best = []
    return {"values": values, "ratios": ratios, "better": figure.better, "best": best}


def _ratio(value: float | None, first: float | None) -> float | None:
    """None where it would say nothing: of nothing, or across zero."""
    return value / first if value is not None and first is not None and value >= 0 and first > 0 else None


def _notes(runs: Sequence[Report]) -> list[str]:
    """What differs besides the figures, then what each run's own report warns of."""
    work = [_difference(key, runs) for key in _WORK]
    setup = [_difference(key, runs) for key in _SETUP]
    notes = [note for note in work if note]
    if notes:
        notes.append("these runs did not do the same work: their ratios say less than they seem to")
    notes += [note for note in setup if note]
    return notes + [f"{run['label']}: {note}" for run in runs for note in run.get("notes", ())]


def _difference(key: str, runs: Sequence[Report]) -> str | None:
    """One setting, with the runs that have each of its values; None if it is the same in all."""
    labels: dict[str, list[str]] = {}
    for run in runs:
        labels.setdefault(_shown(run.get(key)), []).append(run["label"])
    if len(labels) < 2:
        return None
    sides = "; ".join(f"{value} in {' and '.join(names)}" for value, names in labels.items())
    return f"different {key.replace('_', ' ')}: {sides}"


def _shown(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, int):
        return f"{value:,}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(comparison: Mapping[str, Any], shown: Sequence[int]) -> Table:
    gap = 1 if len(shown) < _RUNS_ABREAST else 0
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
    table.add_column("figure", style="dim", no_wrap=True)
    for run in shown:
        table.add_column(Text(comparison["runs"][run]["label"]), justify="right", overflow="fold")
    figures = comparison["figures"]
    for section in _SECTIONS:
        for figure in section:
            if figure.name in figures:
                table.add_row(figure.heading, *(_cell(figure, figures[figure.name], run) for run in shown))
        table.add_section()
    return table


def _cell(figure: _Figure, compared: Mapping[str, Any], run: int) -> Text:
    best = run in compared["best"]
    text = f"{figure.show(compared['values'][run])}{'*' if best else ' '} {_times(compared['ratios'][run]):>5}"
    return Text(text, style="bold green" if best else "")


def _times(ratio: float | None) -> str:
    """Five characters at most; a ratio that needs more is that of a first value next to nothing."""
    if ratio is None or ratio >= 9999.5:
        return "-"
    return f"{ratio:.{2 if ratio < 9.995 else 1 if ratio < 99.95 else 0}f}x"
