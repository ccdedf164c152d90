"""What each rule of `balanced` is worth: the policy without it, on SARATHI's GPT-3 pipeline, simulated.

    python examples/ablate_balanced.py --output examples/figures/ablation.json

Each variant replaces one function or constant of the policy by what a scheduler without the idea would have. Throughput
is a ratio to the whole policy's, bubbles are steady ones, of one seed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
from compare_policies import Case, run, zipf
from record import Record

from sarathi_pp.core.policy import auto_chunk_size, balanced
from sarathi_pp.core.policy.view import Limits, View
from sarathi_pp.sim import experiment

SEED = 31
KEPT = ("tokens_per_s", "steady", "whole", "request_bubble_p50_s", "itl_p50_s", "itl_p99_s", "ttft_p50_s")


def works(requests: int) -> dict[str, dict[str, Any]]:
    half = requests // 2
    change = f"then:{zipf(half, 2, SEED)}+{zipf(half, 20, SEED)}"
    return {
        **{f"P:D {ratio}": {"spec": zipf(requests, ratio, SEED)} for ratio in (2, 10, 40)},
        "P:D 2, then 20": {"spec": change},
        "8 requests/s": {"spec": f"poisson:rate=8,{zipf(requests, 10, SEED)}"},
        "jitter 5 %": {"spec": zipf(requests, 10, SEED), "jitter_cv": 0.05},
    }


def _by_count(decoding: balanced._Decoding, sequence: Any) -> float:
    return decoding.total_s / decoding.count


def _prior_ratio(view: View) -> float:
    return balanced._PRIOR_RATIO


def _never(*arguments: Any) -> float:
    return 0.0


def _no_more_than_stages(policy: str, num_stages: int) -> int:
    return num_stages


def _as_many_as_allowed(limits: Limits) -> int:
    return limits.inflight


def _fixed(size: int) -> Callable[..., balanced._Cycle]:
    return lambda view, *rest: balanced._Cycle(min(size, view.limits.chunk_size), view.limits.inflight, prompts=True)


# What makes a variant of the policy for as long as it is entered.
VARIANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "all of it": nullcontext,
    "no microbatch to spare": lambda: patch.object(experiment, "auto_inflight", _no_more_than_stages),
    "always one to spare": lambda: patch.object(balanced, "_fewest", _as_many_as_allowed),
    "one to spare also where seats are short": lambda: patch.object(balanced, "_SPARE_COST", 1.0),
    "256 tokens, whatever the work": lambda: patch.object(balanced, "_choose_cycle", _fixed(256)),
    "512 tokens, whatever the work": lambda: patch.object(balanced, "_choose_cycle", _fixed(512)),
    "P:D of finished requests alone": lambda: patch.object(balanced, "_least_ratio_so_far", _prior_ratio),
    "P:D taken to be 8": lambda: patch.object(balanced, "_prompt_to_output", _prior_ratio),
    "no larger chunks where all can start": lambda: patch.object(balanced, "_quickest", _never),
    "decodes shared by count": lambda: patch.object(balanced._Decoding, "seconds", _by_count),
}


def measure(variant: str, work: str, requests: int) -> dict[str, Any]:
    case = Case(
        policy="balanced", chunk_size=auto_chunk_size("balanced"), seed=SEED, work=work, **works(requests)[work]
    )
    with VARIANTS[variant]():
        found = run(case)
    return {"variant": variant, "work": work, **{name: found[name] for name in KEPT}}


@click.command()
@click.option("--requests", type=click.IntRange(min=10), default=400, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Where the JSON goes.")
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
