"""A check that stages compute what transformers computes, on this machine, for one model.

    transformers' own layers   prompts in one piece      ->  activations before and after each stage, logits
    stages                     the same, as in a run:    ->  the same rows
                               chunks, then decodes,
                               several prompts at once

Every stage gets the activations that transformers has there. So a difference does not travel, and the layer that causes
it is found by computing each layer of the stage alone. Prompts are computed in groups, so that memory is bounded.

Rounding may decide which expert a row takes. If a stage differs, it is computed again with the experts of transformers
in such ties (router_ties.py). All rows are compared, and the ties are counted: only a few of them can be rounding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sarathi_pp.checkpoint.facts.support import ModelFacts, check_model
from sarathi_pp.checkpoint.tensor_file import ReadCount
from sarathi_pp.core.partition import partition
from sarathi_pp.errors import CapacityError
from sarathi_pp.model.attention import AttentionBackend, choose_backend
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import load_stage
from sarathi_pp.model.memory import is_out_of_memory
from sarathi_pp.process.activity import Activity
from sarathi_pp.stages.check_memory import CheckMemory, Layers, split_groups
from sarathi_pp.stages.check_prompts import Boundary, find_boundaries
from sarathi_pp.stages.reference import Expected, Reference
from sarathi_pp.stages.router_ties import Choice, TakeTies

SCHEMA = "sarathi-pp/check/1"
# Largest difference of a row that is rounding, see _error.
MOST_ERROR = 1e-4
# Two logits that differ by less than this share of the largest one are a close call: rounding may decide between them.
_CLOSE = 1e-4
# Most rows of a layer that may take the experts of transformers in ties: a share of all rows, or a few.
_MOST_TIES = 0.01
_FEW_TIES = 2
_PAGE_SIZE = 16
_CHUNK = 48
# Tokens at the end of each prompt that are computed one at a time, as decodes are.
_DECODES = 4
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StageCheck:
    """The result for one stage.

    Attributes:
        layers: (first, end).
        error: largest difference of a row from transformers, as a share of what the stage adds to the row.
        first_layer: index of the first layer that differs by more than rounding; None if none does alone.
        layer_error: the largest difference of that layer.
        num_ties: number of rows that took the experts of transformers instead of others with equal scores, added up
            over layers.
        tie_layer: index of the first layer with more of them than rounding explains; None if there is none.
        layer_ties: the number of them in that layer.
    """

    layers: Layers
    error: float
    first_layer: int | None = None
    layer_error: float | None = None
    num_ties: int = 0
    tie_layer: int | None = None
    layer_ties: int | None = None

    @property
    def exact(self) -> bool:
        return self.error <= MOST_ERROR and self.tie_layer is None


@dataclass(frozen=True, slots=True)
class BoundaryCheck(Boundary):
    """A boundary of the model.

    Attributes:
        reached: a prompt was longer, so the check covers it.
    """

    reached: bool


@dataclass
class ModelCheck:
    """The result for a model.

    Attributes:
        whole: transformers computed its whole model at once. Otherwise it computed one stage's layers at a time,
            because two copies of the model do not fit into memory.
        boundaries: numbers of tokens beyond which the model computes in another way, such as sliding windows.
        num_tokens: number of positions whose next token was compared.
        num_equal: number of them whose next token is equal.
        num_close: number of others that are close calls.
    """

    model: str
    model_type: str
    quantised: str | None
    whole: bool
    attention: str
    boundaries: list[BoundaryCheck]
    stages: list[StageCheck] = field(default_factory=list)
    num_tokens: int = 0
    num_equal: int = 0
    num_close: int = 0

    @property
    def num_ties(self) -> int:
        """The number of rows that took the experts of transformers, added up over all layers."""
        return sum(stage.num_ties for stage in self.stages)

    @property
    def exact(self) -> bool:
        """All stages agree, and all next tokens are equal or close calls."""
        return all(stage.exact for stage in self.stages) and self.num_equal + self.num_close == self.num_tokens

    def to_json(self) -> dict[str, Any]:
        """Return the document that `sarathi-pp check --json` prints. Errors that are not finite are null there."""
        document = {"schema": SCHEMA, **asdict(self), "num_ties": self.num_ties, "exact": self.exact}
        for stage in document["stages"]:
            for key in ("error", "layer_error"):
                stage[key] = stage[key] if stage[key] is not None and math.isfinite(stage[key]) else None
        return document


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
        CapacityError: the memory is too small.
    """
    facts = check_model(directory)
    stages = partition(facts.num_layers, num_stages)
    lengths = [len(prompt) for prompt in prompts]
    parts = CheckMemory.of(directory, facts, stages).parts(lengths)
    backend = choose_backend("auto", _CPU, _PAGE_SIZE)
    boundaries = [
        BoundaryCheck(boundary.kind, boundary.num_tokens, max(lengths) > boundary.num_tokens)
        for boundary in find_boundaries(directory, facts)
    ]
    whole = parts[0] == (0, facts.num_layers)
    found = ModelCheck(name, facts.model_type, facts.quantised, whole, backend.name, boundaries)
    checker = _Checker(directory, facts, backend, split_groups(lengths), activity)
    rows = [torch.tensor(prompt) for prompt in prompts]
    for part in parts:
        inside = [layers for layers in stages if part[0] <= layers[0] and layers[1] <= part[1]]
        for result in _compare(checker, part, inside, rows):
            found.stages.append(result.check(sum(lengths)))
            found.num_tokens += result.num_tokens
            found.num_equal += result.num_equal
            found.num_close += result.num_close
    return found


