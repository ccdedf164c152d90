"""Options that a profile decides, and options that it leaves to the user."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sarathi_pp.checkpoint.facts.support import ModelFacts, check_model
from sarathi_pp.config import RunConfig
from sarathi_pp.core.cost.estimate import DeviceSpeed
from sarathi_pp.core.cost.model import CostModel, StageCost
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.cost.sizing import saturation
from sarathi_pp.errors import ConfigError, MissingError, PartitionError
from sarathi_pp.model.dtypes import Dtypes
from sarathi_pp.run.auto_options import estimated_cost, profile_mismatch, tuned
from tests.core.cost.test_profile import PROFILE

ADDER = Path(__file__).parents[2] / "examples" / "tiny-adder"
# A layer takes 1.1 ms for a microbatch of one tile; the head takes as long as four layers.
HEAVY = replace(
    PROFILE,
    cost=CostModel(
        128,
        (
            StageCost((0, 3), 3e-3, 3e-4, 0.0, 0.0, 0.0),
            StageCost((3, 8), 5e-3 + 4.4e-3, 5e-4, 0.0, 0.0, 0.0),
        ),
    ),
)


@pytest.fixture
def facts() -> ModelFacts:
    return replace(check_model(ADDER), num_layers=8, hidden_size=1024, dtype="bfloat16")


def config(tmp_path: Path, profile: Profile = HEAVY, **options: Any) -> RunConfig:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile.to_json()))
    return RunConfig(**{"model": "m", "stages": 2, "policy": "sarathi", "profile": path} | options)


def test_the_profile_decides_what_is_auto(tmp_path: Path, facts: ModelFacts) -> None:
    asked = config(tmp_path)
    found = tuned(asked, facts)
    assert found.chunk_size == saturation(HEAVY.cost) and found.inflight == 2
    assert isinstance(found.layer_split, tuple) and found.layer_split[0] > found.layer_split[1]
    assert replace(found, layer_split=None, chunk_size=None, inflight=None) == asked
    assert tuned(config(tmp_path, chunk_size=128), facts).layer_split == (6, 2)


@pytest.mark.parametrize(("stages", "inflight"), [(2, 2), (3, 4)])
def test_jitter_puts_one_more_in_flight_from_three_stages_on(
    stages: int, inflight: int, tmp_path: Path, facts: ModelFacts
) -> None:
    jittery = replace(HEAVY, jitter_cv=0.05)
    assert tuned(config(tmp_path, jittery, stages=stages), facts).inflight == inflight


def test_what_the_user_said_stays(tmp_path: Path, facts: ModelFacts) -> None:
    said = {"layer_split": (4, 4), "chunk_size": 77, "inflight": 5}
    asked = config(tmp_path, **said)
    assert tuned(asked, facts) == asked
    assert tuned(config(tmp_path, layer_split="even"), facts).layer_split == "even"


def test_without_a_profile_nothing_changes(facts: ModelFacts) -> None:
    asked = RunConfig(model="m", stages=2)
    assert tuned(asked, facts) is asked and list(profile_mismatch(asked, facts.dtype)) == []


@pytest.mark.parametrize(("policy", "given"), [("sarathi:even=1", True), ("orca", False), ("balanced", False)])
def test_only_policies_that_fill_microbatches_get_a_size(
    policy: str, given: bool, tmp_path: Path, facts: ModelFacts
) -> None:
    found = tuned(config(tmp_path, policy=policy), facts)
    assert found.chunk_size == (saturation(HEAVY.cost) if given else None)


def test_the_split_is_for_the_microbatch_that_will_run(tmp_path: Path, facts: ModelFacts) -> None:
    """In a larger microbatch, the head's fixed reads are a smaller part of the stage's time."""
    fixed_head = replace(
        PROFILE, cost=CostModel(1, (PROFILE.cost.stages[0], replace(PROFILE.cost.stages[1], a0=50e-3, head_s=0.0)))
    )
    splits = [tuned(config(tmp_path, fixed_head, chunk_size=size), facts).layer_split for size in (4, 2048)]
    assert splits[0] != splits[1] and splits[0] is not None and splits[1] is not None
    assert splits[0][1] < splits[1][1]


def test_another_models_profile_is_refused(tmp_path: Path, facts: ModelFacts) -> None:
    with pytest.raises(
        ConfigError, match="was measured on synthetic, of 8 layers and hidden size 1024; this model has 9"
    ):
        tuned(config(tmp_path), replace(facts, num_layers=9))
    with pytest.raises(PartitionError, match="9 stages are more"):
        tuned(config(tmp_path, stages=9), facts)
    with pytest.raises(MissingError, match="cannot read the profile"):
        tuned(RunConfig(model="m", profile=tmp_path / "none"), facts)


def test_times_of_another_dtype_or_device_are_warned_of(tmp_path: Path, facts: ModelFacts) -> None:
    assert list(profile_mismatch(config(tmp_path), facts.dtype)) == []
    (said,) = profile_mismatch(config(tmp_path), "float32")
    assert "was measured in bfloat16, and this run is in float32" in said
    (said,) = profile_mismatch(config(tmp_path, device="cuda"), facts.dtype)
    assert "was measured on cpu, and this run is on cuda" in said


def test_times_of_other_shards_are_warned_of(tmp_path: Path, facts: ModelFacts) -> None:
    (said,) = profile_mismatch(config(tmp_path, tensor_parallel_size=2), facts.dtype)
    assert said.endswith("was measured with --tensor-parallel-size 1, and this run has 2")
    sharded = replace(HEAVY, tensor_parallel_size=2)
    (said,) = profile_mismatch(config(tmp_path, sharded), facts.dtype)
    assert said.endswith("was measured with --tensor-parallel-size 2, and this run has 1")
    assert list(profile_mismatch(config(tmp_path, sharded, tensor_parallel_size=2), facts.dtype)) == []


def test_times_of_another_type_of_keys_and_values_are_warned_of(tmp_path: Path, facts: ModelFacts) -> None:
    (said,) = profile_mismatch(config(tmp_path, kv_cache_dtype="fp8"), facts.dtype)
    assert said.endswith("was measured with --kv-cache-dtype auto, and this run has fp8")
    in_float8 = replace(HEAVY, kv_cache_dtype="fp8")
    (said,) = profile_mismatch(config(tmp_path, in_float8), facts.dtype)
    assert said.endswith("was measured with --kv-cache-dtype fp8, and this run has auto")
    assert list(profile_mismatch(config(tmp_path, in_float8, kv_cache_dtype="fp8"), facts.dtype)) == []


@pytest.mark.parametrize(("device", "traffic"), [("cuda", 1), ("cpu", 1 + 2 * 4)])
def test_only_a_cpu_copies_keys_and_values_in_float8_before_it_reads_them(device: str, traffic: int) -> None:
    facts = check_model(ADDER)
    dtypes, speed = Dtypes("float32", "float32"), DeviceSpeed({4: 1e15}, 1e9, 1, 0.0)
    plain, float8 = (
        estimated_cost(
            ADDER, facts, [(0, 5)], dtypes=dtypes, device=device, page_size=16, kv_cache_dtype=kind, speed=speed
        ).stages[0]
        for kind in ("auto", "fp8")
    )
    assert (float8.a3, 4 * float8.page_bytes) == (pytest.approx(traffic / 4 * plain.a3), plain.page_bytes)
    assert replace(float8, a3=plain.a3, page_bytes=plain.page_bytes) == plain


def test_an_estimate_reads_the_models_own_sizes() -> None:
    facts = check_model(ADDER)
    model = estimated_cost(
        ADDER, facts, [(0, 3), (3, 5)], dtypes=Dtypes("float32", "float32"), device="cpu", page_size=16
    )
    first = model.stages[0]
    weights = 64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 192
    assert first.a1 == pytest.approx(3 * 2 * weights / 1e11)
    assert first.page_bytes == 16 * 3 * 2 * 2 * 16 * 4


def test_an_estimate_of_coded_weights_counts_codes_with_scales_and_the_expanded_weight() -> None:
    speed = DeviceSpeed({2: 1e15}, 1e9, 1, 0.0, hidden_share=0.0)
    facts, layers = check_model(ADDER), [(0, 3), (3, 5)]
    plain, float8, mxfp4 = (
        estimated_cost(
            ADDER, facts, layers, dtypes=Dtypes("bfloat16", "bfloat16", bits), device="cuda", page_size=16, speed=speed
        ).stages[0]
        for bits in (None, 8, 4)
    )
    assert float8.a0 == pytest.approx((1 + 4) / 2 * plain.a0)
    assert mxfp4.a0 == pytest.approx((17 / 32 + 4) / 2 * plain.a0)


def test_an_estimate_of_shards_is_of_each() -> None:
    facts = check_model(ADDER)
    options = {"dtypes": Dtypes("float32", "float32"), "device": "cpu", "page_size": 16}
    whole, half = (estimated_cost(ADDER, facts, [(0, 5)], **options, shards=shards).stages[0] for shards in (1, 2))
    assert (half.a3, half.page_bytes) == (whole.a3 / 2, whole.page_bytes / 2)
    assert half.a0 > whole.a0  # sums over gloo, of a model that is read in microseconds
