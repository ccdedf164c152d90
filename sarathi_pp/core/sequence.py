"""The state of one request: three cursors over its tokens; the phase is derived, never stored.

    tokens   [ prompt .................. | output ...... ]
              0 ....... done ........ issued ......... known
              `- KV written -' `- in flight -' `- to be computed

`done <= issued <= known` always. Where issued == known the next token is in flight and nothing can be issued.
A decode is a grant of 1 where issued == known - 1 past the prompt. Several chunks may be in flight at once:
stages are first in first out, so chunk k+1 reaches a stage after chunk k has written its KV there.
"""

from __future__ import annotations

from sarathi_pp.core.request import Request


class Sequence:
    __slots__ = ("request", "tokens", "done", "issued", "epoch", "pages")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = list(request.prompt_token_ids)
        self.done = 0
        self.issued = 0
        self.epoch = 0
        self.pages: list[int] = []

    @property
    def index(self) -> int:
        return self.request.index

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def remaining(self) -> int:
        """Tokens that are known and not yet issued."""
        return len(self.tokens) - self.issued

    @property
    def decoding(self) -> bool:
        """Whether the next grant is a decode."""
        return self.issued == len(self.tokens) - 1 and self.num_output > 0

    @property
    def paragraph_ends(self) -> tuple[int, ...]:
        return self.request.paragraph_ends

    def restart(self) -> None:
        """Forget all computed KV; what is in flight becomes stale by its epoch."""
        self.done = self.issued = 0
        self.epoch += 1
        self.pages = []

    def __repr__(self) -> str:
        return f"Sequence(s{self.index}.{self.epoch} {self.done}<={self.issued}<={self.known} pages={len(self.pages)})"
