"""The rules of a request say by token ids what its sampling parameters say in words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.core.draw_rules import MOST_BYTES, DrawRules
from sarathi_pp.core.request import Request
from sarathi_pp.errors import RowError
from sarathi_pp.inputs.generation_config import GenerationDefaults
from sarathi_pp.inputs.parse import ParsedLine
from sarathi_pp.inputs.prompt_limits import PromptLimits
from sarathi_pp.inputs.request_maker import RequestMaker
from sarathi_pp.text.tokenizer import Tokenizer
from tests.inputs.test_source import Words
from tests.text.test_tokenizer import BYTES, PIECES, VOCAB_SIZE

PROMPT = (5, 6, 7)
LIMITS = PromptLimits(max_model_len=100, num_pages=100, page_size=16, vocab_size=VOCAB_SIZE)
NEUTRAL: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "no_repeat_ngram_size": (0,),
    "logit_bias": ((), {7: 0.0}),
    "bad_words": ([],),
    "bad_words_ids": ([], [[1]]),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "stop_token_ids": ([], [9]),
    "include_stop_str_in_output": (False, True),
    "min_length": (0, 2, 3),
    "typical_p": (1, 0.5),
    "epsilon_cutoff": (0, 0.5),
    "eta_cutoff": (0, 0.5),
}


def make(
    overrides: dict[str, Any] | None = None,
    *,
    backend: Any = BYTES,
    eos: tuple[int, ...] = (1, VOCAB_SIZE + 7),
    **defaults: object,
) -> Request:
    """Make the request of a line that sets these sampling fields.

    Args:
        eos: the model's end-of-sequence tokens. One of them has no row in the embedding.
        defaults: sampling fields that the model sets.
    """
    tokenizer = Tokenizer(backend, vocab_size=VOCAB_SIZE, eos_token_ids=eos)
    known = GenerationDefaults(defaults, frozenset(eos))
    parsed = ParsedLine(1, "1", "own", prompt_token_ids=PROMPT, overrides=overrides or {})
    return RequestMaker(tokenizer, known, LIMITS, seed=0).make(parsed, 0, 0.0)


def rules(overrides: dict[str, Any] | None = None, **options: Any) -> DrawRules | None:
    return make(overrides, **options).rules


def refused(overrides: dict[str, Any], **options: Any) -> str:
    with pytest.raises(RowError) as raised:
        make(overrides, **options)
    assert raised.value.code == "invalid_parameter"
    return raised.value.message


def test_a_plain_request_has_no_rules() -> None:
    assert rules() is None
    assert rules({"temperature": 0.7, "top_p": 0.9, "top_k": 5, "stop": "x", "ignore_eos": True}) is None


@given(st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in NEUTRAL.items()}))
def test_parameters_that_change_nothing_make_no_rules(overrides: dict[str, Any]) -> None:
    """The request is greedy, so parameters that only change how tokens are sampled change nothing either."""
    assert rules(overrides) is None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
        ({"frequency_penalty": -0.5}, {"frequency_penalty": -0.5}),
        ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
        ({"logit_bias": {7: 1, 6: 0, 5: -100}}, {"logit_bias": ((5, -100.0), (7, 1.0))}),
        ({"allowed_token_ids": [7, 5, 7]}, {"allowed_token_ids": (5, 7)}),
        ({"suppress_tokens": [7, 5, 7]}, {"banned_token_ids": (5, 7)}),
        ({"begin_suppress_tokens": [7, 5]}, {"banned_at_start": (5, 7)}),
        ({"bad_words_ids": [[7, 5], [1], [1, 2], [7, 5], [3]]}, {"bad_words": ((7, 5), (1, 2), (3,))}),
        ({"min_new_tokens": 3}, {"min_tokens": 3, "end_token_ids": (1,)}),
        ({"min_new_tokens": 3, "stop_token_ids": [9, 1, 8]}, {"min_tokens": 3, "end_token_ids": (1, 8, 9)}),
        ({"min_new_tokens": 3, "stop_token_ids": [9], "ignore_eos": True}, {"min_tokens": 3, "end_token_ids": (9,)}),
        ({"min_length": 5}, {"min_tokens": 2, "end_token_ids": (1,)}),
        ({"temperature": 1, "typical_p": 0.5}, {"typical_p": 0.5}),
        ({"temperature": 1, "epsilon_cutoff": 0.5}, {"epsilon_cutoff": 0.5}),
        ({"temperature": 1, "eta_cutoff": 0.5}, {"eta_cutoff": 0.5}),
    ],
)
def test_a_parameter_becomes_a_rule_wherever_it_comes_from(overrides: dict[str, Any], expected: dict[str, Any]) -> None:
    assert rules(overrides) == DrawRules(num_prompt=3, **expected)
    assert rules(**overrides) == DrawRules(num_prompt=3, **expected)


def test_a_line_switches_off_a_rule_of_the_model() -> None:
    assert rules({"repetition_penalty": 1}, repetition_penalty=1.05) is None
    assert rules({"min_new_tokens": 0}, min_length=50) is None


def test_a_shortest_output_without_a_token_that_ends_it_is_no_rule() -> None:
    found = make({"min_new_tokens": 3, "ignore_eos": True})
    # Stop strings are not looked for before, so the parameter stays.
    assert (found.rules, found.sampling.min_new_tokens) == (None, 3)
    assert rules({"min_new_tokens": 3}, eos=()) is None


def test_a_shortest_output_is_at_most_the_longest() -> None:
    found = make({"min_new_tokens": 10**9, "max_new_tokens": 10**9})
    assert (found.sampling.min_new_tokens, found.sampling.max_new_tokens) == (100, 100)
    assert found.rules is not None and found.rules.min_tokens == 100
    assert make({"min_new_tokens": 50, "max_new_tokens": 8}).sampling.min_new_tokens == 8
    counted = make({"min_length": 5}).sampling
    assert (counted.min_new_tokens, counted.min_length) == (2, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {VOCAB_SIZE: 1.0}),
        ("allowed_token_ids", [5, VOCAB_SIZE]),
        ("bad_words_ids", [[5], [5, VOCAB_SIZE]]),
        ("stop_token_ids", [VOCAB_SIZE]),
        ("suppress_tokens", [VOCAB_SIZE]),
        ("begin_suppress_tokens", [VOCAB_SIZE, 5]),
    ],
)
def test_an_id_that_the_model_does_not_have_is_refused(name: str, value: object) -> None:
    assert refused({name: value}) == f"{name} has the token id {VOCAB_SIZE}; it must be one of the model's, 0 to 399"


def test_an_id_without_a_token_in_the_models_own_lists_has_no_effect() -> None:
    assert rules(suppress_tokens=[VOCAB_SIZE], begin_suppress_tokens=[VOCAB_SIZE]) is None
    assert rules(suppress_tokens=[VOCAB_SIZE, 5]) == DrawRules(num_prompt=3, banned_token_ids=(5,))


@pytest.mark.parametrize(
    "overrides",
    [
        {"allowed_token_ids": [5, 6], "suppress_tokens": [5], "bad_words_ids": [[6]]},
        {"allowed_token_ids": [5], "begin_suppress_tokens": [5]},
        {"allowed_token_ids": [1], "min_new_tokens": 1},
        {"suppress_tokens": list(range(VOCAB_SIZE))},
    ],
)
def test_rules_that_allow_no_first_token_are_refused(overrides: dict[str, Any]) -> None:
    assert refused(overrides).startswith("the sampling parameters ban every token at the start of the output; allow")


def test_rules_that_do_not_fit_into_a_message_are_refused() -> None:
    fitting = [[5, 300]] * 5000  # equal sequences count once
    assert rules({"bad_words_ids": fitting}) == DrawRules(num_prompt=3, bad_words=((5, 300),))
    message = refused({"bad_words_ids": [[one % 400, one // 400] for one in range(10_000)]})
    assert f"bytes; the limit is {MOST_BYTES}. Give fewer" in message and int(message.split(" take ")[1][:5]) > 65536


def as_vllm(backend: Any, words: list[str]) -> tuple[tuple[int, ...], ...]:
    """Return the sequences of bad words as vLLM's SamplingParams.update_from_tokenizer makes them."""
    found: list[list[int]] = []
    for word in words:
        for prefix in ("", " "):
            ids = backend.encode(prefix + word.lstrip(), add_special_tokens=False)
            if not prefix or (ids[0] != found[-1][0] and len(ids) == len(found[-1])):
                found.append(ids)
    return tuple(dict.fromkeys(map(tuple, found)))


