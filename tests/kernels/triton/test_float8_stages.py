"""Stages that keep their weights in FP8 compute the bits of stages that dequantise them on load.

They run here on CPU tensors, with kernels in the interpreter.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sarathi_pp_kernels.triton import few_rows
from torch import Tensor, nn

from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.checkpoint.files import open_checkpoint
from sarathi_pp.checkpoint.tensor_file import ReadCount
from sarathi_pp.config import RunConfig
from sarathi_pp.errors import CapacityError, ConfigError
from sarathi_pp.model import loader
from sarathi_pp.model.attention.sdpa import SdpaAttention
from sarathi_pp.model.coded.experts import Float8Experts
from sarathi_pp.model.coded.linear import Float8Linear
from sarathi_pp.model.fuse import cuda_modules
from sarathi_pp.model.fuse.rewrite import fuse
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import load_stage, stage_bytes, stage_sizes, stage_stored_bytes
from sarathi_pp.model.stage_model import StageModel
from sarathi_pp.model.tensor_parallel import TensorShard
from sarathi_pp.model.weights import HeldTypes
from sarathi_pp.stages.model_stage import ModelStages
from tests import thinning
from tests.checkpoint.quantised import FORMS, publish, write_published
from tests.model.families import NUM_LAYERS, write_checkpoint

CPU = torch.device("cpu")
PAGE_SIZE = 8
WHOLE = (0, NUM_LAYERS)
# The interpreter takes a second for the weights of a layer. By default, layers that are alike run twice.
ALIKE = WHOLE if thinning.full else (0, 2)


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "fuse", partial(fuse, by_kernels=True))
    monkeypatch.setattr(few_rows, "MOST_ROWS", 0)  # test_few_rows.py tests the products of few rows


def load(
    directory: Path,
    *,
    coded: bool,
    shard: TensorShard | None = None,
    layers: tuple[int, int] = WHOLE,
    room_bytes: int | None = None,
    count: ReadCount | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    return load_stage(
        directory,
        layers,
        check_model(directory).num_layers,
        dtype,
        CPU,
        SdpaAttention(),
        room_bytes,
        shard,
        count,
        coded=coded,
    )


def outputs(stage: StageModel, directory: Path, shards: int = 1, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Return the logits of a prompt in two chunks, of which the second one runs with another sequence's decode."""
    facts = check_model(directory)
    slots = 2 if facts.has_states else 0
    kv = KVShard(stage.layers, 6, PAGE_SIZE, facts.sharded(shards).caches, dtype, CPU, num_slots=slots)
    ids = torch.arange(3, 18)
    found = []
    for spans, given in (
        ((Span(0, 9, (4, 2), slot=0),), ids[:9]),
        ((Span(9, 6, (4, 2), slot=0), Span(0, 1, (5,), slot=1)), torch.cat([ids[9:], ids[:1]])),
    ):
        found.append(stage.forward(given, build_inputs(spans, range(len(given)), PAGE_SIZE, CPU), kv))
    return found


def modules(stage: StageModel, kind: type[nn.Module]) -> list[Any]:
    return [module for module in stage.module.modules() if type(module) is kind]


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *(("llama", "fp8 blocks"), ("qwen3", "fp8 tensor"), ("llama", "float8 channels")),
        pytest.param("qwen3", "fp8 blocks", marks=pytest.mark.full),
        pytest.param("llama", "fp8 tensor", marks=pytest.mark.full),
        pytest.param("qwen3", "float8 channels", marks=pytest.mark.full),
    ],
)
def test_dense_layers(family: str, form: str, tmp_path: Path) -> None:
    directory = write_published(family, form, tmp_path).quantised
    ours, theirs = (load(directory, coded=coded, layers=ALIKE) for coded in (True, False))
    for one, other in zip(outputs(ours, directory), outputs(theirs, directory), strict=True):
        assert one.isfinite().all() and torch.equal(one, other)
    # Query, key and value; gate and up.
    assert len(modules(ours, Float8Linear)) == 4 * ALIKE[1] and not modules(ours, cuda_modules.MergedLinear)
    assert len(modules(theirs, cuda_modules.MergedLinear)) == 2 * ALIKE[1]
    names = set(dict(ours.module.named_parameters()))
    assert not any("_proj.weight" in name or "qkv.weight" in name for name in names)


