"""Compare policies with and without the prefix cache, on SARATHI's GPT-3 pipeline, simulated.

    python examples/benchmarks/compare_prefix_cache.py --output docs/benchmarks/results/prefix-cache-simulated.json \
        --picture docs/benchmarks/results/prefix-cache-simulated.png

256 prompts arrive at once, with outputs of 32 to 160 tokens. Each prompt begins with the tokens of its group, and has
64 to 256 tokens of its own. Every policy has a chunk size of 512. The works are:

8 groups    1,024 shared tokens, and the KV cache and seats of the preset. All policies run. Four also run with other
            chunk sizes
4 groups    6,000 shared tokens. Also with a small KV cache, and with different numbers of seats
64 groups   of 4 requests, with a small KV cache. Also in the order of their groups
no groups   prompts of the same lengths as with 8 groups. The cache must not change the schedule

All but the first run with `balanced` and `vllm` alone. Prints tables of means over the seeds. Then it prints what the
microbatches of the first work hold. At the end it writes every run as JSON. --picture also draws the first work, in
headless Chromium.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import plotly.graph_objects as go
from photograph import photograph
from plotly.subplots import make_subplots
from record import Record

from sarathi_pp.config import PrefixCacheMode
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.core.request import Request
from sarathi_pp.sim.experiment import Experiment, report_of, simulate
from sarathi_pp.sim.presets import preset
from sarathi_pp.sim.workload import Workload, parse_workload

POLICIES = ("balanced", "sarathi", "sarathi-serve", "gllm", "sglang", "vllm", "tensorrt-llm", "orca")
TWO = ("balanced", "vllm")
MODES: tuple[PrefixCacheMode, ...] = ("off", "all")
CHUNK_SIZE = 512
CHUNK_SIZES = (64, 128, 256, 512, 1024, 2048)
# Policies that run with each of these sizes on the first work.
SIZED = ("balanced", "sarathi", "sglang", "vllm")
OWN_TOKENS = (64, 256)
FIGURES = ("wall_s", "steady", "hit_rate", "evictions", "preemptions")
GREY, BLUE = "#b4b9c2", "#1f5fa8"


class Work(NamedTuple):
    """A kind of work.

    Attributes:
        shared: tokens that the prompts of a group share.
        groups: number of groups; 0 if nothing is shared.
        pages: pages of the KV cache; None for those of the preset, 55,296.
        seats: most requests that run at once; None for those of the preset, 216.
        is_sorted: requests come in the order of their groups.
    """

    title: str
    policies: Sequence[str]
    shared: int
    groups: int
    pages: int | None = None
    seats: int | None = None
    is_sorted: bool = False

    def spec(self, requests: int, seed: int) -> str:
        low, high = (self.shared + own for own in OWN_TOKENS)
        sharing = f",shared={self.shared},groups={self.groups}" if self.groups else ""
        return f"uniform:n={requests},min={low},max={high},output=32,output_max=160,seed={seed}{sharing}"


MAIN = Work("8 groups", POLICIES, 1024, 8)
NOTHING_SHARED = Work("no groups", TWO, 1024, 0)
WORKS = (
    MAIN,
    Work("4 groups", TWO, 6000, 4),
    *(Work(f"4 groups, 9,600 pages, {seats} seats", TWO, 6000, 4, 9600, seats) for seats in (32, 64, 128, 216)),
    *(
        Work(f"64 groups, 2,437 pages, {seats} seats{', sorted' * is_sorted}", TWO, 1024, 64, 2437, seats, is_sorted)
        for seats in (24, 48)
        for is_sorted in (False, True)
    ),
    NOTHING_SHARED,
)


class SortedWorkload(Workload):
    """The requests of a workload in the order of their prompts, so that those of a group come one after the other."""

    @classmethod
    def of(cls, workload: Workload) -> SortedWorkload:
        return cls(**{one.name: getattr(workload, one.name) for one in fields(workload)})

    def requests(self, *, token_ids: bool = True, vocabulary: int = 32_000) -> Iterator[Request]:
        drawn = Workload.requests(self, vocabulary=vocabulary)
        ordered = sorted(drawn, key=lambda request: tuple(request.prompt_token_ids))
        return (replace(request, index=index) for index, request in enumerate(ordered))


class Case(NamedTuple):
    """One run: a kind of work, a policy, a mode of the prefix cache, a seed, and a chunk size."""

    work: Work
    policy: str
    mode: PrefixCacheMode
    requests: int
    seed: int
    chunk_size: int = CHUNK_SIZE

    def experiment(self) -> Experiment:
        profile, workload = preset("gpt3-a100-tp8pp8"), parse_workload(self.work.spec(self.requests, self.seed))
        return Experiment(
            profile=profile if self.work.pages is None else replace(profile, pages=self.work.pages),
            workload=SortedWorkload.of(workload) if self.work.is_sorted else workload,
            policy=parse_policy(self.policy),
            chunk_size=self.chunk_size,
            max_num_seqs=self.work.seats,
            prefix_cache=self.mode,
        )


def run(case: Case) -> dict[str, Any]:
    report = report_of(case.experiment())
    cache = report.get("prefix_cache") or {}
    return {
        "work": case.work.title,
        "policy": case.policy,
        "prefix_cache": case.mode,
        "seed": case.seed,
        "chunk_size": case.chunk_size,
        "wall_s": report["wall_s"],
        "steady": report["bubble_ratio_steady"],
        "hit_rate": cache.get("hit_rate", 0.0),
        "evictions": cache.get("evictions", 0),
        "preemptions": report["preemptions"],
    }


def rows(works: Sequence[Work], runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each work and policy: means over the seeds, without and with the cache."""
    found = []
    for work in works:
        for policy in work.policies:
            off, on = (_means(runs, work.title, policy, mode, CHUNK_SIZE) for mode in MODES)
            faster = off["wall_s"] / on["wall_s"]
            found.append({"work": work.title, "policy": policy, "off": off, "on": on, "times_faster": faster})
    return found


