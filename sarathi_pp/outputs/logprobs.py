"""Log probabilities in output lines, in our own form and in OpenAI's.

own         [{"id", "logprob", "top": [[id, logprob], ...]}, ...]
chat        {"content": [{"token", "bytes", "logprob", "top_logprobs": [{"token", "bytes", "logprob"}, ...]}, ...]}
completion  {"tokens", "token_logprobs", "top_logprobs": [{token: logprob}, ...], "text_offset"}
            With `echo`, the prompt's tokens come first. The first one of all has null.
"""

from __future__ import annotations

from itertools import accumulate

from sarathi_pp.core.request import Completion
from sarathi_pp.text.tokenizer import Tokenizer


def own_logprobs(completion: Completion) -> list[dict[str, object]]:
    """Return the log probabilities of a completion in our own form."""
    assert completion.logprobs is not None
    return [
        {"id": token_id, "logprob": one.logprob, "top": one.top}
        for token_id, one in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


def own_prompt_logprobs(completion: Completion) -> dict[str, object]:
    """Return the key of an output line with the log probabilities of the prompt. Empty if the request wants none."""
    found = completion.prompt_logprobs
    return {} if found is None else {"prompt_logprobs": found.entries(completion.request.prompt_token_ids)}


def openai_logprobs(
    completion: Completion, tokenizer: Tokenizer, *, is_chat: bool, is_echo: bool = False
) -> dict[str, object] | None:
    """Return the log probabilities of a completion in OpenAI's form; None if the request wants none.

    Args:
        is_echo: the prompt's tokens come first.
    """
    of_prompt = completion.prompt_logprobs if is_echo and completion.request.sampling.logprobs is not None else None
    if completion.logprobs is None and of_prompt is None:
        return None
    pairs = list(zip(completion.token_ids, completion.logprobs or (), strict=True))
    if is_chat:
        content = [
            {
                **_entry(token_id, one.logprob, tokenizer),
                "top_logprobs": [_entry(top_id, logprob, tokenizer) for top_id, logprob in one.top],
            }
            for token_id, one in pairs
        ]
        return {"content": content}
    echoed = [] if of_prompt is None else zip(completion.request.prompt_token_ids, of_prompt.by_token(), strict=True)
    rows = [*echoed, *pairs]
    tokens = [_text(token_id, tokenizer) for token_id, _ in rows]
    # A special token that the text leaves out moves no later token.
    skips = completion.request.sampling.skip_special_tokens and tokenizer.has_text
    lengths = [
        len(text) * (not skips or tokenizer.visible(token_id)) for text, (token_id, _) in zip(tokens, rows, strict=True)
    ]
    # Two tokens may have the same text, as parts of characters do. The likelier one stays.
    return {
        "tokens": tokens,
        "token_logprobs": [None if one is None else one.logprob for _, one in rows],
        "top_logprobs": [
            None if one is None else {_text(top_id, tokenizer): logprob for top_id, logprob in reversed(one.top)}
            for _, one in rows
        ],
        "text_offset": [0, *accumulate(lengths)][: len(tokens)],
    }


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, object]:
    found = tokenizer.token_bytes(token_id)
    return {"token": found.decode(errors="replace"), "bytes": list(found), "logprob": logprob}


def _text(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")
