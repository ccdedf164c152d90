"""GPU memory needed besides weights and KV pages: measured for the largest possible microbatch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.config import ResolvedRun, RunConfig
from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.core.plan import Chunk, MicroBatch, SamplingRow
from sarathi_pp.core.policy import POLICIES
from sarathi_pp.drawing.draw import Edits
from sarathi_pp.errors import CapacityError
from sarathi_pp.model.inputs import StageInputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import load_stage
from sarathi_pp.model.stage_model import StageModel
from sarathi_pp.stages import model_stage, working_memory
from sarathi_pp.stages.capacity import resolve
from sarathi_pp.stages.model_stage import ModelStages
from tests.mockgpu.machine import TIMELINE
from tests.model.families import NUM_LAYERS, VOCAB_SIZE, write_checkpoint

GPU = torch.device("cuda", 0)
WHOLE = (0, NUM_LAYERS)
PAGE, LONGEST, SEQUENCES = 16, 40, 5
ROOM = 1 << 30
HIDDEN, KV_HEADS, HEAD_DIM = 48, 2, 16
# A page of one layer, in float32.
PAGE_BYTES = 2 * PAGE * KV_HEADS * HEAD_DIM * 4
ACTIVATIONS, WEIGHTS = 10_000, 300_000
DRAWN = SamplingRow(position=0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write a checkpoint whose slices are loaded once."""
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint("llama", directory)
    loaded: dict[tuple[int, int], StageModel] = {}

    def load(model_dir: Path, layers: tuple[int, int], *args: Any) -> StageModel:
        if layers not in loaded:
            loaded[layers] = load_stage(model_dir, layers, *args)
        return loaded[layers]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_stage, "load_stage", load)
        yield directory


def make(model: Path, *, by_nccl: bool = False, **options: Any) -> tuple[RunConfig, ModelStages]:
    given = {"device": "cuda", "page_size": PAGE, "max_model_len": LONGEST, "max_num_seqs": SEQUENCES, **options}
    config = RunConfig(model=str(model), dtype="float32", **{"attention": "sdpa", **given})
    return config, ModelStages(config, model, check_model(model), torch.float32, GPU, by_nccl=by_nccl)


def resolved(config: RunConfig, stages: ModelStages, pages: int) -> ResolvedRun:
    given = {"page_size": PAGE, "dtype": "float32", "device": "cuda", "attention": stages.attention}
    return resolve(config, check_model(Path(config.model)), (WHOLE,), [pages], **given)


def working_bytes(stages: ModelStages, layers: tuple[int, int] = WHOLE) -> int:
    """Return the bytes that are kept free when pages are counted, to a page."""
    one = PAGE_BYTES * (layers[1] - layers[0])
    free, total = torch.cuda.mem_get_info(GPU)
    return int(free - total * (1 - 0.9)) - one * stages.count_pages(layers, {})


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Record tokens, rows of logits and rows drawn of each microbatch.

    Triton's interpreter takes seconds for one. Here it takes memory only: ACTIVATIONS bytes per token, and WEIGHTS per
    row drawn.
    """
    found: list[tuple[int, int, int]] = []

    def compute(model: StageModel, x: Tensor, inputs: StageInputs, kv: KVShard, backend: object = None) -> Tensor:
        torch.empty((x.shape[0], ACTIVATIONS), dtype=torch.uint8, device=GPU)
        rows = inputs.logit_rows.shape[0] if model.has_lm_head else x.shape[0]
        found.append((x.shape[0], rows if model.has_lm_head else 0, 0))
        return torch.zeros((rows, VOCAB_SIZE if model.has_lm_head else HIDDEN), device=GPU)

    def draw(logits: Tensor, rows: list[SamplingRow], edits: Edits) -> None:
        assert logits.shape[0] == len(rows) == len(edits) and all(edit.rules.edits for edit in edits.values())
        assert any(row.temperature > 0 for row in rows), "the weights of no row are computed"
        torch.empty((len(rows), WEIGHTS), dtype=torch.uint8, device=GPU)
        found[-1] = (*found[-1][:2], len(rows))

    monkeypatch.setattr(StageModel, "forward", compute)
    monkeypatch.setattr(working_memory, "draw", draw)
    return found


# They bound a microbatch by a chunk size, by prompts, by both, and by one kind of work.
VARIED = ("sarathi", "orca", "balanced", "distserve")


@pytest.mark.parametrize(
    "policy", [pytest.param(name, marks=[pytest.mark.full] * (name not in VARIED)) for name in sorted(POLICIES)]
)
def test_the_largest_microbatch_of_a_policy_is_measured(model, policy, computed):
    for chunk_size in (None, 3):
        computed.clear()
        config, stages = make(model, policy=policy, chunk_size=chunk_size)
        stages.load(WHOLE, ROOM)
        (measured,) = computed
        run = resolved(config, stages, stages.count_pages(WHOLE, {}))
        rows = min(SEQUENCES, run.max_microbatch_tokens)
        assert measured == (run.max_microbatch_tokens, rows, rows)


@pytest.mark.usefixtures("computed")
def test_tokens_and_the_most_drawn_rows_are_in_it(model):
    """Five rows' weights outweigh nine tokens' activations, and 200 tokens' activations outweigh the weights."""
    for chunk_size, needed in ((9, SEQUENCES * WEIGHTS), (200, 200 * ACTIVATIONS)):
        _, stages = make(model, chunk_size=chunk_size)
        stages.load(WHOLE, ROOM)
        assert needed <= working_bytes(stages) <= 1.1 * needed


