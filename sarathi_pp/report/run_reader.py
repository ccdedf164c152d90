"""A reader of run directories, for the commands that report on runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sarathi_pp.analysis.replicas import Replica, summarise_replicas
from sarathi_pp.analysis.summary import read_timeline
from sarathi_pp.errors import InputError, MissingError
from sarathi_pp.report.advice import Advice, ComparedRun, advise, advise_comparison
from sarathi_pp.sim.rerun import CannotTry, Rerun

if TYPE_CHECKING:
    from sarathi_pp.tuning.fit import Fit

_ATTEMPT = re.compile(r"attempt-\d{4,}")
_REPLICA = re.compile(r"replica-(\d{4,})")
_TRACE = re.compile(r"trace-(\d+)-of-(\d+)\.jsonl")
# Keys of run.json that become keys of the report, because no trace holds them.
_NAMES = ("model", "dtype", "kv_cache_dtype", "attention", "sarathi_pp", "torch")
_NUMBERS = (
    "max_num_seqs",
    "max_model_len",
    "request_rate",
    "kv_cache_bytes",
    "max_pages",
    "state_pages_per_sequence",
)
# Keys of an earlier report.json that are kept. They are known only at the end of a run.
_ENDINGS = ("resumed", "written", "stopped_by")


@dataclass(frozen=True, slots=True)
class Run:
    """A run with its figures.

    Attributes:
        path: the run directory.
        replicas: the replicas that ran until the end.
        report: the report over all replicas.
        fitted: cost model of the first replica's microbatches; None if they are too few for a fit.
    """

    path: Path
    replicas: Sequence[Replica]
    report: dict[str, Any]
    fitted: Fit | None

    def trial(self) -> Rerun | None:
        """Return a simulation of this run, in which changes can be tried; None if there is no cost model.

        Raises:
            CannotTry: the run has several replicas, or `Rerun.of` cannot simulate it.
        """
        from sarathi_pp.tuning.fit import fit_links

        if len(self.replicas) > 1:
            raise CannotTry(f"the simulator repeats runs of one pipeline, and this one has {len(self.replicas)}")
        if self.fitted is None:
            return None
        report, timeline = self.report, self.replicas[0].timeline
        return Rerun.of(
            timeline,
            self.fitted.model,
            fit_links(timeline),
            max_num_seqs=report.get("max_num_seqs"),
            max_model_len=report.get("max_model_len"),
            max_pages=report.get("max_pages"),
            request_rate=report.get("request_rate"),
            pages_follow_layers=report.get("attention") != "emulated",
            keeps_states="state_bytes_per_sequence" in report,
            state_pages=report.get("state_pages_per_sequence") or 0.0,
        )


def read_run(path: Path, attempt: int | None = None, *, advised: bool = True) -> Run:
    """Return one attempt of a run, with all figures computed from its traces.

    Args:
        path: the run directory.
        attempt: number of the attempt; None for the last one.
        advised: add advice to the report, which takes longer.

    Raises:
        MissingError: the directory holds no traces, or not all of them.
        InputError: the traces cannot be used.
    """
    endings = _endings(path) if attempt is None else {}
    run = _fold(path, find_traces(path, attempt), _facts(path) | endings)
    return replace(run, report=run.report | _advice(run)) if advised else run


def advise_runs(runs: Mapping[str, Run]) -> dict[str, Any]:
    """Return the advice that follows from several runs together, as keys of a comparison.

    Args:
        runs: the runs by label.
    """
    compared = [ComparedRun(label, run.report, partial(_trial, run)) for label, run in runs.items()]
    return _looked_for(lambda: advise_comparison(compared), [])


def _trial(run: Run) -> Rerun | None:
    try:
        return run.trial()
    except CannotTry:
        return None


def analyse(traces: Sequence[Sequence[Path]], facts: Mapping[str, object]) -> Iterator[dict[str, Any]]:
    """Yield the report of a run that has just ended: first without advice, then with it, which takes longer.

    Args:
        traces: one list per replica, with one trace per stage.
        facts: keys of the report that no trace holds.
    """
    run = explain(traces, facts)
    yield run.report
    yield run.report | _advice(run)


def explain(traces: Sequence[Sequence[Path]], facts: Mapping[str, object]) -> Run:
    """Return a run with its causes and without advice, which takes longer. The run may still be running.

    Args:
        traces: one list per replica, with one trace per stage.
        facts: keys of the report that no trace holds.
    """
    run = _fold(traces[0][0].parent, traces, facts)
    return replace(run, report=run.report | {"advice": []})


def _fold(path: Path, traces: Sequence[Sequence[Path]], facts: Mapping[str, object]) -> Run:
    from sarathi_pp.tuning.fit import fit_cost  # scipy is slow to import, and only a report needs it

    timelines = [read_timeline(of_one) for of_one in traces]
    fits = [fit_cost(timeline) for timeline in timelines]
    replicas = [Replica.fold(timeline, fitted or "too short") for timeline, fitted in zip(timelines, fits, strict=True)]
    return Run(path, replicas, summarise_replicas(replicas) | dict(facts), fits[0])


def _advice(run: Run) -> dict[str, Any]:
    """Return the advice, the largest gain first, as keys of a report."""
    notes: list[str] = list(run.report["notes"])

    def look() -> list[Advice]:
        try:
            return advise(run.report, run.trial())
        except CannotTry as error:
            notes.append(f"no predicted gains: {error}")
            # With several replicas, the report holds sums. The rules for untried advice need figures of one pipeline.
            repeated = len(run.replicas) == 1
            return advise(run.report, untried="the simulator could not repeat this run" if repeated else None)

    return _looked_for(look, notes)


def _looked_for(look: Callable[[], list[Advice]], notes: list[str]) -> dict[str, Any]:
    """Return the advice that `look` finds, and the notes, as keys of a report.

    A failure or an interrupt ends the search for advice, and becomes a note. The figures must not be lost.
    """
    try:
        return {"advice": [asdict(advice) for advice in look()], "notes": notes}
    except (Exception, KeyboardInterrupt) as error:
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        return {"advice": [], "notes": [*notes, f"no advice: {why}"]}


def find_traces(run: Path, attempt: int | None) -> list[list[Path]]:
    """Return one list per replica, with one trace per stage, stage 0 first.

    Raises:
        MissingError: the directory holds no traces, or not all of them.
        InputError: the directory holds traces of several runs.
    """
    attempts = sorted(path for path in run.glob("attempt-*") if _ATTEMPT.fullmatch(path.name) and path.is_dir())
    if attempt is not None:
        attempts = [run / f"attempt-{attempt:04d}"]
    last = attempts[-1] if attempts else run
    if not attempts:
        raise MissingError(f"{last} holds no trace. Give the directory of a run")
    replicas = sorted(path for path in last.glob("replica-*") if path.is_dir())
    earlier = ". --attempt reads an earlier attempt" if len(attempts) > 1 else ""
    return [_find_replica(run, folder, earlier) for folder in replicas or [last]]


def _find_replica(run: Path, folder: Path, earlier: str) -> list[Path]:
    found = {match.groups(): path for path in folder.glob("trace-*") if (match := _TRACE.fullmatch(path.name))}
    if not found:
        raise MissingError(f"{folder} holds no trace. Give the directory of a run{earlier}")
    sizes = sorted({int(size) for _, size in found})
    if len(sizes) > 1:
        raise InputError(
            f"{folder} holds traces of runs with {' and with '.join(map(str, sizes))} stages. Keep those of one run"
        )
    missing = sorted(set(range(sizes[0])) - {int(stage) for stage, _ in found})
    if missing:
        raise MissingError(_incomplete(run, folder, sizes[0], missing))
    return [found[key] for key in sorted(found)]


def _incomplete(run: Path, attempt: Path, expected: int, missing: Sequence[int]) -> str:
    """Return the error message about missing traces. It names the hosts that hold them, if these are known.

    Each host keeps the traces of its own stages. They are sent to rank 0 when the run ends normally.
    """
    known, named = _known(run), _REPLICA.fullmatch(attempt.name)
    hosts, shards = known.get("hosts") or [], known.get("tensor_parallel_size") or 1
    first = int(named[1]) * expected if named else 0
    at = {
        stage: (first + stage) * shards for stage in missing
    }  # by rank: the stages of a replica, the ranks of a stage
    where = [f"{stage} ({hosts[at[stage]]})" if at[stage] < len(hosts) else str(stage) for stage in missing]
    return (
        f"{attempt} holds {expected - len(missing)} of {expected} traces; missing: stage {', '.join(where)}"
        f"\n  try  again after the run has ended. If it was killed, copy the missing traces here, from the run "
        f"directory on their host"
    )


def _facts(run: Path) -> dict[str, Any]:
    known = _known(run)
    names = {name: known[name] for name in _NAMES if isinstance(known.get(name), str)}
    numbers = {name: known.get(name) for name in _NUMBERS}
    facts = names | {name: value for name, value in numbers.items() if isinstance(value, int | float) and value > 0}
    if isinstance(states := known.get("state_bytes_per_sequence"), int) and states >= 0:
        facts["state_bytes_per_sequence"] = states
    shards, command = known.get("tensor_parallel_size"), known.get("command")
    if isinstance(shards, int) and shards > 1:
        facts["tensor_parallel_size"] = shards
    if isinstance(command, list):
        facts["command"] = list(map(str, command))
    return facts


def _endings(run: Path) -> dict[str, Any]:
    """Return the facts about the last start that only report.json holds; empty if the run did not end normally."""
    known = _read_object(run / "report.json")
    found = {name: known[name] for name in _ENDINGS if name in known}
    if not isinstance(found.get("resumed", {}), dict):
        del found["resumed"]
    return found


def _known(run: Path) -> dict[str, Any]:
    """Return run.json; empty if the run was killed early or its traces were moved. No figure needs it."""
    return _read_object(run / "run.json")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
