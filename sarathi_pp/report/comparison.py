"""Runs side by side: each figure of each run, its ratio to the first run, and the settings that differ.

    figure              orca         sarathi
    tokens/s     611.4  1.00x   765.5* 1.25x
    bubble       31.0%  1.00x    8.2%* 0.26x

Runs that did different work are compared too. A note warns of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sarathi_pp.analysis.summary import Report
from sarathi_pp.errors import InputError
from sarathi_pp.report import formats
from sarathi_pp.report.vocabulary import CAUSES, LATENCIES, cause_name, kv_cache_dtype, name_of, prefix_cache_mode

SCHEMA = "sarathi-pp/comparison/1"

Better = Literal["lower", "higher"]

# Number of runs next to each other in 80 columns. Further runs come in a table below, with the first run again.
_RUNS_ABREAST = 4
_NARROW = 80
# Characters that each further run takes in a wider terminal.
_RUN_COLUMNS = 17


@dataclass(frozen=True, slots=True)
class _Figure:
    """A figure of a report that the comparison shows.

    Attributes:
        path: its key in the report, after the keys of the objects that contain it.
        heading: its name in the table.
        better: the direction in which it improves; None if neither direction is better.
        share: shown as a percentage.
    """

    path: tuple[str, ...]
    heading: str
    better: Better | None = None
    share: bool = False

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def of(self, report: Report) -> float | None:
        """Return the figure's value in a report; None if the report does not have it."""
        value: Any = report
        for key in self.path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value if isinstance(value, int | float) else None

    def show(self, value: float | None) -> str:
        if value is None or self.share:
            return formats.share(value)
        if abs(value) >= 1_000_000:
            return f"{value:.3g}"
        if isinstance(value, int) or abs(value) >= 1000:
            return f"{value:,.0f}"
        decimals = 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
        return formats.unsigned_zero(f"{value:.{decimals}f}")


def _spread(name: str, heading: str, keys: Sequence[str] = ("mean", "p50", "p90", "p99")) -> tuple[_Figure, ...]:
    return tuple(_Figure((name, key), f"{heading} {key} s", "lower") for key in keys)


