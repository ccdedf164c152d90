"""The rules that decide when the output of a request ends, and how.

drawn token -> appended to its sequence -> Ending, or None if the output continues -> Completion
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from sarathi_pp.core.draw_rules import Failure
from sarathi_pp.core.plan import SampledToken
from sarathi_pp.core.request import Completion, ErrorCode, FinishReason, Request
from sarathi_pp.core.sequence import Sequence

# A function (request, token id) that returns whether the output ends with this token.
StopRule = Callable[[Request, int], bool]

_CODES: dict[Failure, ErrorCode] = {
    Failure.NOT_FINITE: "non_finite_logits",
    Failure.NO_TOKEN: "no_allowed_token",
    Failure.GRAMMAR: "invalid_grammar",
}


class Ending(NamedTuple):
    """The way in which an output ended. The fields are those of Completion."""

    reason: FinishReason
    error_code: ErrorCode | None = None
    first_bad: int = -1

    def complete(self, sequence: Sequence) -> Completion:
        """Return the completion of a sequence that ended in this way."""
        return Completion(
            sequence.request,
            tuple(sequence.tokens[sequence.num_prompt :]),
            self.reason,
            sequence.num_preemptions,
            self.first_bad,
            self.error_code,
            tuple(sequence.logprobs or ()) or None,  # emulated stages bring none
            sequence.prompt_logprobs if sequence.scored(0, sequence.num_prompt) is None else None,
            sequence.num_cached,
        )


_STOPPED, _LONGEST, _NO_PAGES = Ending("stop"), Ending("length"), Ending("error", "kv_cache_exhausted")


@dataclass(frozen=True, slots=True)
class EndRules:
    """The rules of one run by which outputs end.

    Attributes:
        max_model_len: most tokens of prompt and output together.
        num_kv_tokens: tokens that fit into all KV pages together.
        eos_token_ids: ids that end an output unless its request ignores them.
        stop_rule: called with each new token of each request, in order. True ends the output there ("stop" strings).
    """

    max_model_len: int
    num_kv_tokens: int
    eos_token_ids: frozenset[int]
    stop_rule: StopRule

    def gets_no_output(self, request: Request) -> bool:
        """Return whether a request asks for no token, or its prompt fills `max_model_len`."""
        return request.sampling.max_new_tokens == 0 or len(request.prompt_token_ids) == self.max_model_len

    def continues_after(self, sequence: Sequence) -> bool:
        """Return whether the output continues after the token that is drawn next, unless the token itself ends it."""
        known = len(sequence.tokens) + 1
        most_tokens = min(sequence.num_prompt + sequence.request.sampling.max_new_tokens, self.max_model_len)
        return known < most_tokens and known <= self.num_kv_tokens

    def append(self, sequence: Sequence, token: SampledToken) -> Ending | None:
        """Append a drawn token to its sequence, unless none was drawn or wanted. Return the end of the output, if any.

        The answer must not depend on the size of the KV cache. So an output that the cache cannot hold is an error, and
        not a shorter answer.
        """
        request, failure = sequence.request, token.failure
        if sequence.prompt_logprobs is not None and failure != Failure.NOT_FINITE and self.gets_no_output(request):
            return _LONGEST
        if failure:
            return Ending("error", _CODES[failure], token.first_bad)
        sampling = request.sampling
        sequence.add(token.token_id)
        if sequence.logprobs is not None and token.logprobs is not None:
            sequence.logprobs.append(token.logprobs)
        stopped = self.stop_rule(request, token.token_id) or token.token_id in sampling.stop_token_ids
        if stopped or (token.token_id in self.eos_token_ids and not sampling.ignore_eos):
            return _STOPPED
        known = sequence.num_drawn
        if known - sequence.num_prompt >= sampling.max_new_tokens or known >= self.max_model_len:
            return _LONGEST
        return _NO_PAGES if known > self.num_kv_tokens else None
