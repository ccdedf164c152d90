"""Weights in FP8 and MXFP4 on a simulated GPU: graphs and eager calls give the tokens of dequantised weights."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from sarathi_pp_kernels.triton import few_rows

from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.core.plan import Chunk, MicroBatch, SamplingRow
from sarathi_pp.model.attention.triton import TritonAttention
from sarathi_pp.model.graphs import CudaGraph, Shape, StageGraphs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import load_stage, stage_bytes
from sarathi_pp.model.weights import HeldTypes
from sarathi_pp.stages.model_stage import ModelStage
from tests.checkpoint.quantised import write_published
from tests.mockgpu.machine import TIMELINE
from tests.model.families import with_layers

GPU = torch.device("cuda", 0)
NUM_LAYERS = 2
WHOLE = (0, NUM_LAYERS)
SHAPES = (Shape(4, 2, decodes=False), Shape(2, 2, decodes=True))
GREEDY = SamplingRow(position=0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
MODELS = [
    ("llama", "fp8 blocks"),
    pytest.param(("qwen3_moe", "fp8 blocks"), marks=pytest.mark.full),
    ("gpt_oss", "mxfp4"),
]


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model[0])
def model(request, tmp_path_factory) -> Path:
    family, form = request.param
    return write_published(family, form, tmp_path_factory.mktemp(family), with_layers(family, NUM_LAYERS)).quantised


def make_stage(model: Path, *, coded: bool, graphed: bool) -> ModelStage:
    facts = check_model(model)
    loaded = load_stage(
        model, WHOLE, NUM_LAYERS, torch.float32, GPU, TritonAttention(), dequantised=torch.float32, coded=coded
    )
    kv = KVShard(WHOLE, 8, 16, facts.caches, torch.float32, GPU, spare=True)
    graphs = None
    if graphed:
        empty = [CudaGraph(torch.cuda.graph_pool_handle()) for _ in SHAPES]
        graphs = StageGraphs(loaded, kv, SHAPES, facts.hidden_size, facts.num_heads, GPU, empty)
    return ModelStage(loaded, kv, facts.hidden_size, torch.float32, GPU, graphs=graphs)


MICROBATCHES = [
    MicroBatch(0, (Chunk(0, 0, 0, 2, False, (3, 4), (4,), GREEDY), Chunk(1, 0, 0, 2, False, (6, 7), (2,), GREEDY))),
    MicroBatch(1, (Chunk(0, 0, 2, 1, True, (5,), (), GREEDY), Chunk(1, 0, 2, 1, True, (8,), (), GREEDY))),
]


@pytest.mark.parametrize("most_rows", [0, few_rows.MOST_ROWS])
def test_tokens_by_graphs_and_without(model, most_rows, monkeypatch):
    """Weights are expanded, or codes are multiplied."""
    monkeypatch.setattr(few_rows, "MOST_ROWS", most_rows)
    plain = make_stage(model, coded=False, graphed=False)
    expected = [plain.prepare(microbatch)(None).tokens for microbatch in MICROBATCHES]
    for graphed in (False, True):
        if graphed and has_experts(plain) and not most_rows:
            continue  # on the host, torch's grouped product reads how many tokens an expert has
        stage = make_stage(model, coded=True, graphed=graphed)
        before = TIMELINE.waits.copy()
        found = [stage.prepare(microbatch)(None).tokens for microbatch in MICROBATCHES]
        assert found == expected and all(found)
        if most_rows or not has_experts(plain):
            assert TIMELINE.waits - before == {"copy to the host": 2}, "the host waits for nothing else"
        assert stage.graphed == ((2, 0) if graphed else None)


def has_experts(stage: ModelStage) -> bool:
    return any(hasattr(module, "gate_up_proj") for module in stage.model.module.modules())


def test_the_bytes_that_are_counted_are_taken(model):
    taken, counted, loaded = [], [], []
    for coded in (True, False):
        gc.collect()
        before = TIMELINE.live_bytes()
        loaded.append(load_stage(model, WHOLE, NUM_LAYERS, torch.float32, GPU, TritonAttention(), coded=coded))
        gc.collect()
        taken.append(TIMELINE.live_bytes() - before)
        counted.append(stage_bytes(model, WHOLE, HeldTypes.on("cuda", torch.float32, coded=coded)))
    assert [stage.num_bytes for stage in loaded] == counted
    # Rotary embeddings are in no file. Both stages have them.
    assert taken[1] - taken[0] == counted[1] - counted[0] > 0.1 * counted[1]
    assert all(tensor.is_cuda for tensor in (*loaded[0].module.parameters(), *loaded[0].module.buffers()))
