"""Weights in FP8 and MXFP4: expanded values, and stages that keep them against stages that dequantise them on load."""

from __future__ import annotations

from itertools import accumulate, product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.model.attention.triton import TritonAttention
from sarathi_pp.model.graphs import CudaGraph, Shape, StageGraphs
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import load_stage
from tests.checkpoint.quantised import write_published
from tests.gpu.comparison import BF16, DEVICE, DTYPES, F16, F32, NAMES, Pairs, compare, sized
from tests.model.families import VOCAB_SIZE, with_layers

# numpy warns of NaN and infinity in the interpreter. Some codes mean these.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
Sizes = tuple[int, int]
# Rows and columns of a matrix, of a block, and of the first block at which the matrix begins.
SIZES: list[tuple[Sizes, Sizes, Sizes]] = sized(
    [
        ((1000, 4096), (128, 128), (0, 0)),
        ((130, 300), (128, 128), (0, 0)),
        ((7, 48), (1, 48), (0, 0)),
        ((33, 1100), (33, 1100), (0, 0)),
        ((40, 100), (32, 16), (31, 5)),
        ((20, 600), (64, 700), (40, 90)),
        ((3, 20), (2, 3), (1, 2)),
    ],
    tiny=[((3, 20), (2, 16), (1, 2))],
)
COUNTS = sized([1, 5], tiny=[2])
BITS = {F32: torch.int32, BF16: torch.int16, F16: torch.int16}

LIMITS = {BF16: 2e-2, F32: 2e-5}
LAYERS = sized([2], tiny=[1])[0]
NUM_PAGES, PAGE_SIZE = 8, 16
# Start, number of tokens and pages of the sequences in each microbatch: a chunk, a chunk with a decode, decodes.
SCHEDULE = sized(
    [[[(0, 5, (4,))], [(0, 4, (2,)), (5, 1, (4,))], [(6, 1, (4,)), (4, 1, (2,))]]],
    tiny=[[[(0, 2, (4,)), (0, 1, (2,))]]],
)[0]
SHAPES = sized([Shape(6, 2, decodes=False), Shape(2, 2, decodes=True)], tiny=[Shape(3, 2, decodes=False)])
# Matrices, outputs and groups of 32 inputs.
MXFP4_SIZES = sized([(3, 5760, 90), (2, 65, 5), (1, 64, 4), (5, 1, 1), (1, 130, 9)], tiny=[(2, 65, 5)])
# Family and form, whether a graph computes the stage, and whether codes are multiplied. Otherwise weights are expanded.
# The simulated GPU cannot capture torch's product of expanded experts.
FP8, MXFP4 = "fp8 blocks", "mxfp4"
CASES = sized(
    [
        (*model, graphed, few)
        for model in (("llama", FP8), ("qwen3_moe", FP8), ("gpt_oss", MXFP4))
        for graphed, few in product((False, True), repeat=2)
    ],
    tiny=[
        ("llama", FP8, True, False),
        ("llama", FP8, True, True),
        ("qwen3_moe", FP8, False, False),
        ("qwen3_moe", FP8, False, True),
        ("gpt_oss", MXFP4, False, False),
        ("gpt_oss", MXFP4, True, True),
    ],
)


