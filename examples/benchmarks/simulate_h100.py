"""Simulate policies on DeepSeek-V3 and Qwen3.5-397B-A17B in pipelines of H100 hosts: the presets of `simulate`.

    python examples/benchmarks/simulate_h100.py --output docs/benchmarks/results/h100-policies.json

Each policy has its best chunk size of CHUNK_SIZES. A policy without chunks has one row of its own size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from record import Record

from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.layer_shape import count_kinds
from sarathi_pp.sim.experiment import Experiment, report_of
from sarathi_pp.sim.presets import preset
from sarathi_pp.sim.workload import parse_workload

PRESETS = (
    "deepseek-v3-h100-tp8pp2",
    "deepseek-v3-h100-tp8pp4",
    "qwen3.5-397b-h100-tp8pp2",
    "qwen3.5-397b-h100-tp8pp4",
)
POLICIES = ("orca", "vllm", "sarathi", "balanced")
CHUNK_SIZES = (512, 1024, 2048, 4096, 8192)


def describe(name: str, profile: Profile) -> dict[str, Any]:
    """Return the layer split of a preset and the KV tokens for which it has room."""
    spans = [stage.layers for stage in profile.cost.stages]
    kinds = [count_kinds(layer.kind for layer in profile.cost.layer_costs[slice(*span)]) for span in spans]
    return {
        "preset": name,
        "split": [end - first for first, end in spans],
        "kinds": kinds,
        "ridge": profile.cost.ridge,
        "kv_tokens": profile.pages * profile.page_size,
        "max_num_seqs": profile.max_num_seqs,
    }


def simulate_policy(profile: Profile, policy: str, spec: str) -> dict[str, Any]:
    """Return the figures of a policy at its best chunk size."""
    chosen = parse_policy(policy)
    reports = {
        size: report_of(Experiment(profile=profile, workload=parse_workload(spec), policy=chosen, chunk_size=size))
        for size in (CHUNK_SIZES if chosen.kind.uses_chunk_size else CHUNK_SIZES[-1:])
    }
    best = max(reports, key=lambda size: reports[size]["total_tokens_per_s"])
    return {
        "policy": policy,
        "chunk_size": best if chosen.kind.uses_chunk_size else None,
        "tokens_per_s": reports[best]["total_tokens_per_s"],
        "bubble_ratio": reports[best]["bubble_ratio"],
        "bubble_ratio_steady": reports[best]["bubble_ratio_steady"],
        "tokens_per_s_by_chunk_size": {size: report["total_tokens_per_s"] for size, report in reports.items()},
    }


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| preset | policy | chunk size | tokens/s | bubble | steady bubble |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        for found in row["policies"]:
            size = f"{found['chunk_size']:,}" if found["chunk_size"] else "none"
            steady = f"{found['bubble_ratio_steady']:.1%}" if found["bubble_ratio_steady"] is not None else "-"
            yield (
                f"| {row['preset']} | {found['policy']} | {size} | {found['tokens_per_s']:,.0f} | "
                f"{found['bubble_ratio']:.1%} | {steady} |"
            )


@click.command()
@click.option("--workload", "spec", default="zipf:n=2048,min=1024,max=4096,theta=0.4,pd=10", show_default=True)
@click.option("--presets", default=",".join(PRESETS), show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
def main(spec: str, presets: str, output: Path | None) -> None:
    record, rows = Record.begin(), []
    for name in presets.split(","):
        profile = preset(name)
        row = describe(name, profile)
        row["policies"] = [simulate_policy(profile, policy, spec) for policy in POLICIES]
        rows.append(row)
        click.echo(f"{name}: layers {row['split']}, ridge {row['ridge']:,}, {row['kv_tokens']:,} tokens of KV")
    click.echo("\n".join(lines(rows)))
    record.write(output, {"workload": spec, "rows": rows})


if __name__ == "__main__":
    main()
