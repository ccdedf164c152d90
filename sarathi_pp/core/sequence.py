"""The state of one request: three cursors over its tokens. The phase is derived, never stored.

    tokens   [ prompt .................. | output ...... ]
              0 ....... done ........ issued ......... known
              `- KV written -' `- in flight -' `- to be computed

`done <= issued <= known` always. If issued == known, the next token is in flight and nothing can be issued.
A decode is a grant of 1 after the prompt, with issued == known - 1. Several chunks may be in flight at once.
Stages are first in, first out, so chunk k+1 reaches a stage after chunk k has written its KV there.
"""

from __future__ import annotations

from array import array

from sarathi_pp.core.request import Request


class Sequence:
    __slots__ = ("request", "index", "num_prompt", "draw", "tokens", "done", "issued", "epoch", "pages")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.index = request.index
        self.num_prompt = len(request.prompt_token_ids)
        params = request.sampling
        assert params.seed is not None, "requests carry a concrete seed"
        # All fields of a SamplingRow except the position.
        self.draw = (params.temperature, params.top_k, params.top_p, params.min_p, params.seed)
        # An array and not a list: the garbage collector would walk all tokens of all sequences, 100 ms with 4096 of
        # them. Until `start` it is the request's own array, so that the tokens of a waiting prompt are stored once.
        assert isinstance(request.prompt_token_ids, array)
        self.tokens: array[int] = request.prompt_token_ids
        self.done = 0
        self.issued = 0
        self.epoch = 0
        self.pages: list[int] = []

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def remaining(self) -> int:
        """Number of known tokens that are not yet issued."""
        return len(self.tokens) - self.issued

    @property
    def decoding(self) -> bool:
        """Return whether the next grant is a decode."""
        return self.issued == len(self.tokens) - 1 and self.issued >= self.num_prompt

    @property
    def paragraph_ends(self) -> tuple[int, ...]:
        return self.request.paragraph_ends

    @property
    def past_prompt(self) -> bool:
        """Return whether the whole prompt is issued."""
        return self.issued >= self.num_prompt

    def start(self) -> None:
        """Copy the tokens from the request, so that output can be appended to them. A second call does nothing."""
        if self.tokens is self.request.prompt_token_ids:
            self.tokens = self.tokens[:]

    def restart(self) -> None:
        """Forget all computed KV. Chunks in flight become stale by their epoch."""
        self.done = self.issued = 0
        self.epoch += 1
        self.pages = []

    def __repr__(self) -> str:
        return f"Sequence(s{self.index}.{self.epoch} {self.done}<={self.issued}<={self.known} pages={len(self.pages)})"
