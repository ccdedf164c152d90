"""A base model without transformers' own forward: the same bits, the supported families, and cached angles."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from _pytest.mark import ParameterSet
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sarathi_pp.checkpoint.facts.families import FAMILIES as SUPPORTED
from sarathi_pp.checkpoint.facts.layer_cache import plain_caches
from sarathi_pp.model import loader
from sarathi_pp.model.attention import choose_backend
from sarathi_pp.model.fuse.bare_model import BareModel, bare_lm_head, use_bare_model
from sarathi_pp.model.fuse.packed_linear import has_gemm
from sarathi_pp.model.fuse.rotary_cache import RotaryCache
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import load_lm_head, load_stage
from sarathi_pp.model.stage_model import StageModel
from tests import thinning
from tests.model.families import BRIEF, FAMILIES, NUM_LAYERS, architecture, write_checkpoint

CPU = torch.device("cpu")
PAGE_SIZE = 16
LIKE_LLAMA = {"llama", "mistral", "qwen2", "qwen3"}
WITH_BARE_MODEL = LIKE_LLAMA | {
    *("apertus", "arcee", "cohere", "ernie4_5", "glm", "glm4", "helium", "hunyuan_v1_dense"),
    *("jais2", "ministral3", "olmo", "olmo2", "phi3", "phi3_longrope", "seed_oss", "smollm3"),
}
# Older releases of transformers give these the base model of Llama, newer ones another that returns router logits.
WITH_EITHER = {"dots1", "glm4_moe", "hunyuan_v1_moe", "solar_open"}
# Youtu has Llama's base model, and in older releases the others too. Pages of latents differ from those of these tests.
WITH_LATENTS = {"axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "youtu"}
# These fill the registers of fused kernels.
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
# Two sequences, one after the other and together: starts and counts of each.
MICROBATCHES = [[(0, 7)], [(7, 1), (0, 20)], [(8, 1), (20, 1)], [(9, 5), (21, 1)]]
positions = st.lists(st.integers(0, 9000), min_size=1, max_size=70)


def checkpoint(directory: Path, family: str, **changed: Any) -> Path:
    config = FAMILIES[family]()
    config.update(changed)
    write_checkpoint(family, directory, config=config)
    return directory


def without_weights(family: str) -> Any:
    """Return transformers' model on the meta device: its code alone decides what replaces it."""
    with torch.device("meta"):
        return getattr(transformers, architecture(family))(FAMILIES[family]())


def run(stages: list[StageModel], dtype: torch.dtype) -> list[Tensor]:
    """Return the outputs of each microbatch after all stages, and the last one's head rows separately."""
    config = stages[0].module.config
    kv_heads = config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shards = [
        KVShard(stage.layers, 8, PAGE_SIZE, plain_caches(stage.layers[1], kv_heads, head_dim), dtype, CPU)
        for stage in stages
    ]
    generator, found = torch.Generator().manual_seed(3), []
    for extents in MICROBATCHES:
        spans = [Span(start, count, range(4 * place, 4 * place + 4)) for place, (start, count) in enumerate(extents)]
        rows = sum(count for _, count in extents)
        drawn = range(rows) if all(count == 1 for _, count in extents) else [rows - 1]
        inputs = build_inputs(spans, drawn, PAGE_SIZE, CPU)
        x = torch.randint(0, config.vocab_size, (rows,), generator=generator)
        for stage, kv in zip(stages, shards, strict=True):
            before, x = x, stage.forward(x, inputs, kv)
        found += [before, x, stages[-1].forward_rows(before, inputs, shards[-1])]
    return found


def load(directory: Path, dtype: torch.dtype, bounds: tuple[int, ...]) -> list[StageModel]:
    backend = choose_backend("auto", CPU, PAGE_SIZE)
    return [load_stage(directory, layers, NUM_LAYERS, dtype, CPU, backend) for layers in pairwise(bounds)]


def bare() -> Iterator[ParameterSet]:
    """Yield the families in both types. In bfloat16 only those like Llama have other layers than in float32."""
    for family in sorted(WITH_BARE_MODEL):
        for dtype in (torch.float32, torch.bfloat16):
            full = family in BRIEF or (dtype == torch.bfloat16 and family not in LIKE_LLAMA)
            name = f"{family}-{str(dtype).removeprefix('torch.')}"
            yield pytest.param(family, dtype, marks=[pytest.mark.full] if full else [], id=name)


