"""A request, and its completion: the output and the reason why it ended."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.core.plan import TokenLogprobs
from sarathi_pp.core.prompt_logprobs import PromptLogprobs
from sarathi_pp.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "error"]
# Most prompt tokens in a replica's queue of waiting requests. They take 128 MiB, and are more than a KV cache holds.
MAX_WAITING_TOKENS = 1 << 25

ErrorCode = Literal["non_finite_logits", "no_allowed_token", "invalid_grammar", "kv_cache_exhausted"]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    Attributes:
        index: number that is unique in a run: the number of its input line minus 1, plus 2**32 for each earlier choice
            of the same line. Schedules and traces name the sequence by it: see request_index.py.
        prompt_token_ids: never empty. They are stored as an int32 array, 4 bytes per token, since thousands of long
            prompts may wait.
        sampling: sampling parameters. Their seed is a number, never None.
        arrival_s: time of arrival in seconds, on the coordinator's clock. Latencies count from this time.
        paragraph_ends: for each paragraph of the prompt, the number of prompt tokens up to its end. Empty unless the
            policy needs it (`Policy.wants_paragraphs`).
        rules: rules that change the logits before a token is drawn; None if there are none.
        cache_salt: requests with different salts share no KV pages.
    """

    index: int
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    arrival_s: float = 0.0
    paragraph_ends: tuple[int, ...] = ()
    rules: DrawRules | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.prompt_token_ids, array):
            object.__setattr__(self, "prompt_token_ids", array("i", self.prompt_token_ids))


@dataclass(frozen=True, slots=True)
class Completion:
    """The output of a finished request.

    Attributes:
        token_ids: every generated token, the end-of-sequence token included.
        first_bad: index (from 0) of the first stage whose output had NaN or infinity; -1 if none had, or if no stage
            checked (`--debug-nan`).
        error_code: cause of the finish reason "error"; None for every other reason. `no_allowed_token`: the rules of
            the request ban every token. `kv_cache_exhausted`: the prompt
            and this output fill the whole KV cache, so that the next token cannot be computed.
        logprobs: for each token, if the request wants them; otherwise None.
        prompt_logprobs: those of the prompt, if the request wants them; otherwise None.
        cached_tokens: number of prompt tokens whose keys and values were there already.
    """

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_preemptions: int = 0
    first_bad: int = -1
    error_code: ErrorCode | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    cached_tokens: int = 0
