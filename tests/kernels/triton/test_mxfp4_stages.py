"""Stages that keep their experts in MXFP4 compute the bits of stages that dequantise them on load.

They run here on CPU tensors, with kernels in the interpreter.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from sarathi_pp_kernels.triton import few_rows

from sarathi_pp.checkpoint.files import open_checkpoint
from sarathi_pp.checkpoint.tensor_file import ReadCount
from sarathi_pp.errors import CapacityError
from sarathi_pp.model import loader
from sarathi_pp.model.coded.experts import WEIGHTS, Mxfp4Experts
from sarathi_pp.model.fuse.rewrite import fuse
from sarathi_pp.model.loader import stage_bytes, stage_sizes, stage_stored_bytes
from sarathi_pp.model.weights import HeldTypes
from tests.checkpoint.quantised import write_published
from tests.kernels.triton.test_float8_stages import WHOLE, load, modules, modules_of, outputs, taken
from tests.model.families import NUM_LAYERS


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "fuse", partial(fuse, by_kernels=True))
    monkeypatch.setattr(few_rows, "MOST_ROWS", 0)  # test_few_rows.py tests the products of few rows


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_published("gpt_oss", "mxfp4", tmp_path_factory.mktemp("gpt_oss")).quantised


def test_logits_have_the_same_bits(directory: Path) -> None:
    """Biases of the experts and sinks of attention are loaded as in a stage that dequantises."""
    ours, theirs = (load(directory, coded=coded) for coded in (True, False))
    for one, other in zip(outputs(ours, directory), outputs(theirs, directory), strict=True):
        assert one.isfinite().all() and torch.equal(one, other)
    assert len(modules(ours, Mxfp4Experts)) == NUM_LAYERS and not modules(theirs, Mxfp4Experts)
    names, plain = ({name for name, _ in stage.module.named_parameters()} for stage in (ours, theirs))
    assert plain - names == {
        f"model.layers.{layer}.mlp.experts.{weight}" for layer in range(NUM_LAYERS) for weight in WEIGHTS
    }
    assert not names - plain


def test_few_rows(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are multiplied. Sums have another order, so logits are close in float32."""
    monkeypatch.setattr(few_rows, "MOST_ROWS", 16)
    ours, theirs = (load(directory, coded=coded, dtype=torch.float32) for coded in (True, False))
    assert modules(ours, Mxfp4Experts)
    for experts in modules(ours, Mxfp4Experts):
        monkeypatch.setattr(experts, "_expand", None)
    pairs = zip(*(outputs(stage, directory, dtype=torch.float32) for stage in (ours, theirs)), strict=True)
    for one, other in pairs:
        assert (one - other).norm() < 2e-5 * other.norm()


def test_experts_that_no_token_needs_are_not_expanded(directory: Path) -> None:
    experts = modules(load(directory, coded=True), Mxfp4Experts)[0]
    expected = modules_of(load(directory, coded=False), "gate_up_proj")[0]
    inner = experts._experts[0]
    inner.gate_up_proj.fill_(math.nan)
    inner.down_proj.fill_(math.nan)
    hidden = torch.ones(2, expected.gate_up_proj.shape[1], dtype=torch.bfloat16)
    index, weights = torch.tensor([[1, 3], [3, 1]]), torch.full((2, 2), 0.5, dtype=torch.bfloat16)
    assert torch.equal(experts(hidden, index, weights), expected(hidden, index, weights))
    written = [not inner.gate_up_proj[i].isnan().any() for i in range(len(inner.gate_up_proj))]
    assert written == [i in (1, 3) for i in range(len(written))]
    assert torch.equal(inner.down_proj[[1, 3]], expected.down_proj[[1, 3]])


def test_memory_is_counted(directory: Path) -> None:
    """Codes, scales and scratch: the sizes that are counted from file headers are those that are allocated."""
    kept, plain = (HeldTypes.on("cuda", torch.bfloat16, coded=coded) for coded in (True, False))
    for layers in (WHOLE, (1, 3)):
        ours, theirs = (load(directory, coded=coded, layers=layers) for coded in (True, False))
        scratches = [getattr(one._experts[0], name) for one in modules(ours, Mxfp4Experts) for name in WEIGHTS]
        assert len({one.untyped_storage().data_ptr() for one in scratches}) == 1, "one piece of memory"
        sizes, all_sizes = (stage_sizes(directory, layers, held) for held in (kept, plain))
        assert scratches[0].untyped_storage().nbytes() == sizes.scratch > all_sizes.scratch == 0
        assert taken(theirs) - taken(ours) == all_sizes.weights - sizes.weights > 0.4 * all_sizes.weights
        assert ours.num_bytes == sum(sizes) == stage_bytes(directory, layers, kept)
        checkpoint = open_checkpoint(directory)
        assert ours.bytes_read == stage_stored_bytes(directory, layers, kept, None, checkpoint) == theirs.bytes_read
    load(directory, coded=True, room_bytes=stage_bytes(directory, WHOLE, kept))
    read = ReadCount()
    with pytest.raises(CapacityError, match="are available"):
        load(directory, coded=True, room_bytes=stage_bytes(directory, WHOLE, kept) - 1, count=read)
    assert not read.num_bytes