@pytest.mark.oldest
@pytest.mark.parametrize("family, dtype", list(bare()))
def test_no_bit_differs_from_transformers_own_forward(family, dtype, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as compiled layers need it
    try:
        directory = checkpoint(tmp_path, family, **(WIDE if family in LIKE_LLAMA else {}))
        for bounds in ((0, 2, NUM_LAYERS), *([(0, NUM_LAYERS)] if thinning.full else [])):
            stages = load(directory, dtype, bounds)
            assert all(isinstance(stage.module.base_model, BareModel) for stage in stages)
            head = load_lm_head(directory, dtype, CPU)
            assert isinstance(head.module.base_model, BareModel)
            with (
                mock.patch.object(loader, "use_bare_model", lambda module, name: False),
                mock.patch.object(loader, "bare_lm_head", lambda module, name: None),
            ):
                own, own_head = load(directory, dtype, bounds), load_lm_head(directory, dtype, CPU)
            assert not any(isinstance(stage.module.base_model, BareModel) for stage in own)
            found = run(stages, dtype)
            assert all(map(torch.equal, found, run(own, dtype)))
            for logits, rows in zip(found[1::3], found[2::3], strict=True):
                assert torch.equal(head.forward(rows), logits) and torch.equal(own_head.forward(rows), logits)
    finally:
        torch.set_num_threads(before)


@pytest.mark.oldest
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_head_is_bare_where_the_model_makes_nothing_else_of_what_it_gives(family, tmp_path):
    """This is false if logits are scaled or capped, and for models that were not reviewed."""
    like = family in LIKE_LLAMA
    module = load_lm_head(checkpoint(tmp_path, family), torch.float32, CPU).module if like else without_weights(family)
    assert (bare_lm_head(module, "lm_head") is not None) == like


@pytest.mark.oldest
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - WITH_BARE_MODEL - WITH_EITHER - WITH_LATENTS))
def test_others_keep_their_own_forward(family):
    module = without_weights(family)
    assert not use_bare_model(module, SUPPORTED[type(module).__name__].base)
    assert not any(isinstance(part, BareModel) for part in module.modules())


def rotary(head_dim: int = 64, **parameters: Any) -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 10000.0, **parameters}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=head_dim, rope_parameters=rope)
    return LlamaRotaryEmbedding(config)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS: list[dict[str, Any]] = [
    {},
    {"rope_type": "linear", "factor": 2.5},
    {**LLAMA3, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
]


@pytest.mark.oldest
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("head_dim", "kind"), [*((64, kind) for kind in KINDS), (32, {}), (96, {}), (128, {})])
def test_angles_looked_up_are_those_computed(head_dim, kind, dtype, threads):
    """The order and the number of threads may vary. The table grows after 4,096."""
    model = rotary(head_dim, **kind)
    assert RotaryCache.fits(model)
    cache, like = RotaryCache(model), torch.zeros(1, dtype=dtype)

    @given(positions)
    @settings(max_examples=thinning.examples(60), deadline=None)
    def check(asked: list[int]) -> None:
        at = torch.tensor(asked)
        looked_up, computed = cache.of(at, max(asked) + 1, like), model(like, position_ids=at[None])
        assert all(map(torch.equal, looked_up, computed))
        assert all(one.is_contiguous() and one.dtype == dtype for one in looked_up)

    check()


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def test_angles_that_depend_on_the_longest_are_not_looked_up():
    assert not RotaryCache.fits(rotary(rope_type="dynamic", factor=2.0))
    factors = [1.0] * 32
    assert not RotaryCache.fits(
        rotary(rope_type="longrope", short_factor=factors, long_factor=factors, original_max_position_embeddings=64)
    )
    assert not RotaryCache.fits(rotary(48)), "some of it would be computed one by one"


@pytest.mark.skipif(not has_gemm(), reason="this processor has no bfloat16 products, or numba is not here")
@pytest.mark.oldest
@pytest.mark.parametrize("family", sorted(LIKE_LLAMA))
def test_the_angles_of_compiled_layers_are_looked_up(family, tmp_path):
    (stage,) = load(checkpoint(tmp_path, family, **WIDE), torch.bfloat16, (0, NUM_LAYERS))
    bare = stage.module.base_model
    with mock.patch.object(RotaryCache, "of", side_effect=RotaryCache.of, autospec=True) as looked_up:
        run([stage], torch.bfloat16)
    assert bare._rotary_cache is not None and looked_up.call_count == 2 * len(MICROBATCHES)
