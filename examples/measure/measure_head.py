"""What it is worth that the first stage computes the head of some microbatches: real runs with it and without, in turn.

    python examples/measure/make_254m.py /tmp/m254
    python examples/measure/measure_head.py --model /tmp/m254 --output examples/figures/head.json

Two stages, a compute thread each; `--head auto` and `--head last` under two policies take turns in every round. Of
each work and policy: medians and extremes of both, the tokens a second of `auto` over those of `last` in the same
round, and the share of the requests to which all runs gave the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from record import Record, spread

from sarathi_pp.bench.contest import OurRun, Run, Work, hold
from sarathi_pp.config import HEADS
from sarathi_pp.model.support import check_model
from sarathi_pp.sim.workload import parse_workload

WORKS = {
    "32 x 64-128, 64 out": "uniform:n=32,min=64,max=128,output=64",
    "32 x 256-1024, P:D 2": "uniform:n=32,min=256,max=1024,pd=2",
    "32 x 256-1024, P:D 8": "uniform:n=32,min=256,max=1024,pd=8",
}
POLICIES = ("balanced", "sarathi")
KEPT = ("total_tokens_per_s", "bubble_ratio", "bubble_ratio_steady")
SEQS = 32


def label(policy: str, head: str) -> str:
    return f"{policy}, head {head}"


def entrants() -> list[OurRun]:
    return [
        OurRun(label(policy, head), ("--stages", "2", "--policy", policy, "--head", head))
        for policy in POLICIES
        for head in HEADS
    ]


def compare(runs: Sequence[Run]) -> dict[str, Any]:
    """Of one work."""
    of = {one.label: [run for run in runs if run.entrant == one.label] for one in entrants()}
    found: dict[str, Any] = {
        name: {key: spread([run.report[key] for run in mine]) for key in KEPT} for name, mine in of.items()
    }
    for policy in POLICIES:
        moved, kept = ([run.report["total_tokens_per_s"] for run in of[label(policy, head)]] for head in HEADS)
        found[f"{policy}, auto over last"] = spread([one / other for one, other in zip(moved, kept, strict=True)])
    same = [all(run.token_ids[index] == first for run in runs) for index, first in enumerate(runs[0].token_ids)]
    return {**found, "same tokens": sum(same) / len(same), "stolen": spread([run.stolen for run in runs])}


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option(
    "--work", "names", type=click.Choice(list(WORKS)), multiple=True, default=tuple(WORKS), help="[default: all]"
)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Where the JSON goes; written after every work.")
def main(model: Path, names: tuple[str, ...], rounds: int, output: Path | None) -> None:
    record, facts = Record.begin(), check_model(model)
    found: dict[str, Mapping[str, Any]] = {}
    for name in names:
        with TemporaryDirectory() as scratch:
            requests = list(parse_workload(WORKS[name]).requests(vocabulary=facts.vocab_size))
            work = Work(model, facts.dtype, requests, SEQS, Path(scratch))
            runs = hold(work, entrants(), rounds, _say)
        found[name] = compare(runs)
        document = record.write(output, {"model": str(model), "rounds": rounds, "works": found})
    print(json.dumps(document["works"]))


def _say(run: Run) -> None:
    print(run.round, run.entrant, *(f"{run.report[key]:.4g}" for key in KEPT), flush=True)


if __name__ == "__main__":
    main()
