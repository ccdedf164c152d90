"""Measure the gain of each rule of `balanced`: the policy without the rule, simulated on two pipelines.

    python examples/benchmarks/ablate_balanced.py --output docs/benchmarks/results/ablation.json

The pipelines are SARATHI's GPT-3 pipeline and two CPU cores. Each variant replaces one function or constant of the
policy, so that it works as a scheduler without the rule. Throughput is a ratio to that of the whole policy. Bubbles are
steady ones. There is one seed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
from compare_policies import SLOW, figures, zipf
from record import Record

from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.policy import balanced, parse_policy
from sarathi_pp.core.policy.view import Limits, View
from sarathi_pp.outputs.profile_file import read_profile
from sarathi_pp.sim.experiment import Experiment, report_of
from sarathi_pp.sim.presets import preset
from sarathi_pp.sim.workload import parse_workload

SEED = 31
# Two stages of the 298M model on two cores, as `sarathi-pp profile` measured them for `measure_300m.py`.
CPU_PROFILE = Path(__file__).parents[2] / "docs" / "benchmarks" / "results" / "profile-300m.json"
KEPT = ("tokens_per_s", "steady", "whole", "request_bubble_p50_s", "itl_p50_s", "itl_p99_s", "ttft_p50_s")


def works(requests: int) -> dict[str, Experiment]:
    half = requests // 2
    change = f"then:{zipf(half, 2, SEED)}+{zipf(half, 20, SEED)}"
    gpt3 = partial(_experiment, preset("gpt3-a100-tp8pp8"))
    cpu = replace(read_profile(CPU_PROFILE), max_num_seqs=32)
    return {
        **{f"P:D {ratio}": gpt3(zipf(requests, ratio, SEED)) for ratio in (2, 10, 40)},
        "P:D 2, then 20": gpt3(change),
        "8 requests/s": gpt3(f"poisson:rate=8,{zipf(requests, 10, SEED)}"),
        "jitter 5 %": gpt3(zipf(requests, 10, SEED), jitter_cv=0.05),
        "a slow stage": gpt3(zipf(requests, 10, SEED), slow=SLOW),
        "298M, 32 at once": _experiment(cpu, "uniform:n=32,min=256,max=1024,pd=8,seed=0"),
        "298M, P:D 20": _experiment(cpu, f"uniform:n={requests},min=256,max=1024,pd=20,seed=0"),
    }


def _experiment(
    profile: Profile, spec: str, jitter_cv: float = 0.0, slow: Mapping[int, float] | None = None
) -> Experiment:
    return Experiment(
        profile=profile,
        workload=parse_workload(spec),
        policy=parse_policy("balanced"),
        chunk_size=parse_policy("balanced").kind.default_chunk_size,
        jitter_cv=jitter_cv,
        slow=slow or {},
        seed=SEED,
    )


def _by_count(decoding: balanced._Decoding, sequence: Any) -> float:
    return decoding.total_s / decoding.count


def _prior_ratio(view: View) -> float:
    return balanced._PRIOR_RATIO


def _never(*arguments: Any) -> float:
    return 0.0


def _as_many_as_allowed(limits: Limits) -> int:
    return limits.inflight


def _what_is_left(view: View, at_hand: int, before: Any) -> balanced._Burst:
    return balanced._Burst(at_hand, 0)


def _fixed(size: int) -> Callable[..., balanced._Cycle]:
    return lambda view, *rest: balanced._Cycle(
        min(size, view.limits.chunk_size), view.limits.num_stages, view.limits.inflight, prompts=True
    )


# Each context manager makes a variant of the policy inside its block.
VARIANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "all of it": nullcontext,
    "no microbatch to spare": lambda: patch.object(balanced.Balanced, "spare_microbatches", 0),
    "always one to spare": lambda: patch.object(balanced, "_fewest", _as_many_as_allowed),
    "one to spare also where seats are short": lambda: patch.object(balanced, "_SPARE_COST", 1.0),
    "one to spare beside a slow stage too": lambda: patch.object(balanced, "_AHEAD", 1.0),
    "256 tokens, whatever the work": lambda: patch.object(balanced, "_choose_cycle", _fixed(256)),
    "512 tokens, whatever the work": lambda: patch.object(balanced, "_choose_cycle", _fixed(512)),
    "no seat left for the prompt that is computed": lambda: patch.object(balanced, "_PROMPTS_AT_A_TIME", 0),
    "P:D of finished requests alone": lambda: patch.object(balanced, "_least_ratio_so_far", _prior_ratio),
    "P:D taken to be 8": lambda: patch.object(balanced, "_prompt_to_output", _prior_ratio),
    "no larger chunks where all can start": lambda: patch.object(balanced, "_quickest", _never),
    "larger chunks by what is left of a burst": lambda: patch.object(balanced, "_burst", _what_is_left),
    "decodes shared by count": lambda: patch.object(balanced._Decoding, "seconds", _by_count),
}


def measure(variant: str, work: str, requests: int) -> dict[str, Any]:
    with VARIANTS[variant]():
        found = figures(report_of(works(requests)[work]))
    return {"variant": variant, "work": work, **{name: found[name] for name in KEPT}}


@click.command()
@click.option("--requests", type=click.IntRange(min=10), default=400, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(requests: int, output: Path | None) -> None:
    record = Record.begin()
    pairs = [(variant, work) for work in works(requests) for variant in VARIANTS]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(measure, variant, work, requests) for variant, work in pairs]
        rows = [future.result() for future in futures]
    for row in rows:
        whole = next(r for r in rows if r["work"] == row["work"] and r["variant"] == "all of it")
        row["throughput"] = row["tokens_per_s"] / whole["tokens_per_s"]
        print(f"{row['work']:16} {row['variant']:40} {row['throughput']:7.3f} {row['steady']:7.2%}", file=sys.stderr)
    print(json.dumps(record.write(output, {"rows": rows})))


if __name__ == "__main__":
    main()