@pytest.mark.parametrize("backend", [BYTES, PIECES])
@given(words=st.lists(st.text("abE hello\u8a9e", min_size=1, max_size=6).filter(str.strip), min_size=1, max_size=4))
def test_bad_words_are_the_tokens_that_vllm_bans(backend: Any, words: list[str]) -> None:
    expected = as_vllm(backend, words)
    assert rules({"bad_words": words}, backend=backend, eos=()) == DrawRules(num_prompt=3, bad_words=expected)


def test_a_bad_word_is_banned_with_and_without_a_space() -> None:
    found = rules({"bad_words": ["and", "STOP"]})
    assert found is not None and [BYTES.decode(ids) for ids in found.bad_words] == ["and", " and", "STOP"]


class Table(Words):
    """A tokenizer of three words, given as a table."""

    def __call__(self, text: str, **kwargs: object) -> dict[str, list[int]]:
        return {"input_ids": {"a": [5, 6], " a": [5, 7], "b": [5], " b": [6]}.get(text, [])}


def test_a_word_after_a_space_is_banned_if_another_token_begins_it() -> None:
    assert rules({"bad_words": ["a"]}, backend=Table()) == DrawRules(num_prompt=3, bad_words=((5, 6),))
    assert rules({"bad_words": ["b"]}, backend=Table()) == DrawRules(num_prompt=3, bad_words=((5,), (6,)))
    message = refused({"bad_words": ["b", "c"]}, backend=Table())
    assert message == "bad_words[1] is 'c'; it must be a text for which the tokenizer has tokens"


def test_bad_words_need_a_tokenizer() -> None:
    with pytest.raises(RowError, match="bad_words need the model's tokenizer files") as raised:
        make({"bad_words": ["a"]}, backend=None)
    assert raised.value.code == "no_tokenizer"
    assert rules({"bad_words_ids": [[5]]}, backend=None) == DrawRules(num_prompt=3, bad_words=((5,),))
