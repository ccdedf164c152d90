"""The answers that a Python program gets."""

from __future__ import annotations

from dataclasses import dataclass, field

from sarathi_pp.core.plan import TokenLogprobs
from sarathi_pp.core.request import FinishReason
from sarathi_pp.errors import RowError
from sarathi_pp.outputs.answer_message import ToolCall


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One output of a prompt.

    Args:
        text: the generated text, without the prompt. None for a model without tokenizer files.
        token_ids: all generated ids, including the end-of-sequence id.
        finish_reason: `stop`, or `length` at the limit.
        logprobs: log probability of each token, and the likeliest tokens with theirs. None unless the sampling
            parameters ask for them.
        content, reasoning, tool_calls: parts of the text of an answer to `chat`, if the tokenizer has a response
            template. Otherwise None and no calls.
        metrics: latencies of this output in seconds, by name, such as `ttft_s`. None for times that do not exist. Also
            `cached_tokens`, the number of prompt tokens that were found in the prefix cache.
    """

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    metrics: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt.

    Args:
        prompt: text of the prompt. None for token ids and conversations.
        prompt_token_ids: ids of the prompt. Empty if the prompt cannot run.
        outputs: `n` outputs, in the order of their numbers. Empty if the prompt cannot run, or if an output failed.
        error: the reason why there is no output. None if there is one.
        metrics: those of the first output. Empty if there is no output.
        index: position of the prompt in the call.
        request_id: number of the request since the LLM was made, as text.
        prompt_logprobs: log probability of each prompt token from `logprobs_from` on, and the likeliest tokens with
            theirs. Token 0 has None. None unless the sampling parameters ask for them.
        num_cached_tokens: number of prompt tokens that the first output found in the prefix cache. None if the prompt
            cannot run, or if an output failed.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    error: RowError | None = None
    metrics: dict[str, object] = field(default_factory=dict)
    index: int = 0
    request_id: str = ""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int | None = None