# A cause has no direction: it is in seconds, of a run that may have had more to do.
_SECTIONS: tuple[tuple[_Figure, ...], ...] = (
    (
        _Figure(("total_tokens_per_s",), "tokens/s", "higher"),
        _Figure(("output_tokens_per_s",), "output tokens/s", "higher"),
        _Figure(("prefix_cache", "hit_rate"), "prompt tokens found", "higher", share=True),
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
    tuple(_Figure(("causes", cause), f"{cause_name(cause)} s") for cause in CAUSES),
    tuple(chain.from_iterable(_spread(latency, name_of(latency)) for latency in LATENCIES)),
    (
        _Figure(("microbatch_time_cv",), "microbatch time cv", "lower"),
        _Figure(("microbatch_tokens_cv",), "microbatch tokens cv"),
        _Figure(("kv", "peak_used"), "KV pages, peak"),
        _Figure(("kv", "fragmentation"), "KV fragmentation", "lower", share=True),
        _Figure(("preemptions",), "preemptions", "lower"),
    ),
)
_FIGURES = {figure.name: figure for section in _SECTIONS for figure in section}

# Values that differ by at most this share count as equal. Two runs with the same settings may differ by it.
_SAME = 0.01

# The work that the runs were asked to do, which gives the ratios their meaning, and the setup that they did it with.
_WORK = ("model", "dtype", "kv_cache_dtype", "device", "requests", "failed", "prompt_tokens", "output_tokens")
_SETUP = (
    *("policy", "chunk_size", "stages", "layer_split", "inflight", "max_num_seqs", "max_model_len", "attention"),
    "prefix_cache",
)


def compare(reports: Sequence[tuple[str, Report]]) -> dict[str, Any]:
    """Return the comparison as one JSON document. Ratios are to the first run.

    The keys of the document:

        figures       by dotted key of the report, only for figures that at least one run has
          values      one per run, or None
          ratios      one per run, or None
          better      "lower" or "higher"; None if neither is better
          best        the runs within 1 % of the best value; empty if all are
        differences   the settings that differ
          name
          values      one per run
          same_work   False if the runs were asked to do different work

    Args:
        reports: (name, report) pairs. A report is from summary.summarise. The name of its directory distinguishes runs
            with the same settings.

    Raises:
        InputError: fewer than two runs.
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
        "differences": [found._asdict() for found in _differences(runs)],
        "notes": _notes(runs),
    }


class Row(NamedTuple):
    """One figure of all runs, as text.

    Attributes:
        heading: name of the figure.
        values: one per run.
        ratios: ratio of each value to that of the first run.
        best: indices of the runs that are marked as best.
    """

    heading: str
    values: list[str]
    ratios: list[str]
    best: list[int]


def sections_of(comparison: Mapping[str, Any]) -> list[list[Row]]:
    """Return the rows of a comparison's table, as one list per section of the table."""
    figures = comparison["figures"]
    return [[_row(one, figures[one.name]) for one in section if one.name in figures] for section in _SECTIONS]


def differences_of(comparison: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the settings that differ, each with its value in every run."""
    return [(one["name"].replace("_", " "), list(map(_shown, one["values"]))) for one in comparison["differences"]]


def render_comparison(comparison: Mapping[str, Any]) -> RenderableType:
    """Return the tables of a document from `compare`: figures as rows, runs as columns, the best runs marked."""
    parts: list[RenderableType] = [_Tables(comparison)]
    parts.append(Text("* the best, or within 1 % of it; x: times the first run", style="dim"))
    parts += [Text(f"advice: {advice['text']}", style="cyan") for advice in comparison.get("advice", [])]
    parts += [Text(f"note: {note}", style="yellow") for note in comparison["notes"]]
    return Group(*parts)


@dataclass(frozen=True, slots=True)
class _Tables:
    """Tables of the runs, with as many columns as the console has room for."""

    comparison: Mapping[str, Any]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        count = len(self.comparison["runs"])
        abreast = _RUNS_ABREAST + max(0, options.max_width - _NARROW) // _RUN_COLUMNS
        for first in range(1, count, abreast - 1):
            shown = [0, *range(first, min(first + abreast - 1, count))]
            yield _table(self.comparison, shown)
            yield ""


def _labels(reports: Sequence[tuple[str, Report]]) -> list[str]:
    """Return a label for each run: its values of the settings in which the runs differ.

    Runs with equal labels also get their name, and then a number if that is equal too.
    """
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
    """Return a ratio; None if a value is unknown or negative, or if the first one is 0."""
    return value / first if value is not None and first is not None and value >= 0 and first > 0 else None


class _Difference(NamedTuple):
    name: str
    values: list[Any]
    same_work: bool


def _differences(runs: Sequence[Report]) -> list[_Difference]:
    """Return the settings that are not the same in all runs. The settings that define the work come first."""
    settings = ((key, [_setting(run, key) for run in runs], key not in _WORK) for key in (*_WORK, *_SETUP))
    return [_Difference(*one) for one in settings if len(set(map(_shown, one[1]))) > 1]


def _setting(run: Report, key: str) -> Any:
    if key == "kv_cache_dtype":
        return kv_cache_dtype(run)
    return prefix_cache_mode(run) if key == "prefix_cache" else run.get(key)


def _notes(runs: Sequence[Report]) -> list[str]:
    """Return warnings about the ratios, then the notes of each run."""
    notes = []
    if not all(one.same_work for one in _differences(runs)):
        notes.append("these runs did not do the same work: their ratios say less than they seem to")
    return notes + [f"{run['label']}: {note}" for run in runs for note in run.get("notes", ())]


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
    for section in sections_of(comparison):
        for row in section:
            table.add_row(row.heading, *(_cell(row, run) for run in shown))
        table.add_section()
    for name, values in differences_of(comparison):
        table.add_row(name, *(Text(values[run], style="dim") for run in shown))
    return table


def _row(figure: _Figure, compared: Mapping[str, Any]) -> Row:
    ratios = list(map(_times, compared["ratios"]))
    return Row(figure.heading, list(map(figure.show, compared["values"])), ratios, compared["best"])


def _cell(row: Row, run: int) -> Text:
    best = run in row.best
    text = f"{row.values[run]}{'*' if best else ' '} {row.ratios[run]:>5}"
    return Text(text, style="bold green" if best else "")


def _times(ratio: float | None) -> str:
    """Return a ratio as text of at most five characters, such as "1.25x".

    Return "-" for a ratio of 10,000 or more. It says nothing, because the value of the first run is almost 0.
    """
    if ratio is None or ratio >= 9999.5:
        return "-"
    return f"{ratio:.{2 if ratio < 9.995 else 1 if ratio < 99.95 else 0}f}x"
