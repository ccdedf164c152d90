"""`sarathi-pp simulate`: policies on a virtual clock, side by side."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from sarathi_pp.analysis.summary import Report
from sarathi_pp.bench.workload_file import read_workload
from sarathi_pp.cli.options import policies_option, workload_option
from sarathi_pp.cli.values import Count, Real
from sarathi_pp.config import HEADS
from sarathi_pp.core.policy import PolicySpec, parse_policy
from sarathi_pp.outputs.profile_file import read_profile
from sarathi_pp.report.policies import render_policies, runs_document
from sarathi_pp.sim.experiment import Experiment, report_of
from sarathi_pp.sim.presets import PRESETS, preset


class SlowStage(click.ParamType[tuple[int, float]]):
    """3:1.1, that is stage 3 takes 1.1 times what the profile says."""

    name = "stage:factor"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        stage, _, factor = str(value).partition(":")
        try:
            slow = int(stage), float(factor)
        except ValueError:
            self.fail(f"{value!r} is not a stage and a factor like 3:1.1", param, ctx)
        if slow[0] < 0 or not 0 < slow[1] < float("inf"):
            self.fail(f"{value!r}: stages count from 0, and the factor is above 0", param, ctx)
        return slow


@click.command()
@click.option("--profile", type=click.Path(path_type=Path), help="profile.json of the pipeline.")
@click.option("--preset", "preset_name", type=click.Choice(list(PRESETS)), help="A published pipeline instead.")
@workload_option(example="zipf:n=1000,min=1024,max=4096,theta=0.4,pd=10")
@policies_option
@click.option(
    "--chunk-size",
    "chunk_sizes",
    multiple=True,
    type=Count(auto=True),
    help="Several times for a sweep.  [default: each policy's own]",
)
@click.option("--stages", type=Count(), help="Layers are shared out evenly.  [default: the profile's]")
@click.option(
    "--replicas",
    "--data-parallel-size",
    type=Count(),
    default=1,
    show_default=True,
    help="Pipelines of so many stages, which share the requests.",
)
@click.option("--max-num-seqs", type=Count(), help="Of a pipeline.  [default: the profile's]")
@click.option("--inflight", type=Count(auto=True), default="auto", help="[default: stages; balanced: one more]")
@click.option(
    "--head",
    type=click.Choice(HEADS),
    default="auto",
    show_default=True,
    help="As in generate, where the profile is of a CPU.",
)
@click.option("--jitter-cv", type=Real(0, 1), help="Noise of stage times.  [default: the profile's]")
@click.option("--slow-stage", "slow", multiple=True, type=SlowStage(), help="A stage slower than the policy is told.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the noise; a workload has its own.")
@click.option(
    "--tbt-slo",
    type=Real(0, min_open=True),
    help="Also find the highest request rate within this bound, which balanced is told.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of the table.")
def simulate(policies: tuple[str, ...], chunk_sizes: tuple[int | None, ...], as_json: bool, **options: Any) -> None:
    """Run policies on a modelled pipeline: the real coordinator, a virtual clock, the figures of a real run."""
    if (options["profile"] is None) == (options["preset_name"] is None):
        raise click.UsageError("give either --profile FILE or --preset NAME")
    slow = dict(options["slow"])
    if len(slow) < len(options["slow"]):
        raise click.UsageError("--slow-stage is given twice for one stage; leave one of them out")
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
        )
        for policy in map(parse_policy, policies)
        for chunk_size in chunk_sizes or (None,)
    ]
    reports = [_report(experiment, options["tbt_slo"]) for experiment in experiments]
    document = runs_document(reports, workload=workload.spec, model=profile.model)
    if as_json:
        click.echo(json.dumps(document))
    else:
        Console().print(render_policies(document))


def _bound(policy: PolicySpec, tbt_slo_s: float | None) -> PolicySpec:
    """Hold a policy to the bound if it can keep one."""
    return policy.with_tbt_slo(tbt_slo_s) if tbt_slo_s and policy.keeps_tbt_slo else policy


def _report(experiment: Experiment, tbt_slo_s: float | None) -> Report:
    report = report_of(experiment)
    if tbt_slo_s is not None:
        from sarathi_pp.sim.capacity import find_capacity

        report["capacity"] = asdict(find_capacity(experiment, tbt_slo_s))
    return report
