"""The table of `simulate`: policies that did the same work, one per line, with bubbles, throughput and latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sarathi_pp.analysis.summary import RUNS_SCHEMA, Report
from sarathi_pp.report import formats


def runs_document(reports: Sequence[Report], **facts: Any) -> dict[str, Any]:
    """Return the document that `simulate --json` prints.

    Args:
        reports: one report per run.
        facts: further keys of the document, which are the same for all runs.
    """
    return {
        "schema": RUNS_SCHEMA,
        **facts,
        "runs": [report | {"bubble_floor": bubble_floor(report)} for report in reports],
    }


def bubble_floor(report: Report) -> float | None:
    """Return the bubble that remains under any schedule, because stages take unequal time.

    It is 1 - mean / maximum of the compute seconds of the stages. With several replicas, each replica has its own
    maximum, because a replica with less work could have had more.
    """
    replicas: dict[int, list[float]] = {}
    for stage in report["per_stage"]:
        replicas.setdefault(stage.get("replica", 0), []).append(stage["compute_s"])
    least_s = sum(len(compute_s) * max(compute_s) for compute_s in replicas.values())
    return 1 - sum(map(sum, replicas.values())) / least_s if least_s > 0 else None


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table, which shows one figure of a report.

    Attributes:
        heading: name of the figure, over several lines.
        key: key in the report.
        at: key in the figure's object, such as `p50`; None if the figure is one number.
    """

    heading: str
    key: str
    at: str | None = None


_RATIOS = (_Column("bubble", "bubble_ratio"), _Column("steady\nbubble", "bubble_ratio_steady"))
_SECONDS = (
    _Column("request\nbubble\np50 s", "request_bubble_s", "p50"),
    _Column("ttft\np50 s", "ttft_s", "p50"),
    _Column("ttft\np99 s", "ttft_s", "p99"),
    _Column("itl\np50 s", "itl_s", "p50"),
    _Column("itl\np99 s", "itl_s", "p99"),
)


def render_policies(document: dict[str, Any]) -> RenderableType:
    """Return the document of `runs_document` as a table. It fits 80 columns."""
    searched = any("capacity" in run for run in document["runs"])
    parts: list[RenderableType] = [Text(str(document["workload"]))] if "workload" in document else []
    parts += [_table(document["runs"], searched=searched), Text("\n".join(_remarks(document, searched)), style="dim")]
    return Group(*parts)


def _remarks(document: dict[str, Any], searched: bool) -> list[str]:
    floors = {run["policy"]: formats.share(run["bubble_floor"]) for run in document["runs"]}
    alike = len(set(floors.values())) == 1
    each = next(iter(floors.values())) if alike else ", ".join(f"{policy} {floor}" for policy, floor in floors.items())
    remarks = [f"bubble floor, which unequal stages cost under any schedule: {each}"]
    if searched:
        remarks.append("req per s: the highest request rate within the bound; - if the requests are too few to tell")
    if len({run["chunk_size"] for run in document["runs"]}) > 1:
        remarks.append("the chunk sizes differ: use --chunk-size to compare policies at the same one")
    return remarks


def _table(runs: Sequence[Report], *, searched: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    # Only this column folds if the line is too short: a reader can read a name over two lines, but not a figure.
    table.add_column("policy", overflow="fold")
    capacity = ["req\nper s"] if searched else []
    for heading in ("chunk\nsize", "tokens/s", *(one.heading for one in (*_RATIOS, *_SECONDS)), *capacity):
        table.add_column(heading, justify="right", no_wrap=True)
    lowest = min((run["bubble_ratio"] for run in runs if run["bubble_ratio"] is not None), default=None)
    for run in runs:
        bubble, *ratios = (formats.share(run[one.key]) for one in _RATIOS)
        best = len(runs) > 1 and run["bubble_ratio"] == lowest
        table.add_row(
            run["policy"],
            str(run["chunk_size"]),
            _rate(run["total_tokens_per_s"]),
            Text(bubble, style="bold green" if best else "bold"),
            *ratios,
            *(_short(run[one.key][one.at]) for one in _SECONDS),
            *([_rate(run["capacity"]["rate"])] if searched else []),
        )
    return table


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _short(value: float | None) -> str:
    """Return seconds as text. Times below 100,000 s have at most five characters."""
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
