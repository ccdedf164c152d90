"""The samples of a request depend only on its prompt, parameters and seed: not on stages, chunks or batch mates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

from sarathi_pp.sampling_params import SamplingParams
from tests.engine.pipeline import run_pipeline
from tests.exact.references import Reference, Tokens

NUM_PROMPTS = 16
NEW_TOKENS = 10
# Prompts of the run alone: they end inside a page and beyond a window, and one has a single token.
ALONE = (1, 3, 5, 10)

WAYS = {
    "temperature": {"temperature": 1.0},
    "hot": {"temperature": 3.0},
    "top_k": {"temperature": 1.5, "top_k": 5},
    "top_p": {"temperature": 1.5, "top_p": 0.7},
    "min_p": {"temperature": 2.0, "min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    "greedy": {"temperature": 0.0},
}

VARIATIONS = {
    "one token a microbatch": {"stages": 2, "chunk_size": 1},
    "small chunks": {"stages": 4, "chunk_size": 7},
    "whole prompts": {"stages": 1, "chunk_size": 128},
    "orca": {"stages": 2, "policy": "orca"},
    "one seat": {"stages": 2, "chunk_size": 64, "max_num_seqs": 1},
    "one by one": {"stages": 2, "chunk_size": 16, "per_take": 1},
    "more in flight": {"stages": 2, "chunk_size": 16, "inflight": 4},
}

pytestmark = pytest.mark.timeout(120)


def parameters(**changed: object) -> list[SamplingParams]:
    """Return for each prompt a different way of sampling and a different seed, so that mixed-up rows show."""
    ways = list(WAYS.values())
    return [
        replace(SamplingParams(max_new_tokens=NEW_TOKENS, seed=100 + number, **ways[number % len(ways)]), **changed)
        for number in range(NUM_PROMPTS)
    ]


def samples(known: Reference, **setting: object) -> list[Tokens]:
    setting = {"stages": 1, "chunk_size": 16, "sampling": parameters(), **setting}
    return run_pipeline(known.directory, known.prompts[:NUM_PROMPTS], **setting).tokens


@pytest.fixture(scope="module")
def plain(reference) -> Callable[[str], list[Tokens]]:
    """Sample a family with one stage and chunks of 16, once."""
    return cache(lambda family: samples(reference(family)))


def varied() -> Iterator[object]:
    """Yield two families with every variation; by default, each variation in one of them."""
    for number, family in enumerate(("llama", "gemma3_text")):
        for place, name in enumerate(VARIATIONS):
            yield pytest.param(family, name, marks=[] if place % 2 == number else [pytest.mark.full])


@pytest.mark.parametrize("family, name", list(varied()))
def test_samples_do_not_depend_on_how_the_work_is_cut(family, name, reference, plain):
    known = reference(family)
    assert samples(known, **VARIATIONS[name]) == plain(family)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "opt"])
def test_samples_do_not_depend_on_stages(family, reference, plain):
    known = reference(family)
    assert samples(known, stages=2, chunk_size=7) == plain(family)
    assert samples(known, stages=4, chunk_size=64) == plain(family)


@pytest.mark.parametrize("number", ALONE)
def test_samples_do_not_depend_on_batch_mates(number, reference, plain):
    known = reference("llama")
    alone = run_pipeline(
        known.directory, [known.prompts[number]], stages=2, chunk_size=16, sampling=[parameters()[number]]
    )
    assert alone.tokens == [plain("llama")[number]]


@pytest.mark.parametrize("policy", ["sarathi", "orca"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_preempted_sequence_samples_the_same_tokens_again(family, policy, reference, plain):
    """A recomputed sequence draws again at its earlier positions, and must not draw twice at one position."""
    known = reference(family)
    outcome = run_pipeline(
        known.directory,
        known.prompts[:NUM_PROMPTS],
        stages=2,
        policy=policy,
        chunk_size=16,
        num_pages=30,
        page_size=4,
        sampling=parameters(),
    )
    assert outcome.num_preemptions > 0
    assert outcome.tokens == plain(family)


def test_the_seed_alone_tells_two_samples_of_a_prompt_apart(reference):
    known = reference("llama")
    params = [SamplingParams(max_new_tokens=NEW_TOKENS, temperature=1.5, seed=seed) for seed in (1, 2, 1, 3)]
    tokens = run_pipeline(known.directory, [known.prompts[0]] * 4, stages=2, sampling=params).tokens
    assert tokens[0] == tokens[2]
    assert len(set(tokens)) == 3


def test_the_ways_of_sampling_change_what_is_drawn(reference, plain):
    """Otherwise the tests above would hold for a runtime that ignores all parameters but the seed."""
    known = reference("llama")
    drawn = plain("llama")
    others = {
        "temperature": samples(known, sampling=parameters(temperature=0.7)),
        "seed": samples(known, sampling=parameters(seed=1)),
        "top_k": samples(known, sampling=parameters(top_k=2)),
        "top_p": samples(known, sampling=parameters(top_p=0.3)),
        "min_p": samples(known, sampling=parameters(min_p=0.5)),
    }
    assert {name: tokens != drawn for name, tokens in others.items()} == dict.fromkeys(others, True)
    greedy = [number for number in range(NUM_PROMPTS) if parameters()[number].greedy]
    assert [drawn[number][:8] for number in greedy] == [known.outputs[number] for number in greedy]
