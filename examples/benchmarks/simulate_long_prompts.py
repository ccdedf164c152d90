"""Simulate one prompt of 128k or 1M tokens on 1 to 8 H100 hosts, and print the strong-scaling efficiency.

    python examples/benchmarks/simulate_long_prompts.py --output docs/benchmarks/results/h100-long-prompts.json

The model is DeepSeek-V3 with FP8 weights. Each stage is a host of 8 H100 (sarathi_pp/sim/h100_hosts.py). Attention is
computed in one of two ways:

    absorbed   queries are as wide as latents, as in this runtime: 2 * 512 + 64 products per head, query and key
    expanded   keys and values are made of the latents, as other engines do for prompts: 192 + 128 products. The time to
               make them is left out.

    speedup(P)    = seconds on one host / seconds on P hosts
    efficiency(P) = speedup(P) / P

The layers are split by the time of a chunk in the middle of the prompt. Each time is that of the best chunk size. One
host has no bubble, and takes the same time with every policy.
The KV cache is as large as the prompt. `fits` says if the GPUs have room for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from record import Record

from sarathi_pp.core.cost.model import Load
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.sim.experiment import Experiment, report_of, simulate
from sarathi_pp.sim.h100_hosts import h100_hosts
from sarathi_pp.sim.published_models import PublishedModel, deepseek_v3
from sarathi_pp.sim.workload import parse_workload

LENGTHS = (131_072, 1_048_576)
HOSTS = (2, 4, 8)
POLICIES = ("sarathi", "sglang", "sglang:dynamic=1", "balanced")
# Products per row and key of all 128 heads, with expanded keys and values.
EXPANDED = 128 * (192 + 128)
# The layers are split by the time of a chunk of this size in the middle of the prompt.
LOAD_TOKENS = 2048
CHUNK_SIZES = (512, 1024, 2048, 4096, 8192, 16_384)
# LMSYS blog of 2026-01-15: DeepSeek-V3.1 on H20, four stages of 8 GPUs against one, chunks of 12k tokens that shrink.
PUBLISHED = {"speedup": 3.31, "efficiency": 0.828, "stages": 4}


def model_of(attention: str) -> PublishedModel:
    """Return DeepSeek-V3 with absorbed or expanded attention."""
    model = deepseek_v3()
    if attention == "absorbed":
        return model
    return replace(model, shapes=tuple(replace(shape, score_channels=EXPANDED) for shape in model.shapes))


def experiment(attention: str, num_hosts: int, policy: str, chunk_size: int, length: int) -> tuple[Experiment, bool]:
    """Return an experiment with one prompt, and whether the GPUs have room for it."""
    load = Load(LOAD_TOKENS, LOAD_TOKENS * length / 2, 0, 0)
    profile = h100_hosts(model_of(attention), num_hosts, weight_bytes=1, load=load)
    needed = length // profile.page_size + 2
    return Experiment(
        profile=replace(profile, pages=needed),
        workload=parse_workload(f"fixed:n=1,prompt={length},output=1"),
        policy=parse_policy(policy),
        chunk_size=chunk_size,
        prefix_cache="off",
    ), profile.pages >= needed


def best_of(attention: str, num_hosts: int, policy: str, length: int) -> dict[str, Any]:
    """Return the figures of a policy at its fastest chunk size."""
    runs = {size: experiment(attention, num_hosts, policy, size, length) for size in CHUNK_SIZES}
    reports = {size: report_of(run) for size, (run, _) in runs.items()}
    best = min(reports, key=lambda size: reports[size]["wall_s"])
    run, fits = runs[best]
    sizes = [event.load.num_tokens for event in simulate(run).issued]
    return {
        "stages": num_hosts,
        "policy": policy,
        "split": [end - first for first, end in (stage.layers for stage in run.profile.cost.stages)],
        "fits": fits,
        "chunk_size": best,
        "largest_chunk": max(sizes),
        "smallest_chunk": min(sizes[:-1]),  # the last one has what is left
        "microbatches": len(sizes),
        "wall_s": reports[best]["wall_s"],
        "bubble_ratio": reports[best]["bubble_ratio"],
        "wall_s_by_chunk_size": {size: report["wall_s"] for size, report in reports.items()},
    }


def simulate_length(attention: str, length: int) -> dict[str, Any]:
    """Return the figures of one prompt length: one host, and every policy on several."""
    alone = best_of(attention, 1, "sarathi", length)
    rows = [best_of(attention, num_hosts, policy, length) for num_hosts in HOSTS for policy in POLICIES]
    for row in rows:
        row["speedup"] = alone["wall_s"] / row["wall_s"]
        row["efficiency"] = row["speedup"] / row["stages"]
    return {"attention": attention, "prompt_tokens": length, "one_host": alone, "rows": rows}


def lines(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    names = ("attention", "prompt", "hosts", "policy", "chunk size", "chunks", "seconds", "bubble", "speedup")
    yield f"| {' | '.join(names)} | efficiency | fits |"
    yield "|---" * (len(names) + 2) + "|"
    for length in found:
        work = f"{length['attention']} | {length['prompt_tokens']:,}"
        for row in ({**length["one_host"], "policy": "any", "speedup": 1.0, "efficiency": 1.0}, *length["rows"]):
            yield (
                f"| {work} | {row['stages']} | {row['policy']} | {row['chunk_size']:,} | {row['microbatches']:,} | "
                f"{row['wall_s']:,.1f} | {row['bubble_ratio']:.1%} | {row['speedup']:.2f} | {row['efficiency']:.1%} | "
                f"{'yes' if row['fits'] else 'no'} |"
            )


@click.command()
@click.option("--lengths", default=",".join(map(str, LENGTHS)), show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
def main(lengths: str, output: Path | None) -> None:
    record = Record.begin()
    found = [simulate_length(way, int(length)) for way in ("absorbed", "expanded") for length in lengths.split(",")]
    click.echo("\n".join(lines(found)))
    click.echo(
        f"published: SGLang on H20, {PUBLISHED['stages']} stages: speedup {PUBLISHED['speedup']}, "
        f"efficiency {PUBLISHED['efficiency']:.1%}"
    )
    record.write(output, {"published": PUBLISHED, "lengths": found})


if __name__ == "__main__":
    main()
