"""`balanced` without tuning against the other policies with theirs, on SARATHI's GPT-3 pipeline, simulated.

    python examples/compare_policies.py --output examples/figures/policies-gpt3.json

Workloads of SARATHI's section 5.3 (zipf, 1024 to 4096 tokens, theta 0.4) at five ratios of prompt to output, with a
ratio that changes in mid-run (each part as long as the others' whole), with noise, with a slow stage, and with Poisson
arrivals at shares of what `balanced` reaches offline. Rivals that take a chunk size are run at every one and the best
throughput of each seed is taken afterwards, which no user could do; off the five ratios only the two that come closest
are. `balanced` gets no size. Every policy's own default is listed beside it, of the first seed. Prints a table and
writes every run as JSON, the table as Markdown beside it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import click
from record import Record

from sarathi_pp.core.policy import POLICIES, auto_chunk_size
from sarathi_pp.report.policies import bubble_floor
from sarathi_pp.sim.experiment import Experiment, simulate
from sarathi_pp.sim.presets import preset
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.trace.bubbles import measure_bubbles
from sarathi_pp.trace.summary import summarise_timeline

RATIOS = (2, 5, 10, 20, 40)
CHANGE = "P:D 2, then 20"
JITTER = (0.02, 0.05)
LOADS = (0.5, 0.7, 0.8, 0.9, 0.95)
TUNED = ("sarathi", "sarathi-serve", "vllm", "sglang", "tensorrt-llm")
# Of those, the ones that come closest to `balanced`.
CLOSEST = ("sarathi", "sarathi-serve")
CHUNK_SIZES = (128, 256, 512, 1024, 2048)
# Enough of them that filling and draining the pipeline do not count.
CAPACITY_REQUESTS = 2000
LATENCIES = ("ttft_s", "itl_s")


class Case(NamedTuple):
    work: str
    spec: str
    policy: str
    chunk_size: int
    seed: int
    jitter_cv: float = 0.0
    slow: float = 1.0


def run(case: Case) -> dict[str, Any]:
    experiment = Experiment(
        profile=preset("gpt3-a100-tp8pp8"),
        workload=parse_workload(case.spec),
        policy=case.policy,
        chunk_size=case.chunk_size,
        jitter_cv=case.jitter_cv,
        slow={3: case.slow},
        seed=case.seed,
    )
    timeline = simulate(experiment)
    report = summarise_timeline(timeline, measure_bubbles(timeline))
    return {
        **case._asdict(),
        "tokens_per_s": report["total_tokens_per_s"],
        "steady": report["bubble_ratio_steady"],
        "whole": report["bubble_ratio"],
        "floor": bubble_floor(report),
        "request_bubble_p50_s": report["request_bubble_s"]["p50"],
        **{f"{name[:-2]}_{at}_s": report[name][at] for name in LATENCIES for at in ("p50", "p99")},
    }


def zipf(requests: int, ratio: int, seed: int) -> str:
    return f"zipf:n={requests},min=1024,max=4096,theta=0.4,pd={ratio},seed={seed}"


def noise(jitter_cv: float) -> str:
    return f"jitter {100 * jitter_cv:g} %"


def swept(*rivals: str) -> list[tuple[str, int]]:
    """`balanced` as it is, and the rivals at every chunk size."""
    return [("balanced", auto_chunk_size("balanced")), *((policy, size) for policy in rivals for size in CHUNK_SIZES)]


def offline_cases(requests: int, seeds: range) -> list[Case]:
    works = {f"P:D {ratio}": {seed: zipf(requests, ratio, seed) for seed in seeds} for ratio in RATIOS}
    change = {seed: f"then:{zipf(requests, 2, seed)}+{zipf(requests, 20, seed)}" for seed in seeds}
    first = seeds[0]
    cases = []
    for name, specs in works.items():
        cases += [Case(name, specs[seed], *run, seed) for seed in seeds for run in swept(*TUNED)]
    for name, specs in {**works, CHANGE: change}.items():
        cases += [Case(name, specs[first], policy, auto_chunk_size(policy), first) for policy in POLICIES]
    for seed in seeds:
        steady = works["P:D 10"][seed]
        for run in swept(*CLOSEST):
            cases.append(Case(CHANGE, change[seed], *run, seed))
            cases += [Case(noise(cv), steady, *run, seed, jitter_cv=cv) for cv in JITTER]
            cases.append(Case("a slow stage", steady, *run, seed, slow=1.1))
    # In this order, so that a table starts with the ratios.
    order = [*works, CHANGE, *(noise(cv) for cv in JITTER), "a slow stage"]
    return sorted(dict.fromkeys(cases), key=lambda case: order.index(case.work))


def arrival_cases(requests: int, seeds: range, capacity: float) -> list[Case]:
    return [
        Case(
            f"arrivals at {load:.0%}",
            f"poisson:rate={load * capacity:.3f},{zipf(requests, 10, seed)}",
            policy,
            size,
            seed,
        )
        for load in LOADS
        for seed in seeds
        for policy, size in swept(*CLOSEST)
    ]


def rows(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each work and policy: `balanced`, the tuned rivals, and every default."""
    table = []
    for work in dict.fromkeys(result["work"] for result in results):
        here = [result for result in results if result["work"] == work]
        for policy in dict.fromkeys(result["policy"] for result in here):
            runs = [result for result in here if result["policy"] == policy]
            default = [result for result in runs if result["chunk_size"] == auto_chunk_size(policy)]
            table.append(_row(work, policy, "default", default))
            if len({result["chunk_size"] for result in runs}) > 1:
                seeds = dict.fromkeys(result["seed"] for result in runs)
                best = [max((r for r in runs if r["seed"] == seed), key=lambda r: r["tokens_per_s"]) for seed in seeds]
                table.append(_row(work, policy, "tuned", best))
    return table


