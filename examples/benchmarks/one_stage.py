"""One stage alone on one core, without a pipeline: the time of its microbatches."""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch

from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.model.attention import choose_backend
from sarathi_pp.model.fuse.packed_linear import warm_linears
from sarathi_pp.model.inputs import Span, StageInputs, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import load_stage
from sarathi_pp.model.stage_model import StageModel

CPU = torch.device("cpu")
PAGE_SIZE = 16
NUM_PAGES = 1024
TURNS = 3

# For each sequence of a microbatch, its earlier tokens and its tokens.
Extents = list[tuple[int, int]]
# The replacements that make a variant of a stage: an owner in the package, a name, and the new value.
Replaced = Sequence[tuple[object, str, Any]]
Case = TypeVar("Case", bound=Hashable)


@dataclass(frozen=True)
class Stage:
    """A stage with filled KV pages.

    Attributes:
        replaced: replacements that apply while the stage computes.
    """

    model: StageModel
    kv: KVShard
    replaced: Replaced = ()

    def seconds(self, x: torch.Tensor, inputs: StageInputs) -> float:
        with replacing(self.replaced):
            begin_s = time.perf_counter()
            self.model.forward(x, inputs, self.kv)
            return time.perf_counter() - begin_s


@contextmanager
def replacing(replaced: Replaced) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def on_one_core() -> None:
    """Bind this process to one core, with one thread."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def load(directory: Path, most_tokens: int, *, replaced: Replaced = (), attention: str = "auto") -> Stage:
    """Load half of the layers of a bfloat16 checkpoint.

    Args:
        most_tokens: most tokens of a microbatch.
    """
    facts = check_model(directory)
    layers = (0, facts.num_layers // 2)
    backend = choose_backend(attention, CPU, PAGE_SIZE)
    with replacing(replaced):
        model = load_stage(directory, layers, facts.num_layers, torch.bfloat16, CPU, backend)
        warm_linears(model.module, most_tokens, time.perf_counter)
    kv = KVShard(layers, NUM_PAGES, PAGE_SIZE, facts.caches, torch.bfloat16, CPU)
    for layer in range(*layers):
        kv.keys(layer).normal_()
        kv.values(layer).normal_()
    return Stage(model, kv, replaced)


def inputs_of(extents: Extents) -> StageInputs:
    """Build the inputs of a microbatch. Its pages are scattered, as after some time of serving."""
    pages = iter(torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(0)).tolist())
    spans = [Span(start, count, list(islice(pages, -(-(start + count) // PAGE_SIZE)))) for start, count in extents]
    return build_inputs(spans, (), PAGE_SIZE, CPU)


def seconds_of(cases: Mapping[Case, tuple[Stage, Extents]], rounds: int) -> dict[Case, list[float]]:
    """Return, for each case, the shortest of three turns in each round. An uncounted round before them compiles."""
    prepared = {case: (stage, inputs_of(extents)) for case, (stage, extents) in cases.items()}
    taken: dict[Case, list[float]] = {case: [] for case in cases}
    for turn in range(rounds + 1):
        for case, (stage, inputs) in prepared.items():
            x = torch.arange(inputs.num_tokens) + 3
            seconds = min(stage.seconds(x, inputs) for _ in range(TURNS))
            if turn:
                taken[case].append(seconds)
    return taken
