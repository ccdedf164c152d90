"""The state of one request: three cursors over its tokens; the phase is derived, never stored.

    tokens   [ prompt .................. | output ...... ]
              0 ....... done ........ issued ......... known
              `- KV written -' `- in flight -' `- to be computed

`done <= issued <= known` always. Where issued == known the next token is in flight and nothing can be issued.
A decode is a grant of 1 where issued == known - 1 past the prompt. Several chunks may be in flight at once:
stages are first in first out, so chunk k+1 reaches a stage after chunk k has written its KV there.
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
        # What a SamplingRow holds beside the position.
        self.draw = (params.temperature, params.top_k, params.top_p, params.min_p, params.seed)
        # No list: the garbage collector would walk all tokens of all sequences, 100 ms with 4096 of them. The request's
        # own array until `start`, so that a waiting prompt is held once.
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
        """Tokens that are known and not yet issued."""
        return len(self.tokens) - self.issued

    @property
    def decoding(self) -> bool:
        """Whether the next grant is a decode."""
        return self.issued == len(self.tokens) - 1 and self.issued >= self.num_prompt

    @property
    def paragraph_ends(self) -> tuple[int, ...]:
        return self.request.paragraph_ends

    @property
    def past_prompt(self) -> bool:
        """Whether its whole prompt is issued."""
        return self.issued >= self.num_prompt

    def start(self) -> None:
        """Hold tokens of its own from now on, to which the output is appended."""
        if self.tokens is self.request.prompt_token_ids:
            self.tokens = self.tokens[:]

    def restart(self) -> None:
        """Forget all computed KV; what is in flight becomes stale by its epoch."""
        self.done = self.issued = 0
        self.epoch += 1
        self.pages = []

    def __repr__(self) -> str:
        return f"Sequence(s{self.index}.{self.epoch} {self.done}<={self.issued}<={self.known} pages={len(self.pages)})"
