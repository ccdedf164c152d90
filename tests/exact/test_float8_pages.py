"""With keys and values in FP8, float32 answers are those of transformers with a cache that rounds what it stores.

The work may be split and batched in any way: a row sees rounded keys and values, those of its own chunk too. So the
bits of log probabilities are equal for every cut as well.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from sarathi_pp.core.draw_rules import DrawRules
from tests.engine.pipeline import Outcome, run_pipeline
from tests.exact.references import NEW_TOKENS, Reference, Tokens
from tests.exact.rounding_cache import generate

# Smallest gap of the two best logits, as a share of the largest, of answers that are compared. It is larger than in
# other tests: a difference in the last bit of a key may round it to the next FP8 value.
LEAST_GAP = 2e-3
FAMILIES = ("llama", "gemma2", "gpt_oss", "opt", "deepseek_v3", "qwen3_next")

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def rounded(reference: Any) -> Any:
    """Return the clear answers of a family by prompt, computed once."""

    @cache
    def answers(family: str) -> dict[Tokens, Tokens]:
        known: Reference = reference(family)
        found = {prompt: generate(known.model, prompt, NEW_TOKENS) for prompt in known.prompts}
        return {prompt: output for prompt, (output, gap) in found.items() if gap >= LEAST_GAP}

    return answers


def run(known: Reference, **setting: Any) -> Outcome:
    rules = [DrawRules(num_prompt=len(prompt), logprobs=2) for prompt in known.prompts]
    return run_pipeline(known.directory, known.prompts, rules=rules, kv_cache_dtype="fp8", **setting)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_transformers_with_a_rounding_cache(family: str, reference: Any, rounded: Any) -> None:
    known, answers = reference(family), rounded(family)
    outcome = run(known, stages=2, chunk_size=16)
    found = {prompt: output for prompt, output in zip(known.prompts, outcome.tokens, strict=True) if prompt in answers}
    assert found == answers
    assert len(answers) > len(known.prompts) // 2


def test_rounding_changes_answers(reference: Any) -> None:
    """Otherwise the tests of this file would show nothing."""
    known = reference("llama")
    assert (
        run(known, stages=1).logprobs
        != run_pipeline(
            known.directory,
            known.prompts,
            stages=1,
            rules=[DrawRules(num_prompt=len(prompt), logprobs=2) for prompt in known.prompts],
        ).logprobs
    )


@pytest.mark.parametrize(
    "setting",
    [
        {"stages": 2, "chunk_size": 7},
        {"stages": 1, "chunk_size": 128, "policy": "orca"},
        {"stages": 2, "num_pages": 32},
        {"stages": 2, "prefix_cache": "all", "per_take": 3},
    ],
    ids=["chunks of 7", "whole prompts", "preempted", "prefix cache"],
)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_no_cut_changes_a_bit(family: str, setting: dict[str, Any], reference: Any) -> None:
    known = reference(family)
    expected, found = run(known, stages=1, chunk_size=16), run(known, **setting)
    assert found.tokens == expected.tokens and found.logprobs == expected.logprobs
    assert (setting.get("num_pages") == 32) == (found.num_preemptions > 0)
