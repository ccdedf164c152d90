"""A request, and how it ended."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sarathi_pp.config import SamplingParams

FinishReason = Literal["stop", "length", "error"]
# Prompt tokens that one queue of waiting requests may hold: 128 MiB, and more than a KV cache holds.
MAX_WAITING_TOKENS = 1 << 25

ErrorCode = Literal["non_finite_logits", "kv_cache_exhausted"]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    Attributes:
        index: arrival order, unique in a run. It names the sequence in schedules and traces (`s<index>`).
        prompt_token_ids: never empty. They are stored as an int32 array, 4 bytes per token, since thousands of long
            prompts may wait.
        sampling: its seed is already concrete.
        arrival_s: time on the coordinator's clock, from which latencies count.
        paragraph_ends: prompt positions at which a paragraph of the text ends, ascending. Empty unless the policy wants
            them (`Policy.wants_paragraphs`).
    """

    index: int
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    arrival_s: float = 0.0
    paragraph_ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.prompt_token_ids, array):
            object.__setattr__(self, "prompt_token_ids", array("i", self.prompt_token_ids))


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request.

    Attributes:
        token_ids: every generated token, the end-of-sequence token included.
        first_bad: the first stage whose output was not finite, for `non_finite_logits`; -1 if no stage checked.
        error_code: cause of the finish reason "error"; None for every other reason. `kv_cache_exhausted`: the prompt
            and this output fill the whole KV cache, so that the next token cannot be computed.
    """

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_preemptions: int = 0
    first_bad: int = -1
    error_code: ErrorCode | None = None
