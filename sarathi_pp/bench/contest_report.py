"""The document of a contest: all runs, each entrant's medians over the rounds, and the floor.

The floor is the least time in which the machine can do the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from sarathi_pp.analysis.summary import RUNS_SCHEMA, Report

# For each figure of an entrant, the keys that lead to it in the JSON of a run.
_FIGURES = {
    "total_tokens_per_s": ("total_tokens_per_s",),
    "wall_s": ("wall_s",),
    "bubble_ratio": ("bubble_ratio",),
    "bubble_ratio_steady": ("bubble_ratio_steady",),
    "ttft_p50_s": ("ttft_s", "p50"),
    "ttft_p99_s": ("ttft_s", "p99"),
    "peak_memory_bytes": ("peak_memory_bytes",),
    "command_s": ("command_s",),
    "stolen": ("stolen",),
}


def contest_document(runs: Sequence[Report], floor_s: float, **facts: Any) -> dict[str, Any]:
    """Return the document that `bench --json` prints.

    Args:
        runs: in the order in which they ran, with `entrant` and `round`.
        floor_s: the least seconds in which the machine can do the work.
        facts: further keys of the document, which describe all runs.
    """
    names = list(dict.fromkeys(run["entrant"] for run in runs))
    of = {name: [run for run in runs if run["entrant"] == name] for name in names}
    tokens = runs[0]["prompt_tokens"] + runs[0]["output_tokens"]
    floor = {"floor_s": floor_s, "floor_tokens_per_s": tokens / floor_s}
    summary = {name: _summary(of[name], of[names[0]], floor_s) for name in names}
    return {"schema": RUNS_SCHEMA, **facts, **floor, "summary": summary, "runs": list(runs)}


def _summary(runs: Sequence[Report], firsts: Sequence[Report], floor_s: float) -> Report:
    figures = {name: _spread([_at(run, path) for run in runs]) for name, path in _FIGURES.items()}
    rates = [run["total_tokens_per_s"] / first["total_tokens_per_s"] for run, first in zip(runs, firsts, strict=False)]
    return {
        **figures,
        "of_floor": _spread([floor_s / run["wall_s"] for run in runs]),
        "tokens_per_s_against_first": _spread(rates),
        "same_tokens": min(run["same_tokens"] for run in runs),
    }


def _at(run: Report, path: Sequence[str]) -> float | None:
    value: Any = run
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, int | float) else None


def _spread(values: Sequence[float | None]) -> Report | None:
    found = [value for value in values if value is not None]
    return {"median": median(found), "min": min(found), "max": max(found)} if found else None
