"""Microbatches of a small stage, by CUDA graphs one after the other, and the same launched without graphs."""

from __future__ import annotations

import random

import pytest
import torch

from sarathi_pp.bench.gpu.stage import Extents, GpuStage, ModelShape, lay_out, synthetic_tokens
from sarathi_pp.model.graphs import CudaGraph, StageGraphs, graph_shapes
from sarathi_pp.model.inputs import Span, build_inputs
from tests.gpu.comparison import BF16, DEVICE, DTYPES, F32, NAMES, Pairs, compare, sized

LIMITS = {F32: 2e-5, BF16: 2e-2}
SHAPE = sized([ModelShape(512, 1536, 4, 8, 4, 2048)], tiny=[ModelShape(32, 64, 1, 2, 1, 64)])[0]
# Most tokens and most sequences of a microbatch, number of microbatches, tokens in pages, most earlier tokens.
TOKENS, SEQS, COUNT, ROOM, EARLIER = sized([(160, 12, 40, 16384, 900)], tiny=[(3, 1, 2, 64, 10)])[0]


def microbatch(chance: random.Random, has_chunk: bool) -> Extents:
    count = chance.randint(1, SEQS)
    extents = [(chance.randint(0, EARLIER), 1) for _ in range(count)]
    if has_chunk:
        extents[0] = (extents[0][0], chance.randint(2, TOKENS - count))
    return extents


def laid_out(stage: GpuStage, extents: Extents) -> tuple[list[Span], list[int], list[int]]:
    """Return the spans, the rows that need logits, and the token ids."""
    spans, ids, rows = lay_out(extents, stage.page_size, stage.kv.num_pages), [], []
    for span in spans:
        ids += synthetic_tokens(span.start, span.num_tokens, SHAPE.vocab_size)
        rows.append(len(ids) - 1)
    return spans, rows, ids


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_graphs(dtype: torch.dtype) -> None:
    def graphed() -> Pairs:
        stage = GpuStage(SHAPE, dtype, DEVICE, ROOM, "triton")
        pool, shapes = torch.cuda.graph_pool_handle(), graph_shapes(TOKENS, SEQS)
        sizes = SHAPE.hidden_size, SHAPE.num_heads
        graphs = StageGraphs(stage.model, stage.kv, shapes, *sizes, DEVICE, [CudaGraph(pool) for _ in shapes])
        chance = random.Random(int(torch.randint(1 << 31, ())))
        microbatches = [laid_out(stage, microbatch(chance, has_chunk=bool(at % 2))) for at in range(COUNT)]
        pages = [
            tensor for layer in range(SHAPE.num_layers) for tensor in (stage.kv.keys(layer), stage.kv.values(layer))
        ]
        before = [tensor.clone() for tensor in pages]
        by_graphs = []
        for spans, rows, ids in microbatches:
            compute = graphs.prepare(spans, rows, ids)
            assert compute is not None, f"no graph for {len(ids)} tokens of {len(spans)} sequences"
            for graph in graphs._graphs:
                assert graph._out is not None, "it was captured"
                graph._x.fill_(float("nan"))  # read only by stages that do not embed
                graph._out.fill_(float("nan"))
            by_graphs.append(compute(None))
        for tensor, numbers in zip(pages, before, strict=True):
            tensor.copy_(numbers)  # a microbatch writes what others read
        launched = []
        for spans, rows, ids in microbatches:
            inputs = build_inputs(spans, rows, stage.page_size, DEVICE)
            launched.append(stage.model.forward(torch.tensor(ids, device=DEVICE), inputs, stage.kv))
        return {f"microbatch {at}": pair for at, pair in enumerate(zip(by_graphs, launched, strict=True))}

    compare(graphed, LIMITS[dtype], repeatable=False)