@pytest.mark.parametrize("rules", [b"", DrawRules(num_prompt=1, presence_penalty=1.0).to_bytes()], ids=["", "rules"])
def test_a_real_microbatch_that_draws_the_most_rows_needs_no_more(rules, model):
    layers, count = (NUM_LAYERS - 1, NUM_LAYERS), 12
    config, stages = make(model, chunk_size=count, max_num_seqs=count)
    gc.collect()
    torch.cuda.synchronize()
    stages.load(layers, ROOM)
    kept = working_bytes(stages, layers)
    stage = stages.make(resolved(config, stages, 40), layers, torch.float32)
    chunks = tuple(Chunk(index, 0, 0, 1, False, (5,), (index,), DRAWN, rules=rules) for index in range(count))
    hidden = torch.zeros(count, HIDDEN, device=GPU)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    stage.prepare(MicroBatch(0, chunks))(hidden)
    needed = torch.cuda.max_memory_allocated() - before
    assert count * VOCAB_SIZE * (8 + 4 * (rules != b"")) < needed <= kept, (needed, kept)


@pytest.mark.usefixtures("computed")
def test_graphs_and_buffers_are_kept_room_for(model):
    sizes, count = {}, 64
    for eager, by_nccl in ((True, False), (False, False), (True, True)):
        options = {"chunk_size": count, "enforce_eager": eager, "inflight": 3}
        _, stages = make(model, attention="triton", by_nccl=by_nccl, **options)
        stages.load((2, 4), ROOM)
        sizes[eager, by_nccl] = working_bytes(stages, (2, 4))
    # Hidden states that arrive and leave, 4 messages each way.
    assert abs(sizes[True, True] - sizes[True, False] - 2 * 4 * count * HIDDEN * 4) <= 2 * PAGE_BYTES
    # The largest graph takes the memory of the largest microbatch, and holds its inputs and outputs.
    graphs = count * ACTIVATIONS + 2 * count * HIDDEN * 4
    assert sizes[False, False] - sizes[True, False] > graphs - 2 * PAGE_BYTES


def test_a_graphs_rows_are_freed_before_the_next_one_is_made(model, monkeypatch):
    """Otherwise captures of many shapes need more than the measurement with two of them."""
    outputs: list[weakref.ref[Tensor]] = []

    def compute(model: StageModel, x: Tensor, inputs: StageInputs, kv: KVShard, backend: object = None) -> Tensor:
        assert all(output() is None for output in outputs)
        found = torch.zeros((x.shape[0], HIDDEN), device=GPU)
        outputs.append(weakref.ref(found))
        return found

    monkeypatch.setattr(StageModel, "forward", compute)
    _, stages = make(model, attention="triton", chunk_size=64)
    stages.load((2, 4), ROOM)
    assert len(outputs) == 1 + 2 * 2, "the largest microbatch, and two graphs that are warmed up and captured"


@pytest.mark.usefixtures("computed")
@pytest.mark.parametrize(
    ("policy", "remedies"),
    [("sarathi", "--chunk-size or --max-num-seqs,"), ("orca", "smaller --max-model-len or --max-num-seqs,")],
)
def test_a_gpu_without_room_for_it_is_named_with_what_helps(model, policy, remedies, monkeypatch):
    options = {"policy": policy, "max_model_len": 400, "chunk_size": 400}
    _, stages = make(model, **options)
    stages.load(WHOLE, ROOM)
    monkeypatch.setattr(TIMELINE, "_room", TIMELINE.live_bytes() + working_bytes(stages) // 2)
    says = rf"microbatch of --policy {policy}, of 40[05] tokens, of which 5 have logits: CUDA.*\n.*{remedies}"
    with pytest.raises(CapacityError, match=says):
        stages.load(WHOLE, ROOM)


@pytest.mark.usefixtures("computed")
def test_no_room_for_pages_besides_it_is_said(model):
    _, stages = make(model, gpu_memory_utilization=1e-6)
    stages.load(WHOLE, ROOM)
    with pytest.raises(CapacityError, match=r"it takes .* which leaves no room for KV pages\n"):
        stages.count_pages(WHOLE, {})


def test_nothing_is_measured_if_the_pages_memory_is_given(model, computed):
    _, stages = make(model, kv_cache_memory_bytes=1 << 20)
    stages.load(WHOLE, ROOM)
    assert not computed and stages.count_pages(WHOLE, {}) == (1 << 20) // (PAGE_BYTES * NUM_LAYERS)
