"""Outputs with a grammar are the same however the work is cut, and never begin before their token."""

from __future__ import annotations

import re

import pytest

from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.structured_outputs import StructuredOutputs
from sarathi_pp.text.grammar import grammar_text
from tests.engine.pipeline import run_pipeline
from tests.text.grammar_model import EOS, write_grammar_model
from tests.text.test_tokenizer import BYTES

NEW_TOKENS = 40
REGEX = "([a-z]{2,4} ){2}[0-9]{3}"
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_grammar_model(tmp_path_factory.mktemp("model"))


def rules(prompt, regex: str = REGEX, **more) -> DrawRules:
    grammar = grammar_text(StructuredOutputs("regex", regex))
    return DrawRules(num_prompt=len(prompt), grammar=grammar, end_token_ids=(EOS,), **more)


def outputs(model, prompts, given, *, stages: int = 1, **changed):
    params = [
        SamplingParams(max_new_tokens=NEW_TOKENS, temperature=number % 2, seed=7) for number in range(len(prompts))
    ]
    return run_pipeline(model, prompts, stages=stages, sampling=params, rules=given, eos_token_ids=(EOS,), **changed)


PROMPTS = [tuple(range(3 + n, 30 + 2 * n)) for n in range(8)]
GIVEN = [rules(prompt) if number % 4 else None for number, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def expected(model):
    """Return the tokens of one stage."""
    return outputs(model, PROMPTS, GIVEN).tokens


@pytest.fixture(scope="module")
def free(model):
    """Return the tokens without grammars."""
    return outputs(model, PROMPTS, [None] * len(PROMPTS)).tokens


@pytest.mark.parametrize(
    "stages, changed",
    [
        (2, {"chunk_size": 7, "moves_head": True}),
        (3, {"chunk_size": 64, "inflight": 5}),
        (2, {"num_pages": 20, "policy": "orca"}),
        (2, {"policy": "chunkllm"}),
        (2, {"two_shards": True, "chunk_size": 7}),
        pytest.param(1, {"two_shards": True, "num_pages": 20}, marks=pytest.mark.full),
    ],
    ids=["moved heads", "three stages", "preempted", "chunks overlap", "tensor shards", "shards, preempted"],
)
def test_a_grammar_gives_the_same_tokens_however_the_work_is_cut(stages, changed, model, expected, free):
    found = outputs(model, PROMPTS, GIVEN, stages=stages, **changed)
    assert found.tokens == expected
    assert [found.tokens[number] for number in (0, 4)] == [free[number] for number in (0, 4)]
    assert (found.num_preemptions > 0) == ("num_pages" in changed)
    for given, tokens in zip(GIVEN, found.tokens, strict=True):
        if given is not None:
            assert tokens[-1] == EOS, tokens
            assert re.fullmatch(REGEX, BYTES.decode(tokens[:-1])), tokens


# The place of the token after which the grammar of each row begins. None: a token that the output does not have.
BEGINS = (12, 0, 20, NEW_TOKENS - 1, 33, None, NEW_TOKENS - 4, 4)


@pytest.mark.parametrize(
    "stages, changed", [(1, {}), (2, {"num_pages": 20, "policy": "orca"})], ids=["one stage", "preempted"]
)
def test_the_output_is_free_until_the_token_after_which_the_grammar_begins(stages, changed, model, free):
    """The token may also be in the prompt, where it does not count. It may come late, at the very end, or never."""
    never = next(token for token in range(3, 300) if token not in free[BEGINS.index(None)])
    tokens = [never if at is None else output[at] for at, output in zip(BEGINS, free, strict=True)]
    assert tokens[0] in PROMPTS[0]
    given = [rules(prompt, "[0-9]{3}", start_after=one) for prompt, one in zip(PROMPTS, tokens, strict=True)]
    found = outputs(model, PROMPTS, given, stages=stages, **changed)
    assert (found.num_preemptions > 0) == ("num_pages" in changed)
    for at, without, output, reason in zip(BEGINS, free, found.tokens, found.reasons, strict=True):
        num_free = NEW_TOKENS if at is None else at + 1
        ended = output[-1] == EOS
        assert output[:num_free] == without[:num_free]
        digits = BYTES.decode(output[num_free : -1 if ended else None])
        assert re.fullmatch("[0-9]{3}" if ended else "[0-9]{0,3}", digits)
        assert reason == ("stop" if ended else "length") and (ended or len(output) == NEW_TOKENS)
    assert 0 < found.reasons.count("stop") < len(BEGINS)
