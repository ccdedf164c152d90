"""The stage costs that the policy of a run gets before the stages have run anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.config import RunConfig
from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.cost.repartition import repartition
from sarathi_pp.distributed.control_plane import ControlPlane
from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.engine.progress import IgnoreReports
from sarathi_pp.inputs.generation_config import GenerationDefaults
from sarathi_pp.model.dtypes import Dtypes
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.process.watchdog import Watchdog
from sarathi_pp.run import rank as rank_module
from sarathi_pp.run.auto_options import estimated_cost
from sarathi_pp.run.preflight import Preflight
from sarathi_pp.run.rank import set_up
from sarathi_pp.run.setup import Member, agree_on_start
from sarathi_pp.stages.emulated_stage import emulated_facts, with_profile
from sarathi_pp.trace.clock import SystemClock
from tests.core.cost.test_profile import PROFILE
from tests.model.families import write_checkpoint


def first_cost(
    config: RunConfig, model_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, emulated: Profile | None = None
) -> CostModel:
    told: list[Any] = []
    monkeypatch.setattr(rank_module, "Engine", lambda *given, cost, **rest: told.append(cost))
    facts = check_model(model_dir) if emulated is None else emulated_facts(emulated, config.page_size)
    plane = ControlPlane.join(RankEnvironment(), 60, 60)
    run_dir = RunDirectory(folder / "run")
    here = None if emulated is not None else model_dir
    checked = Preflight(config, here, emulated, facts, GenerationDefaults(), run_dir)
    member = Member(checked, plane, Watchdog(None), SystemClock())
    rank = set_up(member, agree_on_start(member))
    rank.driver(IgnoreReports())
    rank.abandon()
    plane.leave()
    (cost,) = told
    assert isinstance(cost, CostModel)
    return cost


def test_without_a_profile_it_is_the_estimate_that_plan_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has experts, which only its config.json shows."""
    directory = tmp_path / "model"
    write_checkpoint("qwen3_moe", directory)
    config = RunConfig(model=str(directory), dtype="float32", device="cpu", kv_cache_memory_bytes=1 << 20, page_size=4)
    facts = check_model(directory)
    dtypes, layers = Dtypes("float32", "float32"), [(0, facts.num_layers)]
    planned = estimated_cost(directory, facts, layers, dtypes=dtypes, device="cpu", page_size=4)
    assert first_cost(config, directory, tmp_path, monkeypatch) == planned


def test_of_emulated_stages_it_is_their_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_profile(RunConfig(model=""), PROFILE)
    found = first_cost(config, Path(), tmp_path, monkeypatch, emulated=PROFILE)
    assert found == repartition(PROFILE.cost, [(0, 8)])
