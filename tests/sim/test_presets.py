"""The presets of published models: their sizes, and whether they fit their GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sarathi_pp.core.cost.model import Load
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.errors import ConfigError
from sarathi_pp.layer_shape import count_kinds
from sarathi_pp.sim.experiment import Experiment
from sarathi_pp.sim.h100_hosts import h100_hosts, weights_bytes
from sarathi_pp.sim.presets import PRESETS, preset
from sarathi_pp.sim.published_models import PublishedModel, deepseek_v3, qwen3_5_397b
from sarathi_pp.sim.workload import parse_workload


@pytest.mark.parametrize(
    ("model", "billions", "used", "kinds"),
    [
        (deepseek_v3(), 671, 37, "3 latent attention with an MLP, 58 latent attention with experts"),
        (qwen3_5_397b(), 397, 17, "45 linear, 15 attention"),
    ],
    ids=["deepseek-v3", "qwen3.5"],
)
def test_models_have_the_published_numbers_of_weights(
    model: PublishedModel, billions: int, used: int, kinds: str
) -> None:
    ends = 2 * model.hidden_size * model.vocab_size
    assert (sum(shape.weights for shape in model.shapes) + ends) / 1e9 == pytest.approx(billions, rel=2e-3)
    assert (sum(shape.token_weights for shape in model.shapes) + ends) / 1e9 == pytest.approx(used, rel=0.03)
    assert count_kinds(shape.kind for shape in model.shapes) == kinds


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"gpt3-a100-tp8pp8"}))
def test_presets_fit_their_gpus_and_their_stages_take_similar_times(name: str) -> None:
    profile = preset(name)
    assert profile.pages * profile.page_size > 2048 * profile.max_num_seqs
    times = [profile.cost.seconds(stage, Load(1920, 2e6, 128, 128 * 2048)) for stage in range(len(profile.cost.stages))]
    assert max(times) < 1.15 * min(times)


def test_deepseek_in_bfloat16_needs_more_than_16_gpus() -> None:
    assert h100_hosts(deepseek_v3(), 2, weight_bytes=2).pages < 0
    profile = preset("deepseek-v3-h100-tp8pp4")
    each = [weights_bytes(deepseek_v3(), profile.cost, stage, 2) for stage in range(4)]
    assert max(each) < 46e9 and 8 * sum(each) > 1.34e12


def test_an_unknown_preset_names_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="'gpt5' is not known; choose one of gpt3-a100-tp8pp8, deepseek-v3"):
        preset("gpt5")


def test_a_long_prompt_has_a_split_of_its_own() -> None:
    """The first layers have little to compute besides attention, so short prompts put more of them on one stage."""
    long = Load(2048, 2048 * 5e5, 0, 0)
    short, fitted = (h100_hosts(deepseek_v3(), 8, 1, *load).cost for load in ((), (long,)))
    slowest = [max(cost.seconds(stage, long) for stage in range(8)) for cost in (short, fitted)]
    assert slowest[1] < 0.95 * slowest[0]
    assert max(end - first for first, end in (stage.layers for stage in fitted.stages)) == 8


def test_layers_with_a_state_share_no_pages() -> None:
    profile, work = preset("qwen3.5-397b-h100-tp8pp2"), parse_workload("uniform:n=4,min=64,max=64,output=4,shared=32")
    hybrid = Experiment(profile=profile, workload=work, policy=parse_policy("sarathi"), chunk_size=512)
    assert hybrid.limits().prefix_cache == "off"
    with pytest.raises(ConfigError, match="--prefix-cache is all; some layers of .* keep one state per sequence"):
        replace(hybrid, prefix_cache="all").limits()
    assert replace(hybrid, profile=preset("deepseek-v3-h100-tp8pp2")).limits().prefix_cache == "all"
