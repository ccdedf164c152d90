"""The times of one request's tokens: collected while it runs, turned into its RequestFinished at the end."""

from __future__ import annotations

from array import array

from sarathi_pp.core.request import Completion
from sarathi_pp.trace.events import RequestFinished


class TokenTimes:
    """The times of one request's tokens, in seconds on the coordinator's clock."""

    __slots__ = ("first_issue_s", "_first_token_s", "_last_token_s", "_gaps_us")

    def __init__(self) -> None:
        self.first_issue_s: float | None = None
        self._first_token_s: float | None = None
        self._last_token_s = 0.0
        self._gaps_us = array("q")

    def issued(self, at_s: float) -> None:
        """Record that a chunk was issued. Only the request's first chunk counts, even if a preemption runs it again."""
        if self.first_issue_s is None:
            self.first_issue_s = at_s

    def token_came(self, at_s: float) -> None:
        if self._first_token_s is None:
            self._first_token_s = at_s
        else:
            self._gaps_us.append(round((at_s - self._last_token_s) * 1e6))
        self._last_token_s = at_s

    def finished(self, completion: Completion, at_s: float) -> RequestFinished:
        request = completion.request
        return RequestFinished(
            request.index,
            request.arrival_s,
            self.first_issue_s,
            self._first_token_s,
            at_s,
            len(request.prompt_token_ids),
            len(completion.token_ids),
            completion.finish_reason,
            completion.num_preemptions,
            tuple(self._gaps_us),
            completion.cached_tokens,
        )
