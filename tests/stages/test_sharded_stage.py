"""Stages of tensor shards: half of the KV heads, so twice the pages, and the tokens of a whole stage."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.config import ResolvedRun, RunConfig
from sarathi_pp.core.plan import Chunk, MicroBatch, SamplingRow
from sarathi_pp.model.tensor_parallel import TensorShard
from sarathi_pp.stages.capacity import resolve
from sarathi_pp.stages.model_stage import ModelStages
from tests.model.families import NUM_LAYERS, write_checkpoint
from tests.model.shards import Sum

CPU = torch.device("cpu")
LAYERS = (0, NUM_LAYERS)
GREEDY = SamplingRow(position=9, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint("qwen3", directory)
    return directory


def maker(directory: Path, shard: TensorShard | None) -> ModelStages:
    config = RunConfig(model=str(directory), dtype="float32", device="cpu", kv_cache_memory_bytes=1 << 20, page_size=4)
    stages = ModelStages(config, directory, check_model(directory), torch.float32, CPU, shard)
    stages.load(LAYERS, 1 << 30)
    return stages


def tokens(stages: ModelStages, directory: Path, pages: int) -> tuple[int, ...]:
    run: ResolvedRun = resolve(
        RunConfig(model=str(directory), max_num_seqs=1, max_model_len=64),
        check_model(directory),
        (LAYERS,),
        [pages],
        page_size=4,
        dtype="float32",
        device="cpu",
        attention=stages.attention,
    )
    stage = stages.make(run, LAYERS, torch.float32)
    stage.warm_up(8, 8)
    chunk = Chunk(0, 0, 0, 9, token_ids=tuple(range(3, 12)), new_pages=(1, 5, 2), sampling=GREEDY)
    first = stage.prepare(MicroBatch(0, (chunk,)))(None).tokens[0].token_id
    chunk = Chunk(0, 0, 9, 1, token_ids=(first,), sampling=GREEDY)
    return first, stage.prepare(MicroBatch(1, (chunk,)))(None).tokens[0].token_id


def test_two_shards_hold_twice_the_pages_and_draw_the_same_tokens(directory: Path) -> None:
    whole = maker(directory, None)
    total = Sum(2)
    shards = [maker(directory, total.shard(index)) for index in range(2)]
    pages = whole.count_pages(LAYERS, {})
    assert pages == (1 << 20) // (2 * NUM_LAYERS * 4 * 2 * 16 * 4)
    assert [shard.count_pages(LAYERS, {}) for shard in shards] == [(1 << 20) // (2 * NUM_LAYERS * 4 * 1 * 16 * 4)] * 2

    def drawn(shard: ModelStages) -> tuple[int, ...]:
        with total.turn:
            return tokens(shard, directory, pages)

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(drawn, shards))
    assert found[0] == found[1] == tokens(whole, directory, pages)
