"""Check the simulator: compare emulated runs of 8 stages with their simulation.

    python examples/benchmarks/measure_emulated.py --work-dir /tmp/emulated \
        --output docs/benchmarks/results/emulated-8.json

Stages of the real runtime (8 processes, gloo, the real coordinator) sleep the times of SARATHI's GPT-3 pipeline. They
sleep 25 times as long, so that two cores keep up with nine processes. The hidden size is 1024, so that loopback can
carry the activations. A first run of other requests measures the link between these processes, as `sarathi-pp profile`
does. The cores are kept awake. Three policies run on three workloads, and the mix of the last workload changes halfway.
The document compares wall time and bubble ratio with those of the simulator.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
from awake import awake
from measure_300m import PREDICTED, Report
from record import Record

from sarathi_pp.analysis.timeline import Timeline
from sarathi_pp.bench.contest import write_prompts
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.report.run_reader import find_traces
from sarathi_pp.sim.experiment import Experiment, report_of
from sarathi_pp.sim.presets import preset
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.trace.recorder import read_trace
from sarathi_pp.tuning.fit import measure_link

SLOWER = 25.0
SEQS = 64
POLICIES = ("balanced", "sarathi", "orca")
WORKLOADS = (
    "zipf:n=32,min=256,max=1024,theta=0.4,pd=10,seed=3",
    "zipf:n=24,min=128,max=512,theta=0.4,pd=3,seed=4",
    "then:uniform:n=16,min=128,max=384,pd=2,seed=5+uniform:n=16,min=256,max=512,pd=20,seed=6",
)
# Whole prompts, so that activations of many sizes cross the link.
CALIBRATION = ("uniform:n=32,min=32,max=1024,pd=20,seed=9", "orca")
WARM_UP = 8


def make_profile() -> Profile:
    found = preset("gpt3-a100-tp8pp8")
    cost = replace(found.cost, stages=tuple(stage.scaled(SLOWER) for stage in found.cost.stages))
    return replace(found, hidden_size=1024, dtype="float32", cost=cost, max_num_seqs=SEQS, pages=8192)


def with_measured_link(profile: Profile, work_dir: Path) -> Profile:
    """Return the profile with the measured link between its emulated stages."""
    spec, policy = CALIBRATION
    emulate(work_dir, profile, policy, spec)
    traces = find_traces(work_dir / "answers.jsonl.run", None)[0]
    timeline = Timeline.read(read_trace(trace) for trace in traces)
    counted = np.arange(len(timeline.issued)) >= WARM_UP
    link = measure_link(timeline, counted, row_bytes=4 * profile.hidden_size)
    return replace(profile, link_latency_s=link.latency_s, link_bytes_per_s=link.bytes_per_s)


def emulate(work_dir: Path, profile: Profile, policy: str, spec: str) -> Report:
    (work_dir / "profile.json").write_text(json.dumps(profile.to_json()))
    write_prompts(work_dir / "prompts.jsonl", parse_workload(spec).requests())
    command = [sys.executable, "-P", "-m", "sarathi_pp", "generate", "--emulate", str(work_dir / "profile.json")]
    command += ["--input", str(work_dir / "prompts.jsonl"), "--output", str(work_dir / "answers.jsonl"), "--overwrite"]
    command += [
        "--stages",
        "8",
        "--policy",
        policy,
        "--chunk-size",
        str(parse_policy(policy).kind.default_chunk_size),
        "--quiet",
        "--json",
    ]
    command += ["--max-num-seqs", str(SEQS), "--layer-split", "even"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True)
    report: Report = json.loads(done.stdout.splitlines()[-1])
    assert report["failed"] == 0, report
    return report


def predict(profile: Profile, policy: str, spec: str) -> Report:
    return report_of(
        Experiment(
            profile=profile,
            workload=parse_workload(spec),
            policy=parse_policy(policy),
            chunk_size=parse_policy(policy).kind.default_chunk_size,
            max_num_seqs=SEQS,
        )
    )


def largest_errors(runs: list[Report]) -> dict[str, float]:
    return {
        "largest wall error": max(abs(run["wall, predicted / measured"] - 1) for run in runs),
        "largest bubble error": max(abs(run["bubble, predicted - measured"]) for run in runs),
    }


@click.command()
@click.option("--work-dir", type=click.Path(path_type=Path), required=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write after every run.")
def main(work_dir: Path, output: Path | None) -> None:
    record = Record.begin()
    work_dir.mkdir(parents=True, exist_ok=True)
    with awake():
        measure(work_dir, record, output)


def measure(work_dir: Path, record: Record, output: Path | None) -> None:
    profile = with_measured_link(make_profile(), work_dir)
    link = {"latency_s": profile.link_latency_s, "bytes_per_s": profile.link_bytes_per_s}
    print(json.dumps(link), flush=True)
    runs: list[Report] = []
    for spec in WORKLOADS:
        for policy in POLICIES:
            measured, predicted = emulate(work_dir, profile, policy, spec), predict(profile, policy, spec)
            run = {
                "workload": spec,
                "policy": policy,
                "measured": {name: measured[name] for name in (*PREDICTED, "microbatches")},
                "predicted": {name: predicted[name] for name in (*PREDICTED, "microbatches")},
                "wall, predicted / measured": predicted["wall_s"] / measured["wall_s"],
                "bubble, predicted - measured": predicted["bubble_ratio"] - measured["bubble_ratio"],
            }
            runs.append(run)
            print(json.dumps(run), flush=True)
            complete = len(runs) == len(WORKLOADS) * len(POLICIES)
            record.write(output, {"complete": complete, **largest_errors(runs), "link": link, "runs": runs})
    print(json.dumps(largest_errors(runs)))


if __name__ == "__main__":
    main()
