"""Run directories, read for the commands that report on them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sarathi_pp.errors import MissingError
from sarathi_pp.report.advice import advise
from sarathi_pp.trace.bubbles import Bubbles, measure_bubbles
from sarathi_pp.trace.summary import read_timeline, summarise, summarise_timeline
from sarathi_pp.trace.timeline import Timeline

if TYPE_CHECKING:
    from sarathi_pp.bench.profile import Fit

# What no trace holds, from run.json.
_FACTS = ("model", "dtype", "attention", "max_num_seqs", "max_model_len")


@dataclass(frozen=True, slots=True)
class Run:
    path: Path
    timeline: Timeline
    bubbles: Bubbles
    report: dict[str, Any]


def read_run(path: Path, attempt: int | None = None) -> Run:
    """One attempt of a run, the last unless named, folded anew from its traces.

    Raises MissingError where the directory holds no traces or not all, InputError for traces that cannot be used.
    """
    timeline = read_timeline(find_traces(path, attempt))
    bubbles = measure_bubbles(timeline)
    return Run(path, timeline, bubbles, _with_advice(summarise_timeline(timeline, bubbles, _fit) | _facts(path)))


def analyse(traces: Sequence[Path], facts: Mapping[str, object]) -> dict[str, Any]:
    """The report of a run that has just ended, with causes and advice."""
    return _with_advice(summarise(traces, facts, _fit))


def _with_advice(report: dict[str, Any]) -> dict[str, Any]:
    """The report and what to change, the most worthwhile first."""
    return report | {"advice": [asdict(advice) for advice in advise(report)]}


def _fit(timeline: Timeline) -> Fit | None:
    """The cost model that a run's causes are found with."""
    from sarathi_pp.bench.profile import fit_cost  # scipy is slow to import, and only a report needs it

    return fit_cost(timeline)


def find_traces(run: Path, attempt: int | None) -> list[Path]:
    """One trace a stage, stage 0 first. Raises MissingError where the directory holds none or not all."""
    attempts = sorted(run.glob("attempt-*")) if attempt is None else [run / f"attempt-{attempt:04d}"]
    traces = sorted(attempts[-1].glob("trace-*-of-*.jsonl")) if attempts else []
    if not traces:
        raise MissingError(f"{attempts[-1] if attempts else run} holds no trace; give the directory of a run")
    expected = int(re.findall(r"-of-(\d+)", traces[0].name)[0])
    if len(traces) != expected:
        found = {int(re.findall(r"trace-(\d+)", trace.name)[0]) for trace in traces}
        raise MissingError(_incomplete(run, traces[0].parent, expected, sorted(set(range(expected)) - found)))
    return traces


def _incomplete(run: Path, attempt: Path, expected: int, missing: Sequence[int]) -> str:
    """Each host keeps its own stages' traces until the run ends in order, when they come to rank 0."""
    hosts = _known(run).get("hosts") or []
    where = [f"{stage} ({hosts[stage]})" if stage < len(hosts) else str(stage) for stage in missing]
    return (
        f"{attempt} holds {expected - len(missing)} of {expected} traces; missing: stage {', '.join(where)}"
        f"\n  try  again once the run has ended; if it was killed, copy the missing ones here, from the run directory"
        f" on their host"
    )


def _facts(run: Path) -> dict[str, Any]:
    known = _known(run)
    return {name: known[name] for name in _FACTS if name in known}


def _known(run: Path) -> dict[str, Any]:
    """run.json; empty for a run that was killed early, or traces that were moved: no figure needs it."""
    try:
        known = json.loads((run / "run.json").read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
