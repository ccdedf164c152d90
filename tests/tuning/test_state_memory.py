"""A plan counts the states of all sequences, next to pages for one request."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sarathi_pp.cli.plan import render_plan
from sarathi_pp.config import RunConfig
from sarathi_pp.core.cost.model import LayerCost
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.tuning.model_memory import ModelMemory, PlannedModel
from sarathi_pp.tuning.plan import make_plan
from tests.stages.test_state_capacity import CACHES, PAGE_BYTES, STATE, STATE_BYTES
from tests.tuning.test_plan import ADDER, PROFILE, WORKLOAD, plan

# Pages of the longest request of the workload, of 364 tokens, in the two layers that have pages.
REQUEST_BYTES = 23 * 2 * PAGE_BYTES


@pytest.fixture
def hybrid(monkeypatch: pytest.MonkeyPatch) -> PlannedModel:
    """Let each plan take the tiny model for one whose layers keep states."""
    found = PlannedModel.find(ADDER)
    model = replace(found, facts=replace(found.facts, own_caches=CACHES))
    monkeypatch.setattr(PlannedModel, "find", lambda name: model)
    return model


def test_the_states_of_each_stage_are_planned(hybrid: PlannedModel, tmp_path: Path) -> None:
    found = plan(tmp_path, layer_split=(4, 1))
    budget = 2000 * 3 * PAGE_BYTES + 128 * 2 * STATE_BYTES  # of the first stage of the profile
    pages = (budget - 128 * 2 * STATE_BYTES) // (2 * PAGE_BYTES)
    first, last = found["per_stage"]
    assert (first["pages"], last["pages"], found["pages"]) == (pages, None, pages)
    assert (first["state_bytes"], last["state_bytes"]) == (128 * 2 * STATE_BYTES, 128 * STATE_BYTES)
    assert (first["kv_bytes"], last["kv_bytes"]) == (budget, 128 * STATE_BYTES)
    assert (first["least_kv_bytes"], last["least_kv_bytes"]) == (
        REQUEST_BYTES + 128 * 2 * STATE_BYTES, 128 * STATE_BYTES
    )  # fmt: skip
    assert found["state_bytes_per_sequence"] == 3 * STATE_BYTES and found["fits"]
    text = StringIO()
    Console(file=text, width=200).print(render_plan(found))
    assert "KV includes the states of 128 sequences" in text.getvalue()
    (row,) = (line.split() for line in text.getvalue().splitlines() if line.split()[:2] == ["1", "4-4"])
    assert row[6:8] == ["-", "-"]
    assert f"One has {3 * STATE_BYTES / 2**20:.3g} MiB in all stages" in text.getvalue()


def test_a_model_without_attention_has_no_pages(hybrid: PlannedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(hybrid.facts, own_caches=(STATE,) * 5)
    monkeypatch.setattr(PlannedModel, "find", lambda name: replace(hybrid, facts=facts))
    found = cached(64 * 5 * STATE_BYTES)
    assert found["verdict"] == "fits: a KV cache of the states of 64 sequences"
    assert [found["pages"], *(stage["pages"] for stage in found["per_stage"])] == [None, None]
    found = cached(64 * 5 * STATE_BYTES - 1)
    assert not found["fits"] and found["verdict"].endswith("for the states of 64 sequences")


def test_a_plan_without_states_does_not_speak_of_them(tmp_path: Path) -> None:
    found = plan(tmp_path)
    assert found["state_bytes_per_sequence"] == 0 and {stage["state_bytes"] for stage in found["per_stage"]} == {0}
    text = StringIO()
    Console(file=text, width=200).print(render_plan(found))
    assert "states" not in text.getvalue()


def cached(num_bytes: int, **options: Any) -> dict[str, Any]:
    return make_plan(RunConfig(model=ADDER, kv_cache_memory_bytes=num_bytes, **options), parse_workload(WORKLOAD))


def test_fewer_sequences_are_a_remedy_that_fits(hybrid: PlannedModel) -> None:
    num_bytes = REQUEST_BYTES + 10 * 3 * STATE_BYTES + STATE_BYTES
    found = cached(num_bytes)
    assert not found["fits"] and "for the states of 64 sequences and a request of 364 tokens" in found["verdict"]
    assert ["--max-num-seqs", "10"] in [list(remedy["options"]) for remedy in found["would_fit"]]
    assert [cached(num_bytes, max_num_seqs=count)["fits"] for count in (10, 11)] == [True, False]


@pytest.mark.parametrize("num_bytes", [REQUEST_BYTES - 1, REQUEST_BYTES + 1])
def test_no_number_of_sequences_helps_if_not_even_one_fits(num_bytes: int, hybrid: PlannedModel) -> None:
    found = cached(num_bytes)
    assert not found["fits"] and "--max-num-seqs" not in {remedy["options"][0] for remedy in found["would_fit"]}


def test_a_shorter_request_leaves_room_for_the_states(hybrid: PlannedModel) -> None:
    num_bytes = REQUEST_BYTES + 64 * 3 * STATE_BYTES
    found = cached(num_bytes, max_model_len=1152)
    assert ["--max-model-len", str(23 * 16)] in [list(remedy["options"]) for remedy in found["would_fit"]]
    assert cached(num_bytes, max_model_len=23 * 16)["fits"]


def test_more_requests_need_more_pages_and_no_more_states(hybrid: PlannedModel) -> None:
    memory = ModelMemory.of(hybrid, RunConfig(model=ADDER), "cpu", 364)
    one, three = (memory.excess_bytes((0, 5), 64, 0, count) for count in (1, 3))
    assert three - one == 2 * REQUEST_BYTES
    assert memory.least_kv_bytes((0, 5)) == REQUEST_BYTES + 64 * 3 * STATE_BYTES


def test_graphs_take_no_memory_in_a_model_that_keeps_states(hybrid: PlannedModel) -> None:
    whole = (0, 5)
    states = ModelMemory.of(hybrid, RunConfig(model=ADDER), "cuda", 364)
    plain = ModelMemory.of(replace(hybrid, facts=replace(hybrid.facts, own_caches=())), states.config, "cuda", 364)
    eager = plain.with_options(enforce_eager=True)
    assert states.working_bytes(whole, 64) == eager.working_bytes(whole, 64) < plain.working_bytes(whole, 64)


def test_requests_that_cannot_share_pages_get_no_more_seats(hybrid: PlannedModel, tmp_path: Path) -> None:
    assert plan(tmp_path, workload="fixed:n=64,prompt=330,output=34,shared=304", max_num_seqs=4)["notes"] == []


def test_equal_layers_with_states_are_not_said_to_differ(tmp_path: Path) -> None:
    layers = (LayerCost("mamba", 1e-3, 1e-3, 0, 0, 0, page_bytes=0),) * 5
    found = plan(tmp_path, replace(PROFILE, cost=replace(PROFILE.cost, layer_costs=layers)))
    assert [stage["layer_kinds"] for stage in found["per_stage"]] == [None, None]
