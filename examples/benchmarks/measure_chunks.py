"""Measure the cost of chunks, and of decodes that share a microbatch with a chunk: one stage on one core.

    python examples/benchmarks/measure_chunks.py --model /tmp/m300/model --output docs/benchmarks/results/chunks.json

riding      A chunk of 256 tokens after 256 earlier ones, with 1 to 32 decodes at position 400, and the same decodes
            alone. The figures are the milliseconds that each decode adds to the chunk, and that it takes alone
            (SARATHI, arXiv 2308.16369, Table 2). The size of the chunk does not change. The LM head, which the last
            stage has, is not included.
chunking    A prompt of 2,048 tokens in chunks of 64 to 1,024, as a ratio to the time of the whole prompt (section 5.4).

Loads half of the layers of a bfloat16 checkpoint. In each round every microbatch takes a turn. The document has medians
and extremes over the rounds. Ratios and differences are taken within a round.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from awake import awake
from one_stage import Extents, Stage, load, on_one_core, seconds_of
from record import Record, spread

from sarathi_pp.bench.machine import stolen

CHUNK: Extents = [(256, 256)]
DECODES = (1, 2, 4, 8, 16, 32)
CONTEXT = 400
PROMPT = 2048
CHUNK_SIZES = (64, 128, 256, 512, 1024, PROMPT)


def riding(stage: Stage, rounds: int) -> dict[str, Any]:
    decodes = {count: [(CONTEXT, 1)] * count for count in DECODES}
    cases: dict[tuple[str, int], tuple[Stage, Extents]] = {}
    for count, rows in decodes.items():
        for name, extents in (("alone", rows), ("chunk", CHUNK), ("both", CHUNK + rows)):
            cases[name, count] = (stage, extents)
    taken = seconds_of(cases, rounds)
    found = {}
    for count in DECODES:
        pairs = zip(taken["both", count], taken["chunk", count], strict=True)
        found[str(count)] = {
            "riding, ms": spread([1000 * (both - chunk) / count for both, chunk in pairs]),
            "alone, ms": spread([1000 * seconds / count for seconds in taken["alone", count]]),
        }
    return found


def chunking(stage: Stage, rounds: int) -> dict[str, Any]:
    starts = {size: range(0, PROMPT, size) for size in CHUNK_SIZES}
    taken = seconds_of({(at, size): (stage, [(at, size)]) for size in CHUNK_SIZES for at in starts[size]}, rounds)
    prompts = {
        size: [sum(of_round) for of_round in zip(*(taken[at, size] for at in starts[size]), strict=True)]
        for size in CHUNK_SIZES
    }
    return {
        str(size): {
            "s": spread(of_size),
            "times as long as whole": spread([a / b for a, b in zip(of_size, prompts[PROMPT], strict=True)]),
        }
        for size, of_size in prompts.items()
    }


def show(title: str, found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    print(title)
    for name, figures in found.items():
        cells = (f"{figure} {of['median']:.2f} ({of['min']:.2f} to {of['max']:.2f})" for figure, of in figures.items())
        print(f"{name:>6}  {'   '.join(cells)}", flush=True)


@click.command()
@click.option("--model", type=click.Path(path_type=Path), required=True, help="Checkpoint that measure_300m.py made.")
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
def main(model: Path, rounds: int, output: Path | None) -> None:
    record = Record.begin()
    on_one_core()
    with awake(), stolen() as lost:
        stage = load(model, PROMPT)
        found = {"riding": riding(stage, rounds), "chunking": chunking(stage, rounds)}
    for title, figures in found.items():
        show(title, figures)
    record.write(output, {"rounds": rounds, "stolen": lost.share, **found})


if __name__ == "__main__":
    main()
