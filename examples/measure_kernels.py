"""What each of the CPU kernels is worth: one stage's microbatches with all of them, and with each taken away.

    python examples/measure_kernels.py --model /tmp/m300/model --output examples/figures/kernels.json

Loads half of a bfloat16 checkpoint's layers once for each variant and runs the same microbatches through all of them,
in turn, on one core. Prints milliseconds a microbatch (median of the rounds) and how many times as long it takes
without the kernel (median and spread of the rounds' ratios), and writes them as JSON. What must not change is tested:
tests/model/test_fuse.py, test_packed.py, test_attention.py.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from awake import awake
from record import Record, spread

from sarathi_pp.bench.machine import stolen
from sarathi_pp.model import fuse, packed, slice
from sarathi_pp.model.attention import choose_backend, numba
from sarathi_pp.model.inputs import Span, StageInputs, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.packed import warm_linears
from sarathi_pp.model.slice import StageModel, load_stage
from sarathi_pp.model.support import check_model

CPU = torch.device("cpu")
PAGE_SIZE = 16
NUM_PAGES = 1024
ALL = "all"
# Tokens behind, and tokens of each sequence in the microbatch.
Extents = list[tuple[int, int]]
# What is taken away, by what has to be replaced for it while a stage is loaded.
WITHOUT: dict[str, tuple[tuple[object, str, Any], ...]] = {
    ALL: (),
    "fused layers": ((fuse, "_part", lambda child: None), (fuse, "_layer", lambda child: None)),
    "own products and fused layers": ((fuse, "has_panels", bool), (packed, "has_panels", bool)),
    "packed weights and fused layers": ((slice, "fuse", lambda module: 0),),
    "the choice of tiles": ((packed, "_most_high_rows", lambda linears, now: 112),),
    "own attention of chunks and decodes": (),
    "registers in attention": ((numba.NumbaAttention, "_fits_lanes", lambda self, kv: False),),
}
TORCH_ATTENTION = "own attention of chunks and decodes"


@dataclass(frozen=True)
class Stage:
    """A variant of it, with its pages filled."""

    replaced: tuple[tuple[object, str, Any], ...]
    model: StageModel
    kv: KVShard

    def seconds(self, x: torch.Tensor, inputs: StageInputs) -> float:
        with replacing(self.replaced):
            begin_s = time.perf_counter()
            self.model.forward(x, inputs, self.kv)
            return time.perf_counter() - begin_s


@contextmanager
def replacing(replaced: tuple[tuple[object, str, Any], ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def load(directory: Path, variant: str, most_tokens: int) -> Stage:
    """most_tokens: of a microbatch."""
    facts = check_model(directory)
    layers = (0, facts.num_layers // 2)
    backend = choose_backend("sdpa" if variant == TORCH_ATTENTION else "auto", CPU, PAGE_SIZE)
    with replacing(WITHOUT[variant]):
        model = load_stage(directory, layers, facts.num_layers, torch.bfloat16, CPU, backend)
        warm_linears(model.module, most_tokens, time.perf_counter)
    kv = KVShard(layers, NUM_PAGES, PAGE_SIZE, facts.num_kv_heads, facts.head_dim, torch.bfloat16, CPU)
    for layer in range(*layers):
        kv.keys(layer).normal_()
        kv.values(layer).normal_()
    return Stage(WITHOUT[variant], model, kv)


def microbatches() -> dict[str, Extents]:
    return {
        "1 decode at 100": [(100, 1)],
        "16 decodes at 100": [(100, 1)] * 16,
        "16 decodes at 700": [(700, 1)] * 16,
        "64 tokens behind 256": [(256, 64)],
        "256 tokens behind 512": [(512, 256)],
        "96 tokens behind 256, 16 decodes at 700": [(256, 96), *[(700, 1)] * 16],
    }


def inputs_of(extents: Extents) -> StageInputs:
    """Pages lie scattered, as after a while of serving."""
    pages = iter(torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(0)).tolist())
    spans = [Span(start, count, list(islice(pages, -(-(start + count) // PAGE_SIZE)))) for start, count in extents]
    return build_inputs(spans, (), PAGE_SIZE, CPU)


def measure(stages: dict[str, Stage], rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, extents in microbatches().items():
        inputs = inputs_of(extents)
        x = torch.arange(inputs.num_tokens) + 3
        taken: dict[str, list[float]] = {variant: [] for variant in stages}
        for turn in range(rounds + 1):
            for variant, stage in stages.items():
                seconds = min(stage.seconds(x, inputs) for _ in range(3))
                if turn:  # the first one compiles
                    taken[variant].append(seconds)
        found[name] = {}
        for variant, of_variant in taken.items():
            ratios = [without / whole for without, whole in zip(of_variant, taken[ALL], strict=True)]
            found[name][variant] = {
                "ms": 1000 * statistics.median(of_variant),
                "times as long": spread(ratios),
            }
            print(
                f"{name:40}  without {variant:36}" if variant != ALL else f"{name:40}  with all of them {'':27}",
                f"{found[name][variant]['ms']:8.2f} ms  {found[name][variant]['times as long']['median']:.2f}",
                flush=True,
            )
    return found


@click.command()
@click.option("--model", type=click.Path(path_type=Path), required=True, help="As measure_300m.py makes one.")
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
def main(model: Path, rounds: int, output: Path | None) -> None:
    record = Record.begin()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    most_tokens = max(sum(count for _, count in extents) for extents in microbatches().values())
    with awake(), stolen() as lost:
        found = measure({variant: load(model, variant, most_tokens) for variant in WITHOUT}, rounds)
    document = record.write(output, {"rounds": rounds, "stolen": lost.share, "without": found})
    print(json.dumps({name: value for name, value in document.items() if name != "without"}))


if __name__ == "__main__":
    main()
