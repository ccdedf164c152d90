"""Run two hosts of two stages over several kinds of wires, and compare each with the simulator.

    python examples/benchmarks/measure_links.py --work-dir /tmp/links --output docs/benchmarks/results/links.json

The hosts are network namespaces (hosts.py), joined by torchrun. A token bucket gives the wire its rate, and netem gives
it its delay. If the kernel has no netem, the profile has the delay (`added_latency_s` of the edges between the hosts).
Stages are emulated: they sleep 5 times as long as SARATHI's GPT-3 pipeline would compute. Activations have a hidden
size of 1024 in float32, so a chunk of 256 tokens is 1 MiB. It takes 37 ms on a stage, 8.8 ms on a wire of 1 Gbit/s and
88 ms on one of 100 Mbit/s.

A run of other requests over unshaped wires measures the cost of each edge. All other figures are predicted. The edges
between the hosts then have the wire's rate for payload, and its delay. Wires take turns, so that other work on the
machine affects all of them. Figures are medians.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from awake import awake
from hosts import PAYLOAD, Hosts, make_hosts
from record import Record, spread

from sarathi_pp.analysis.bubbles import measure_bubbles
from sarathi_pp.analysis.causes import explain
from sarathi_pp.analysis.summary import summarise_timeline
from sarathi_pp.analysis.timeline import Timeline
from sarathi_pp.bench.contest import write_prompts
from sarathi_pp.bench.machine import stolen
from sarathi_pp.core.cost.profile import EdgeLink, Profile
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.report.run_reader import find_traces
from sarathi_pp.sim.experiment import Experiment, simulate
from sarathi_pp.sim.presets import preset
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.trace.recorder import read_trace
from sarathi_pp.tuning.fit import measure_links

SLOWER = 5.0
SEQS = 32
STAGES = 4
# Indices among the edges 0 -> 1 -> 2 -> 3 -> 0.
BETWEEN_HOSTS = (1, 3)
POLICIES = ("sarathi", "balanced")
WORKLOAD = "uniform:n=32,min=128,max=512,pd=8,seed=3"
CALIBRATION = ("uniform:n=32,min=16,max=1024,pd=20,seed=9", "orca")
WARM_UP = 8
KEPT = ("wall_s", "total_tokens_per_s", "bubble_ratio", "microbatches")

Figures = dict[str, float]
Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wire:
    """A kind of wire between two hosts.

    Attributes:
        bits_per_s: None for a wire that is as fast as the kernel copies.
    """

    bits_per_s: float | None = None
    delay_s: float = 0.0


WIRES = {
    "unshaped": Wire(),
    "1 Gbit/s": Wire(1e9),
    "100 Mbit/s": Wire(1e8),
    "+0.2 ms": Wire(delay_s=2e-4),
    "+2 ms": Wire(delay_s=2e-3),
}


def make_profile() -> Profile:
    found = preset("gpt3-a100-tp8pp8")
    chosen = (*found.cost.stages[: STAGES - 1], found.cost.stages[-1])
    stages = tuple(
        replace(stage.scaled(SLOWER), layers=(12 * index, 12 * index + 12)) for index, stage in enumerate(chosen)
    )
    return replace(
        found,
        hidden_size=1024,
        dtype="float32",
        num_layers=12 * STAGES,
        cost=replace(found.cost, stages=stages),
        max_num_seqs=SEQS,
        pages=4096,
    )


def over(profile: Profile, wire: Wire) -> Profile:
    """Return the profile with that wire on the edges between the hosts."""

    def between(link: EdgeLink) -> EdgeLink:
        rate = link.bytes_per_s if wire.bits_per_s is None else PAYLOAD * wire.bits_per_s / 8
        return EdgeLink(link.latency_s, min(link.bytes_per_s, rate), wire.delay_s)

    links = (between(link) if edge in BETWEEN_HOSTS else link for edge, link in enumerate(profile.links))
    return replace(profile, links=tuple(links))


def emulate(hosts: Hosts, work_dir: Path, profile: Profile, policy: str, spec: str) -> Report:
    """Run once on both hosts, and return the report."""
    (work_dir / "profile.json").write_text(json.dumps(profile.to_json()))
    write_prompts(work_dir / "prompts.jsonl", parse_workload(spec).requests())
    script = work_dir / "sarathi-pp"
    script.write_text("from sarathi_pp.cli.main import main\n\nmain()\n")
    agents = []
    for host in range(len(hosts.names)):
        command = [*hosts.torchrun(host, STAGES // len(hosts.names)), str(script), "generate"]
        command += ["--emulate", str(work_dir / "profile.json"), "--input", str(work_dir / "prompts.jsonl")]
        command += ["--output", str(work_dir / "answers.jsonl"), "--overwrite", "--quiet", "--policy", policy]
        command += [
            "--run-dir",
            str(work_dir / f"run-of-host{host}"),
            "--chunk-size",
            str(parse_policy(policy).kind.default_chunk_size),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": hosts.interface(host)}
        agents.append(subprocess.Popen(command, env=environment))
    try:
        codes = [agent.wait() for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert codes == [0, 0], codes
    report: Report = json.loads((work_dir / "run-of-host0" / "report.json").read_text())
    assert report["failed"] == 0, report
    return report


def with_measured_links(hosts: Hosts, work_dir: Path, profile: Profile) -> Profile:
    """Return the profile with the cost of each edge, measured over unshaped wires."""
    spec, policy = CALIBRATION
    emulate(hosts, work_dir, profile, policy, spec)
    (traces,) = find_traces(work_dir / "run-of-host0", None)
    timeline = Timeline.read(map(read_trace, traces))
    counted = np.arange(timeline.num_returned) >= WARM_UP
    return replace(profile, links=tuple(measure_links(timeline, counted, row_bytes=4 * profile.hidden_size)))


def figures_of(report: Mapping[str, Any]) -> Figures:
    return {**{name: report[name] for name in KEPT}, "communication_s": report["causes"]["communication_s"]}


def predict(profile: Profile, policy: str) -> Figures:
    experiment = Experiment(
        profile=profile,
        workload=parse_workload(WORKLOAD),
        policy=parse_policy(policy),
        chunk_size=parse_policy(policy).kind.default_chunk_size,
        max_num_seqs=SEQS,
    )
    timeline = simulate(experiment)
    report = summarise_timeline(timeline, measure_bubbles(timeline))
    causes = explain(timeline, experiment.cost())
    return figures_of({**report, "causes": {"communication_s": causes.communication_s}})


def measure(
    hosts: Hosts, work_dir: Path, policies: tuple[str, ...], repeats: int, write: Callable[[Report], object]
) -> Report:
    by_kernel = hosts.can_delay()
    profile = with_measured_links(hosts, work_dir, make_profile())
    links = [{"latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s} for link in profile.links]
    print(json.dumps(links), flush=True)
    found: dict[tuple[str, str], list[Figures]] = {}
    loads: list[float] = []
    for repeat in range(repeats):
        for policy in policies:
            for name, wire in WIRES.items():
                hosts.shape(bits_per_s=wire.bits_per_s, delay_s=wire.delay_s if by_kernel else 0.0)
                own = over(profile, replace(wire, delay_s=0.0) if by_kernel else wire)
                report = emulate(hosts, work_dir, own, policy, WORKLOAD)
                loads.append(os.getloadavg()[0])
                found.setdefault((policy, name), []).append(figures_of(report))
                print(repeat, policy, name, json.dumps(figures_of(report)), flush=True)
        rows = [
            row_of(policy, name, runs, predict(over(profile, WIRES[name]), policy))
            for (policy, name), runs in found.items()
        ]
        facts = {"complete": repeat == repeats - 1, "repeats": repeat + 1, "load average": spread(loads)}
        delay = "netem" if by_kernel else "added_latency_s in the profile, waited for by the receiver"
        figures = {**facts, "delayed by": delay, "workload": WORKLOAD, "links by themselves": links, "runs": rows}
        write(figures)
    return figures


def row_of(policy: str, wire: str, runs: list[Figures], predicted: Figures) -> Report:
    measured = {name: spread([run[name] for run in runs]) for name in runs[0]}
    wall_s = statistics.median(run["wall_s"] for run in runs)
    bubble = statistics.median(run["bubble_ratio"] for run in runs)
    return {
        "policy": policy,
        "wire": wire,
        "measured": measured,
        "predicted": predicted,
        "wall, predicted / measured": predicted["wall_s"] / wall_s,
        "bubble, predicted - measured": predicted["bubble_ratio"] - bubble,
    }


@click.command()
@click.option("--work-dir", type=click.Path(path_type=Path), required=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--policy", "policies", multiple=True, default=POLICIES, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write after every round.")
def main(work_dir: Path, repeats: int, policies: tuple[str, ...], output: Path | None) -> None:
    record = Record.begin()
    work_dir.mkdir(parents=True, exist_ok=True)
    with make_hosts(2) as hosts, awake(), stolen() as lost:
        figures = measure(hosts, work_dir, policies, repeats, lambda figures: record.write(output, figures))
    record.write(output, {**figures, "share of the cores that the host took": lost.share})


if __name__ == "__main__":
    main()