def by_chunk_size(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each of the SIZED policies and chunk sizes: means over the seeds of the first work."""
    return [
        {"policy": policy, "chunk_size": size}
        | {name: _means(runs, MAIN.title, policy, mode, size) for name, mode in zip(("off", "on"), MODES, strict=True)}
        for policy in SIZED
        for size in CHUNK_SIZES
    ]


def _means(
    runs: Sequence[dict[str, Any]], work: str, policy: str, mode: PrefixCacheMode, chunk_size: int
) -> dict[str, float]:
    wanted = (work, policy, mode, chunk_size)
    same = [one for one in runs if (one["work"], one["policy"], one["prefix_cache"], one["chunk_size"]) == wanted]
    return {name: statistics.fmean(one[name] for one in same) for name in FIGURES}


def markdown(table: Sequence[dict[str, Any]]) -> str:
    heads = ("work", "policy", "off: wall s", "steady", "on: wall s", "steady", "hits", "evictions", "times faster")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in table:
        off, on = row["off"], row["on"]
        before, after = (f"{one['wall_s']:.1f} | {one['steady']:.1%}" for one in (off, on))
        cells = (row["work"], row["policy"], before, after, f"{on['hit_rate']:.0%}", f"{on['evictions']:,.0f}")
        lines.append("| " + " | ".join((*cells, f"{row['times_faster']:.2f}")) + " |")
    return "\n".join(lines)


def markdown_of_sizes(table: Sequence[dict[str, Any]]) -> str:
    """Return a table of wall time and steady bubble, with a column for each chunk size."""
    lines = [f"| policy | cache | {' | '.join(map(str, CHUNK_SIZES))} |", "|---" * (len(CHUNK_SIZES) + 2) + "|"]
    for policy in dict.fromkeys(row["policy"] for row in table):
        here = [row for row in table if row["policy"] == policy]
        for mode in ("off", "on"):
            cells = (f"{row[mode]['wall_s']:.1f} s, {row[mode]['steady']:.1%}" for row in here)
            lines.append(f"| {policy} | {mode} | {' | '.join(cells)} |")
    return "\n".join(lines)


def microbatches(case: Case) -> dict[str, Any]:
    """Return what the microbatches of a run hold, without the first and the last quarter of them.

    The figures are the mean number of decodes, and the share of microbatches that have prompt tokens.
    """
    issued = simulate(case.experiment()).issued
    middle = slice(len(issued) // 4, -(len(issued) // 4))
    decodes, prefill_tokens = (list(issued.column(name))[middle] for name in ("decodes", "prefill_tokens"))
    return {
        "policy": case.policy,
        "prefix_cache": case.mode,
        "decodes": statistics.fmean(decodes),
        "with_prefill": sum(tokens > 0 for tokens in prefill_tokens) / len(prefill_tokens),
    }


def is_shown(case: Case) -> bool:
    """Check if `microbatches` of this run are part of the document."""
    return case.work == MAIN and case.seed == 0 and case.chunk_size == CHUNK_SIZE


def has_same_schedule(policy: str, requests: int, seed: int) -> bool:
    """Check that the cache changes no microbatch if nothing is shared."""
    cases = (Case(NOTHING_SHARED, policy, mode, requests, seed) for mode in MODES)
    off, on = ([(event.at_s, event.text) for event in simulate(case.experiment()).issued] for case in cases)
    return off == on


def draw(table: Sequence[dict[str, Any]], picture: Path) -> None:
    """Draw wall time and steady bubble of each policy on the first work, without and with the cache."""
    here = [row for row in table if row["work"] == MAIN.title]
    names = [row["policy"] for row in here]
    figure = make_subplots(cols=2, subplot_titles=("wall time, s", "steady bubble, %"), horizontal_spacing=0.06)
    for mode, title, colour in (("off", "no prefix cache", GREY), ("on", "prefix cache", BLUE)):
        for column, (name, factor) in enumerate((("wall_s", 1.0), ("steady", 100.0)), start=1):
            values = [factor * row[mode][name] for row in here]
            bars = go.Bar(x=names, y=values, name=title, marker_color=colour, showlegend=column == 1)
            figure.add_trace(bars.update(text=[f"{value:.1f}" for value in values], textposition="outside"), 1, column)
    figure.update_layout(
        width=1100,
        height=420,
        template="plotly_white",
        margin={"t": 60, "b": 40, "l": 30, "r": 10},
        legend={"orientation": "h", "x": 0.5, "xanchor": "center", "y": 1.16},
    )
    figure.update_xaxes(tickfont={"size": 10})
    photograph(figure.to_html(), ".plotly-graph-div", picture, drawn=".main-svg", width=1120, height=440)


@click.command()
@click.option("--requests", type=click.IntRange(min=64), default=256, show_default=True)
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
@click.option("--picture", type=click.Path(path_type=Path), help="PNG file for the plot.")
def main(requests: int, seeds: int, output: Path | None, picture: Path | None) -> None:
    record = Record.begin()
    cases = [
        Case(work, policy, mode, requests, seed)
        for work in WORKS
        for policy in work.policies
        for mode in MODES
        for seed in range(seeds)
    ]
    cases += [
        Case(MAIN, policy, mode, requests, seed, size)
        for policy in SIZED
        for mode in MODES
        for seed in range(seeds)
        for size in CHUNK_SIZES
        if size != CHUNK_SIZE
    ]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        runs = list(pool.map(run, cases))
        held = list(pool.map(microbatches, [case for case in cases if is_shown(case)]))
    same = {policy: has_same_schedule(policy, requests, seed=0) for policy in NOTHING_SHARED.policies}
    table, sizes = rows(WORKS, runs), by_chunk_size(runs)
    print(markdown(table), markdown_of_sizes(sizes), sep="\n\n", end="\n\n")
    for one in held:
        print(f"{one['policy']:14} {one['prefix_cache']:4} {one['decodes']:5.1f} decodes {one['with_prefill']:6.1%}")
    print("nothing shared, same schedule with and without the cache:", same)
    specs = {work.title: work.spec(requests, seed=0) for work in WORKS}
    figures = {
        "workloads": specs,
        "same schedule if nothing is shared": same,
        "rows": table,
        "chunk sizes": sizes,
        "microbatches of the first work, seed 0": held,
        "runs": runs,
    }
    record.write(output, figures)
    if picture is not None:
        draw(table, picture)


if __name__ == "__main__":
    main()
