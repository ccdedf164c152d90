"""Log probabilities of the tokens of a prompt, which come back chunk by chunk."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from sarathi_pp.core.plan import ChunkLogprobs, TokenLogprobs


@dataclass(slots=True)
class PromptLogprobs:
    """The log probabilities of consecutive prompt tokens, as arrays, because a prompt may be long.

    Attributes:
        first: position of the first token that is wanted. Token 0 has no log probability.
        num_top: number of likeliest tokens at each position.
        logprobs: those of the tokens from position max(1, first) on.
        top_ids, top_logprobs: of the likeliest tokens, likeliest first, `num_top` for each position.
    """

    first: int
    num_top: int
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    top_ids: array[int] = field(default_factory=lambda: array("i"))
    top_logprobs: array[float] = field(default_factory=lambda: array("d"))

    @property
    def next(self) -> int:
        """Position of the first token that is wanted and still has no log probability."""
        return max(1, self.first) + len(self.logprobs)

    def add(self, found: ChunkLogprobs) -> None:
        """Append the log probabilities of a chunk's tokens. They continue the earlier ones."""
        assert found.first == self.next and found.num_top == self.num_top, (found[:4], self.next, self.num_top)
        self.logprobs.extend(found.logprobs)
        self.top_ids.extend(found.top_ids)
        self.top_logprobs.extend(found.top_logprobs)

    def by_token(self) -> list[TokenLogprobs | None]:
        """Return the log probabilities from position `first` on. None stands for token 0."""
        number = self.num_top
        tops = list(zip(self.top_ids, self.top_logprobs, strict=True))
        found = [
            TokenLogprobs(logprob, tuple(tops[place * number : (place + 1) * number]))
            for place, logprob in enumerate(self.logprobs)
        ]
        return [None, *found] if self.first == 0 else [*found]

    def entries(self, token_ids: Sequence[int]) -> list[dict[str, object] | None]:
        """Return the log probabilities in the form of our own output lines.

        Args:
            token_ids: those of the whole prompt.
        """
        return [
            None if one is None else {"id": token_id, "logprob": one.logprob, "top": one.top}
            for token_id, one in zip(token_ids[self.first :], self.by_token(), strict=True)
        ]
