from __future__ import annotations

from sarathi_pp.inputs.unknown_tokens import UnknownTokens


def test_prompts_with_many_unknown_tokens_are_counted() -> None:
    unknown = UnknownTokens(token_id=3)
    unknown.count((3, 5, 5, 5))
    assert unknown.warning() is None
    unknown.count((1, 7, 3))
    assert "1 of 2 prompts have more than 30% unknown tokens (id 3)" in str(unknown.warning())


def test_without_an_unknown_token_there_is_no_warning() -> None:
    unknown = UnknownTokens()
    unknown.count((0, 0))
    assert unknown.num_prompts == 1 and unknown.warning() is None
