"""A check that stages compute what transformers computes, on this machine, for one model.

    transformers' own layers   prompts in one piece      ->  activations before and after every layer, logits
    stages                     the same, as in a run:    ->  the same rows
                               chunks, then decodes,
                               several prompts at once

Every stage gets the activations that transformers has there. So a difference does not travel, and the layer that causes
it is found by computing each layer of the stage alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from sarathi_pp.core.partition import partition
from sarathi_pp.model.attention import AttentionBackend, choose_backend
from sarathi_pp.model.checkpoint.support import ModelFacts, check_model
from sarathi_pp.model.checkpoint.tensor_file import ReadCount
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import load_stage, stage_bytes
from sarathi_pp.model.reference import Reference
from sarathi_pp.process.activity import Activity

SCHEMA = "sarathi-pp/check/1"
# Largest difference of a row that is rounding, see _error.
MOST_ERROR = 1e-4
# Two logits that differ by less than this share of the largest one are a close call: rounding may decide between them.
_CLOSE = 1e-4
_PAGE_SIZE = 16
_CHUNK = 48
# Tokens at the end of each prompt that are computed one at a time, as decodes are.
_DECODES = 4
# Share of the available memory that transformers' whole model and one stage may take.
_ROOM = 0.7
_CPU = torch.device("cpu")

Layers = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StageCheck:
    """The result for one stage.

    Attributes:
        layers: (first, end).
        error: largest difference of a row from transformers, as a share of what the stage adds to the row.
        first_layer: index of the first layer that differs by more than rounding; None if none does alone.
        layer_error: the largest difference of that layer.
    """

    layers: Layers
    error: float
    first_layer: int | None = None
    layer_error: float | None = None

    @property
    def exact(self) -> bool:
        return self.error <= MOST_ERROR


@dataclass
class ModelCheck:
    """The result for a model.

    Attributes:
        whole: transformers computed its whole model at once. Otherwise it computed one stage's layers at a time,
            because they do not fit into memory together.
        num_tokens: number of positions whose next token was compared.
        num_equal: number of them whose next token is equal.
        num_close: number of others that are close calls.
    """

    model: str
    model_type: str
    quantised: str | None
    whole: bool
    attention: str
    stages: list[StageCheck] = field(default_factory=list)
    num_tokens: int = 0
    num_equal: int = 0
    num_close: int = 0

    @property
    def exact(self) -> bool:
        """All stages agree, and all next tokens are equal or close calls."""
        return all(stage.exact for stage in self.stages) and self.num_equal + self.num_close == self.num_tokens

    def to_json(self) -> dict[str, Any]:
        """Return the document that `sarathi-pp check --json` prints."""
        return {"schema": SCHEMA, **asdict(self), "exact": self.exact}


def check_stages(
    name: str, directory: Path, num_stages: int, prompts: Sequence[Sequence[int]], activity: Activity
) -> ModelCheck:
    """Compare every stage of a model with transformers in float32.

    Args:
        name: the model, for the result.
        prompts: token ids of the prompts; at least one, and none empty.
        activity: shows the progress.

    Raises:
        PartitionError: the model has fewer layers than stages.
        InputError, MissingError, UnsafeError, UnsupportedModelError: see `check_model`.
        CapacityError: a stage does not fit into memory.
    """
    facts = check_model(directory)
    stages = partition(facts.num_layers, num_stages)
    backend = choose_backend("auto", _CPU, _PAGE_SIZE)
    whole = _fits(directory, facts, stages)
    found = ModelCheck(name, facts.model_type, facts.quantised, whole, backend.name)
    expected = [torch.tensor(prompt) for prompt in prompts]
    for layers, activations in _references(directory, facts, stages, expected, whole, activity):
        first, end = layers
        with activity.phase(f"comparing layers {first} to {end - 1} of {facts.num_layers}"):
            stage = _Stage(directory, layers, facts, backend)
            rows = stage.compute(activations[first])
            del stage  # the next one is loaded before this name is bound again
            check = StageCheck(layers, _error(rows, activations[end], activations[first]))
            if not check.exact:
                check = _locate(directory, facts, backend, check, activations)
            found.stages.append(check)
        if end == facts.num_layers:
            _count_tokens(found, rows, activations[end])
    return found


def _fits(directory: Path, facts: ModelFacts, stages: Sequence[Layers]) -> bool:
    """Return whether transformers' whole model and the largest stage fit into memory together."""
    needed = stage_bytes(directory, (0, facts.num_layers), torch.float32)
    largest = max(stage_bytes(directory, layers, torch.float32) for layers in stages)
    return needed + largest <= _ROOM * psutil.virtual_memory().available


