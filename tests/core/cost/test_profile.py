from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sarathi_pp.core.cost.model import LayerCost
from sarathi_pp.core.cost.profile import Drift, EdgeLink, Profile
from sarathi_pp.errors import InputError
from tests.core.cost.test_cost import COST

PROFILE = Profile(
    model="synthetic",
    device="cpu",
    dtype="bfloat16",
    hidden_size=1024,
    num_layers=8,
    cost=COST,
    link_latency_s=1e-4,
    link_bytes_per_s=1e9,
    jitter_cv=0.02,
    pages=1000,
    max_num_seqs=64,
    error=0.03,
    drift=Drift(0.1, 2.5),
)
LINKS = tuple(EdgeLink(1e-4 * (edge + 1), 1e9, 2e-3 if edge == 1 else 0.0) for edge in range(len(COST.stages)))


def test_a_profile_comes_back_from_json() -> None:
    with_ridge = replace(PROFILE, cost=replace(COST, ridge=8))
    of_shards = replace(PROFILE, tensor_parallel_size=2, host_s=1e-3)
    in_float8 = replace(PROFILE, kv_cache_dtype="fp8")
    for profile in (PROFILE, replace(PROFILE, links=LINKS), of_shards, with_ridge, in_float8):
        assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_links_of_edges_need_no_added_latency_and_are_as_many_as_stages() -> None:
    data = replace(PROFILE, links=LINKS).to_json()
    for link in data["links"]:
        del link["added_latency_s"]
    assert {link.added_latency_s for link in Profile.from_json(data).links} == {0.0}
    data["links"].append(data["links"][0])
    with pytest.raises(
        InputError, match=f"'links' has {len(LINKS) + 1} entries; {len(LINKS)} stages have {len(LINKS)}"
    ):
        Profile.from_json(data)
    data["links"] = [dict(data["links"][0], bytes_per_s=0)] * len(LINKS)
    with pytest.raises(InputError, match="'bytes_per_s' is 0; it must be above 0"):
        Profile.from_json(data)


def test_only_a_profile_of_keys_and_values_in_float8_names_their_type() -> None:
    assert "kv_cache_dtype" not in PROFILE.to_json()
    assert replace(PROFILE, kv_cache_dtype="fp8").to_json()["kv_cache_dtype"] == "fp8"


def test_only_profiles_of_shards_name_them() -> None:
    assert "tensor_parallel_size" not in PROFILE.to_json()
    assert replace(PROFILE, tensor_parallel_size=4).to_json()["tensor_parallel_size"] == 4


def test_a_profile_written_by_hand_needs_no_drift_and_no_ridge() -> None:
    data = PROFILE.to_json()
    del data["drift"], data["host_s"], data["ridge"]
    found = Profile.from_json(data)
    assert (found.drift.cv, found.host_s, found.cost.ridge) == (0, 0, 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["schema"], "sarathi-pp/profile/9", "schema is 'sarathi-pp/profile/9'; this version reads"),
        (["tile"], 0, "'tile' is 0; it must be an integer of at least 1"),
        (["tile"], True, "'tile' is True"),
        (["model"], None, "'model' is None; it must be a string"),
        (["stages"], [], "'stages' must be a list with one object"),
        (["stages", 0, "a1"], -1.0, "'a1' is -1.0; it must be a number of at least 0"),
        (["stages", 0, "a1"], float("nan"), "'a1' is nan"),
        (["stages", 0, "layers"], [0], r"'layers' is \[0\]; it must be \[first, end\)"),
        (["stages", 0, "layers"], [0, 4], r"they must cover \[0, 8\)"),
        (["link"], 3, "'link' must be an object"),
        (["link", "bytes_per_s"], 0, "'bytes_per_s' is 0; it must be above 0"),
        (["links"], {}, "'links' must be a list with one object for each edge"),
        (["pages"], 1.5, "'pages' is 1.5"),
        (["tensor_parallel_size"], 0, "'tensor_parallel_size' is 0; it must be an integer of at least 1"),
        (["drift"], 0.1, "'drift' is 0.1; it must be an object"),
        (["drift", "seconds"], 0, "'seconds' is 0; it must be above 0"),
        (["dtype"], "int4", "'dtype' is 'int4'; it must be one of float32, bfloat16, float16"),
        (["kv_cache_dtype"], "int8", "'kv_cache_dtype' is 'int8'; it must be one of auto, fp8"),
        (["stages", 0, "a0"], 10**400, "'a0' is 1000"),
    ],
)
def test_a_bad_profile_names_what_is_wrong(path: list[Any], value: object, message: str) -> None:
    data: Any = PROFILE.to_json()
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InputError, match=message):
        Profile.from_json(data)


def test_what_is_no_object_is_refused() -> None:
    with pytest.raises(InputError, match="schema is 'list'"):
        Profile.from_json([])


def test_costs_of_layers_come_back_and_are_as_many_as_layers() -> None:
    layers = (
        LayerCost("linear", 1e-3, 1e-5, 0.0, 0.0, 1e-4, 0),
        LayerCost("attention", 2e-3, 1e-5, 1e-8, 1e-7, 0.0, 64),
    )
    assert "layer_costs" not in PROFILE.to_json()
    profile = replace(PROFILE, cost=replace(COST, layer_costs=layers * 4))
    data = json.loads(json.dumps(profile.to_json()))
    assert Profile.from_json(data) == profile
    with pytest.raises(InputError, match="'layer_costs' has 3 entries; the model has 8 layers"):
        Profile.from_json(data | {"layer_costs": data["layer_costs"][:3]})
    with pytest.raises(InputError, match="'a1' is 0; it must be above 0"):
        Profile.from_json(data | {"layer_costs": [data["layer_costs"][0] | {"a1": 0}] * 8})
    with pytest.raises(InputError, match="must be a list with one object for each layer"):
        Profile.from_json(data | {"layer_costs": {}})
