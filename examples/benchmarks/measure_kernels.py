"""Measure the gain of each CPU kernel: microbatches of one stage with all kernels, and without each of them.

    python examples/benchmarks/measure_kernels.py --model /tmp/m300/model --output docs/benchmarks/results/kernels.json

Loads half of the layers of a bfloat16 checkpoint once per variant. Runs the same microbatches through all variants in
turn, on one core. Also runs rows through the LM head alone, as a first stage computes it. Prints the milliseconds per
microbatch, and the ratio of the times without and with the kernel. Writes both as JSON, with the spread over the
rounds.

tests/model/fuse/ tests that kernels do not change results: test_rewrite.py, test_packed_linear.py, test_attention.py,
test_bare_model.py. The gain of huge pages cannot be measured here: weights that a process loads later are read as fast
without them.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import click
import torch
from awake import awake
from one_stage import CPU, TURNS, Extents, Replaced, Stage, load, on_one_core, replacing, seconds_of
from record import Record, spread

from sarathi_pp.bench.machine import stolen
from sarathi_pp.model import loader
from sarathi_pp.model.attention import numba
from sarathi_pp.model.fuse import packed_linear, rewrite
from sarathi_pp.model.loader import load_lm_head
from sarathi_pp.model.stage_model import LMHead

ALL = "all"
# For each variant without a kernel, the replacements in the package while its stage is loaded and computes.
WITHOUT: dict[str, Replaced] = {
    ALL: (),
    "one call of all layers": ((loader, "compile_layers", lambda layers: False),),
    "fused layers": ((rewrite, "_part", lambda kit, child: None), (rewrite, "_layer", lambda child: None)),
    "own products and fused layers": ((rewrite, "has_gemm", bool), (packed_linear, "has_gemm", bool)),
    "packed weights and fused layers": ((loader, "fuse", lambda module: 0),),
    "the choice of tiles": ((packed_linear, "_most_high_rows", lambda linears, now: 112),),
    "own attention of chunks and decodes": (),
    "registers in attention": ((numba.NumbaAttention, "fits_simd", lambda self, kv: False),),
}
TORCH_ATTENTION = "own attention of chunks and decodes"
HEAD_ROWS = 16
WITHOUT_OF_HEAD: dict[str, Replaced] = {
    ALL: (),
    "a bare head": (
        (loader, "use_bare_model", lambda module, name: False),
        (loader, "bare_lm_head", lambda module, name: None),
    ),
}


def microbatches() -> dict[str, Extents]:
    return {
        "1 decode at 100": [(100, 1)],
        "16 decodes at 100": [(100, 1)] * 16,
        "16 decodes at 700": [(700, 1)] * 16,
        "64 tokens behind 256": [(256, 64)],
        "256 tokens behind 512": [(512, 256)],
        "96 tokens behind 256, 16 decodes at 700": [(256, 96), *[(700, 1)] * 16],
    }


def load_without(directory: Path, kernel: str) -> Stage:
    most_tokens = max(sum(count for _, count in extents) for extents in microbatches().values())
    attention = "sdpa" if kernel == TORCH_ATTENTION else "auto"
    return load(directory, most_tokens, replaced=WITHOUT[kernel], attention=attention)


def measure(stages: dict[str, Stage], rounds: int) -> dict[str, Any]:
    return {
        name: compared(name, seconds_of({variant: (stage, extents) for variant, stage in stages.items()}, rounds))
        for name, extents in microbatches().items()
    }


def measure_heads(directory: Path, rounds: int) -> dict[str, Any]:
    heads: dict[str, LMHead] = {}
    for variant, replaced in WITHOUT_OF_HEAD.items():
        with replacing(replaced):
            heads[variant] = load_lm_head(directory, torch.bfloat16, CPU)
            packed_linear.warm_linears(heads[variant].module, HEAD_ROWS, time.perf_counter)
    rows = torch.randn(HEAD_ROWS, heads[ALL].size, dtype=torch.bfloat16)
    taken: dict[str, list[float]] = {variant: [] for variant in heads}
    for turn in range(rounds + 1):
        for variant, head in heads.items():
            seconds = min(head_seconds(head, rows) for _ in range(TURNS))
            if turn:
                taken[variant].append(seconds)
    return compared(f"the head of {HEAD_ROWS} rows", taken)


def head_seconds(head: LMHead, rows: torch.Tensor) -> float:
    begin_s = time.perf_counter()
    head.forward(rows)
    return time.perf_counter() - begin_s


def compared(name: str, taken: dict[str, list[float]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variant, of_variant in taken.items():
        ratios = [without / whole for without, whole in zip(of_variant, taken[ALL], strict=True)]
        found[variant] = {"ms": 1000 * statistics.median(of_variant), "times as long": spread(ratios)}
        print(
            f"{name:40}  without {variant:36}" if variant != ALL else f"{name:40}  with all of them {'':27}",
            f"{found[variant]['ms']:8.2f} ms  {found[variant]['times as long']['median']:.2f}",
            flush=True,
        )
    return found


@click.command()
@click.option("--model", type=click.Path(path_type=Path), required=True, help="Checkpoint that measure_300m.py made.")
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
def main(model: Path, rounds: int, output: Path | None) -> None:
    record = Record.begin()
    on_one_core()
    with awake(), stolen() as lost:
        found = measure({kernel: load_without(model, kernel) for kernel in WITHOUT}, rounds)
        found[f"the head of {HEAD_ROWS} rows"] = measure_heads(model, rounds)
    document = record.write(output, {"rounds": rounds, "stolen": lost.share, "without": found})
    print(json.dumps({name: value for name, value in document.items() if name != "without"}))


if __name__ == "__main__":
    main()
