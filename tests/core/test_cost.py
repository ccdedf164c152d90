from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.core.cost import CostModel, Load, Profile, StageCost
from sarathi_pp.core.plan import MicroBatch
from sarathi_pp.errors import InputError

PROFILE = Profile(
    model="made-up",
    device="cpu",
    dtype="bfloat16",
    hidden_size=1024,
    num_layers=8,
    cost=CostModel(
        128,
        (
            StageCost((0, 3), 1e-3, 2e-3, 3e-7, 4e-6, 5e-4, page_bytes=300),
            StageCost((3, 8), 2e-3, 3e-3, 4e-7, 5e-6, 6e-4, head_s=1e-2, page_bytes=500),
        ),
    ),
    link_latency_s=1e-4,
    link_bytes_per_s=1e9,
    jitter_cv=0.02,
    pages=1000,
    max_num_seqs=64,
    error=0.03,
)

loads = st.builds(Load, st.integers(0, 5000), st.floats(0, 1e8), st.integers(0, 500), st.integers(0, 10**7))


def test_the_formula_term_by_term() -> None:
    load = Load.of(MicroBatch.parse("m0[s0:256+130 s1:0+20 | d s2:99 s3:199]"))
    assert (load.prefill_tokens, load.decodes, load.decode_context) == (150, 2, 300)
    assert load.prefill_attention == 130 * 256 + 130**2 / 2 + 20**2 / 2
    terms = PROFILE.cost.terms(1, load)
    assert terms.fixed == 2e-3
    assert terms.prefill == pytest.approx(2 * 3e-3 + 4e-7 * load.prefill_attention)  # 152 tokens are two tiles of 128
    assert terms.context == pytest.approx(5e-6 * 300)
    assert terms.decode == pytest.approx(2 * (6e-4 + 1e-2))
    assert PROFILE.cost.seconds(1, load) == pytest.approx(terms.fixed + terms.prefill + terms.context + terms.decode)


@pytest.mark.parametrize(("tokens", "tiles"), [(0, 0), (1, 1), (128, 1), (129, 2), (256, 2)])
def test_tokens_move_in_whole_tiles(tokens: int, tiles: int) -> None:
    assert PROFILE.cost.terms(0, Load(tokens, 0.0, 0, 0)).prefill == pytest.approx(tiles * 2e-3)


@given(load=loads, cut=st.integers(1, 7))
def test_another_split_costs_the_same_in_all(load: Load, cut: int) -> None:
    layers = [(0, cut), (cut, 8)]
    split = PROFILE.cost.split(layers)
    assert [stage.layers for stage in split.stages] == layers
    before, after = (sum(model.seconds(stage, load) for stage in (0, 1)) for model in (PROFILE.cost, split))
    assert after == pytest.approx(before)
    assert [stage.head_s for stage in split.stages] == [0.0, 1e-2]
    assert sum(stage.page_bytes for stage in split.stages) == 800


@pytest.mark.parametrize("layers", [[(0, 8)], [(0, 3), (3, 8)], [(0, 1), (1, 2), (2, 8)]])
def test_a_layer_takes_its_share_of_its_stage(layers: list[tuple[int, int]]) -> None:
    split = PROFILE.cost.split(layers)
    assert sum(stage.a1 for stage in split.stages) == pytest.approx(5e-3)
    if layers[0] == (0, 1):
        assert split.stages[0].a1 == pytest.approx(2e-3 / 3)


def test_a_profile_comes_back_from_json() -> None:
    assert Profile.from_json(json.loads(json.dumps(PROFILE.to_json()))) == PROFILE


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
        (["pages"], 1.5, "'pages' is 1.5"),
        (["dtype"], "int4", "'dtype' is 'int4'; it must be one of float32, bfloat16, float16"),
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