def _row(work: str, policy: str, kind: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    figures = [name for name in runs[0] if name not in Case._fields]
    return {
        "work": work,
        "policy": policy,
        "kind": kind,
        "chunk_sizes": sorted({run["chunk_size"] for run in runs}),
        **{name: statistics.fmean(run[name] for run in runs) for name in figures if runs[0][name] is not None},
        "steady_max": max((run["steady"] for run in runs if run["steady"] is not None), default=None),
    }


def gains(table: list[dict[str, Any]]) -> dict[str, float]:
    """Throughput of `balanced` over the best rival's of the same work, tuned or not."""
    found = {}
    for work in dict.fromkeys(row["work"] for row in table):
        here = [row for row in table if row["work"] == work]
        ours = next(row["tokens_per_s"] for row in here if row["policy"] == "balanced")
        found[work] = ours / max(row["tokens_per_s"] for row in here if row["policy"] != "balanced")
    return found


def markdown(table: list[dict[str, Any]]) -> str:
    """The rows as a table, means over the seeds."""
    heads = ("work", "policy", "chunk size", "tokens/s", "steady bubble", "whole bubble", "request bubble p50 s")
    heads += ("TTFT p50 s", "TTFT p99 s", "TBT p50 s", "TBT p99 s")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in table:
        sizes = "/".join(map(str, row["chunk_sizes"]))
        size = "none given" if row["policy"] == "balanced" else f"{row['kind']} {sizes}"
        ratios = (f"{row.get('steady', 0):.2%}", f"{row['whole']:.2%}", f"{row['request_bubble_p50_s']:.3f}")
        seconds = (f"{row[name]:.3f}" for name in ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s"))
        lines.append(
            "| "
            + " | ".join((row["work"], row["policy"], size, f"{row['tokens_per_s']:,.0f}", *ratios, *seconds))
            + " |"
        )
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--requests", type=click.IntRange(min=10), default=1000, show_default=True)
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Where the JSON goes, and the table, as .md.")
def main(requests: int, seeds: int, output: Path | None) -> None:
    record, used = Record.begin(), range(31, 31 + seeds)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(run, offline_cases(requests, used)))
        spec = zipf(CAPACITY_REQUESTS, 10, used[0])
        lengths = [sum(pair) for pair in parse_workload(spec).lengths()]
        capacity = run(Case("capacity", spec, "balanced", 2048, used[0]))["tokens_per_s"] / statistics.fmean(lengths)
        results += pool.map(run, arrival_cases(requests, used, capacity))
    table = rows(results)
    print(
        f"{'work':18} {'policy':18} {'':8} {'tokens/s':>9} {'steady':>7} {'whole':>7} {'floor':>6} {'request':>8}",
        file=sys.stderr,
    )
    for row in table:
        ratios = f"{row.get('steady', 0):7.2%} {row['whole']:7.2%} {row['floor']:6.2%}"
        named = f"{row['work']:18} {row['policy']:18} {row['kind']:8} {row['tokens_per_s']:9.0f}"
        print(f"{named} {ratios} {row['request_bubble_p50_s']:8.3f}", file=sys.stderr)
    shown = {"throughput over the best rival": gains(table)}
    figures = {"capacity_requests_per_s": capacity, **shown, "rows": table, "runs": results}
    record.write(output, figures, indent=None)  # of thousands of runs: one line
    if output is not None:
        output.with_suffix(".md").write_text(f"`{record.command}`\n\n{markdown(table)}")
    print(json.dumps(shown))


if __name__ == "__main__":
    main()