def random_weight(count: int, sizes: tuple[Sizes, Sizes, Sizes], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes of all kinds, and scales of this type between about 1e-4 and 1."""
    shape, block, first = sizes
    blocks = (-(-(start + size) // length) for start, size, length in zip(first, shape, block, strict=True))
    codes = torch.randint(0, 256, (count, *shape), dtype=torch.uint8).to(DEVICE)
    return codes, (10 ** (-4 * torch.rand(count, *blocks))).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=NAMES.get)
@pytest.mark.parametrize("scale_dtype", sized([BF16, F16, F32], tiny=[F32]), ids=NAMES.get)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values(sizes: tuple[Sizes, Sizes, Sizes], scale_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """All matrices are written, or those that are needed. Each is part of a larger one, whose other rows stay."""
    from sarathi_pp_kernels.triton.expand import expand, reference_expand

    (rows, columns), block, first = sizes

    def expanded() -> Pairs:
        pairs = {}
        for count, e5m2, some in product(COUNTS, (False, True), (False, True)):
            codes, scales = random_weight(count, sizes, scale_dtype)
            needed = torch.arange(1, count + 1, dtype=torch.int32).remainder(2).to(DEVICE) if some else None
            found = []
            for function in (expand, reference_expand):
                both = torch.full((count, 2 * rows, columns), 5.0, dtype=dtype).to(DEVICE)
                function(codes, scales, both[:, rows:], block, first, e5m2=e5m2, needed=needed)
                found.append(both)
            name = f"{count} matrices, e5m2: {e5m2}, some: {some}"
            ours, theirs = (one.isnan() for one in found)
            pairs[f"NaN of {name}"] = ours, theirs
            ours, theirs = (one.masked_fill(one.isnan(), 0.0).view(BITS[dtype]) for one in found)
            pairs[f"bits of {name}"] = ours, theirs
        return pairs

    compare(expanded, 0.0)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=NAMES.get)
@pytest.mark.parametrize("sizes", MXFP4_SIZES, ids=str)
def test_mxfp4_values(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """All matrices are written, or those that are needed. The others stay."""
    from sarathi_pp_kernels.triton.expand_mxfp4 import expand_mxfp4, reference_expand_mxfp4

    count, outputs, groups = sizes

    def expanded() -> Pairs:
        pairs = {}
        for some in (False, True):
            codes = torch.randint(0, 256, (count, outputs, groups * 16), dtype=torch.uint8).to(DEVICE)
            scales = torch.randint(0, 256, (count, outputs, groups), dtype=torch.uint8).to(DEVICE)
            needed = torch.arange(1, count + 1, dtype=torch.int32).remainder(2).to(DEVICE) if some else None
            found = []
            for function in (expand_mxfp4, reference_expand_mxfp4):
                target = torch.full((count, groups * 32, outputs), 5.0, dtype=dtype).to(DEVICE)
                function(codes, scales, target, needed)
                found.append(target)
            ours, theirs = (one.isnan() for one in found)
            pairs[f"NaN, some: {some}"] = ours, theirs
            ours, theirs = (one.masked_fill(one.isnan(), 0.0).view(BITS[dtype]) for one in found)
            pairs[f"bits, some: {some}"] = ours, theirs
        return pairs

    compare(expanded, 0.0)


@pytest.mark.parametrize(("family", "form", "graphed", "few"), CASES)
def test_stages(
    family: str, form: str, graphed: bool, few: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that stay as they are stored give the logits of weights that are dequantised on load.

    They are expanded for each product, or their codes are multiplied.
    """
    from sarathi_pp_kernels.triton import few_rows

    monkeypatch.setattr(few_rows, "MOST_ROWS", few_rows.MOST_ROWS if few else 0)
    dtype = DTYPES[0]
    directory = write_published(family, form, tmp_path, with_layers(family, LAYERS)).quantised
    facts, layers = check_model(directory), (0, LAYERS)
    kept, plain = (
        load_stage(directory, layers, LAYERS, dtype, DEVICE, TritonAttention(), dequantised=dtype, coded=coded)
        for coded in (True, False)
    )
    assert kept.num_bytes < plain.num_bytes or LAYERS == 1  # experts of one layer are expanded at once

    def logits() -> Pairs:
        ours, theirs = (
            KVShard(layers, NUM_PAGES, PAGE_SIZE, facts.caches, dtype, DEVICE, spare=True) for _ in range(2)
        )
        graphs = None
        if graphed:
            empty = [CudaGraph(torch.cuda.graph_pool_handle()) for _ in SHAPES]
            try:
                graphs = StageGraphs(kept, ours, SHAPES, facts.hidden_size, facts.num_heads, DEVICE, empty)
            except RuntimeError as error:
                if few or family == "llama" or "captur" not in str(error):
                    raise
                pytest.skip(f"torch cannot capture its product of experts: {error}")
        pairs = {}
        for number, parts in enumerate(SCHEDULE):
            spans = [Span(start, count, pages) for start, count, pages in parts]
            ids = torch.randint(3, VOCAB_SIZE, (sum(span.num_tokens for span in spans),))
            last = [end - 1 for end in accumulate(span.num_tokens for span in spans)]
            inputs = build_inputs(spans, last, PAGE_SIZE, DEVICE)
            expected = plain.forward(ids.to(DEVICE), inputs, theirs)
            if graphs is None:
                found = kept.forward(ids.to(DEVICE), inputs, ours)
            else:
                compute = graphs.prepare(spans, last, ids.tolist())
                assert compute is not None, "no graph fits"
                found = compute(None)
            pairs[f"microbatch {number}"] = found, expected
        return pairs

    compare(logits, LIMITS[dtype], repeatable=False)