def _compare(checker: _Checker, part: Layers, stages: Sequence[Layers], rows: list[Tensor]) -> list[_Result]:
    """Compare a part as `_Checker.compare` does. Raise CapacityError if memory runs out."""
    try:
        return checker.compare(part, stages, rows)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise CapacityError(
            f"memory ran out while layers {part[0]} to {part[1] - 1} were compared: {str(error)[:200]}"
            f"\n  try  more --stages, or shorter prompts"
        ) from error


@dataclass
class _Difference:
    """The largest difference of rows from those of transformers, and the number of equal next tokens.

    Attributes:
        ties: number of rows that took the experts of transformers, by layer.
    """

    error: float = 0.0
    num_tokens: int = 0
    num_equal: int = 0
    num_close: int = 0
    ties: Counter[int] = field(default_factory=Counter)

    @property
    def exact(self) -> bool:
        return self.error <= MOST_ERROR

    def add(self, other: _Difference) -> None:
        self.error = max(self.error, other.error)
        self.num_tokens += other.num_tokens
        self.num_equal += other.num_equal
        self.num_close += other.num_close
        self.ties += other.ties


@dataclass
class _Result(_Difference):
    """The difference of a stage in all groups.

    Attributes:
        example: inputs of transformers' layers for the first group in which the stage differs; None if it is exact.
    """

    layers: Layers = (0, 0)
    example: list[Tensor] | None = None
    first_layer: int | None = None
    layer_error: float | None = None

    def check(self, num_rows: int) -> StageCheck:
        """Return the result for the user.

        Args:
            num_rows: tokens of all prompts.
        """
        most = max(_FEW_TIES, _MOST_TIES * num_rows)
        layer = min((layer for layer, count in self.ties.items() if count > most), default=None)
        count = None if layer is None else self.ties[layer]
        return StageCheck(self.layers, self.error, self.first_layer, self.layer_error, self.ties.total(), layer, count)


@dataclass(frozen=True, slots=True)
class _Checker:
    """A comparison of the stages of one model with transformers, group by group.

    Attributes:
        groups: prompts of each group, by index.
    """

    directory: Path
    facts: ModelFacts
    backend: AttentionBackend
    groups: Sequence[range]
    activity: Activity

    def compare(self, part: Layers, stages: Sequence[Layers], rows: list[Tensor]) -> list[_Result]:
        """Compare the stages of a part of the model, which transformers computes at once.

        Args:
            rows: the inputs of the part's first layer for every prompt. They are replaced by its outputs, unless these
                are logits.
        """
        num_layers, count = self.facts.num_layers, ReadCount()
        with self.activity.phase("loading transformers' own layers", count):
            reference = Reference(self.directory, part, num_layers, count)
        with self.activity.phase("loading the stages"):
            loaded = [self._load(layers) for layers in stages]
        results = [_Result(layers=layers) for layers in stages]
        for number, group in enumerate(self.groups, 1):
            inputs = [rows[index] for index in group]
            named = f"layers {part[0]} to {part[1] - 1} of {num_layers}, group {number} of {len(self.groups)}"
            with self.activity.phase(f"computing with transformers: {named}"):
                expected = reference.compute(inputs, [first for first, _ in stages])
            with self.activity.phase(f"comparing {named}"):
                for stage, result in zip(loaded, results, strict=True):
                    difference = stage.compare(expected)
                    if not difference.exact and result.example is None:
                        result.example = inputs
                    result.add(difference)
            if part[1] < num_layers:
                for index, outputs in zip(group, expected.activations[part[1]], strict=True):
                    rows[index] = outputs
        loaded.clear()  # the memory is used for single layers now
        for result in results:
            self._locate(reference, result)
        return results

    def _load(self, layers: Layers) -> _Stage:
        return _Stage(self.directory, layers, self.facts, self.backend)

    def _locate(self, reference: Reference, result: _Result) -> None:
        """Find the first layer of a stage that differs when it computes alone."""
        if result.example is None:
            return
        first, end = result.layers
        with self.activity.phase(f"comparing each of the layers {first} to {end - 1} alone"):
            expected = reference.compute(result.example, range(first, end + 1))
            for layer in range(first, end):
                difference = self._load((layer, layer + 1)).compare(expected)
                if not difference.exact:
                    result.first_layer, result.layer_error = layer, difference.error
                    return


