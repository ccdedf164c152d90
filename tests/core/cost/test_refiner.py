import random
from dataclasses import replace

import pytest

from sarathi_pp.core.cost.model import CostModel, Load, StageCost
from sarathi_pp.core.cost.refiner import CostRefiner

TRUE = CostModel(
    16, (StageCost((0, 4), 2e-3, 1e-3, 2e-9, 1e-7, 3e-5), StageCost((4, 8), 1e-3, 2e-3, 1e-9, 2e-7, 1e-5, head_s=2e-5))
)
GUESS = CostModel(
    16, (StageCost((0, 4), 1e-3, 5e-4, 1e-9, 1e-8, 1e-4), StageCost((4, 8), 5e-3, 5e-4, 1e-8, 1e-6, 1e-4, head_s=1e-5))
)


def loads(count, seed=0):
    draw = random.Random(seed)
    for _ in range(count):
        prefill, decodes = draw.choice([0, 64, 200, 500]), draw.randint(1, 30)
        context = decodes * draw.randint(50, 2000)
        yield Load(prefill, prefill * draw.uniform(0, 3000), decodes, context)


def error(model, true=TRUE):
    pairs = [(model.seconds(s, load), true.seconds(s, load)) for load in loads(50, seed=9) for s in (0, 1)]
    return sum(abs(guess - seconds) / seconds for guess, seconds in pairs) / len(pairs)


def observe(refiner, count, true=TRUE, noise=0.0, seed=1):
    draw = random.Random(seed)
    for load in loads(count, seed):
        for stage in (0, 1):
            refiner.observe(stage, refiner.row(load), true.seconds(stage, load) * draw.gauss(1, noise))
    return refiner.model


def test_it_starts_from_what_it_was_given():
    assert CostRefiner(GUESS).model == GUESS


def test_tile_and_ridge_stay():
    true = replace(TRUE, ridge=400)
    found = observe(CostRefiner(replace(GUESS, ridge=400)), 300, true)
    assert (found.tile, found.ridge) == (16, 400)
    assert error(found, true) < 0.05


def test_a_wrong_start_is_forgotten():
    refiner = CostRefiner(GUESS)
    assert error(GUESS) > 0.3
    observe(refiner, 400)
    for _ in range(40):  # the solution changes with each refresh
        observe(refiner, 16)
    assert error(refiner.model) < 0.05


@pytest.mark.parametrize("speed", [0.02, 0.3, 3.0, 50.0])
def test_a_start_of_another_machine_is_right_within_a_few_microbatches(speed):
    refiner = CostRefiner(CostModel(16, tuple(stage.scaled(speed) for stage in TRUE.stages)))
    observe(refiner, 32, noise=0.05)
    assert error(refiner.model) < 0.05


@pytest.mark.parametrize(("prefill", "decode"), [(0.33, 1.0), (3.0, 1.0), (1.0, 0.33), (1.0, 3.0)])
def test_decodes_are_learnt_at_once_where_only_prompts_told_how_fast_the_machine_is(prefill, decode):
    scaled = (
        replace(s, a0=s.a0 * prefill, a1=s.a1 * prefill, a2=s.a2 * prefill, a3=s.a3 * decode, a4=s.a4 * decode)
        for s in TRUE.stages
    )
    refiner = CostRefiner(CostModel(16, tuple(scaled)))
    for load in loads(64):
        for stage in (0, 1):
            prompts = replace(load, decodes=0, decode_context=0)
            refiner.observe(stage, refiner.row(prompts), TRUE.seconds(stage, prompts))
    assert refiner.model != TRUE
    observe(refiner, 32)
    assert error(refiner.model) < 0.05


def test_a_single_cold_microbatch_does_not_make_a_slow_machine():
    refiner = CostRefiner(TRUE)
    for load in loads(3):
        refiner.observe(0, refiner.row(load), 50 * TRUE.seconds(0, load))
    observe(refiner, 16)
    assert error(refiner.model) < 0.02


