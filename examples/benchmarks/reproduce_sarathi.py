"""Simulate SARATHI's section 5.3: GPT-3 on 64 A100s, 10,000 requests, Orca compared with chunked prefills.

    python examples/benchmarks/reproduce_sarathi.py --output docs/benchmarks/results/sarathi-5.3.json

The simulation is that of `sarathi-pp simulate --preset gpt3-a100-tp8pp8 --workload ... --policy ...`. The document also
has the two factors of the paper: 6.29 for the median bubble of a request, and 1.91 for the throughput.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from record import Record

from sarathi_pp.core.policy import parse_policy
from sarathi_pp.sim.experiment import Experiment, report_of
from sarathi_pp.sim.presets import preset
from sarathi_pp.sim.workload import parse_workload

WORKLOAD = "zipf:n=10000,min=1024,max=4096,theta=0.4,pd=10"
POLICIES = ("orca", "sarathi", "balanced")
PAPER = {"request_bubble": 6.29, "throughput": 1.91}
KEPT = ("chunk_size", "microbatches", "wall_s", "total_tokens_per_s", "bubble_ratio", "bubble_ratio_steady")


def run(policy: str) -> dict[str, Any]:
    experiment = Experiment(
        profile=preset("gpt3-a100-tp8pp8"),
        workload=parse_workload(WORKLOAD),
        policy=parse_policy(policy),
        chunk_size=parse_policy(policy).kind.default_chunk_size,
    )
    report = report_of(experiment)
    return {**{name: report[name] for name in KEPT}, "request_bubble_p50_s": report["request_bubble_s"]["p50"]}


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(output: Path | None) -> None:
    record = Record.begin()
    runs = {policy: run(policy) for policy in POLICIES}
    orca, sarathi = runs["orca"], runs["sarathi"]
    factors = {
        "request_bubble": orca["request_bubble_p50_s"] / sarathi["request_bubble_p50_s"],
        "throughput": sarathi["total_tokens_per_s"] / orca["total_tokens_per_s"],
    }
    figures = {"workload": WORKLOAD, "runs": runs, "sarathi against orca": factors, "in the paper": PAPER}
    print(json.dumps(record.write(output, figures), indent=1))


if __name__ == "__main__":
    main()
