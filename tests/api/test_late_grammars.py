"""Structured output that begins after a token of plain text, given as the vocabulary writes it."""

from __future__ import annotations

from typing import Any

import pytest

from sarathi_pp import LLM, SamplingParams
from tests.text.grammar_model import EOS, write_grammar_model
from tests.text.test_tokenizer import BYTES

MOST_TOKENS = 16
# Place of the token in the output.
AT = 4
SEVEN, EIGHT = BYTES.convert_tokens_to_ids(["7", "8"])


def written(token_id: int) -> str:
    return BYTES.convert_ids_to_tokens(token_id)


@pytest.mark.timeout(120)
def test_the_output_after_the_token_matches(tmp_path):
    model = write_grammar_model(tmp_path / "model")

    def params(regex: str, start_after: str, **more: Any) -> SamplingParams:
        return SamplingParams(MOST_TOKENS, structured_outputs={"regex": regex, "start_after": start_after}, **more)

    with LLM(str(model), stages=1, kv_cache_memory_bytes=16 << 20) as llm:
        (free,) = llm.generate(["hello"], SamplingParams(MOST_TOKENS))
        tokens = free.outputs[0].token_ids
        assert len(tokens) == MOST_TOKENS and tokens.index(tokens[AT]) == AT
        never = next(token for token in range(3, 300) if token not in tokens)
        begin, end = ({"logit_bias": ((token, 100.0),)} for token in (SEVEN, EOS))
        asked = [
            params("[a-c]{3}", written(tokens[AT])),
            params("[a-c]{3}", written(never)),
            params("[a-c]{3}", written(never), **end),
            params("[78]{5}", "7", allowed_token_ids=(SEVEN, EIGHT, EOS), **begin),
            params("[a-c]{3}", "</none>"),
        ]
        soon, absent, ended, again, refused = llm.generate(["hello"] * len(asked), asked)
    *others, last = soon.outputs[0].token_ids
    assert (tuple(others[: AT + 1]), last, soon.outputs[0].finish_reason) == (tokens[: AT + 1], EOS, "stop")
    assert {*BYTES.decode(others[AT + 1 :])} <= {*"abc"} and len(BYTES.decode(others[AT + 1 :])) == 3
    assert (absent.outputs[0].token_ids, absent.outputs[0].finish_reason) == (tokens, "length")
    assert (ended.outputs[0].token_ids, ended.outputs[0].finish_reason) == ((EOS,), "stop")
    assert again.outputs[0].token_ids == (SEVEN,) * 6 + (EOS,), "only the first one begins the grammar"
    assert refused.error is not None and "one token of the vocabulary" in refused.error.message