def _references(
    directory: Path,
    facts: ModelFacts,
    stages: Sequence[Layers],
    prompts: list[Tensor],
    whole: bool,
    activity: Activity,
) -> Iterator[tuple[Layers, dict[int, list[Tensor]]]]:
    """Yield each stage's layers with transformers' activations before and after every one of them."""
    parts = [(0, facts.num_layers)] if whole else list(stages)
    inputs = prompts
    for part in parts:
        count = ReadCount()
        with activity.phase("loading transformers' own layers", count):
            reference = Reference(directory, part, facts.num_layers, count)
        with activity.phase("computing with transformers' own layers"):
            activations = reference.activations(inputs)
        del reference
        if part[0] == 0:
            activations[0] = prompts
        inputs = activations[part[1]]
        for layers in stages:
            if part[0] <= layers[0] and layers[1] <= part[1]:
                yield layers, activations


class _Stage:
    """One stage, which computes prompts as a run does: in chunks, several prompts in a microbatch, then decodes."""

    def __init__(self, directory: Path, layers: Layers, facts: ModelFacts, backend: AttentionBackend) -> None:
        self._model = load_stage(directory, layers, facts.num_layers, torch.float32, _CPU, backend)
        self._facts = facts
        self._layers = layers

    def compute(self, prompts: Sequence[Tensor]) -> list[Tensor]:
        """Return the output rows of every prompt: activations, or logits of the last stage."""
        tables, num_pages = [], 0
        for prompt in prompts:
            needed = -(-len(prompt) // _PAGE_SIZE)
            tables.append(range(num_pages, num_pages + needed))
            num_pages += needed
        facts = self._facts
        longrope_after = facts.longrope_after or facts.max_position_embeddings
        kv = KVShard(self._layers, num_pages, _PAGE_SIZE, facts.num_kv_heads, facts.head_dim, torch.float32, _CPU)
        outputs: list[list[Tensor]] = [[] for _ in prompts]
        for microbatch in _microbatches([len(prompt) for prompt in prompts]):
            spans = [
                Span(first, end - first, tables[index], long_factors=len(prompts[index]) > longrope_after)
                for index, first, end in microbatch
            ]
            num_rows = sum(span.num_tokens for span in spans)
            inputs = build_inputs(spans, range(num_rows), _PAGE_SIZE, _CPU)
            rows = torch.cat([prompts[index][first:end] for index, first, end in microbatch])
            output = self._model.forward(rows, inputs, kv)
            found = torch.split_with_sizes(output, [span.num_tokens for span in spans])
            for (index, _, _), part in zip(microbatch, found, strict=True):
                outputs[index].append(part)
        return [torch.cat(parts) for parts in outputs]


def _microbatches(lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield microbatches of (prompt, first token, end): of each prompt the next chunk, or the next decode."""
    done = [0] * len(lengths)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        microbatch = []
        for index, length in enumerate(lengths):
            first, decodes = done[index], max(0, length - _DECODES)
            end = min(first + _CHUNK + index, decodes) if first < decodes else min(first + 1, length)
            if end > first:
                microbatch.append((index, first, end))
            done[index] = end
        yield microbatch


def _locate(
    directory: Path,
    facts: ModelFacts,
    backend: AttentionBackend,
    check: StageCheck,
    activations: dict[int, list[Tensor]],
) -> StageCheck:
    """Return the result of a stage that differs, with the first of its layers that differs when it computes alone."""
    for layer in range(*check.layers):
        rows = _Stage(directory, (layer, layer + 1), facts, backend).compute(activations[layer])
        error = _error(rows, activations[layer + 1], activations[layer])
        if error > MOST_ERROR:
            return StageCheck(check.layers, check.error, layer, error)
    return check


def _error(found: Sequence[Tensor], expected: Sequence[Tensor], inputs: Sequence[Tensor]) -> float:
    """Return the largest difference of a row, as a share of what the layers add to the row. NaN counts as infinite.

    The first token of many models has a few values that are thousands of times larger than the others. So each row has
    a measure of its own, and its largest value counts a hundredth, for the rounding of the sum.
    """
    worst = 0.0
    for ours, theirs, before in zip(found, expected, inputs, strict=True):
        largest = theirs.abs().amax(-1)
        added = (theirs - before).square().mean(-1).sqrt() if theirs.shape == before.shape else largest
        error = ((ours - theirs).abs().amax(-1) / (added + 0.01 * largest).clamp(min=1e-30)).max().item()
        if not math.isfinite(error):
            return math.inf
        worst = max(worst, error)
    return worst


def _count_tokens(check: ModelCheck, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compare the next token of every position."""
    for ours, theirs in zip(found, expected, strict=True):
        best = theirs.topk(2).values
        close = best[:, 0] - best[:, 1] < _CLOSE * theirs.abs().max()
        equal = ours.argmax(-1) == theirs.argmax(-1)
        check.num_tokens += len(equal)
        check.num_equal += int(equal.sum())
        check.num_close += int((~equal & close).sum())
