"""An emulated stage alone, on a clock that only sleeps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sarathi_pp.core.cost.model import CostModel, Load, StageCost
from sarathi_pp.core.cost.repartition import repartition
from sarathi_pp.core.plan import MicroBatch
from sarathi_pp.stages.emulated_stage import EmulatedStage
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
