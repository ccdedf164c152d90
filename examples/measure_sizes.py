"""Throughput over chunk size and P:D on real runs, and where SARATHI expects the most gain (arXiv 2308.16369, 5.1.3).

    python examples/measure_sizes.py --work-dir /tmp/m300 --output examples/figures/sizes.json

24 prompts of 128 to 512 tokens on the 298M model of measure_300m.py, which is made where it is not there, on two
stages, a compute thread each: `orca`, which cuts no prompt, and `sarathi` with chunk sizes of 64 to 512, at P:D 2 to
32. All take their turns in every round. Written after every round are medians and extremes, of tokens a second and of
what each size has more of them than `orca` in the same round; and for each size the P:D at which that is most in the
median, beside the paper's: where the decodes of half of the requests, B - 1 = 12, ride along with every chunk and
neither is left over. That is P:D = C / (B - 1) with C the prompt tokens of a microbatch, which are the chunk size
without its decodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from awake import awake
from measure_300m import make_checkpoint
from measure_growth import Point, run
from record import Record, spread

from sarathi_pp.bench.machine import stolen

NUM_SEQS, STAGES = 24, 2
DECODES = NUM_SEQS // STAGES
RATIOS = (2, 4, 8, 16, 32)
CHUNK_SIZES = (64, 128, 256, 512)
BASE = "orca"
KEPT = ("total_tokens_per_s", "bubble_ratio")
# Of each P:D and entrant, by name: the figures of every round.
Found = dict[str, dict[str, list[Mapping[str, float]]]]


def name_of(chunk_size: int) -> str:
    return f"sarathi {chunk_size}"


def points(work_dir: Path) -> Iterator[tuple[str, Point]]:
    for ratio in RATIOS:
        work = f"uniform:n={NUM_SEQS},min=128,max=512,pd={ratio},seed=0"
        given = ("--model", str(work_dir / "model"), "--stages", str(STAGES), "--max-num-seqs", str(NUM_SEQS))
        given += ("--layer-split", "even")
        yield BASE, Point(f"P:D {ratio}", 0, work, (*given, "--policy", BASE))
        for size in CHUNK_SIZES:
            options = (*given, "--policy", "sarathi", "--chunk-size", str(size))
            yield name_of(size), Point(f"P:D {ratio}", size, work, options)


def summary(found: Found) -> dict[str, Any]:
    gains = {
        at: {
            name: [one / base for one, base in zip(rates(of_name), rates(of_at[BASE]), strict=True)]
            for name, of_name in of_at.items()
        }
        for at, of_at in found.items()
    }
    middle = {at: {name: spread(of_name)["median"] for name, of_name in of_at.items()} for at, of_at in gains.items()}
    return {
        "runs": {
            at: {name: {key: spread([one[key] for one in of_name]) for key in KEPT} for name, of_name in of_at.items()}
            for at, of_at in found.items()
        },
        "times the tokens/s of orca": {
            at: {name: spread(of_name) for name, of_name in of_at.items()} for at, of_at in gains.items()
        },
        "most gain": {
            name_of(size): {
                "at": max(middle, key=lambda at: middle[at][name_of(size)]),
                "C / (B - 1)": (size - DECODES) / DECODES,
            }
            for size in CHUNK_SIZES
        },
    }


def rates(runs: Sequence[Mapping[str, float]]) -> list[float]:
    return [one["total_tokens_per_s"] for one in runs]


@click.command()
@click.option("--work-dir", type=click.Path(path_type=Path), required=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Where the JSON goes; written after every round.")
def main(work_dir: Path, rounds: int, output: Path | None) -> None:
    record = Record.begin()
    work_dir.mkdir(parents=True, exist_ok=True)
    if not (work_dir / "model" / "config.json").exists():
        make_checkpoint(work_dir / "model")
    found: Found = {}
    for made in range(1, rounds + 1):
        with awake(), stolen() as lost:
            for name, point in points(work_dir):
                figures = run(point, work_dir)
                found.setdefault(point.axis, {}).setdefault(name, []).append(figures)
                print(point.axis, name, " ".join(f"{figures[key]:.4g}" for key in KEPT), flush=True)
        record.write(output, {"rounds made": made, "stolen in the last": lost.share, **summary(found)})


if __name__ == "__main__":
    main()
