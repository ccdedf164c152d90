"""Log probabilities in output lines, in our own form and in OpenAI's.

own         [{"id", "logprob", "top": [[id, logprob], ...]}, ...]
chat        {"content": [{"token", "bytes", "logprob", "top_logprobs": [{"token", "bytes", "logprob"}, ...]}, ...]}
completion  {"tokens", "token_logprobs", "top_logprobs": [{token: logprob}, ...], "text_offset"}
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


def openai_logprobs(completion: Completion, tokenizer: Tokenizer, *, is_chat: bool) -> dict[str, object] | None:
    """Return the log probabilities of a completion in OpenAI's form; None if the request wants none."""
    if completion.logprobs is None:
        return None
    pairs = list(zip(completion.token_ids, completion.logprobs, strict=True))
    if is_chat:
        content = [
            {
                **_entry(token_id, one.logprob, tokenizer),
                "top_logprobs": [_entry(top_id, logprob, tokenizer) for top_id, logprob in one.top],
            }
            for token_id, one in pairs
        ]
        return {"content": content}
    tokens = [_text(token_id, tokenizer) for token_id, _ in pairs]
    # Two tokens may have the same text, as parts of characters do. The likelier one stays.
    return {
        "tokens": tokens,
        "token_logprobs": [one.logprob for _, one in pairs],
        "top_logprobs": [
            {_text(top_id, tokenizer): logprob for top_id, logprob in reversed(one.top)} for _, one in pairs
        ],
        "text_offset": [0, *accumulate(map(len, tokens))][: len(tokens)],
    }


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, object]:
    found = tokenizer.token_bytes(token_id)
    return {"token": found.decode(errors="replace"), "bytes": list(found), "logprob": logprob}


def _text(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")