@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=pytest.mark.full), "deepseek_v3"])
def test_experts(family: str, tmp_path: Path) -> None:
    """Weights that latent attention absorbs are dequantised. Other tests compare the outputs of qwen3_moe."""
    directory = write_published(family, "fp8 blocks", tmp_path).quantised
    ours, theirs = load(directory, coded=True), load(directory, coded=False)
    for one, other in zip(outputs(ours, directory), outputs(theirs, directory), strict=True):
        assert one.isfinite().all() and torch.equal(one, other)
    assert modules(ours, Float8Experts) and modules(ours, Float8Linear)


# Families whose files name experts in different ways, and layers that keep states.
OTHERS = (
    *("mixtral", "qwen2_moe", "minimax_m2", "glm4_moe", "hy_v3", "exaone_moe", "ernie4_5_moe", "afmoe", "deepseek_v2"),
    *("hunyuan_v1_moe", "olmoe", "qwen3_next", "qwen3_5_moe_text", "lfm2_moe", "granitemoehybrid"),
)


def write_quantised(family: str, folder: Path) -> Path:
    """Write a model whose linear layers and single experts are all stored in FP8."""
    write_checkpoint(family, folder / "source")
    of_layers = re.compile(r"\.layers\..*(_proj|\.w[123])\.weight$")
    form = replace(FORMS["fp8 blocks"], of=lambda name, weight: weight.ndim == 2 and of_layers.search(name) is not None)
    publish(form, folder / "source", folder / "quantised", folder / "reference")
    return folder / "quantised"


@pytest.mark.full
@pytest.mark.parametrize("family", OTHERS)
def test_other_families(family: str, tmp_path: Path) -> None:
    directory = write_quantised(family, tmp_path)
    layers = (0, check_model(directory).num_layers)
    ours, theirs = (load(directory, coded=coded, layers=layers) for coded in (True, False))
    for one, other in zip(outputs(ours, directory), outputs(theirs, directory), strict=True):
        assert one.isfinite().all() and torch.equal(one, other)
    kept, plain = (HeldTypes.on("cuda", torch.bfloat16, coded=coded) for coded in (True, False))
    counted = stage_bytes(directory, layers, plain) - stage_sizes(directory, layers, kept).weights
    assert taken(theirs) - taken(ours) == counted > 0, "every weight that is counted in FP8 is held so"


# One family stores the experts of a layer together. FP8 is read for experts that are stored one by one.
SINGLE_EXPERTS = ("deepseek_v3", *(family for family in OTHERS if family != "granitemoehybrid"))


