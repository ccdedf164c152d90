"""Log probabilities of prompts are those of transformers, and equal to the last bit however the work is cut."""

from __future__ import annotations

import pytest

from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.sampling_params import SamplingParams
from tests.engine.pipeline import run_pipeline
from tests.model.families import VOCAB_SIZE

NUM_PROMPTS = 6
NEW_TOKENS = 8
pytestmark = pytest.mark.timeout(120)


def params(**changed) -> list[SamplingParams]:
    """Return the parameters of NUM_PROMPTS requests. The last one wants no log probabilities of its prompt."""
    wanted = [{"prompt_logprobs": number, "logprobs_from": number} for number in range(NUM_PROMPTS - 1)]
    common = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "seed": 0, **changed}
    return [SamplingParams(**common, **one) for one in (*wanted, {})]


def run(known, *, stages, size, **changed):
    sampling = changed.pop("sampling", params())
    return run_pipeline(
        known.directory, known.prompts[:NUM_PROMPTS], stages=stages, chunk_size=size, sampling=sampling, **changed
    )


@pytest.fixture(scope="module")
def known(reference):
    return reference("llama")


@pytest.fixture(scope="module")
def whole(known):
    """Return the outcome of one stage with large chunks."""
    return run(known, stages=1, size=512)


def test_they_are_those_of_transformers(known, whole):
    for prompt, found, sampling in zip(known.prompts, whole.prompt_logprobs, params(), strict=False):
        if sampling.prompt_logprobs is None:
            assert found is None
            continue
        rows, rounding = known.log_softmax(prompt)
        first = sampling.logprobs_from
        expected = [
            None if place == 0 else rows[place - 1, prompt[place]].item() for place in range(first, len(prompt))
        ]
        ours = found.by_token()
        assert [one is None for one in ours] == [one is None for one in expected]
        pairs = [(one, theirs, place) for place, (one, theirs) in enumerate(zip(ours, expected, strict=True)) if one]
        for one, theirs, place in pairs:
            assert one.logprob == pytest.approx(theirs, rel=0, abs=rounding)
            top = rows[first + place - 1].topk(sampling.prompt_logprobs)
            assert len(one.top) == sampling.prompt_logprobs
            assert [logprob for _, logprob in one.top] == pytest.approx(top.values.tolist(), rel=0, abs=rounding)


@pytest.mark.parametrize(
    "stages, size, changed",
    [
        (2, 7, {"moves_head": True}),
        (3, 64, {"moves_head": True, "inflight": 5}),
        (2, 1, {"moves_head": False}),
        (2, 16, {"num_pages": 30, "policy": "orca"}),
        (2, 16, {"policy": "chunkllm"}),
        (3, 16, {"per_take": 1, "max_num_seqs": 2}),
    ],
    ids=["small chunks", "three stages", "chunks of one", "preempted", "chunks overlap", "other mates"],
)
def test_they_are_equal_for_every_cut(stages, size, changed, known, whole):
    found = run(known, stages=stages, size=size, **changed)
    assert (found.num_preemptions > 0) == ("num_pages" in changed)
    assert found.prompt_logprobs == whole.prompt_logprobs
    assert found.tokens == whole.tokens
    assert whole.tokens == [output[:NEW_TOKENS] for output in known.outputs[:NUM_PROMPTS]]


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.full), 2])
def test_tensor_shards_give_them_too(stages, known, whole):
    """Their sums have another order of addition, so the last bits differ, but not with the cut of the work."""
    found = run(known, stages=stages, size=512, two_shards=True)
    small = run(known, stages=stages, size=7, two_shards=True, num_pages=30, policy="orca")
    assert found.num_preemptions == 0 < small.num_preemptions
    assert small.prompt_logprobs == found.prompt_logprobs
    assert found.tokens == small.tokens == whole.tokens
    assert sum(one is not None for one in found.prompt_logprobs) == NUM_PROMPTS - 1
    for ours, theirs in zip(found.prompt_logprobs, whole.prompt_logprobs, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
            continue
        for one, other in zip(ours.by_token(), theirs.by_token(), strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.logprob == pytest.approx(other.logprob, rel=0, abs=1e-4)
                assert dict(one.top) == pytest.approx(dict(other.top), rel=0, abs=1e-4)


@pytest.mark.parametrize("new_tokens", [0, 1])
def test_a_request_without_output_computes_its_prompt(new_tokens, known, whole):
    found = run(known, stages=2, size=16, sampling=params(max_new_tokens=new_tokens))
    assert found.prompt_logprobs == whole.prompt_logprobs
    assert found.reasons == ["length"] * NUM_PROMPTS
    assert [len(tokens) for tokens in found.tokens] == [new_tokens] * NUM_PROMPTS


def test_a_prompt_that_fills_the_context_has_them(known, whole):
    longest = max(map(len, known.prompts[:NUM_PROMPTS]))
    found = run(known, stages=2, size=16, max_model_len=longest)
    assert found.prompt_logprobs == whole.prompt_logprobs
    assert min(map(len, found.tokens)) == 0


def test_rules_change_tokens_and_not_them(known, whole):
    rules = [
        DrawRules(num_prompt=len(prompt), logprobs=1, banned_token_ids=tuple(range(0, VOCAB_SIZE, 2)))
        for prompt in known.prompts[:NUM_PROMPTS]
    ]
    found = run(known, stages=2, size=16, rules=rules)
    assert found.prompt_logprobs == whole.prompt_logprobs
    assert all(one is not None and len(one) == NEW_TOKENS for one in found.logprobs)
    assert all(token % 2 for tokens in found.tokens for token in tokens)
