"""A pipeline's stages on a device: the waits of their hosts, and their behaviour if no graph is possible."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sarathi_pp.checkpoint.facts.layer_cache import plain_caches
from sarathi_pp.checkpoint.stored_tensor import StoredTensor
from sarathi_pp.core.plan import Chunk, MicroBatch, SamplingRow, Scored
from sarathi_pp.drawing.scoring import SLICE_ROWS, score
from sarathi_pp.errors import CapacityError
from sarathi_pp.model.attention.triton import TritonAttention
from sarathi_pp.model.graphs import CaptureError, CudaGraph, Shape, StageGraphs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import load_stage, stage_bytes
from sarathi_pp.model.memory import give_back
from sarathi_pp.model.weights import HeldTypes
from sarathi_pp.stages.model_stage import ModelStage
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.wire.shard_group import ShardGroup
from tests.mockgpu import machine
from tests.mockgpu.machine import TIMELINE
from tests.model.families import NUM_LAYERS as ALL_LAYERS
from tests.model.families import with_layers, write_checkpoint

GPU = torch.device("cuda", 0)
NUM_LAYERS = 2
GREEDY = SamplingRow(position=0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
DRAWN = SamplingRow(position=0, temperature=1.0, top_k=3, top_p=0.9, min_p=0.0, seed=7)
SHAPES = (Shape(8, 3, decodes=False), Shape(2, 2, decodes=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint("llama", directory, config=with_layers("llama", NUM_LAYERS))
    return directory


def make_stage(model: Path, layers: tuple[int, int], *, graphed: bool) -> ModelStage:
    loaded = load_stage(model, layers, NUM_LAYERS, torch.float32, GPU, TritonAttention())
    config = loaded.module.config
    heads, head_dim = config.num_key_value_heads, config.head_dim
    kv = KVShard(layers, 8, 16, plain_caches(layers[1], heads, head_dim), torch.float32, GPU, spare=True)
    graphs = None
    if graphed:
        sizes = config.hidden_size, config.num_attention_heads
        empty = [CudaGraph(torch.cuda.graph_pool_handle()) for _ in SHAPES]
        graphs = StageGraphs(loaded, kv, SHAPES, *sizes, GPU, empty)
    return ModelStage(loaded, kv, config.hidden_size, torch.float32, GPU, graphs=graphs)


def microbatches(row: SamplingRow) -> list[MicroBatch]:
    """Return a prompt, another prompt with a decode, and decodes."""
    return [
        MicroBatch(0, (Chunk(0, 0, 0, 5, False, (3, 4, 5, 6, 7), (4,), row),), (), 0.0),
        MicroBatch(
            1, (Chunk(1, 0, 0, 3, False, (6, 7, 8), (2,), row), Chunk(0, 0, 5, 1, True, (5,), (), row)), (), 0.0
        ),
        MicroBatch(2, (Chunk(0, 0, 6, 1, True, (9,), (), row), Chunk(1, 0, 3, 1, True, (3,), (), row)), (), 0.0),
    ]


def waited(work) -> tuple[object, Counter[str]]:
    before = TIMELINE.waits.copy()
    found = work()
    return found, TIMELINE.waits - before


@pytest.mark.parametrize(
    ("row", "graphed"),
    [
        pytest.param(GREEDY, False, id="greedy"),
        pytest.param(DRAWN, True, id="drawn-graphed"),
        pytest.param(GREEDY, True, marks=pytest.mark.full, id="greedy-graphed"),
        pytest.param(DRAWN, False, marks=pytest.mark.full, id="drawn"),
    ],
)
def test_a_host_waits_for_its_tokens_and_for_nothing_else(model, graphed, row):
    middle = NUM_LAYERS // 2
    first = make_stage(model, (0, middle), graphed=graphed)
    last = make_stage(model, (middle, NUM_LAYERS), graphed=graphed)
    for microbatch in microbatches(row):
        output, waits = waited(lambda: first.prepare(microbatch)(None))  # noqa: B023
        assert output.hidden.is_cuda and not waits, waits
        answered, waits = waited(lambda: last.prepare(microbatch)(output.hidden))  # noqa: B023
        assert answered.tokens and waits == {"copy to the host": 1}, waits
    expected = (3, 0) if graphed else None
    assert first.graphed == last.graphed == expected


@pytest.mark.parametrize("num_top", [0, 3])
def test_a_host_waits_once_for_the_scores_of_a_slice(num_top):
    ids = tuple(place % 30 for place in range(2 * SLICE_ROWS + 1))
    whole = MicroBatch(0, (Chunk(2, 0, 0, len(ids), token_ids=ids, scored=Scored(1, len(ids) + 1, num_top, 7)),))
    rows = torch.randn(len(ids), 30, generator=torch.Generator().manual_seed(3))
    ((expected,), _) = score(SimpleNamespace(forward=lambda logits: logits), rows, whole)
    moved = rows.to(GPU)
    (((found,), failed), waits) = waited(lambda: score(SimpleNamespace(forward=lambda logits: logits), moved, whole))
    assert waits == {"copy to the host": 3} and not failed
    assert found[:4] == expected[:4] and found.top_ids == expected.top_ids
    assert found.logprobs == pytest.approx(expected.logprobs, rel=1e-12)
    assert found.top_logprobs == pytest.approx(expected.top_logprobs, rel=1e-12)


def test_a_capture_that_fails_leaves_the_stream_that_computes(caplog):
    """Another stream would be current from then on, and no input waits for it."""
    x = torch.ones(2, device=GPU)
    before = torch.cuda.current_stream()
    with pytest.raises(CaptureError, match="previous error during capture"):
        CudaGraph(torch.cuda.graph_pool_handle()).capture(lambda: x.tolist())
    assert torch.cuda.current_stream().number == before.number
    give_back()
    assert "torch cannot give its unused memory back" in caplog.text
    machine.captures_failed.clear()


def test_a_sum_that_is_refused_fails_the_capture_and_loses_no_rank():
    """The capture itself stays valid."""

    def refuse(x: torch.Tensor) -> None:
        raise RuntimeError("NCCL Error 5: invalid usage")

    x = torch.ones(2, device=GPU)
    shards = ShardGroup(0, 2, ("shard 1",), SimpleNamespace(all_reduce=refuse), SystemClock())
    with pytest.raises(CaptureError, match="NCCL Error 5"):
        CudaGraph(torch.cuda.graph_pool_handle()).capture(lambda: shards.all_reduce(x))
    assert not machine.captures_failed


@pytest.mark.parametrize("share", [0.5, 1.01], ids=["its weights", "what is merged on the way"])
def test_a_model_that_is_too_large_for_the_device_is_said_to_be(share, model, monkeypatch):
    gc.collect()  # memory freed later would be room too
    room_bytes = int(share * stage_bytes(model, (0, NUM_LAYERS), HeldTypes.on("cuda", torch.float32)))
    monkeypatch.setattr(TIMELINE, "_room", TIMELINE.live_bytes() + room_bytes)
    with pytest.raises(CapacityError, match="CUDA out of memory") as refused:
        load_stage(model, (0, NUM_LAYERS), NUM_LAYERS, torch.float32, GPU, TritonAttention())
    where = {frame.name for frame in traceback.extract_tb(refused.value.__cause__.__traceback__)}
    assert ("fuse" in where) == (share > 1), where


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen2_moe"])
def test_weights_pass_through_the_hosts_memory_a_few_at_a_time(family, tmp_path, monkeypatch):
    """Stages on eight GPUs each hold an eighth of a large model. Their host's memory would hold all of it."""
    write_checkpoint(family, tmp_path)
    read, alive, most = StoredTensor.read, [], [0]

    def counted(self: StoredTensor) -> torch.Tensor:
        found = read(self)
        alive.append(weakref.ref(found))
        most[0] = max(most[0], sum(one() is not None for one in alive))
        return found

    monkeypatch.setattr(StoredTensor, "read", counted)
    loaded = load_stage(tmp_path, (0, ALL_LAYERS), ALL_LAYERS, torch.float32, GPU, TritonAttention())
    assert len(alive) > 20 and most[0] <= 10, (len(alive), most)  # up to the number of transformers' threads for it
    assert all(tensor.is_cuda for tensor in (*loaded.module.parameters(), *loaded.module.buffers()))


def test_weights_are_on_the_device_once(model):
    """Merged weights have replaced their parts."""
    gc.collect()
    before = TIMELINE.live_bytes()
    loaded = load_stage(model, (0, NUM_LAYERS), NUM_LAYERS, torch.float32, GPU, TritonAttention())
    gc.collect()
    held = TIMELINE.live_bytes() - before
    tensors = (*loaded.module.parameters(), *loaded.module.buffers())
    assert held == sum({one.data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())
