"""Run and simulate policies on a 300M model with random weights: bubbles, throughput, 2 stages compared with 1.

    python examples/benchmarks/measure_300m.py --work-dir /tmp/m300 --pd 8 --pd 20 --pd 2 \
        --output docs/benchmarks/results/real-300m.json

Makes the checkpoint in the work directory (16 layers, hidden size 1024, bfloat16, seeded, 600 MB), and a workload for
each P:D: `uniform:n=32,min=256,max=1024,pd=P:D`. These are 32 prompts of 256 to 1024 random tokens, all there at time
0. The end of sequence is ignored. 32 requests run at once, and `--requests` gives more of them.

In a round several jobs take turns of four seconds on the cores (turns.py). The jobs are `sarathi-pp generate` with
every policy on 2 stages, with some policies on one stage (`--single-stage`), and a profile of 2 stages. Each stage has
one compute thread. The figures are from the traces, without the time in which a job was stopped. Two jobs with a single
stage each, at the same time, show the speed of both cores together.

Each run of 2 stages is also simulated, from the profile of its turns and from costs fitted to its own spans. The first
simulation is the prediction. The second one shows which part of the error the cost model has. All runs of 2 stages get
the profile that is measured at the start. The chunk size is the default of each policy. The cores are kept awake.
Prints each run and writes all figures as JSON, with the share of the cores that the host took during the round.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
from awake import awake
from record import Record, spread
from turns import take_turns, without

from sarathi_pp.analysis.bubbles import measure_bubbles
from sarathi_pp.analysis.intervals import Interval
from sarathi_pp.analysis.summary import summarise_timeline
from sarathi_pp.analysis.timeline import Timeline
from sarathi_pp.bench.contest import write_prompts
from sarathi_pp.bench.machine import stolen
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.outputs.profile_file import read_profile
from sarathi_pp.report.run_reader import find_traces
from sarathi_pp.sim.experiment import Experiment, report_of
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.trace.events import Event
from sarathi_pp.trace.recorder import read_trace
from sarathi_pp.tuning.fit import fit_cost
from sarathi_pp.tuning.measure import measure

POLICIES = ("balanced", "sarathi", "orca")
ON_ONE_STAGE = ("balanced", "sarathi")
# This policy also runs as two jobs at once, with one stage each. The cores share memory, so two stages cannot be faster
# than two such jobs.
TWICE = "sarathi"
STAGES = 2
SEQS = 32
SEEDS = 9
# In the work directory: the profile that the runs get, and the profile that takes turns with them, with its traces.
FIRST_PROFILE, TURNS_PROFILE, PROFILE_RUN = "profile.json", "profile-turns.json", "profile-turns.run"
FIGURES = ("wall_s", "total_tokens_per_s", "bubble_ratio", "bubble_ratio_steady", "overlap", "microbatch_tokens_cv")
PREDICTIONS = ("predicted", "predicted from its own costs")
PREDICTED = ("wall_s", "bubble_ratio", "bubble_ratio_steady")

Report = dict[str, Any]


def make_checkpoint(directory: Path, intermediate_size: int = 3712, dtype: str = "bfloat16") -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=intermediate_size,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters", file=sys.stderr)
    model.save_pretrained(directory)


class Work(NamedTuple):
    """The work of the runs.

    Attributes:
        dir: directory of the model and its prompts.
        dtype: of the weights.
        requests: number of prompts.
    """

    dir: Path
    dtype: str
    requests: int = SEQS

    def workload(self, ratio: int) -> str:
        return f"uniform:n={self.requests},min=256,max=1024,pd={ratio},seed=0"

    def prompts(self, ratio: int) -> Path:
        return self.dir / f"prompts-{self.requests}-{ratio}.jsonl"


def start(work: Work, name: str, stages: int, printed: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start a command. At its end it prints its JSON document into the file `printed`."""
    words = [sys.executable, "-P", "-m", "sarathi_pp", name, "--model", str(work.dir / "model"), "--quiet", "--json"]
    words += ["--dtype", work.dtype, "--stages", str(stages), "--max-num-seqs", str(SEQS), "--overwrite", *options]
    with printed.open("wb") as file:
        return subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=file)


def last_json(printed: Path) -> Report:
    report: Report = json.loads(printed.read_text().splitlines()[-1])
    return report


