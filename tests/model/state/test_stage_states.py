"""Stages whose layers keep states, against transformers' whole model: every cut of a prompt, and slots used again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sarathi_pp.checkpoint.facts.families import FAMILIES as SUPPORTED
from sarathi_pp.checkpoint.facts.layer_cache import StateCache
from sarathi_pp.checkpoint.facts.support import ModelFacts, check_model
from sarathi_pp.errors import UnsupportedModelError
from sarathi_pp.model.attention import choose_backend
from sarathi_pp.model.dtypes import has_float_products
from sarathi_pp.model.fuse.packed_linear import has_gemm
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import load_stage
from sarathi_pp.model.stage_model import StageModel
from sarathi_pp.model.state import choice, rewrite
from tests.model.families import FAMILIES, NUM_LAYERS, VOCAB_SIZE, architecture, write_checkpoint

CPU = torch.device("cpu")
PAGE_SIZE, LENGTH, NUM_SLOTS = 16, 90, 4
WITH_STATES = [name for name in FAMILIES if SUPPORTED[architecture(name)].states is not None]
# By default, of two families with the same kind of state, one. test_stage_model.py has all of them.
ALIKE = ("qwen3_5_moe_text", "granitemoehybrid_dense", "lfm2")
of_each_kind = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.full] * (name in ALIKE)) for name in WITH_STATES]
)
needs_kernels = pytest.mark.skipif(not has_float_products(), reason="no kernels for this processor")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Write a family's checkpoint once. Return its directory and reference model."""
    written: dict[str, tuple[Path, Any]] = {}

    def save(family: str) -> tuple[Path, Any]:
        if family not in written:
            directory = tmp_path_factory.mktemp(family)
            written[family] = directory, write_checkpoint(family, directory)
        return written[family]

    return save


class Pipeline:
    """All stages of a model in one process. Pages and slots hold NaN until they are written."""

    def __init__(
        self, directory: Path, parts: Sequence[tuple[int, int]] = ((0, 2), (2, 5)), dtype: torch.dtype = torch.float32
    ) -> None:
        facts: ModelFacts = check_model(directory)
        backend = choose_backend("auto", CPU, PAGE_SIZE)
        self.stages: list[StageModel] = [load_stage(directory, part, NUM_LAYERS, dtype, CPU, backend) for part in parts]
        self._kvs = [KVShard(part, 40, PAGE_SIZE, facts.caches, dtype, CPU, num_slots=NUM_SLOTS) for part in parts]
        for kv in self._kvs:
            for layer in range(*kv.layers):
                cache = facts.caches[layer]
                if isinstance(cache, StateCache):
                    kv.conv_state(layer).fill_(torch.nan)
                    if cache.recurrent:
                        kv.recurrent_state(layer).fill_(torch.nan)
                else:
                    kv.keys(layer).fill_(torch.nan)
                    kv.values(layer).fill_(torch.nan)

    def run(self, *chunks: tuple[Tensor, int, int]) -> list[Tensor]:
        """Compute a microbatch of chunks (tokens, position of the first one, slot), and return the logits of each."""
        spans = [
            Span(start, len(tokens), list(range(10 * slot, 10 * slot + 10)), slot=slot)
            for tokens, start, slot in chunks
        ]
        x = torch.cat([tokens for tokens, _, _ in chunks])
        inputs = build_inputs(spans, list(range(len(x))), PAGE_SIZE, CPU)
        for stage, kv in zip(self.stages, self._kvs, strict=True):
            x = stage.forward(x, inputs, kv)
        return list(x.split([len(tokens) for tokens, _, _ in chunks]))

    def sequence(self, tokens: Tensor, size: int, slot: int = 1) -> Tensor:
        """Compute a sequence in chunks of `size` tokens, and return all logits."""
        return torch.cat([self.run((tokens[at : at + size], at, slot))[0] for at in range(0, len(tokens), size)])


def tokens_of(seed: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


def expected_of(reference: Any, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        found: Tensor = reference(tokens[None], use_cache=False).logits[0]
    return found


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).abs().max() / expected.abs().max())


