"""Measure the gain or the cost of an option of `generate`: real runs with both of its values, in turn.

    python examples/benchmarks/make_254m.py /tmp/m254
    python examples/benchmarks/measure_option.py --model /tmp/m254 --option head \
        --output docs/benchmarks/results/head.json

`head`: the first stage computes the LM head of some microbatches, or the last stage computes all of them. `transport`:
stages send through shared memory, or by gloo. `prefix-cache`: requests may share KV pages, or not. No prompts here
begin alike, so this is the cost of the cache. `penalties`, `logprobs`: all requests have penalties, or want log
probabilities, or none do. There are two stages with one compute thread each. Both values of the option take turns in
every round, with each policy.

For each work and policy the document has medians and extremes of both values. It has the ratio of their tokens per
second in the same round, the first value over the second. These are over the undisturbed rounds (rounds.py). The
figures of each round follow, with a mark on disturbed ones. The document also has the share of requests that got the
same tokens in all runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import click
from record import Record, spread
from rounds import describe_rounds, disturbed_rounds, hold_undisturbed, missing_rounds, undisturbed

from sarathi_pp.bench.contest import OurRun, Run, Work
from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.config import HEADS, TRANSPORTS
from sarathi_pp.sim.workload import parse_workload

WORKS = {
    "32 x 64-128, 64 out": "uniform:n=32,min=64,max=128,output=64",
    "32 x 256-1024, P:D 2": "uniform:n=32,min=256,max=1024,pd=2",
    "32 x 256-1024, P:D 8": "uniform:n=32,min=256,max=1024,pd=8",
}
POLICIES = ("balanced", "sarathi")
KEPT = ("total_tokens_per_s", "bubble_ratio", "bubble_ratio_steady")
SEQS = 32


@dataclass(frozen=True, slots=True)
class Option:
    """An option that is compared: the arguments of `generate` for its two values, by the name of each value."""

    name: str
    arguments: Mapping[str, tuple[str, ...]]

    @classmethod
    def choice(cls, name: str, values: Sequence[str]) -> Self:
        return cls(name, {value: (f"--{name}", value) for value in values})

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(self.arguments)

    def label(self, policy: str, value: str) -> str:
        return f"{policy}, {self.name} {value}"

    def entrants(self, policies: Sequence[str]) -> list[OurRun]:
        return [
            OurRun(self.label(policy, value), ("--stages", "2", "--policy", policy, *arguments))
            for policy in policies
            for value, arguments in self.arguments.items()
        ]

    def compare(self, policies: Sequence[str], runs: Sequence[Run]) -> dict[str, Any]:
        """Return the figures of one work. Without an undisturbed round, there are no medians and extremes."""
        same = [all(run.token_ids[index] == first for run in runs) for index, first in enumerate(runs[0].token_ids)]
        counted = undisturbed(runs)
        figures = self._figures(policies, counted) if counted else {}
        return {**figures, "same tokens": sum(same) / len(same), "each round": list(_each_round(runs))}

    def _figures(self, policies: Sequence[str], runs: Sequence[Run]) -> dict[str, Any]:
        of = {one.label: [run for run in runs if run.entrant == one.label] for one in self.entrants(policies)}
        found: dict[str, Any] = {
            name: {key: spread([run.report[key] for run in mine]) for key in KEPT} for name, mine in of.items()
        }
        for policy in policies:
            pair = [
                [run.report["total_tokens_per_s"] for run in of[self.label(policy, value)]] for value in self.values
            ]
            ratios = [one / other for one, other in zip(*pair, strict=True)]
            found[f"{policy}, {' over '.join(self.values)}"] = spread(ratios)
        return {**found, "stolen": spread([run.stolen for run in runs])}


def _each_round(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    disturbed = disturbed_rounds(runs)
    for number in sorted({run.round for run in runs}):
        figures = {
            run.entrant: {**{key: run.report[key] for key in KEPT}, "stolen": run.stolen}
            for run in runs
            if run.round == number
        }
        yield {"disturbed": number in disturbed, **figures}


PENALTIES = ("--repetition-penalty", "1.1", "--presence-penalty", "0.5", "--frequency-penalty", "0.2")
OPTIONS = {
    option.name: option
    for option in (
        Option.choice("head", HEADS),
        Option.choice("transport", TRANSPORTS),
        Option.choice("prefix-cache", ("auto", "off")),
        Option("penalties", {"all": PENALTIES, "none": ()}),
        Option("logprobs", {"all": ("--logprobs", "5"), "none": ()}),
    )
}


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--option", "name", type=click.Choice(list(OPTIONS)), required=True)
@click.option("--policy", "policies", multiple=True, default=POLICIES, show_default=True)
@click.option(
    "--work", "works", type=click.Choice(list(WORKS)), multiple=True, default=tuple(WORKS), help="[default: all]"
)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Undisturbed rounds.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write after every work.")
def main(
    model: Path, name: str, policies: tuple[str, ...], works: tuple[str, ...], rounds: int, output: Path | None
) -> None:
    option, record, facts = OPTIONS[name], Record.begin(), check_model(model)
    found: dict[str, Mapping[str, Any]] = {}
    for title in works:
        with TemporaryDirectory() as scratch:
            requests = list(parse_workload(WORKS[title]).requests(vocabulary=facts.vocab_size))
            work = Work(model, facts.dtype, requests, SEQS, Path(scratch))
            runs = []
            for run in hold_undisturbed(work, option.entrants(policies), rounds):
                _say(run)
                runs.append(run)
        found[title] = {**describe_rounds(runs, rounds), **option.compare(policies, runs)}
        document = record.write(output, {"model": str(model), "works": found})
        if (missing := missing_rounds(runs, rounds)) is not None:
            click.echo(f"{title}: {missing}", err=True)
    print(json.dumps(document["works"]))


def _say(run: Run) -> None:
    print(run.round, run.entrant, *(f"{run.report[key]:.4g}" for key in KEPT), f"stolen {run.stolen:.1%}", flush=True)


if __name__ == "__main__":
    main()