@dataclass(frozen=True)
class Case:
    """One run, or several copies of it at the same time."""

    ratio: int
    policy: str
    stages: int
    copies: int = 1

    @property
    def name(self) -> str:
        at_once = f", {self.copies} at once" * (self.copies > 1)
        return f"P:D {self.ratio}, {self.policy}, {self.stages} stage{'s' * (self.stages > 1)}{at_once}"

    def outputs(self, work: Work) -> list[Path]:
        stem = f"answers-{self.ratio}-{self.policy}-{self.stages}-{self.copies}"
        return [work.dir / f"{stem}-{copy}.jsonl" for copy in range(self.copies)]

    def start(self, work: Work) -> list[subprocess.Popen[bytes]]:
        given = ["--input", str(work.prompts(self.ratio)), "--policy", self.policy]
        given += ["--chunk-size", str(parse_policy(self.policy).kind.default_chunk_size)]
        if self.stages > 1:
            given += ["--profile", str(work.dir / FIRST_PROFILE), "--layer-split", "even"]
        return [
            start(work, "generate", self.stages, output.with_suffix(".printed"), *given, "--output", str(output))
            for output in self.outputs(work)
        ]

    def timelines(self, work: Work, away: Sequence[Interval]) -> list[Timeline]:
        for output in self.outputs(work):
            report = last_json(output.with_suffix(".printed"))
            assert report["failed"] == 0 and report["requests"] == work.requests, report
        return [Timeline.read(traces(output.with_name(f"{output.name}.run"), away)) for output in self.outputs(work)]


def start_profile(work: Work, name: str, *options: str) -> list[subprocess.Popen[bytes]]:
    output = work.dir / name
    return [start(work, "profile", STAGES, output.with_suffix(".printed"), "--output", str(output), *options)]


def traces(run_dir: Path, away: Sequence[Interval]) -> list[list[Event]]:
    return [list(without(away, read_trace(trace))) for trace in find_traces(run_dir, None)[0]]


def profile_of_turns(work: Work, away: Sequence[Interval]) -> Profile:
    """Return the measured profile without the time in which its processes were stopped."""
    told = read_profile(work.dir / TURNS_PROFILE)
    events = traces(work.dir / PROFILE_RUN, away)
    counted = last_json((work.dir / TURNS_PROFILE).with_suffix(".printed"))["microbatches"]
    warm_up = len(Timeline.read(events).issued) - counted
    found = measure(events, warm_up, told.hidden_size * (4 if told.dtype == "float32" else 2))
    return replace(
        told,
        cost=found.fit.model,
        error=found.fit.error,
        jitter_cv=found.jitter_cv,
        drift=found.drift,
        link_latency_s=found.link.latency_s,
        link_bytes_per_s=found.link.bytes_per_s,
    )


def predict(profile: Profile, policy: str, workload: str) -> Report:
    """Simulate a run with several seeds of the profile's noise, and return the medians."""
    experiment = Experiment(
        profile=profile,
        workload=parse_workload(workload),
        policy=parse_policy(policy),
        chunk_size=parse_policy(policy).kind.default_chunk_size,
        max_num_seqs=SEQS,
    )
    reports = [report_of(replace(experiment, seed=seed)) for seed in range(SEEDS)]
    return {name: statistics.median(report[name] for report in reports) for name in PREDICTED}


def refitted(profile: Profile, timeline: Timeline) -> Profile:
    """Return the profile with costs fitted to the run itself, so that the speed of the machine is the same."""
    fit = fit_cost(timeline)
    assert fit is not None
    return replace(profile, cost=fit.model)


def cases_of(ratio: int, with_singles: bool) -> Iterator[Case]:
    for policy in POLICIES:
        yield Case(ratio, policy, STAGES)
        if with_singles and policy in ON_ONE_STAGE:
            yield Case(ratio, policy, 1)
    if with_singles:
        yield Case(ratio, TWICE, 1, copies=2)


def one_heat(work: Work, cases: Sequence[Case]) -> Report:
    """Run the cases and a profile in turn, and return their figures."""
    run_dir = work.dir / PROFILE_RUN
    shutil.rmtree(run_dir, ignore_errors=True)
    jobs: dict[str, Callable[[], Sequence[subprocess.Popen[bytes]]]] = {
        "profile": partial(start_profile, work, TURNS_PROFILE, "--run-dir", str(run_dir)),
        **{case.name: partial(case.start, work) for case in cases},
    }
    with stolen() as lost:
        away = take_turns(jobs)
    profile = profile_of_turns(work, away["profile"])
    found: Report = {"profile error": profile.error, "stolen": lost.share, "cases": {}}
    print(f"profile error {profile.error:.3f}  stolen {lost.share:.3f}", flush=True)
    for case in cases:
        timelines = case.timelines(work, away[case.name])
        reports = [
            summarise_timeline(timeline, measure_bubbles(timeline), fit_cost(timeline) or "too short")
            for timeline in timelines
        ]
        kept = (*FIGURES, "microbatches", "per_stage", "chunk_size", "inflight", "causes")
        figures = found["cases"][case.name] = {name: reports[0][name] for name in kept}
        figures["wall_s"] = statistics.fmean(report["wall_s"] for report in reports)
        print(case.name, " ".join(f"{name} {figures[name]:.3f}" for name in FIGURES), sep="  ", flush=True)
        if case.stages == STAGES:
            same = work.workload(case.ratio)
            figures["predicted"] = predict(profile, case.policy, same)
            figures["predicted from its own costs"] = predict(refitted(profile, timelines[0]), case.policy, same)
            for kind in PREDICTIONS:
                print(f"    {kind}  " + " ".join(f"{value:.3f}" for value in figures[kind].values()), flush=True)
    return found


