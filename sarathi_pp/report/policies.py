"""Runs of several policies on the same work, a line each: bubbles always beside throughput and latency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from sarathi_pp.analysis.summary import RUNS_SCHEMA, Report
from sarathi_pp.report.formats import share


def runs_document(reports: Sequence[Report], **facts: Any) -> dict[str, Any]:
    """What `--json` prints. facts: what all runs have in common."""
    return {
        "schema": RUNS_SCHEMA,
        **facts,
        "runs": [report | {"bubble_floor": bubble_floor(report)} for report in reports],
    }


def bubble_floor(report: Report) -> float | None:
    """1 - mean / max of the stages' compute time: what unequal stages cost under any schedule. Of several replicas the
    max is each one's own: whichever has less to do could have had more.
    """
    replicas: dict[int, list[float]] = {}
    for stage in report["per_stage"]:
        replicas.setdefault(stage.get("replica", 0), []).append(stage["compute_s"])
    least_s = sum(len(compute_s) * max(compute_s) for compute_s in replicas.values())
    return 1 - sum(map(sum, replicas.values())) / least_s if least_s > 0 else None


def render_policies(document: dict[str, Any]) -> Table:
    """The document of `runs_document` as a table of at most 80 columns."""
    searched = any("capacity" in run for run in document["runs"])
    caption = (
        "steady, whole, floor: bubble ratios, the last what unequal stages cost under any schedule; seconds: bubble a "
        "request (median), time to first token, time between tokens"
    )
    if searched:
        caption += "; req/s: the highest rate within the bounds, - where the requests are too few to tell"
    table = Table(title=document.get("workload"), title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.caption, table.caption_justify = caption, "left"
    # Of all columns this one folds where the line is too short: a name cut in two can be read, a figure cannot.
    table.add_column("policy", overflow="fold")
    for heading in (
        "chunk",
        "tok/s",
        "steady",
        "whole",
        "floor",
        "request",
        "TTFT",
        "p99",
        "TBT",
        "p99",
        *(["req/s"] if searched else []),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in document["runs"]:
        table.add_row(
            run["policy"],
            str(run["chunk_size"]),
            _rate(run["total_tokens_per_s"]),
            *(share(run[name]) for name in ("bubble_ratio_steady", "bubble_ratio", "bubble_floor")),
            *(_short(run[name][at]) for name, at in _SECONDS),
            *([_rate(run["capacity"]["rate"])] if searched else []),
        )
    return table


_SECONDS = (("request_bubble_s", "p50"), ("ttft_s", "p50"), ("ttft_s", "p99"), ("itl_s", "p50"), ("itl_s", "p99"))


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _short(value: float | None) -> str:
    """Three figures, at most five characters below 100,000 s."""
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
