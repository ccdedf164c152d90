"""Prompts of a Python program share KV pages: the outputs of a prompt, the turns of a conversation, later calls."""

from __future__ import annotations

from typing import Any

import pytest

from sarathi_pp import LLM, RequestOutput, SamplingParams
from tests.commands.test_choices import ADDER

# Pages of four tokens, so that the short prompts of this model have some.
SMALL_PAGES: dict[str, Any] = {"stages": 1, "dtype": "float32", "page_size": 4}
HOT = SamplingParams(max_new_tokens=6, temperature=1.0, seed=3, n=4)


def facts(answer: RequestOutput) -> list[tuple[str, tuple[int, ...]]]:
    return [(one.text, tuple(one.token_ids)) for one in answer.outputs]


def talk(model: LLM) -> list[RequestOutput]:
    """Return the answers of three turns. The prompt of each turn holds those before it, as token ids."""
    history: list[int] = []
    answers = []
    for question in ((3, 4, 5, 6, 7, 8, 9), (5, 6, 7), (9, 8, 7, 6)):
        history += question
        answers += model.generate([history], SamplingParams(max_new_tokens=9, ignore_eos=True))
        history += answers[-1].outputs[0].token_ids
    return answers


def test_the_outputs_of_a_prompt_share_it() -> None:
    """Each output computes the last page itself. One of them computes the pages before it too."""
    prompt = "12+30=42\n1+2=3\n20+5="
    with LLM(str(ADDER), **SMALL_PAGES) as model:
        (shared,) = model.generate([prompt], HOT)
        (again,) = model.generate([prompt], HOT)
        cached = model.report()["prefix_cache"]
    with LLM(str(ADDER), **SMALL_PAGES, prefix_cache="off") as model:
        (apart,) = model.generate([prompt], HOT)
        assert model.report()["prefix_cache"] is None
    assert facts(shared) == facts(again) == facts(apart)
    pages = (len(shared.prompt_token_ids) - 1) // 4 * 4
    assert pages > 8
    assert (shared.num_cached_tokens, again.num_cached_tokens, apart.num_cached_tokens) == (0, pages, 0)
    assert cached["cached_tokens"] == 7 * pages and cached["mode"] == "all"


def test_the_turns_of_a_conversation_share_their_history() -> None:
    with LLM(str(ADDER), **SMALL_PAGES) as model:
        shared = talk(model)
    with LLM(str(ADDER), **SMALL_PAGES, prefix_cache="off") as model:
        apart = talk(model)
    assert list(map(facts, shared)) == list(map(facts, apart))
    for before, after in zip(shared, shared[1:], strict=False):
        history = len(before.prompt_token_ids) + len(before.outputs[0].token_ids)
        assert after.num_cached_tokens is not None and after.num_cached_tokens > history - 8


@pytest.mark.parametrize("salt", ["", "mine"])
def test_prompts_with_other_salts_share_nothing(salt: str) -> None:
    prompt: dict[str, Any] = {"prompt": "12+30=42\n1+2=3\n20+5="}
    with LLM(str(ADDER), **SMALL_PAGES) as model:
        first, second = (
            model.generate([each], SamplingParams(2))[0]
            for each in (prompt, {**prompt, "cache_salt": salt} if salt else prompt)
        )
    assert facts(first) == facts(second)
    assert (second.num_cached_tokens == 0) == bool(salt)