@needs_kernels
@of_each_kind
def test_every_cut_of_a_prompt_gives_the_same_bits(family: str, saved: Any) -> None:
    directory, reference = saved(family)
    tokens = tokens_of(1)
    whole = Pipeline(directory).sequence(tokens, LENGTH)
    assert error(whole, expected_of(reference, tokens)) < 1e-5
    for parts, size in (((0, 2), (2, 5)), 1), (((0, 1), (1, 3), (3, 5)), 7), (((0, 5),), 64):
        assert torch.equal(Pipeline(directory, parts).sequence(tokens, size), whole), size


@needs_kernels
@of_each_kind
def test_sequences_of_a_microbatch_do_not_mix_and_slots_are_used_again(family: str, saved: Any) -> None:
    directory, reference = saved(family)
    first, second, third = (tokens_of(seed, 40) for seed in (1, 2, 3))
    alone = [Pipeline(directory).sequence(tokens, 40) for tokens in (first, second, third)]
    pipeline = Pipeline(directory)
    made: list[list[Tensor]] = [[], [], []]
    # Sequence 0 has slot 3, sequence 1 slot 0. Sequence 2 gets slot 3 when sequence 0 has ended.
    schedule = [
        ((0, 0, 17, 3),),
        ((1, 0, 1, 0), (0, 17, 1, 3)),
        ((0, 18, 22, 3), (1, 1, 38, 0)),
        ((1, 39, 1, 0), (2, 0, 2, 3)),
        ((2, 2, 1, 3),),
        ((2, 3, 37, 3),),
    ]
    tokens = [first, second, third]
    for microbatch in schedule:
        chunks = [(tokens[number][at : at + count], at, slot) for number, at, count, slot in microbatch]
        for (number, *_), logits in zip(microbatch, pipeline.run(*chunks), strict=True):
            made[number].append(logits)
    for number, logits in enumerate(made):
        assert torch.equal(torch.cat(logits), alone[number]), number
    assert error(alone[0], expected_of(reference, first)) < 1e-5


@pytest.mark.parametrize("family", WITH_STATES)
def test_without_kernels_too(family: str, saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "has_float_products", lambda: False)
    directory, reference = saved(family)
    first, second = tokens_of(1), tokens_of(2)
    pipeline = Pipeline(directory)
    made = [pipeline.run((first[:70], 0, 2), (second[:88], 0, 1))]
    made += [pipeline.run((first[at : at + 1], at, 2), (second[at + 18 : at + 19], at + 18, 1)) for at in (70, 71)]
    made.append(pipeline.run((first[72:], 72, 2)))
    logits = torch.cat([microbatch[0] for microbatch in made])
    assert error(logits, expected_of(reference, first)) < 1e-5
    logits = torch.cat([microbatch[1] for microbatch in made[:3]])
    assert error(logits, expected_of(reference, second)) < 1e-5


@of_each_kind
def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(family: str, saved: Any) -> None:
    directory, reference = saved(family)
    tokens = tokens_of(1)
    exact = expected_of(reference, tokens)
    theirs = expected_of(type(reference).from_pretrained(directory, dtype=torch.bfloat16).eval(), tokens).float()
    pipeline = Pipeline(directory, dtype=torch.bfloat16)
    for size in (LENGTH, 1):
        ours = pipeline.sequence(tokens, size).float()
        assert (ours - exact).norm() < 1.3 * (theirs - exact).norm(), size


@pytest.mark.parametrize("family", WITH_STATES)
def test_each_layer_counts_as_a_step(family: str, saved: Any) -> None:
    pipeline = Pipeline(saved(family)[0], ((0, 5),))
    pipeline.run((tokens_of(1, 3), 0, 0))
    assert pipeline.stages[0].steps.tolist() == [NUM_LAYERS]


@pytest.mark.skipif(not has_gemm(), reason="our product in bfloat16 does not run here")
@pytest.mark.parametrize("family", WITH_STATES)
def test_linear_layers_are_packed(family: str, saved: Any) -> None:
    """Neither a module with a state nor transformers' own reads the weight of a linear layer inside."""
    module = Pipeline(saved(family)[0], ((0, 5),), torch.bfloat16).stages[0].module
    left = {name for name, child in module.named_modules() if type(child) is nn.Linear}
    assert {name for name in left if not name.endswith("shared_expert_gate")} <= {"lm_head"}


@pytest.mark.parametrize("family", WITH_STATES)
def test_code_that_is_not_known_is_refused(family: str, saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "_KNOWN", ())
    with pytest.raises(UnsupportedModelError, match="layer 0 is .*with code that is not known here"):
        Pipeline(saved(family)[0])
