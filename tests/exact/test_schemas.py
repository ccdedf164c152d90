"""Answers to JSON schemas are instances of them, whatever the schema says."""

from __future__ import annotations

import json

import jsonschema
import pytest

from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.structured_outputs import StructuredOutputs
from sarathi_pp.text.grammar import grammar_text
from tests.engine.pipeline import run_pipeline
from tests.text.grammar_model import EOS, write_grammar_model
from tests.text.schemas import Schema, random_schema
from tests.text.test_tokenizer import BYTES

PROMPT = tuple(range(3, 12))
# Without it, random weights write numbers of many digits.
END_BIAS = ((EOS, 2.0),)
LEAST_SHARE = 0.8
FORMATS = jsonschema.FormatChecker()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_grammar_model(tmp_path_factory.mktemp("model"))


def rules(schema: Schema) -> DrawRules:
    grammar = grammar_text(StructuredOutputs.read({"json": schema}))
    return DrawRules(num_prompt=len(PROMPT), grammar=grammar, end_token_ids=(EOS,), logit_bias=END_BIAS)


@pytest.mark.parametrize("first, count", [(0, 20), pytest.param(20, 580, marks=pytest.mark.full)])
@pytest.mark.timeout(600)
def test_every_answer_that_ended_is_an_instance_of_its_schema(first, count, model):
    schemas = [random_schema(seed) for seed in range(first, first + count)]
    params = [SamplingParams(max_new_tokens=150, temperature=1.0, seed=seed) for seed in range(count)]
    found = run_pipeline(
        model,
        [PROMPT] * count,
        stages=2,
        sampling=params,
        rules=[rules(schema) for schema in schemas],
        eos_token_ids=(EOS,),
        chunk_size=64,
        num_pages=2000,
    )
    ended = [index for index, reason in enumerate(found.reasons) if reason == "stop"]
    assert len(ended) >= LEAST_SHARE * count
    for index in ended:
        text = BYTES.decode(found.tokens[index][:-1])
        jsonschema.validate(json.loads(text), schemas[index], format_checker=FORMATS)
