"""`sarathi-pp simulate`: policies on a virtual clock, side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from sarathi_pp.analysis.summary import Report
from sarathi_pp.bench.workload_file import read_workload
from sarathi_pp.cli.option_group import Option, OptionGroup, SectionedCommand
from sarathi_pp.cli.options import PARALLELISM, RUN, SCHEDULE, WORKLOAD
from sarathi_pp.cli.values import Real
from sarathi_pp.core.policy import PolicySpec, parse_policy
from sarathi_pp.outputs.profile_file import read_profile
from sarathi_pp.process.activity import Activity
from sarathi_pp.report import formats
from sarathi_pp.report.policies import render_policies, runs_document
from sarathi_pp.report.status import StatusLine
from sarathi_pp.sim.experiment import Experiment, report_of
from sarathi_pp.sim.presets import PRESETS, preset


class SlowStage(click.ParamType[tuple[int, float]]):
    """A stage and a factor. 3:1.1 means that stage 3 takes 1.1 times the time in the profile."""

    name = "stage:factor"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        stage, _, factor = str(value).partition(":")
        try:
            slow = int(stage), float(factor)
        except ValueError:
            self.fail(f"{value!r} is not a stage and a factor like 3:1.1", param, ctx)
        if slow[0] < 0 or not 0 < slow[1] < float("inf"):
            self.fail(f"{value!r}: stages are numbered from 0, and the factor must be above 0", param, ctx)
        return slow


_SIMULATION = OptionGroup(
    "Simulation",
    Option(
        "--preset", "preset_name", type=click.Choice(list(PRESETS)), help="Published pipeline instead of a profile."
    ),
    Option("--jitter-cv", type=Real(0, 1), show_default="the profile's", help="Noise of stage times."),
    Option(
        "--slow-stage",
        "slow",
        multiple=True,
        type=SlowStage(),
        help="Stage that is slower than in the profile: 3:1.1. May be repeated.",
    ),
)


@click.command(
    cls=SectionedCommand,
    params=[
        WORKLOAD.option("--workload", required=True),
        RUN.option("--seed", help="Seed of the noise. A workload has its own seed."),
        *RUN.options("--json"),
        *_SIMULATION.options(),
        PARALLELISM.option("--stages", show_default="the profile's"),
        *PARALLELISM.options("--replicas", "--head"),
        *SCHEDULE.options("--profile"),
        SCHEDULE.option("--policy", "policies", multiple=True, default=("balanced",)),
        SCHEDULE.option("--chunk-size", "chunk_sizes", multiple=True, default=(), show_default="auto, by the policy"),
        SCHEDULE.option("--max-num-seqs", show_default="the profile's"),
        *SCHEDULE.options("--inflight"),
        SCHEDULE.option("--prefix-cache", show_default="all if the workload shares prefixes, else off"),
        SCHEDULE.option("--tbt-slo", help="Also find the highest request rate that keeps this bound (seconds)."),
    ],
)
def simulate(policies: tuple[str, ...], chunk_sizes: tuple[int | None, ...], as_json: bool, **options: Any) -> None:
    """Run policies on a simulated pipeline, with the real coordinator, a virtual clock and the figures of a real run.

    Needs --profile or --preset. If --stages differs from the profile, each stage gets the same number of layers.
    """
    if (options["profile"] is None) == (options["preset_name"] is None):
        raise click.UsageError("give either --profile FILE or --preset NAME")
    slow = dict(options["slow"])
    if len(slow) < len(options["slow"]):
        raise click.UsageError("--slow-stage is given twice for one stage. Remove one of the two")
    profile = preset(options["preset_name"]) if options["preset_name"] else read_profile(options["profile"])
    workload = read_workload(options["workload"])
    experiments = [
        Experiment(
            profile=profile,
            workload=workload,
            policy=_bound(policy, options["tbt_slo"]),
            chunk_size=chunk_size or policy.kind.default_chunk_size,
            stages=options["stages"],
            replicas=options["replicas"],
            max_num_seqs=options["max_num_seqs"],
            inflight=options["inflight"],
            jitter_cv=options["jitter_cv"],
            slow=slow,
            seed=options["seed"],
            head=options["head"],
            prefix_cache=options["prefix_cache"],
        )
        for policy in map(parse_policy, policies)
        for chunk_size in chunk_sizes or (None,)
    ]
    reports, activity = [], Activity()
    with StatusLine(Console(stderr=True), activity):
        for number, experiment in enumerate(experiments, 1):
            sized = f"{experiment.policy}, chunk size {experiment.chunk_size}"
            with activity.phase(f"simulating {sized} ({number} of {len(experiments)})"):
                reports.append(_report(experiment, options["tbt_slo"]))
    document = runs_document(reports, workload=workload.spec, model=profile.model)
    if as_json:
        click.echo(json.dumps(document))
    else:
        Console().print(render_policies(document), *prefix_cache_lines(document))


def prefix_cache_lines(document: Mapping[str, Any]) -> Iterator[Text]:
    """Yield a line with the share of the prompt tokens that each run found; no line without a prefix cache."""
    cached = [run for run in document["runs"] if run.get("prefix_cache") is not None]
    rates = [formats.share(run["prefix_cache"]["hit_rate"]) for run in cached]
    if cached:
        each = (f"{run['policy']} {rate}" for run, rate in zip(cached, rates, strict=True))
        found = rates[0] if len(set(rates)) == 1 else ", ".join(each)
        yield Text(f"prompt tokens from the prefix cache: {found}", style="dim")


def _bound(policy: PolicySpec, tbt_slo_s: float | None) -> PolicySpec:
    """Return the policy with the bound on the time between tokens. Return a policy that can keep no bound unchanged."""
    return policy.with_tbt_slo(tbt_slo_s) if tbt_slo_s and policy.keeps_tbt_slo else policy


def _report(experiment: Experiment, tbt_slo_s: float | None) -> Report:
    report = report_of(experiment)
    if tbt_slo_s is not None:
        from sarathi_pp.sim.capacity import find_capacity

        report["capacity"] = asdict(find_capacity(experiment, tbt_slo_s))
    return report