class _Stage:
    """One stage, which computes prompts as a run does: in chunks, several prompts in a microbatch, then decodes."""

    def __init__(self, directory: Path, layers: Layers, facts: ModelFacts, backend: AttentionBackend) -> None:
        self._model = load_stage(directory, layers, facts.num_layers, torch.float32, _CPU, backend)
        self._facts = facts
        self._layers = layers

    def compare(self, expected: Expected) -> _Difference:
        """Compare the rows of the stage with those of transformers.

        If they differ, compare the rows that the stage computes with the experts of transformers in ties.

        Args:
            expected: transformers' activations before the stage's first layer and after its last one.
        """
        found = self._compare(expected, None)
        first, end = self._layers
        choices = [[choice for choice in made if first <= choice.layer < end] for made in expected.choices]
        if not found.exact and any(len(choice.rows) for made in choices for choice in made):
            found = self._compare(expected, choices)
        return found

    def _compare(self, expected: Expected, choices: Sequence[Sequence[Choice]] | None) -> _Difference:
        inputs, outputs = (expected.activations[index] for index in self._layers)
        found = _Difference()
        for index, first, rows in self.compute(inputs, choices, found.ties):
            here = slice(first, first + len(rows))
            found.error = max(found.error, _error(rows, outputs[index][here], inputs[index][here]))
            if self._layers[1] == self._facts.num_layers:
                found.add(_count_tokens(rows, outputs[index][here]))
        return found

    def compute(
        self, prompts: Sequence[Tensor], choices: Sequence[Sequence[Choice]] | None, ties: Counter[int]
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield output rows as (prompt, first token, rows). They are activations, or logits of the last stage.

        Args:
            choices: for each prompt, transformers' choices whose ties decide; None to compute without them.
            ties: number of rows that this changes, by layer. It is counted up.
        """
        tables, num_pages = [], 0
        for prompt in prompts:
            needed = -(-len(prompt) // _PAGE_SIZE)
            tables.append(range(num_pages, num_pages + needed))
            num_pages += needed
        facts = self._facts
        longrope_after = facts.longrope_after or facts.max_position_embeddings
        kv = KVShard(self._layers, num_pages, _PAGE_SIZE, facts.caches, torch.float32, _CPU, num_slots=len(prompts))
        for microbatch in _microbatches([len(prompt) for prompt in prompts]):
            spans = [
                Span(first, end - first, tables[index], long_factors=len(prompts[index]) > longrope_after, slot=index)
                for index, first, end in microbatch
            ]
            num_rows = sum(span.num_tokens for span in spans)
            inputs = build_inputs(spans, range(num_rows), _PAGE_SIZE, _CPU)
            rows = torch.cat([prompts[index][first:end] for index, first, end in microbatch])
            made = [(first, end - first, choices[index]) for index, first, end in microbatch] if choices else []
            with TakeTies(made, ties) if choices else nullcontext():
                output = self._model.forward(rows, inputs, kv)
            parts = torch.split_with_sizes(output, [span.num_tokens for span in spans])
            for (index, first, _), part in zip(microbatch, parts, strict=True):
                yield index, first, part


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


def _error(ours: Tensor, theirs: Tensor, before: Tensor) -> float:
    """Return the largest difference of a row, as a share of what the layers add to the row. NaN counts as infinite.

    The first token of many models has a few values that are thousands of times larger than the others. So each row has
    a measure of its own, and its largest value counts a hundredth, for the rounding of the sum.
    """
    largest = theirs.abs().amax(-1)
    added = (theirs - before).square().mean(-1).sqrt() if theirs.shape == before.shape else largest
    error = ((ours - theirs).abs().amax(-1) / (added + 0.01 * largest).clamp(min=1e-30)).max().item()
    return error if math.isfinite(error) else math.inf


def _count_tokens(ours: Tensor, theirs: Tensor) -> _Difference:
    """Compare the next token of every position."""
    best = theirs.topk(2).values
    close = best[:, 0] - best[:, 1] < _CLOSE * theirs.abs().amax(-1)
    equal = ours.argmax(-1) == theirs.argmax(-1)
    return _Difference(0.0, len(equal), int(equal.sum()), int((~equal & close).sum()))