@pytest.mark.parametrize(
    "family", ["qwen3_moe", *(pytest.param(family, marks=pytest.mark.full) for family in SINGLE_EXPERTS)]
)
def test_few_rows_of_experts(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are multiplied. Sums have another order, so logits are close in float32."""
    monkeypatch.setattr(few_rows, "MOST_ROWS", 16)
    directory, dtype = write_quantised(family, tmp_path), torch.float32
    layers = (0, check_model(directory).num_layers)
    ours, theirs = (load(directory, coded=coded, layers=layers, dtype=dtype) for coded in (True, False))
    assert modules(ours, Float8Experts)
    for experts in modules(ours, Float8Experts):
        assert experts._most_rows == 16
        monkeypatch.setattr(experts, "_expand", None)
    pairs = zip(*(outputs(stage, directory, dtype=dtype) for stage in (ours, theirs)), strict=True)
    for one, other in pairs:
        assert (one - other).norm() < 2e-5 * other.norm()


def test_experts_that_no_token_needs_are_not_expanded(tmp_path: Path) -> None:
    directory = write_published("qwen3_moe", "fp8 blocks", tmp_path).quantised
    experts = modules(load(directory, coded=True), Float8Experts)[0]
    expected = modules_of(load(directory, coded=False), "gate_up_proj")[0]
    count, *_ = expected.gate_up_proj.shape
    hidden = torch.ones(2, expected.gate_up_proj.shape[2], dtype=torch.bfloat16)
    index = torch.tensor([[1, 3], [3, 1]])
    inner = experts._experts[0]
    inner.gate_up_proj.fill_(math.nan)
    inner.down_proj.fill_(math.nan)
    weights = torch.full((2, 2), 0.5, dtype=torch.bfloat16)
    assert torch.equal(experts(hidden, index, weights), expected(hidden, index, weights))
    written = [not inner.gate_up_proj[i].isnan().any() for i in range(count)]
    assert written == [i in (1, 3) for i in range(count)]
    assert torch.equal(inner.down_proj[[1, 3]], expected.down_proj[[1, 3]])


def modules_of(stage: StageModel, weight: str) -> list[Any]:
    return [module for module in stage.module.modules() if hasattr(module, weight)]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_memory_is_counted(family: str, tmp_path: Path) -> None:
    """Codes, scales and scratch: the sizes that are counted from file headers are those that are allocated."""
    directory = write_published(family, "fp8 blocks", tmp_path).quantised
    for layers in (WHOLE, (1, 3)):
        ours, theirs = (load(directory, coded=coded, layers=layers) for coded in (True, False))
        kept, plain = (HeldTypes.on("cuda", torch.bfloat16, coded=coded) for coded in (True, False))
        scratches = [one._weight for one in modules(ours, Float8Linear)]
        scratches += [one._experts[0].down_proj for one in modules(ours, Float8Experts)]
        assert len({one.untyped_storage().data_ptr() for one in scratches}) == 1, "one piece of memory"
        sizes, all_sizes = (stage_sizes(directory, layers, held) for held in (kept, plain))
        assert scratches[0].untyped_storage().nbytes() == sizes.scratch > all_sizes.scratch == 0
        # On a CPU, a tied LM head is packed, which is no parameter.
        assert taken(theirs) - taken(ours) == all_sizes.weights - sizes.weights > 0.2 * all_sizes.weights
        assert ours.num_bytes == sum(sizes) == stage_bytes(directory, layers, kept)
        checkpoint = open_checkpoint(directory)
        assert ours.bytes_read == stage_stored_bytes(directory, layers, kept, None, checkpoint) == theirs.bytes_read


def taken(stage: StageModel) -> int:
    tensors = (*stage.module.parameters(), *stage.module.buffers())
    return sum({one.data_ptr(): one.nbytes for one in tensors}.values())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_tensor_shards(family: str, tmp_path: Path) -> None:
    """The summands of each shard. By default this is one, whose weights start inside the stored ones."""
    directory = write_published(family, "fp8 blocks", tmp_path).quantised
    for index in range(2) if thinning.full else (1,):
        shard = TensorShard(index, 2, lambda summand: summand)
        ours, theirs = (load(directory, coded=coded, shard=shard, layers=ALIKE) for coded in (True, False))
        for one, other in zip(outputs(ours, directory, 2), outputs(theirs, directory, 2), strict=True):
            assert torch.equal(one, other)
        assert modules(ours, Float8Linear)


def test_weights_that_no_module_can_hold_are_dequantised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One part of an expert is stored in floats. The others of its layer are counted as they are loaded."""
    write_checkpoint("qwen3_moe", tmp_path / "source")
    form = FORMS["fp8 blocks"]
    skipped = "model.layers.1.mlp.experts.1.up_proj.weight"
    some = replace(form, of=lambda name, weight: name != skipped and form.of(name, weight))
    publish(some, tmp_path / "source", tmp_path / "quantised", tmp_path / "reference")
    found = tmp_path / "quantised"
    caplog.set_level("INFO", "sarathi_pp")
    ours, theirs = (load(found, coded=coded) for coded in (True, False))
    for one, other in zip(outputs(ours, found), outputs(theirs, found), strict=True):
        assert torch.equal(one, other)
    experts = modules(ours, Float8Experts)
    assert len(experts) == len(modules_of(theirs, "gate_up_proj")) - 1
    count = modules_of(theirs, "gate_up_proj")[0].gate_up_proj.shape[0]
    assert f"{3 * count - 1} weights are dequantised" in caplog.text
    scratch = experts[0]._experts[0].down_proj.untyped_storage().nbytes()
    assert theirs.num_bytes + scratch - ours.num_bytes == taken(theirs) - taken(ours) > 0
    load(found, coded=True, room_bytes=ours.num_bytes)
    read = ReadCount()
    with pytest.raises(CapacityError, match="are available"):
        load(found, coded=True, room_bytes=ours.num_bytes - 1, count=read)
    assert not read.num_bytes


def test_a_device_without_our_kernels_is_refused(tmp_path: Path) -> None:
    directory = write_published("llama", "fp8 blocks", tmp_path).quantised
    config, facts = RunConfig(model=str(directory), weights="stored"), check_model(directory)
    with pytest.raises(ConfigError, match="--weights stored: Triton expands the weights, and triton runs on cuda"):
        ModelStages(config, directory, facts, torch.bfloat16, CPU, coded=True)
