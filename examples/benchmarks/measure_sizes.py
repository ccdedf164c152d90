"""Measure throughput by chunk size and P:D in real runs, and compare the best P:D with that of SARATHI.

    python examples/benchmarks/measure_sizes.py --work-dir /tmp/m300 --output docs/benchmarks/results/sizes.json

There are 48 prompts of 128 to 384 tokens. 16 of them run at a time, on two stages with one compute thread each. The
model is the 298M model of measure_300m.py, which is made if it does not exist. The runs are `orca`, which cuts no
prompt, and `sarathi` with chunk sizes of 32 to 256, at P:D 2 to 64. All take turns in every round.

The document is written after every round. It has medians and extremes of tokens per second, and of their ratio to
`orca` in the same round. For each size it has the P:D with the largest median gain. The paper expects it at C / (B - 1)
(arXiv 2308.16369, section 5.1.3). A microbatch has half of the running sequences, so B - 1 = 7 decodes ride on a chunk.
C is the chunk size without these decodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from awake import awake
from measure_300m import Work, last_json, make_checkpoint, start
from record import Record, spread

from sarathi_pp.bench.contest import write_prompts
from sarathi_pp.bench.machine import stolen
from sarathi_pp.sim.workload import parse_workload

STAGES, RUNNING = 2, 16
RIDING = RUNNING // STAGES - 1
RATIOS = (2, 4, 8, 16, 32, 64)
CHUNK_SIZES = (32, 64, 128, 256)
BASE = "orca"
KEPT = ("total_tokens_per_s", "bubble_ratio")
# The figures of each round, by P:D and entrant.
Found = dict[str, dict[str, list[Mapping[str, float]]]]


def entrants() -> Iterator[tuple[str, tuple[str, ...]]]:
    yield BASE, ("--policy", BASE)
    for size in CHUNK_SIZES:
        yield name_of(size), ("--policy", "sarathi", "--chunk-size", str(size))


def name_of(chunk_size: int) -> str:
    return f"sarathi {chunk_size}"


def run(work_dir: Path, ratio: int, options: Sequence[str]) -> Mapping[str, float]:
    rows, answers = work_dir / "sizes-rows.jsonl", work_dir / "sizes-answers.jsonl"
    write_prompts(rows, parse_workload(f"uniform:n=48,min=128,max=384,pd={ratio},seed=0").requests())
    given = ("--max-num-seqs", str(RUNNING), "--layer-split", "even", "--input", str(rows), "--output", str(answers))
    printed = answers.with_suffix(".printed")
    process = start(Work(work_dir, "bfloat16"), "generate", STAGES, printed, *given, *options)
    if process.wait():
        raise click.ClickException(f"{' '.join(options)} at P:D {ratio} ended with code {process.returncode}")
    report = last_json(printed)
    assert report["failed"] == 0, report
    return {key: report[key] for key in KEPT}


def summary(found: Found) -> dict[str, Any]:
    gains = {ratio: {name: gain(of_ratio, name) for name in of_ratio} for ratio, of_ratio in found.items()}
    runs = {
        ratio: {name: {key: spread([one[key] for one in runs]) for key in KEPT} for name, runs in of_ratio.items()}
        for ratio, of_ratio in found.items()
    }
    peaks = {
        name_of(size): {
            "P:D": int(max(gains, key=lambda ratio: gains[ratio][name_of(size)]["median"])),
            "C / (B - 1)": (size - RIDING) / RIDING,
        }
        for size in CHUNK_SIZES
    }
    return {"most gain": peaks, "times the tokens/s of orca": gains, "runs": runs}


def gain(of_ratio: Mapping[str, Sequence[Mapping[str, float]]], name: str) -> dict[str, float]:
    rates, base = ([one["total_tokens_per_s"] for one in of_ratio[of]] for of in (name, BASE))
    return spread([one / other for one, other in zip(rates, base, strict=True)])


@click.command()
@click.option("--work-dir", type=click.Path(path_type=Path), required=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write after every round.")
def main(work_dir: Path, rounds: int, output: Path | None) -> None:
    record = Record.begin()
    work_dir.mkdir(parents=True, exist_ok=True)
    if not (work_dir / "model" / "config.json").exists():
        make_checkpoint(work_dir / "model")
    found: Found = {str(ratio): {name: [] for name, _ in entrants()} for ratio in RATIOS}
    for made in range(1, rounds + 1):
        with awake(), stolen() as lost:
            for ratio in RATIOS:
                for name, options in entrants():
                    figures = run(work_dir, ratio, options)
                    found[str(ratio)][name].append(figures)
                    print(f"P:D {ratio}  {name}  " + " ".join(f"{value:.4g}" for value in figures.values()), flush=True)
        document = record.write(output, {"rounds made": made, "stolen in the last": lost.share, **summary(found)})
    print(json.dumps(document["most gain"]))


if __name__ == "__main__":
    main()