def share(case: Report) -> float:
    """Return the slowest stage's share of the computation.

    Two stages would take this share of the time of one, without bubbles and if cores did not slow each other down.
    """
    computed_s = [stage["compute_s"] for stage in case["per_stage"]]
    return float(max(computed_s) / sum(computed_s))


def summary(rounds: list[Report], singles: tuple[int, ...]) -> Report:
    """Return medians and extremes over the rounds.

    Args:
        rounds: for each round the figures of its heats, by P:D.
        singles: P:D values that also ran on one stage.
    """
    heats = {ratio: [one[ratio]["cases"] for one in rounds] for ratio in rounds[0]}
    cases: Report = {}
    errors: Report = {}
    for heat in heats.values():
        for name, first in heat[0].items():
            cases[name] = {figure: spread([one[name][figure] for one in heat]) for figure in FIGURES}
            if PREDICTIONS[0] in first:
                errors[name] = {kind: off(kind, [one[name] for one in heat]) for kind in PREDICTIONS}
    return {
        "profile error": spread([heat["profile error"] for one in rounds for heat in one.values()]),
        "cases": cases,
        "against balanced": {ratio: rivals(int(ratio), heats[ratio]) for ratio in heats},
        "prediction": errors,
        "wall of 2 stages / wall of 1": {f"P:D {ratio}": speedups(ratio, heats[str(ratio)]) for ratio in singles},
    }


def off(kind: str, cases: list[Report]) -> Report:
    return {
        "wall, predicted / measured": spread([case[kind]["wall_s"] / case["wall_s"] for case in cases]),
        "bubble, predicted - measured": spread([case[kind]["bubble_ratio"] - case["bubble_ratio"] for case in cases]),
    }


def rivals(ratio: int, heats: list[Report]) -> Report:
    """Compare `balanced` with each other policy in the same turns: ratio of tokens per second, difference of bubble."""
    first, *others = (Case(ratio, policy, STAGES).name for policy in POLICIES)
    return {
        other: {
            "tokens/s, balanced / this": spread([h[other]["wall_s"] / h[first]["wall_s"] for h in heats]),
            "bubble, balanced - this": spread([h[first]["bubble_ratio"] - h[other]["bubble_ratio"] for h in heats]),
        }
        for other in others
    }


def speedups(ratio: int, heats: list[Report]) -> Report:
    walls: Report = {}
    for policy in ON_ONE_STAGE:
        one, two = Case(ratio, policy, 1).name, Case(ratio, policy, STAGES).name
        walls[policy] = spread([h[two]["wall_s"] / h[one]["wall_s"] for h in heats])
        walls[f"{policy}, slowest stage's share of the compute"] = spread([share(h[two]) for h in heats])
    alone, both = Case(ratio, TWICE, 1).name, Case(ratio, TWICE, 1, copies=2).name
    walls["two jobs of one stage at once / one after the other"] = spread(
        [h[both]["wall_s"] / (2 * h[alone]["wall_s"]) for h in heats]
    )
    return walls


@click.command()
@click.option("--work-dir", type=click.Path(path_type=Path), required=True)
@click.option(
    "--pd",
    "ratios",
    type=click.IntRange(min=1),
    multiple=True,
    default=(8,),
    show_default=True,
    help="Prompt tokens per output token. May be repeated.",
)
@click.option(
    "--single-stage",
    "singles",
    type=int,
    metavar="PD",
    multiple=True,
    help="A --pd to run on one stage too. May be repeated.",
)
@click.option("--requests", type=click.IntRange(min=1), default=SEQS, show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write after every round.")
def main(
    work_dir: Path,
    ratios: tuple[int, ...],
    singles: tuple[int, ...],
    requests: int,
    dtype: str,
    rounds: int,
    output: Path | None,
) -> None:
    for ratio in singles:
        if ratio not in ratios:
            raise click.UsageError(f"--single-stage {ratio} is not among --pd {' --pd '.join(map(str, ratios))}")
    record = Record.begin()
    work_dir.mkdir(parents=True, exist_ok=True)
    if not (work_dir / "model" / "config.json").exists():
        make_checkpoint(work_dir / "model")
    work = Work(work_dir, dtype, requests)
    for ratio in ratios:
        write_prompts(work.prompts(ratio), parse_workload(work.workload(ratio)).requests())
    results: list[Report] = []
    with awake():
        take_turns({"profile": partial(start_profile, work, FIRST_PROFILE)})
        for _ in range(rounds):
            results.append({str(ratio): one_heat(work, list(cases_of(ratio, ratio in singles))) for ratio in ratios})
            made = {"rounds made": f"{len(results)} of {rounds}"}
            document = record.write(output, {**made, **summary(results, singles), "rounds": results})
    print(json.dumps({name: value for name, value in document.items() if name != "rounds"}, indent=1))


if __name__ == "__main__":
    main()
