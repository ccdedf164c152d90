"""With penalties, bans and biases, greedy output equals that of transformers, however the work is cut."""

from __future__ import annotations

import random

import pytest
import torch

from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.sampling_params import SamplingParams
from tests.engine.pipeline import run_pipeline
from tests.exact.references import Reference, Tokens
from tests.model.families import VOCAB_SIZE

NEW_TOKENS = 12
NUM_PROMPTS = 10
# Twice the largest error of transformers' log probabilities in float32, in this tiny model of large logits.
MOST_ROUNDING = 2e-4
pytestmark = pytest.mark.timeout(120)


def drawn_rules(prompt: Tokens, seed: int) -> tuple[DrawRules, dict[str, object]]:
    """Return some rules at random, and the arguments of transformers' `generate` that mean the same."""
    draw = random.Random(seed)
    rules: dict[str, object] = {"num_prompt": len(prompt)}
    call: dict[str, object] = {}
    if draw.random() < 0.6:
        rules["repetition_penalty"] = call["repetition_penalty"] = draw.choice([0.7, 1.05, 1.5, 3.0])
    if draw.random() < 0.4:
        rules["no_repeat_ngram_size"] = call["no_repeat_ngram_size"] = draw.choice([1, 2, 3])
    if draw.random() < 0.4:
        words = [draw.sample(range(VOCAB_SIZE), draw.choice([1, 1, 2])) for _ in range(20)]
        rules["bad_words"], call["bad_words_ids"] = tuple(map(tuple, words)), words
    if draw.random() < 0.4:
        ends = draw.sample(range(VOCAB_SIZE), 30)
        rules["min_tokens"], rules["end_token_ids"] = 6, tuple(ends)
        call["min_new_tokens"], call["eos_token_id"] = 6, ends
    if draw.random() < 0.4:
        banned = draw.sample(range(VOCAB_SIZE), 40)
        rules["banned_token_ids"], call["suppress_tokens"] = tuple(banned), banned
    if draw.random() < 0.4:
        biases = [(token, draw.uniform(-9, 9)) for token in draw.sample(range(VOCAB_SIZE), 40)]
        rules["logit_bias"], call["sequence_bias"] = tuple(biases), [[[token], bias] for token, bias in biases]
    return DrawRules(**rules), call  # type: ignore[arg-type]


def generate(known: Reference, prompt: Tokens, call: dict[str, object]) -> Tokens:
    settings = known.model.generation_config
    settings.eos_token_id, settings.pad_token_id = None, 0
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = known.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, **call
        )
    return tuple(found[0, len(prompt) :].tolist())


@pytest.fixture(scope="module")
def cases(reference):
    """Return prompts, rules and transformers' answers. A few rows have no rules."""
    known = reference("llama")
    prompts, rules, expected = [], [], []
    for seed, prompt in enumerate(known.prompts[:NUM_PROMPTS]):
        one, call = drawn_rules(prompt, seed)
        prompts.append(prompt)
        rules.append(one if call else None)
        expected.append(generate(known, prompt, call))
    assert sum(rule is not None for rule in rules) >= NUM_PROMPTS - 3
    return known.directory, prompts, rules, expected


@pytest.mark.parametrize(
    "stages, chunk_size, changed",
    [
        (1, 64, {}),
        (2, 7, {"moves_head": True}),
        (3, 16, {"moves_head": True, "inflight": 5}),
        (2, 64, {"moves_head": False}),
        (2, 16, {"num_pages": 30, "policy": "orca"}),
        (2, 1, {"moves_head": True}),
        (2, 16, {"policy": "chunkllm"}),
    ],
    ids=["one stage", "small chunks", "three stages", "head stays", "preempted", "chunks of one", "chunks overlap"],
)
def test_rules_give_the_tokens_of_transformers(stages, chunk_size, changed, cases):
    directory, prompts, rules, expected = cases
    params = [SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, seed=0) for _ in prompts]
    outcome = run_pipeline(
        directory, prompts, stages=stages, chunk_size=chunk_size, sampling=params, rules=rules, **changed
    )
    assert (outcome.num_preemptions > 0) == ("num_pages" in changed)
    for number, (found, theirs) in enumerate(zip(outcome.tokens, expected, strict=True)):
        assert found[: len(theirs)] == theirs, f"prompt {number}, {rules[number]}"


def test_log_probabilities_are_those_of_transformers_and_equal_for_every_cut(reference):
    known = reference("llama")
    prompts = known.prompts[:6]
    rules = [DrawRules(num_prompt=len(prompt), logprobs=number) for number, prompt in enumerate(prompts)]
    found = [
        run_pipeline(known.directory, prompts, stages=stages, chunk_size=size, rules=rules, **changed).logprobs
        for stages, size, changed in (
            (1, 64, {}),
            (3, 7, {"moves_head": True}),
            (2, 16, {"num_pages": 30, "moves_head": False}),
        )
    ]
    assert found[0] == found[1] == found[2]
    for prompt, output, ours in zip(prompts, known.outputs, found[0], strict=False):
        assert ours is not None
        exact, rounding = known.log_softmax((*prompt, *output))
        assert rounding < MOST_ROUNDING
        exact = exact[len(prompt) - 1 : -1]
        assert [one.logprob for one in ours] == pytest.approx(
            [row[token].item() for row, token in zip(exact, output, strict=True)], rel=0, abs=rounding
        )
        for one, row in zip(ours, exact, strict=True):
            likeliest = row.topk(len(one.top)).values.tolist()
            assert [logprob for _, logprob in one.top] == pytest.approx(likeliest, rel=0, abs=rounding)
