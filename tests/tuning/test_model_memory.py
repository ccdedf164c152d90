"""A plan counts a loaded stage's memory: parameters, KV pages, and the memory of a microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers as t
from torch.profiler import ProfilerActivity, profile

from sarathi_pp.config import RunConfig
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.model import loader
from sarathi_pp.model.attention import Needs, choose_backend
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import load_stage
from sarathi_pp.model.stage_model import StageModel
from sarathi_pp.stages import working_memory
from sarathi_pp.stages.capacity import resolve_limits
from sarathi_pp.stages.working_memory import LargestMicrobatch, measure_working_bytes
from sarathi_pp.tuning.model_memory import ModelMemory, PlannedModel

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
MODELS = {
    "llama": (t.LlamaForCausalLM, t.LlamaConfig(**SIZES)),
    "qwen3_moe": (
        t.Qwen3MoeForCausalLM,
        t.Qwen3MoeConfig(**SIZES, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256),
    ),
    "gpt_oss": (
        t.GptOssForCausalLM,
        t.GptOssConfig(**SIZES, head_dim=32, num_local_experts=8, num_experts_per_tok=2),
    ),
}
CHUNK_SIZE, LONGEST = 32, 128


@contextmanager
def measured_on_cpu(device: torch.device) -> Iterator[working_memory._Peak]:
    """Measure the most memory that is allocated at once, as working_memory does on a GPU."""
    peak, now = working_memory._Peak(), 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield peak
    events = [one for one in profiled.profiler.kineto_results.events() if one.name() == "[memory]"]
    for event in sorted(events, key=lambda one: one.start_ns()):
        now += event.nbytes()
        peak.num_bytes = max(peak.num_bytes, now)


def working_bytes(memory: ModelMemory, stage: StageModel, kv: KVShard, monkeypatch: pytest.MonkeyPatch) -> int:
    """Measure the memory of the largest microbatch with the run's own function."""
    monkeypatch.setattr(working_memory, "_measured", measured_on_cpu)
    facts, config = memory.model.facts, memory.config
    limits = resolve_limits(config, facts, config.stages, (), memory.page_size)
    largest = LargestMicrobatch.of(parse_policy(config.policy), limits)
    return measure_working_bytes(stage, kv, largest, facts.hidden_size, facts.num_heads, graphed=False)


@pytest.mark.parametrize("layers", [(0, 2), (2, 4)])
@pytest.mark.parametrize("family", MODELS)
def test_a_stage_takes_what_was_planned_from_its_config(
    family: str, layers: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, config = MODELS[family]
    config.save_pretrained(tmp_path)
    model = kind(config)
    model.config.save_pretrained(tmp_path)
    options = RunConfig(model=str(tmp_path), stages=2, chunk_size=CHUNK_SIZE, max_num_seqs=8, dtype="float32")
    planned = PlannedModel.find(str(tmp_path / "config.json"))
    assert planned.from_config
    memory = ModelMemory.of(planned, options, "cpu", LONGEST)

    model.save_pretrained(tmp_path)
    facts = planned.facts
    backend = choose_backend("sdpa", CPU, 16, Needs(torch.float32, facts.head_dim, facts.softcap, facts.sinks))
    monkeypatch.setattr(loader, "fuse", lambda module, compute: 0)  # packed weights are no parameters
    stage = load_stage(tmp_path, layers, 4, torch.float32, CPU, backend)
    kv = KVShard(layers, LONGEST // 16, 16, facts.caches, torch.float32, CPU)
    held = sum(one.nbytes for one in (*stage.module.parameters(), *stage.module.buffers()))
    pages = sum(kv.keys(layer).nbytes + kv.values(layer).nbytes for layer in range(*layers))
    working = working_bytes(memory, stage, kv, monkeypatch)

    print(family, layers, held, pages, working, memory.working_bytes(layers, CHUNK_SIZE))
    assert memory.weights.num_bytes(layers) == pytest.approx(held, rel=0.01)
    assert memory.least_kv_bytes(layers) == pages
    assert memory.least_bytes(layers, CHUNK_SIZE) == pytest.approx(held + pages + working, rel=0.05)
    assert 0.5 * working < memory.working_bytes(layers, CHUNK_SIZE) < 2 * working


def test_the_plan_has_room_to_score_the_prompt_of_one_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring takes more than drawing: 64 rows of logits, against one and its distribution."""
    sizes = {**SIZES, "vocab_size": 32_000, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = t.LlamaForCausalLM(t.LlamaConfig(**sizes))
    model.save_pretrained(tmp_path)
    options = RunConfig(model=str(tmp_path), chunk_size=LONGEST, max_num_seqs=1, dtype="float32")
    planned = PlannedModel.find(str(tmp_path))
    facts, memory = planned.facts, ModelMemory.of(planned, options, "cpu", LONGEST)
    backend = choose_backend("sdpa", CPU, 16, Needs(torch.float32, facts.head_dim, facts.softcap, facts.sinks))
    stage = load_stage(tmp_path, (0, 1), 1, torch.float32, CPU, backend)
    kv = KVShard((0, 1), LONGEST // 16, 16, facts.caches, torch.float32, CPU)
    working = working_bytes(memory, stage, kv, monkeypatch)
    assert 64 * 32_000 * 4 < working <= memory.working_bytes((0, 1), LONGEST) < 1.5 * working
