"""The verdict of a plan and its remedies, compared with the run's own checks on the same memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.config import RunConfig
from sarathi_pp.errors import CapacityError
from sarathi_pp.process.host import MemoryPool
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.stages import capacity
from sarathi_pp.stages.memory_demand import Demand, require_room, room_for, sharers_of
from sarathi_pp.stages.model_stage import ModelStages
from sarathi_pp.tuning.fitting import fill
from sarathi_pp.tuning.hardware import Hardware
from sarathi_pp.tuning.model_memory import ModelMemory, PlannedModel
from sarathi_pp.tuning.plan import make_plan

ADDER = Path(__file__).parents[2] / "examples" / "tiny-adder"
CPU, WORKLOAD = torch.device("cpu"), parse_workload("fixed:n=4,prompt=30,output=4")
LAYERS = ((0, 3), (3, 5))
WEIGHTS = (595456, 398592)


class Host:
    """A simulated host with limited memory."""

    def __init__(self, free_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes = free_bytes
        monkeypatch.setattr(capacity, "memory_pools", self.pools)

    def pools(self) -> tuple[MemoryPool, ...]:
        return (MemoryPool("host", "the host's memory", self.free_bytes),)


def start(host: Host, config: RunConfig) -> None:
    """Check and load two stages as two ranks of a run do. Raise CapacityError."""
    makers = [ModelStages(config, ADDER, check_model(ADDER), torch.float32, CPU) for _ in LAYERS]
    demands = [Demand(maker.weight_bytes(own), host.pools()) for maker, own in zip(makers, LAYERS, strict=True)]
    require_room(demands, ["host"] * 2, "weights", "")
    for rank, (maker, own) in enumerate(zip(makers, LAYERS, strict=True)):
        maker.load(own, room_for(rank, demands))
    host.free_bytes -= sum(demand.num_bytes for demand in demands)
    for rank, (maker, own) in enumerate(zip(makers, LAYERS, strict=True)):
        maker.count_pages(own, sharers_of(rank, demands))


@pytest.mark.parametrize("free_bytes", [500_000, 990_000, 1_000_000, 1_050_000, 1_100_000, 1_500_000, 8_000_000])
def test_a_run_starts_if_a_plan_says_that_it_fits(free_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a plan needs more memory than a run checks: pages of a whole request, and working memory."""
    config = RunConfig(model=str(ADDER), stages=2, layer_split=(3, 2), device="cpu", head="last", attention="sdpa")
    plan = make_plan(config, WORKLOAD) if Host(free_bytes, monkeypatch) else {}
    try:
        start(Host(free_bytes, monkeypatch), config)
        starts = True
    except CapacityError:
        starts = False
    extra = sum(stage["working_bytes"] for stage in plan["per_stage"]) + 10 * plan["per_stage"][0]["least_kv_bytes"]
    assert starts or not plan["fits"]
    assert plan["fits"] or not starts or free_bytes <= sum(WEIGHTS) + extra
    assert [stage["weights_bytes"] for stage in plan["per_stage"]] == [*WEIGHTS]


def elsewhere(memory: tuple[int, ...], **options: Any) -> dict[str, Any]:
    hardware = Hardware(memory=memory)
    return make_plan(RunConfig(**{"model": str(ADDER), **options}), WORKLOAD, hardware, use_all_devices=True)


def test_layers_follow_memory_and_then_time() -> None:
    """Two devices have one speed. The small one gets the layers that it can hold."""
    kept = {"gpu_memory_utilization": 1.0, "dtype": "float32"}
    context = 512 << 20
    even = elsewhere((context + 50_000_000,) * 2, **kept)
    assert even["layer_split"] == [3, 2]
    floor = {place["stage"]: place["total_bytes"] for place in even["floor"]}
    small = context + floor["first"] + 10_000
    found = elsewhere((small, context + 50_000_000), **kept)
    assert found["fits"] and found["layer_split"] == [1, 4]
    assert found["per_stage"][0]["free_bytes"] >= 0


def test_a_plan_that_does_not_fit_says_by_how_much_and_what_would() -> None:
    context = 512 << 20
    found = elsewhere((context + 700_000,) * 2, gpu_memory_utilization=1.0)
    assert not found["fits"] and found["total_tokens_per_s"] is None
    worst = max(found["per_stage"], key=lambda stage: stage["short_bytes"])
    assert worst["short_bytes"] == worst["total_bytes"] - 700_000 == found["short_bytes"]
    assert found["verdict"].startswith(f"does not fit: stage {worst['stage']} lacks")
    assert found["would_fit"][-1]["options"] == ("--card", "a10")  # the smallest


def test_each_remedy_fits_when_it_is_followed() -> None:
    (whole,) = elsewhere((512 << 20,), gpu_memory_utilization=1.0)["per_stage"]
    memory = (512 << 20) + whole["total_bytes"] - 50_000
    found = elsewhere((memory,), gpu_memory_utilization=1.0)
    (stages, *_) = found["would_fit"]
    assert not found["fits"] and stages["options"][0] == "--stages"
    count = int(stages["options"][1])
    assert elsewhere((memory,) * count, gpu_memory_utilization=1.0)["fits"]
    assert not elsewhere((memory,) * (count - 1), gpu_memory_utilization=1.0)["fits"]


def test_a_shorter_request_is_a_remedy_if_its_length_was_asked_for() -> None:
    context = 512 << 20
    (stage,) = elsewhere((context,), gpu_memory_utilization=1.0, max_model_len=1152)["per_stage"]
    tight = context + stage["total_bytes"] - stage["least_kv_bytes"] // 2
    found = elsewhere((tight,), gpu_memory_utilization=1.0, max_model_len=1152)
    options = {remedy["options"][0]: remedy["options"][1] for remedy in found["would_fit"]}
    assert not found["fits"] and 34 <= int(options["--max-model-len"]) < 1152
    shorter = elsewhere((tight,), gpu_memory_utilization=1.0, max_model_len=int(options["--max-model-len"]))
    assert shorter["fits"]


@pytest.mark.parametrize("kv_cache_memory_bytes", [1 << 10, 8 << 20])
def test_a_kv_cache_that_the_user_sets_gets_remedies_that_fit(kv_cache_memory_bytes: int) -> None:
    """Too small for a request, or too large for the device."""
    context = 512 << 20
    options = {"kv_cache_memory_bytes": kv_cache_memory_bytes}
    found = elsewhere((context + (8 << 20),), **options)
    assert not found["fits"]
    remedies = {remedy["options"][0]: remedy["options"][1] for remedy in found["would_fit"]}
    mib = int(remedies["--kv-cache-memory"].removesuffix("MiB"))
    assert elsewhere((context + (8 << 20),), kv_cache_memory_bytes=mib << 20)["fits"]
    # Other devices do not help a KV cache that is too small for one layer's pages.
    assert ("--card" in remedies) == (kv_cache_memory_bytes == 8 << 20)


def test_filling_gives_each_stage_what_it_can_hold() -> None:
    memory = ModelMemory.of(PlannedModel.find(str(ADDER)), RunConfig(model=str(ADDER), stages=3), "cpu", 34)
    needs = [memory.least_bytes(span, 64) for span in ((0, 2), (2, 3), (3, 5))]
    assert fill(memory, needs, 64) == ((0, 2), (2, 3), (3, 5))
    assert fill(memory, [needs[0], needs[1], needs[2] - 1], 64) is None
    assert fill(memory, [1, 1 << 30, 1 << 30], 64) is None
