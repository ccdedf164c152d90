"""Log probabilities in output lines: every token with its bytes, also bytes that make no character."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sarathi_pp.core.plan import TokenLogprobs
from sarathi_pp.core.request import Completion, Request
from sarathi_pp.outputs.logprobs import openai_logprobs, own_logprobs
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.text.tokenizer import Tokenizer
from tests.text.test_tokenizer import tokenizer

PARAMS = SamplingParams(seed=0, logprobs=2)


def completion(ids: tuple[int, ...], tops: tuple[tuple[int, float], ...] = ()) -> Completion:
    logprobs = tuple(TokenLogprobs(-0.5 - place, tops) for place in range(len(ids)))
    return Completion(Request(0, (1,), PARAMS), ids, "length", logprobs=logprobs)


def test_our_own_form():
    found = own_logprobs(completion((7, 8), ((3, -0.25),)))
    assert found == [
        {"id": 7, "logprob": -0.5, "top": ((3, -0.25),)},
        {"id": 8, "logprob": -1.5, "top": ((3, -0.25),)},
    ]
    assert json.loads(json.dumps(found))[0]["top"] == [[3, -0.25]]


@pytest.mark.parametrize("text", ["the cat", "\u00e9\u00e8", "\U0001f600"])
def test_the_bytes_of_all_tokens_are_the_bytes_of_the_text(text):
    ids = tuple(tokenizer().encode_prompt(text, add_special_tokens=False).token_ids)
    found = openai_logprobs(completion(ids, ((ids[0], -0.25),)), tokenizer(), is_chat=True)
    assert found is not None
    content = found["content"]
    assert bytes(byte for one in content for byte in one["bytes"]) == text.encode()
    first = {"token": content[0]["token"], "bytes": content[0]["bytes"], "logprob": -0.25}
    assert content[0]["top_logprobs"] == [first]


def test_completions_have_offsets_into_the_text_of_their_tokens():
    ids = tuple(tokenizer().encode_prompt("the cat sat", add_special_tokens=False).token_ids)
    found = openai_logprobs(completion(ids, ((ids[0], -0.25),)), tokenizer(), is_chat=False)
    assert found is not None
    whole = "".join(found["tokens"])
    assert whole == "the cat sat"
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert whole[offset:].startswith(token)
    assert found["top_logprobs"] == [{found["tokens"][0]: -0.25}] * len(ids)
    assert found["token_logprobs"][:2] == [-0.5, -1.5]


def test_without_tokenizer_files_tokens_are_named_by_id_and_without_a_wish_there_are_none():
    nameless = Tokenizer(None, vocab_size=100)
    found = openai_logprobs(completion((7,)), nameless, is_chat=False)
    assert found is not None and found["tokens"] == ["token_id:7"] and found["text_offset"] == [0]
    assert openai_logprobs(Completion(Request(0, (1,), PARAMS), (7,), "length"), nameless, is_chat=True) is None


def test_a_special_token_outside_the_text_moves_no_offset():
    known = tokenizer()
    ids = tuple(known.encode_prompt("the cat").token_ids)
    assert known.special_id("<s>") == ids[0]
    text = known.decode(ids)
    found = openai_logprobs(completion(ids), known, is_chat=False)
    assert found is not None
    shown = list(zip(found["tokens"], found["text_offset"], strict=True))[1:]
    assert all(text[offset:].startswith(token) for token, offset in shown)
    whole = openai_logprobs(
        replace(completion(ids), request=Request(0, (1,), replace(PARAMS, skip_special_tokens=False))),
        known,
        is_chat=False,
    )
    assert whole is not None and whole["text_offset"][1] == len("<s>")
