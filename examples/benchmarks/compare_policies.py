"""Compare `balanced` without tuning with the other policies, tuned, on SARATHI's GPT-3 pipeline, simulated.

    python examples/benchmarks/compare_policies.py --output docs/benchmarks/results/policies-gpt3.json \
        --page docs/benchmarks/policies-gpt3.md

The workloads are those of SARATHI's section 5.3 (zipf, 1024 to 4096 tokens, theta 0.4) at five values of P:D. Further
ones have a P:D that changes halfway, noise, a slow stage, or Poisson arrivals at shares of the rate of `balanced`.

The other policies are the rivals. Rivals with a size (chunk size, or most prompt tokens of gLLM) run with every size.
The tuned row takes the fastest size of each seed afterwards, which no user could do. On the further workloads only the
closest rivals run. `balanced` gets no size.

Each policy also has a row with its default size here, and one with the default of its original system if that differs.
These rows have all seeds if the policy is tuned on the workload. Otherwise they have the first seed, and exist only for
the five values of P:D and their change. Each row has its number of seeds. `balanced` is compared only with rows that
have all of its seeds.

Prints a table. At the end it writes every run as JSON, and with --page the table as a Markdown page.
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

from sarathi_pp.core.policy import POLICIES, parse_policy
from sarathi_pp.core.policy.gllm import GLLM
from sarathi_pp.report.policies import bubble_floor
from sarathi_pp.sim.experiment import Experiment, report_of
from sarathi_pp.sim.presets import preset
from sarathi_pp.sim.workload import parse_workload

RATIOS = (2, 5, 10, 20, 40)
CHANGE = "P:D 2, then 20"
JITTER = (0.02, 0.05)
# One stage takes 10 % longer.
SLOW = {3: 1.1}
LOADS = (0.5, 0.7, 0.8, 0.9, 0.95)
TUNED = ("sarathi", "sarathi-serve", "vllm", "sglang", "tensorrt-llm", "splitfuse", "distserve", "gllm")
# The two fastest of these policies in earlier figures. With a changing P:D, another policy was faster than one of them.
CLOSEST = ("sarathi", "sarathi-serve")
CLOSEST_AT_CHANGE = (*CLOSEST, "tensorrt-llm", "gllm")
# Default sizes of the original systems on an A100, if they differ from ours (REFERENCES of each policy).
OWN_SIZES = {"sarathi-serve": 512, "vllm": 2048}
CHUNK_SIZES = (128, 256, 512, 1024, 2048)
# Enough requests that filling and draining the pipeline hardly count.
CAPACITY_REQUESTS = 2000
LATENCIES = ("ttft_s", "itl_s")
CHECK_EVERY = 25
PROGRESS_EVERY = 20


class Case(NamedTuple):
    work: str
    spec: str
    policy: str
    chunk_size: int
    seed: int
    jitter_cv: float = 0.0
    slow: bool = False


def run(case: Case) -> dict[str, Any]:
    experiment = Experiment(
        profile=preset("gpt3-a100-tp8pp8"),
        workload=parse_workload(case.spec),
        policy=parse_policy(case.policy),
        chunk_size=case.chunk_size,
        jitter_cv=case.jitter_cv,
        slow=SLOW if case.slow else {},
        seed=case.seed,
    )
    return {**case._asdict(), **figures(report_of(experiment))}


def figures(report: dict[str, Any]) -> dict[str, Any]:
    return {
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
    """Return policies with chunk sizes: `balanced` with its default, and the rivals with every size."""
    return [
        ("balanced", parse_policy("balanced").kind.default_chunk_size),
        *(of_size(policy, size) for policy in rivals for size in CHUNK_SIZES),
    ]


def of_size(policy: str, size: int) -> tuple[str, int]:
    """Return policy and chunk size. The size of gLLM is its parameter maxp instead."""
    return (f"gllm:maxp={size}", parse_policy("gllm").kind.default_chunk_size) if policy == "gllm" else (policy, size)


def name_of(run: dict[str, Any]) -> str:
    return str(run["policy"]).partition(":")[0]


def size_of(run: dict[str, Any]) -> int:
    _, _, most = str(run["policy"]).partition("maxp=")
    return int(most or (GLLM().maxp if name_of(run) == "gllm" else run["chunk_size"]))


def offline_cases(requests: int, seeds: range) -> list[Case]:
    works = {f"P:D {ratio}": {seed: zipf(requests, ratio, seed) for seed in seeds} for ratio in RATIOS}
    change = {seed: f"then:{zipf(requests // 2, 2, seed)}+{zipf(requests // 2, 20, seed)}" for seed in seeds}
    first = seeds[0]
    cases = []
    for name, specs in works.items():
        cases += [Case(name, specs[seed], *run, seed) for seed in seeds for run in swept(*TUNED)]
    for name, specs in {**works, CHANGE: change}.items():
        cases += [
            Case(name, specs[first], policy, parse_policy(policy).kind.default_chunk_size, first) for policy in POLICIES
        ]
        cases += [Case(name, specs[first], policy, size, first) for policy, size in OWN_SIZES.items()]
    for seed in seeds:
        steady = works["P:D 10"][seed]
        cases += [Case(CHANGE, change[seed], *run, seed) for run in swept(*CLOSEST_AT_CHANGE)]
        for run in swept(*CLOSEST):
            cases += [Case(noise(cv), steady, *run, seed, jitter_cv=cv) for cv in JITTER]
            cases.append(Case("a slow stage", steady, *run, seed, slow=True))
    # The table starts with the five values of P:D.
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
    """Return the rows for each work and policy: with the default size, the original system's default, and tuned."""
    table = []
    for work in dict.fromkeys(result["work"] for result in results):
        here = [result for result in results if result["work"] == work]
        for policy in dict.fromkeys(map(name_of, here)):
            runs = [result for result in here if name_of(result) == policy]
            kinds = {
                "default": [
                    run
                    for run in runs
                    if (run["policy"], run["chunk_size"]) == (policy, parse_policy(policy).kind.default_chunk_size)
                ],
                "own default": [run for run in runs if size_of(run) == OWN_SIZES.get(policy)],
            }
            if len(set(map(size_of, runs)) - {OWN_SIZES.get(policy)}) > 1:
                seeds = dict.fromkeys(result["seed"] for result in runs)
                same = ([run for run in runs if run["seed"] == seed] for seed in seeds)
                kinds["tuned"] = [max(of_seed, key=lambda run: run["tokens_per_s"]) for of_seed in same]
            table += [_row(work, policy, kind, of_kind) for kind, of_kind in kinds.items() if of_kind]
    return table


