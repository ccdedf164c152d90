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


@pytest.mark.parametrize(
    "stages, changed",
    [
        (2, {"chunk_size": 7, "moves_head": True}),
        (3, {"chunk_size": 64, "inflight": 5}),
        (2, {"num_pages": 20, "policy": "orca"}),
        (2, {"policy": "chunkllm"}),
    ],
    ids=["moved heads", "three stages", "preempted", "chunks overlap"],
)
def test_a_grammar_gives_the_same_tokens_however_the_work_is_cut(stages, changed, model):
    expected = outputs(model, PROMPTS, GIVEN)
    free = outputs(model, PROMPTS, [None] * len(PROMPTS))
    found = outputs(model, PROMPTS, GIVEN, stages=stages, **changed)
    assert found.tokens == expected.tokens
    assert [found.tokens[number] for number in (0, 4)] == [free.tokens[number] for number in (0, 4)]
    assert (found.num_preemptions > 0) == ("num_pages" in changed)
    for given, tokens in zip(GIVEN, found.tokens, strict=True):
        if given is not None:
            assert tokens[-1] == EOS, tokens
            assert re.fullmatch(REGEX, BYTES.decode(tokens[:-1])), tokens


def test_the_output_is_free_until_the_token_after_which_the_grammar_begins(model):
    prompt = PROMPTS[0]
    (free,) = outputs(model, [prompt], [None]).tokens
    begin = free[5]
    at = free.index(begin)
    (found,) = outputs(model, [prompt], [rules(prompt, "[0-9]{3}", start_after=begin)]).tokens
    assert found[: at + 1] == free[: at + 1]
    assert BYTES.decode(found[at + 1 : -1]).isdecimal() and len(found) == at + 5
