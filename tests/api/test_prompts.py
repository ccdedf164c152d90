"""The prompts that a program may give."""

from __future__ import annotations

from typing import Any

import pytest

from sarathi_pp.api.prompts import prompt_lines
from sarathi_pp.errors import ConfigError


@pytest.mark.parametrize("prompts", ["ab", ["ab"], {"prompt": "ab"}, [{"prompt": "ab", "multi_modal_data": None}]])
def test_texts(prompts: Any) -> None:
    assert [line.prompt for line in prompt_lines(prompts)] == ["ab"]


@pytest.mark.parametrize("prompts", [[1, 2], [[1, 2]], {"prompt_token_ids": [1, 2]}, [{"prompt_token_ids": (1, 2)}]])
def test_token_ids(prompts: Any) -> None:
    assert [line.prompt_token_ids for line in prompt_lines(prompts)] == [(1, 2)]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({"prompt": "a", "multi_modal_data": {}}, "'multi_modal_data', which is not supported: models read text only"),
        ({"prompt": "a", "promt": 1}, "the unknown key 'promt'. Its keys are prompt or prompt_token_ids"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt and prompt_token_ids. Give one"),
        ({}, "neither prompt nor prompt_token_ids. Give one"),
        ({"prompt": [1]}, "prompts holds .* must be a string"),
        ({"prompt_token_ids": "ab"}, "prompts holds .* must be a string"),
        ({"prompt_token_ids": [1.5]}, "prompts holds .* must be a string"),
        ({"prompt": "a", "cache_salt": ""}, "the cache_salt ''. Give a text of 1 to 256 characters"),
        ({"prompt": "a", "cache_salt": 3}, "the cache_salt 3. Give a text"),
        ({"prompt": "a", "cache_salt": "x" * 257}, "Give a text of 1 to 256 characters"),
        ({"prompt": "a", "cache_salt": "\ud800"}, "Give a text of 1 to 256 characters"),
    ],
)
def test_other_dictionaries_are_refused(prompt: Any, says: str) -> None:
    for prompts in (prompt, ["fine", prompt]):
        with pytest.raises(ConfigError, match=says):
            prompt_lines(prompts)


def test_a_prompt_may_have_a_salt() -> None:
    prompts = [{"prompt": "a", "cache_salt": "x"}, {"prompt_token_ids": [1], "cache_salt": None}, "b"]
    assert [line.cache_salt for line in prompt_lines(prompts)] == ["x", "", ""]  # type: ignore[arg-type]
