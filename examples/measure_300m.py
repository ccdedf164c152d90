"""Bubbles on a 300M-parameter model with random weights: `sarathi` against `orca`, and 2 stages against 1.

    python examples/measure_300m.py --work-dir /tmp/m300 --output examples/figures/runtime-300m-cpu.json

Makes the checkpoint (16 layers, hidden 1024, bfloat16, seeded; 600 MB in the work directory) and the workload
`uniform:n=32,min=256,max=1024,pd=8,seed=0` (32 prompts of 256 to 1024 random tokens, an eighth as many new
ones unless --pd says otherwise, end of sequence ignored, all there at time 0), then runs `sarathi-pp
generate` in turn, several rounds of every case, one compute thread a stage. Speed is compared within a round
only: machines drift. Prints a table and writes every round's figures as JSON.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

CASES = {
    "sarathi, 2 stages": ("--stages", "2", "--policy", "sarathi"),
    "orca, 2 stages": ("--stages", "2", "--policy", "orca"),
    "sarathi, 1 stage": ("--stages", "1", "--policy", "sarathi"),
}
FIGURES = ("wall_s", "total_tokens_per_s", "bubble_ratio", "bubble_ratio_steady", "overlap", "microbatch_tokens_cv")


def make_checkpoint(directory: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=3712,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters", file=sys.stderr)
    model.save_pretrained(directory)


def make_workload(path: Path, prompt_to_output: int) -> None:
    draw = random.Random(0)
    with path.open("w") as file:
        for index in range(32):
            length = draw.randint(256, 1024)
            row = {
                "id": index,
                "prompt_token_ids": [draw.randrange(32000) for _ in range(length)],
                "max_new_tokens": max(1, length // prompt_to_output),
                "ignore_eos": True,
            }
            file.write(json.dumps(row) + "\n")


def run(work_dir: Path, options: tuple[str, ...]) -> dict[str, Any]:
    command = [
        *(sys.executable, "-P", "-m", "sarathi_pp", "generate", "--model", str(work_dir / "model")),
        *("--input", str(work_dir / "prompts.jsonl"), "--output", str(work_dir / "answers.jsonl"), "--overwrite"),
        *("--max-num-seqs", "32", "--chunk-size", "256", "--quiet", "--json", *options),
    ]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["failed"] == 0 and report["requests"] == 32, report
    return report


def median_of(rounds: list[dict[str, dict[str, Any]]], case: str, figure: str) -> float:
    return statistics.median(one[case][figure] for one in rounds)


def summary(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    speedups = [one["sarathi, 2 stages"]["wall_s"] / one["sarathi, 1 stage"]["wall_s"] for one in rounds]
    return {
        "median": {case: {figure: median_of(rounds, case, figure) for figure in FIGURES} for case in CASES},
        "wall of 2 stages / wall of 1": {
            "median": statistics.median(speedups),
            "min": min(speedups),
            "max": max(speedups),
        },
    }


@click.command()
@click.option("--work-dir", type=click.Path(path_type=Path), required=True)
@click.option("--pd", type=click.IntRange(min=1), default=8, show_default=True, help="Prompt tokens to output tokens.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Where the JSON goes.")
def main(work_dir: Path, pd: int, rounds: int, output: Path | None) -> None:
    work_dir.mkdir(parents=True, exist_ok=True)
    if not (work_dir / "model" / "config.json").exists():
        make_checkpoint(work_dir / "model")
    make_workload(work_dir / "prompts.jsonl", pd)
    results: list[dict[str, dict[str, Any]]] = []
    for index in range(rounds):
        results.append({})
        for case, options in CASES.items():
            report = results[-1][case] = run(work_dir, options)
            shown = "  ".join(f"{figure} {report[figure]:.3f}" for figure in FIGURES)
            print(f"round {index + 1}  {case:18} {shown}", flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE, text=True, check=True)
    document = {
        "commit": commit.stdout.strip(),
        "command": "python examples/measure_300m.py " + " ".join(sys.argv[1:]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.platform()}",
        **summary(results),
        "rounds": results,
    }
    print(json.dumps(document["median"], indent=2))
    print("wall of 2 stages / wall of 1:", document["wall of 2 stages / wall of 1"])
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