def test_spans_in_which_the_machine_stood_still_do_not_count_even_where_they_are_most():
    """A process stopped and continued every few seconds rarely computes long microbatches without a pause."""
    refiner = CostRefiner(CostModel(16, tuple(stage.scaled(0.5) for stage in TRUE.stages)))
    for number, load in enumerate(loads(16)):
        for stage in (0, 1):
            stood_still = 12 if number % 5 < 3 else 1
            refiner.observe(stage, refiner.row(load), stood_still * TRUE.seconds(stage, load))
    assert error(refiner.model) < 0.2


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_microbatches_that_are_all_alike_does_not_pass_for_what_makes_them_up(seed):
    draw = random.Random(seed)
    refiner = CostRefiner(TRUE)
    for _ in range(200):
        decodes = draw.randint(4, 8)
        load = Load(512 - decodes, 512 * draw.uniform(0, 1000), decodes, decodes * draw.randint(500, 1000))
        for stage in (0, 1):
            seconds = TRUE.seconds(stage, load) * draw.gauss(1, 0.15)
            refiner.observe(stage, refiner.row(load), seconds)
    few = Load(0, 0.0, 4, 3000)
    for stage in (0, 1):
        assert refiner.model.seconds(stage, few) == pytest.approx(TRUE.seconds(stage, few), rel=0.2)


def test_what_it_started_from_is_forgotten_in_the_end():
    refiner = CostRefiner(GUESS)
    for seed in range(125):
        observe(refiner, 16, seed=seed)
    assert error(refiner.model) < 0.005


def test_terms_that_no_microbatch_has_shown_stay_in_proportion():
    """Only decodes were seen, on a machine three times as slow.

    Its prompts are assumed to be three times as slow too.
    """
    refiner = CostRefiner(TRUE)
    decodes = [replace(load, prefill_tokens=0, prefill_attention=0.0) for load in loads(64)]
    for load in decodes:
        for stage in (0, 1):
            cold = 50 if load is decodes[0] else 1
            refiner.observe(stage, refiner.row(load), 3 * cold * TRUE.seconds(stage, load))
    prompt = Load(512, 512 * 256, 0, 0)
    for stage in (0, 1):
        assert refiner.model.seconds(stage, prompt) == pytest.approx(3 * TRUE.seconds(stage, prompt), rel=0.05)


def test_noise_is_averaged():
    refiner = CostRefiner(GUESS)
    for seed in range(60):
        observe(refiner, 16, noise=0.1, seed=seed)
    assert error(refiner.model) < 0.1


def test_a_machine_that_slows_down_is_noticed():
    refiner = CostRefiner(TRUE)
    slow = CostModel(
        16,
        tuple(StageCost(s.layers, 2 * s.a0, 2 * s.a1, 2 * s.a2, 2 * s.a3, 2 * s.a4, 2 * s.head_s) for s in TRUE.stages),
    )
    for seed in range(120):
        observe(refiner, 16, seed=seed)
    for seed in range(120):
        observe(refiner, 16, true=slow, seed=seed)
    assert error(refiner.model, slow) < 0.1


def test_no_coefficient_is_ever_negative_and_what_was_not_seen_stays():
    refiner = CostRefiner(TRUE)
    for seed in range(20):
        model = observe(refiner, 16, noise=0.5, seed=seed)
        assert all(c >= 0 for s in model.stages for c in (s.a0, s.a1, s.a2, s.a3, s.a4, s.head_s))
    assert [s.layers for s in model.stages] == [(0, 4), (4, 8)] and model.tile == 16


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_span_of_no_length_says_nothing(seconds):
    refiner = CostRefiner(TRUE)
    for load in loads(64):
        for stage in (0, 1):
            refiner.observe(stage, refiner.row(load), seconds)
    assert error(refiner.model) < 1e-6


def test_a_stage_that_tells_its_times_late_is_still_told_how_fast_the_machine_is():
    refiner = CostRefiner(TRUE)
    for load in loads(64):
        refiner.observe(0, refiner.row(load), 3 * TRUE.seconds(0, load))
        refiner.observe(1, refiner.row(load), 0.0)
        assert refiner.model.seconds(1, load) == pytest.approx(TRUE.seconds(1, load))
    prompts = [replace(load, decodes=0, decode_context=0) for load in loads(32, seed=1)]
    for load in prompts:
        refiner.observe(1, refiner.row(load), 3 * TRUE.seconds(1, load))
    decodes = Load(0, 0.0, 20, 20_000)
    assert refiner.model.seconds(1, decodes) == pytest.approx(3 * TRUE.seconds(1, decodes), rel=0.02)
