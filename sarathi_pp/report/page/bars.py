"""Bars of a page as plain HTML: one per cause of the bubble, and one per stage with its five states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sarathi_pp.report import formats
from sarathi_pp.report.vocabulary import CAUSES, STATES, cause_name, name_of


def cause_bars(causes: Sequence[Mapping[str, float]]) -> str:
    """Return HTML: a row per cause, the largest first, with a bar per run. Negative causes follow in their own list.

    Args:
        causes: for each run, seconds by cause.
    """
    total = {key: sum(of_one[key] for of_one in causes) for key in CAUSES}
    largest = max((abs(of_one[key]) for of_one in causes for key in CAUSES), default=0.0) or 1.0
    ordered = sorted(CAUSES, key=lambda key: -total[key])
    above = [_cause_row(key, causes, largest) for key in ordered if total[key] >= 0]
    below = [_cause_row(key, causes, largest) for key in reversed(ordered) if total[key] < 0]
    parts = [f'<div class="causes">{"".join(above)}</div>']
    if below:
        parts.append('<p class="hint">Negative: without it, other waits would have been longer.</p>')
        parts.append(f'<div class="causes negative">{"".join(below)}</div>')
    return "\n".join(parts)


def _cause_row(key: str, causes: Sequence[Mapping[str, float]], largest: float) -> str:
    bars = []
    for number, of_one in enumerate(causes):
        bubble_s = sum(of_one.values())
        share = f" s, {formats.share(of_one[key] / bubble_s, 0)}" if bubble_s > 0 else " s"
        color = f"var(--run-{number % 6})" if len(causes) > 1 else "var(--cause)"
        bar = f'<i style="--length:{abs(of_one[key]) / largest:.4f};background:{color}"></i>'
        bars.append(f'<div class="bar">{bar}<span>{formats.milliseconds_kept(of_one[key])}{share}</span></div>')
    return f"<div><b>{cause_name(key)}<small>{CAUSES[key]}</small></b><div>{''.join(bars)}</div></div>"


def stage_bars(report: Mapping[str, Any]) -> str:
    """Return HTML: a stacked bar per stage with its seconds in each state, and a legend of the colours."""
    rows = []
    for stage in report["per_stage"]:
        whole = sum(stage[key] for key in STATES)
        parts = [
            f'<i class="{_class(key)}" style="width:{100 * stage[key] / whole:.2f}%"'
            f' title="{name_of(key)} {formats.seconds(stage[key])} s"></i>'
            for key in STATES
            if whole > 0 and stage[key] > 0
        ]
        rows.append(f'<div><b>{escape(stage_name(stage))}</b><div class="stack">{"".join(parts)}</div></div>')
    keys = "".join(f'<span><i class="{_class(key)}"></i>{name_of(key)}</span>' for key in STATES)
    return (
        f'<div class="stages" aria-hidden="true">{"".join(rows)}</div><p class="legend" aria-hidden="true">{keys}</p>'
    )


def stage_name(stage: Mapping[str, Any]) -> str:
    """Return the index of a stage as text. With several replicas, the index of its replica precedes it: "1.0"."""
    return f"{stage['replica']}.{stage['stage']}" if "replica" in stage else str(stage["stage"])


def _class(key: str) -> str:
    return f"state {key.removesuffix('_s').replace('_', '-')}"
