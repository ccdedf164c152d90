"""An emulated stage alone, on a clock that only sleeps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sarathi_pp.checkpoint.facts.layer_cache import StateCache, state_bytes
from sarathi_pp.config import RunConfig
from sarathi_pp.core.cost.model import CostModel, LayerCost, Load, StageCost
from sarathi_pp.core.cost.repartition import repartition
from sarathi_pp.core.plan import MicroBatch
from sarathi_pp.errors import ConfigError
from sarathi_pp.stages.emulated_stage import EmulatedStage, emulated_facts, with_profile
from tests.core.cost.test_profile import PROFILE

HEAVY_HEAD = CostModel(1, (StageCost((0, 4), 4e-3, 0, 0, 0, 0), StageCost((4, 8), 4e-3 + 8e-3, 0, 0, 0, 0)))


class Sleeper:
    """A clock that moves only during a sleep."""

    at_s = 0.0

    def now(self) -> float:
        return self.at_s

    def sleep(self, seconds: float) -> None:
        self.at_s += seconds


def slept_s(layers: list[tuple[int, int]], stage: int) -> float:
    run: Any = SimpleNamespace(layers=layers)
    clock: Any = Sleeper()
    emulated = EmulatedStage(replace(PROFILE, cost=HEAVY_HEAD), run, layers[stage], torch.float32, clock)
    emulated.prepare(MicroBatch.parse("m0[s0:0+5]"))(None)
    return clock.now()  # type: ignore[no-any-return]


def test_the_profiles_own_stages_take_exactly_what_it_says() -> None:
    assert [slept_s([(0, 4), (4, 8)], stage) for stage in (0, 1)] == [4e-3, 12e-3]


def test_other_stages_are_cut_as_a_plan_cuts_them() -> None:
    layers = [(0, 6), (6, 7), (7, 8)]
    cut, load = repartition(HEAVY_HEAD, layers), Load(5, 0.0, 0, 0)
    found = [slept_s(layers, stage) for stage in range(3)]
    assert found == pytest.approx([6e-3, 1e-3, 9e-3])
    assert found == [cut.seconds(stage, load) for stage in range(3)]


def test_a_hybrid_s_layers_keep_states_that_take_no_memory() -> None:
    kinds = ["linear"] * 3 + ["attention", "mamba", "conv with experts", "latent attention", "attention with an MLP"]
    layers = tuple(LayerCost(kind, 1e-3, 1e-3, 0, 0, 0, page_bytes=0) for kind in kinds)
    hybrid = emulated_facts(replace(PROFILE, cost=replace(HEAVY_HEAD, layer_costs=layers)), None)
    assert [isinstance(cache, StateCache) for cache in hybrid.caches] == [*[True] * 3, False, True, True, False, False]
    assert hybrid.has_states and state_bytes(hybrid.caches, 4) == 0
    plain = emulated_facts(replace(PROFILE, cost=replace(HEAVY_HEAD, layer_costs=(layers[3],) * 8)), None)
    assert not plain.has_states and not emulated_facts(PROFILE, None).has_states


def test_the_type_of_keys_and_values_is_that_of_the_profile() -> None:
    for kind in ("auto", "fp8"):
        assert with_profile(RunConfig(model=""), replace(PROFILE, kv_cache_dtype=kind)).kv_cache_dtype == kind
    with pytest.raises(ConfigError, match="--emulate runs no model, so --kv-cache-dtype cannot be honoured"):
        with_profile(RunConfig(model="", kv_cache_dtype="fp8"), PROFILE)