def _row(work: str, policy: str, kind: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means over the seeds that have a figure. A figure is None if no seed has it."""
    figures = [name for name in runs[0] if name not in Case._fields]
    known = {name: [run[name] for run in runs if run[name] is not None] for name in figures}
    return {
        "work": work,
        "policy": policy,
        "kind": kind,
        "chunk_sizes": sorted(set(map(size_of, runs))),
        "seeds": len({run["seed"] for run in runs}),
        **{name: statistics.fmean(values) if values else None for name, values in known.items()},
        "steady_max": max(known["steady"], default=None),
    }


def gains(table: list[dict[str, Any]]) -> dict[str, float]:
    """Return, for each work, the throughput of `balanced` over that of the best rival.

    Only rows with all seeds of `balanced` count, because a mean over fewer seeds is about other requests.
    """
    found = {}
    for work in dict.fromkeys(row["work"] for row in table):
        here = [row for row in table if row["work"] == work]
        ours = next(row for row in here if row["policy"] == "balanced")
        # `balanced` runs with every seed of a work, so an equal number of seeds means the same seeds.
        rivals = [row for row in here if row["policy"] != "balanced" and row["seeds"] == ours["seeds"]]
        found[work] = ours["tokens_per_s"] / max(row["tokens_per_s"] for row in rivals)
    return found


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def markdown(table: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table of means over the seeds."""
    heads = (
        "work",
        "policy",
        "chunk size",
        "seeds",
        "tokens/s",
        "steady bubble",
        "whole bubble",
        "floor",
        "request bubble p50 s",
        "TTFT p50 s",
        "TTFT p99 s",
        "TBT p50 s",
        "TBT p99 s",
    )
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in table:
        sizes = "/".join(map(str, row["chunk_sizes"]))
        size = "none given" if row["policy"] == "balanced" else f"{row['kind']} {sizes}"
        named = (row["work"], row["policy"], size, str(row["seeds"]), shown(row["tokens_per_s"], ",.0f"))
        ratios = (shown(row[name], ".2%") for name in ("steady", "whole", "floor"))
        names = ("request_bubble_p50_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")
        lines.append("| " + " | ".join((*named, *ratios, *(shown(row[name], ".3f") for name in names))) + " |")
    return "\n".join(lines) + "\n"


PAGE = """# Policies on a simulated GPT-3 pipeline

One row per policy and kind of work: means over the seeds. The chunk size is this runtime's default, the original
system's own default, or tuned: the fastest size of each seed. The floor is the bubble that unequal stages cost under
any schedule. [simulated.md](simulated.md) explains it. `examples/benchmarks/compare_policies.py` writes this page.

Commit {commit}, {machine}:
`{command}`

"""


def page(document: dict[str, Any]) -> str:
    """Return the Markdown page of a written record."""
    return PAGE.format(**document) + markdown(document["rows"])


class Known:
    """The rivals' runs of an earlier record. Simulations repeat exactly, so a new `balanced` needs no new runs of them.

    Every CHECK_EVERY-th run is repeated as a check.
    """

    def __init__(self, path: Path | None) -> None:
        self._document = json.loads(path.read_text()) if path is not None else {"runs": []}
        found = (run for run in self._document["runs"] if run["policy"] != "balanced")
        self._runs = {Case(**{name: run[name] for name in Case._fields}): run for run in found}

    @property
    def capacity(self) -> float | None:
        return self._document.get("capacity_requests_per_s")

    def described(self) -> dict[str, Any]:
        """Return the commit of the rivals' runs, also if the earlier record took them from a still earlier one."""
        key = "rivals from commit"
        return {key: self._document.get(key, self._document["commit"])} if self._runs else {}

    def complete(self, cases: list[Case]) -> list[dict[str, Any]]:
        """Return the results in the order of the cases.

        Raises:
            click.ClickException: a repeated run differs from the record.
        """
        checked = [case for case in cases if case in self._runs][::CHECK_EVERY]
        missing = [case for case in cases if case not in self._runs]
        fresh = dict(zip((*checked, *missing), run_all([*checked, *missing]), strict=True))
        for case in checked:
            if fresh[case] != self._runs[case]:
                raise click.ClickException(f"{case} differs from the record; run without --rivals-from")
        return [fresh[case] if case in fresh else self._runs[case] for case in cases]


def run_all(cases: list[Case]) -> list[dict[str, Any]]:
    """Run the cases and return the results in their order. Print the number of finished runs from time to time."""
    results = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(run, cases):
            results.append(result)
            if len(results) % PROGRESS_EVERY == 0:
                print(f"{len(results)} of {len(cases)} runs", file=sys.stderr, flush=True)
    return results


def measure_capacity(seed: int) -> float:
    """Return the requests per second of `balanced` if all requests are there at time 0."""
    spec = zipf(CAPACITY_REQUESTS, 10, seed)
    lengths = [sum(pair) for pair in parse_workload(spec).lengths()]
    found = run(Case("capacity", spec, "balanced", parse_policy("balanced").kind.default_chunk_size, seed))
    return float(found["tokens_per_s"]) / statistics.fmean(lengths)


@click.command()
@click.option("--requests", type=click.IntRange(min=10), default=1000, show_default=True)
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
@click.option("--page", "page_path", type=click.Path(path_type=Path), help="Markdown page to write.")
@click.option(
    "--rivals-from",
    type=click.Path(path_type=Path, exists=True),
    help="Earlier record with the rivals' runs; only `balanced` runs again.",
)
def main(requests: int, seeds: int, output: Path | None, page_path: Path | None, rivals_from: Path | None) -> None:
    record, known, used = Record.begin(), Known(rivals_from), range(31, 31 + seeds)
    capacity = known.capacity or measure_capacity(used[0])
    results = known.complete([*offline_cases(requests, used), *arrival_cases(requests, used, capacity)])
    table = rows(results)
    print(
        f"{'work':18} {'policy':18} {'':8} {'tokens/s':>9} {'steady':>7} {'whole':>7} {'floor':>6} {'request':>8}",
        file=sys.stderr,
    )
    for row in table:
        ratios = f"{shown(row['steady'], '.2%'):>7} {shown(row['whole'], '.2%'):>7} {shown(row['floor'], '.2%'):>6}"
        named = f"{row['work']:18} {row['policy']:18} {row['kind']:8} {row['tokens_per_s']:9.0f}"
        print(f"{named} {ratios} {shown(row['request_bubble_p50_s'], '.3f'):>8}", file=sys.stderr)
    ahead = {"throughput over the best rival": gains(table)}
    figures = {**known.described(), "capacity_requests_per_s": capacity, **ahead, "rows": table, "runs": results}
    document = record.write(output, figures, indent=None)  # on one line, because there are thousands of runs
    if page_path is not None:
        page_path.write_text(page(document))
    print(json.dumps(ahead))


if __name__ == "__main__":
    main()
