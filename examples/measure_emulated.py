"""Is the simulator true? Emulated runs of 8 stages against their simulation.

    python examples/measure_emulated.py --work-dir /tmp/emulated --output examples/figures/emulated-8.json

Stages of the real runtime (8 processes, gloo, the real coordinator) sleep the time that SARATHI's GPT-3 pipeline
would compute, five times slower so that two cores keep up with the processes, and with a hidden size of 1024 so that
loopback carries the activations. Three policies on three workloads; wall time and bubble ratio beside the simulator's.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from measure_300m import PREDICTED, Report

from sarathi_pp.core.cost import CostModel, StageCost
from sarathi_pp.core.policy import auto_chunk_size
from sarathi_pp.core.profile import Profile
from sarathi_pp.sim.experiment import Experiment, simulate
from sarathi_pp.sim.presets import preset
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.trace.bubbles import measure_bubbles
from sarathi_pp.trace.summary import summarise_timeline

SLOWER = 5.0
SEQS = 64
POLICIES = ("balanced", "sarathi", "orca")
WORKLOADS = (
    "zipf:n=96,min=256,max=1024,theta=0.4,pd=10,seed=3",
    "zipf:n=64,min=256,max=1024,theta=0.4,pd=3,seed=4",
    "poisson:rate=6,uniform:n=96,min=64,max=900,pd=8,seed=5",
)


def slowed(stage: StageCost) -> StageCost:
    names = ("a0", "a1", "a2", "a3", "a4", "head_s")
    return replace(stage, **{name: SLOWER * getattr(stage, name) for name in names})


def make_profile() -> Profile:
    found = preset("gpt3-a100-tp8pp8")
    cost = CostModel(found.cost.tile, tuple(slowed(stage) for stage in found.cost.stages))
    return replace(found, hidden_size=1024, dtype="float32", cost=cost, max_num_seqs=SEQS, pages=8192)


def write_prompts(path: Path, spec: str) -> None:
    with path.open("w") as file:
        for request in parse_workload(spec).requests():
            row = {
                "id": request.index,
                "prompt_token_ids": list(request.prompt_token_ids),
                "max_new_tokens": request.sampling.max_new_tokens,
                "ignore_eos": True,
            }
            file.write(json.dumps(row) + "\n")


def emulate(work_dir: Path, policy: str, spec: str) -> Report:
    command = [sys.executable, "-P", "-m", "sarathi_pp", "generate", "--emulate", str(work_dir / "profile.json")]
    command += ["--input", str(work_dir / "prompts.jsonl"), "--output", str(work_dir / "answers.jsonl"), "--overwrite"]
    command += ["--stages", "8", "--policy", policy, "--chunk-size", str(auto_chunk_size(policy)), "--quiet", "--json"]
    command += ["--max-num-seqs", str(SEQS), "--layer-split", "even"]
    workload = parse_workload(spec)
    if workload.rate < float("inf"):
        command += ["--request-rate", str(workload.rate)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True)
    report: Report = json.loads(done.stdout.splitlines()[-1])
    assert report["failed"] == 0, report
    return report


def predict(profile: Profile, policy: str, spec: str) -> Report:
    timeline = simulate(
        Experiment(
            profile=profile,
            workload=parse_workload(spec),
            policy=policy,
            chunk_size=auto_chunk_size(policy),
            max_num_seqs=SEQS,
        )
    )
    return summarise_timeline(timeline, measure_bubbles(timeline))


@click.command()
@click.option("--work-dir", type=click.Path(path_type=Path), required=True)
@click.option("--output", type=click.Path(path_type=Path), help="Where the JSON goes.")
def main(work_dir: Path, output: Path | None) -> None:
    work_dir.mkdir(parents=True, exist_ok=True)
    profile = make_profile()
    (work_dir / "profile.json").write_text(json.dumps(profile.to_json()))
    runs: list[dict[str, Any]] = []
    for spec in WORKLOADS:
        write_prompts(work_dir / "prompts.jsonl", spec)
        for policy in POLICIES:
            measured, predicted = emulate(work_dir, policy, spec), predict(profile, policy, spec)
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
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE, text=True, check=False)
    document = {
        "commit": commit.stdout.strip(),
        "command": "python examples/measure_emulated.py " + " ".join(sys.argv[1:]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.platform()}",
        "largest wall error": max(abs(run["wall, predicted / measured"] - 1) for run in runs),
        "largest bubble error": max(abs(run["bubble, predicted - measured"]) for run in runs),
        "runs": runs,
    }
    if output is not None:
        output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({name: value for name, value in document.items() if name != "runs"}))


if __name__ == "__main__":
    main()
