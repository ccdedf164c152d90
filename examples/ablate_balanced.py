"""What each rule of `balanced` is worth: the policy without it, on SARATHI's GPT-3 pipeline, simulated.

    python examples/ablate_balanced.py --output examples/figures/ablation.json

Each variant replaces one function of the policy by what a scheduler without the idea would do. Throughput is a ratio to
the whole policy's, bubbles are steady ones, of one seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
from compare_policies import Case, run, zipf

from sarathi_pp.core.policy import auto_chunk_size, balanced
from sarathi_pp.core.policy.view import View

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


def _known_ratio(view: View) -> float:
    return balanced._PRIOR_RATIO


def _never(*arguments: Any) -> float:
    return 0.0


class _NothingOwed(balanced.Balanced):
    """Forgets what the last microbatch had too much or too little."""

    __slots__ = ()

    def pick(self, view: View) -> list[Any]:
        self._owed_s = 0.0
        return super().pick(view)


def _fixed(size: int) -> Callable[..., int]:
    return lambda view, *rest: min(size, view.limits.chunk_size)


# What is replaced, by what.
VARIANTS: dict[str, tuple[str, Any] | None] = {
    "all of it": None,
    "no microbatch to spare": ("_fewest", None),
    "always one to spare": ("_fewest", lambda limits: limits.inflight),
    "256 tokens, whatever the work": ("_choose_size", _fixed(256)),
    "512 tokens, whatever the work": ("_choose_size", _fixed(512)),
    "P:D taken to be 8": ("_prompt_to_output", _known_ratio),
    "no larger chunks where all can start": ("_quickest", _never),
    "decodes shared by count": ("_Decoding.seconds", _by_count),
    "chunk attention not made up for": ("_attention", _never),
    "nothing carried over": ("Balanced", _NothingOwed),
}


def measure(variant: str, work: str, requests: int) -> dict[str, Any]:
    case: dict[str, Any] = {"work": work, **works(requests)[work]}
    change = VARIANTS[variant]
    if variant == "no microbatch to spare":
        with patch("sarathi_pp.sim.experiment.auto_inflight", lambda policy, num_stages: num_stages):
            found = run(Case(policy="balanced", chunk_size=auto_chunk_size("balanced"), seed=SEED, **case))
    elif change is None:
        found = run(Case(policy="balanced", chunk_size=auto_chunk_size("balanced"), seed=SEED, **case))
    else:
        name, replacement = change
        holder, _, attribute = name.rpartition(".")
        target: Any = getattr(balanced, holder) if holder else balanced
        if name == "Balanced":
            patched = patch.dict("sarathi_pp.core.policy.POLICIES", {"balanced": replacement})
        else:
            patched = patch.object(target, attribute, replacement)
        with patched:
            found = run(Case(policy="balanced", chunk_size=auto_chunk_size("balanced"), seed=SEED, **case))
    return {"variant": variant, "work": work, **{name: found[name] for name in KEPT}}


@click.command()
@click.option("--requests", type=click.IntRange(min=10), default=400, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Where the JSON goes.")
def main(requests: int, output: Path | None) -> None:
    pairs = [(variant, work) for work in works(requests) for variant in VARIANTS]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(measure, variant, work, requests) for variant, work in pairs]
        rows = [future.result() for future in futures]
    for row in rows:
        whole = next(r for r in rows if r["work"] == row["work"] and r["variant"] == "all of it")
        row["throughput"] = row["tokens_per_s"] / whole["tokens_per_s"]
        print(f"{row['work']:16} {row['variant']:38} {row['throughput']:7.3f} {row['steady']:7.2%}", file=sys.stderr)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE, text=True, check=False)
    document = {
        "commit": commit.stdout.strip(),
        "command": "python examples/ablate_balanced.py " + " ".join(sys.argv[1:]),
        "rows": rows,
    }
    if output is not None:
        output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
