"""The prefix cache: sequences that begin with the same tokens share the KV pages of these tokens.

    waiting    find: which pages are there? Is another sequence about to compute the next one?
    begins     begin: hold them. The sequence then starts after their tokens
    running    enter: pages that are full now can be found by others
    leaves     leave: no other sequence waits for its pages

A page is entered when the chunk that fills it is *issued*, not when its result is back. A sequence that finds it is
issued later, and stages compute microbatches in the order in which they come. So on each stage, the page is written
before it is read. No page is found that this very microbatch fills. If the id of the page's last token is not known
then (Limits.issues_ahead), the page is entered when it is.

A shared page is never written again. Each sequence computes at least its last known token, so that its next token can
be drawn, and writes it to a page of its own.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable

from sarathi_pp.config import PrefixCacheMode
from sarathi_pp.core.draw_rules import MOST_BYTES, MOST_MICROBATCH_BYTES, TOKEN_BYTES
from sarathi_pp.core.pages import MOST_SHARED_PAGES, PagePool, extend_digests
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.request import Request
from sarathi_pp.core.sequence import Sequence

_SHORT, _LONG = b"short", b"long"
_MOST_TOKENS_WITH_RULES = (MOST_MICROBATCH_BYTES - MOST_BYTES - 1) // TOKEN_BYTES


class PrefixCache:
    """The links between sequences and shared pages. It keeps `digests`, `found`, `num_entered` and the cursors current.

    Args:
        longrope_after: see Limits.longrope_after. The keys of a sequence with the long factors are others.
        holds: see Policy.holds_sequences.

    Attributes:
        prompt_tokens: prompt tokens of all requests that have started; 0 if the mode is "off".
        cached_tokens: number of these tokens that were found.
        resumed_tokens: tokens that were found when requests started again, after they had lost their pages.
    """

    def __init__(
        self, pool: PagePool, mode: PrefixCacheMode, longrope_after: int | None = None, *, holds: bool = True
    ) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.resumed_tokens = 0
        self._pool = pool
        self._holds = holds
        self.mode = mode
        self._longrope_after = sys.maxsize if longrope_after is None else longrope_after
        # The next page that each running sequence is about to enter. One that could share later pages of it too has
        # found all pages before, so it needs this one next.
        self._coming: dict[bytes, Sequence] = {}

    def find(self, sequence: Sequence, next_pages: set[bytes]) -> bool:
        """Find the pages with which a waiting sequence can begin, and set its cursors to the end of their tokens.

        Args:
            next_pages: digests of the next pages of the sequences that may start before it. That of this one is added.

        Returns:
            Whether the sequence should wait, because another one is about to compute its next page.
        """
        usable = self._usable(sequence)
        if usable:
            self.digest(sequence)
        sequence.entry = self._pool.match(sequence.digests, usable, sequence.found, sequence.entry)
        sequence.num_found = sequence.done = sequence.issued = len(sequence.found) * self._pool.page_size
        if not self._holds or len(sequence.found) >= usable:
            return False
        following = sequence.digests[len(sequence.found)]
        if following in next_pages or following in self._coming:
            return True
        next_pages.add(following)
        return False

    def has_lost(self, sequence: Sequence) -> bool:
        """Return whether pages that a waiting sequence had found were taken since.

        The microbatch that took them may compute the same tokens. Its pages cannot be read in this microbatch.
        """
        return bool(sequence.found) and not self._pool.has(sequence.found[-1], sequence.entry)

    def begin(self, sequence: Sequence) -> int:
        """Let a sequence begin with the pages that were found. Return the number of tokens in those that were idle."""
        if self.mode == "off":
            return 0
        self._count(sequence)
        found = sequence.found
        sequence.pages, sequence.num_entered, sequence.enters = list(found), len(found), True
        self._expect(sequence)
        return self._pool.share(found) * self._pool.page_size

    def enter(self, sequence: Sequence, *, decoded: bool) -> None:
        """Enter the pages that a running sequence has filled, as far as the ids of their tokens are known.

        Args:
            decoded: the chunk that was issued is a decode.
        """
        num_full = min(sequence.issued, sequence.num_drawn) // self._pool.page_size
        if not sequence.enters or sequence.num_entered >= num_full:
            return
        self.leave(sequence)
        if decoded and self.mode == "prompts":
            sequence.enters = False
            return
        self.digest(sequence)
        for at in range(sequence.num_entered, num_full):
            if not self._pool.enter(sequence.pages[at], sequence.digests[at]):
                # Another sequence has computed the same at the same time. The pages after it cannot be entered, because
                # the index has only whole chains of pages that one sequence holds.
                sequence.enters = False
                return
            sequence.num_entered = at + 1
        self._expect(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Forget that a sequence was about to fill a page."""
        following = self._following(sequence)
        if following is not None and self._coming.get(following) is sequence:
            del self._coming[following]

    def forget(self, running: Iterable[Sequence]) -> None:
        """Forget all pages, because some may have wrong contents. Running sequences enter no more."""
        self._pool.forget()
        self._coming.clear()
        for sequence in running:
            sequence.enters = False

    def digest(self, sequence: Sequence) -> None:
        """Compute the digests of a sequence's full pages, as far as they are missing."""
        num_drawn = sequence.num_drawn
        if self.mode != "off" and len(sequence.digests) < num_drawn // self._pool.page_size:
            salt = _chain_start(sequence.request, num_drawn, self._longrope_after)
            tokens = sequence.tokens[:num_drawn] if sequence.num_expected else sequence.tokens
            extend_digests(sequence.digests, tokens, self._pool.page_size, salt)

    def to_compute(self, num_tokens: int) -> int:
        """Estimate how many of `num_tokens` prompt tokens will be computed: the share that was computed so far."""
        if not self.cached_tokens:
            return num_tokens
        return math.ceil(num_tokens * (1 - self.cached_tokens / self.prompt_tokens))

    def _count(self, sequence: Sequence) -> None:
        """Count the tokens that a sequence has found, when it starts."""
        if sequence.epoch == 0:
            self.prompt_tokens += sequence.num_prompt
            sequence.num_cached = sequence.num_found
            self.cached_tokens += sequence.num_found
        else:
            self.resumed_tokens += sequence.num_found

    def _expect(self, sequence: Sequence) -> None:
        """Note the next page that a running sequence will enter, if its tokens are known."""
        following = self._following(sequence)
        if following is not None:
            self._coming.setdefault(following, sequence)

    def _following(self, sequence: Sequence) -> bytes | None:
        digests, at = sequence.digests, sequence.num_entered
        return digests[at] if at < len(digests) else None

    def _usable(self, sequence: Sequence) -> int:
        """Return the most pages with which a waiting sequence can begin.

        Messages bound it, since the tokens before the first chunk of a sequence with rules travel with them. A sequence
        whose request wants log probabilities of its prompt computes all tokens from the first of these on.
        """
        last = sequence.known - 1
        if sequence.rules:
            last = min(last, _MOST_TOKENS_WITH_RULES)
        scores = sequence.prompt_logprobs
        if scores is not None and scores.next < sequence.num_prompt:
            last = min(last, scores.next - 1)
        return min(last // self._pool.page_size, MOST_SHARED_PAGES)


def prompt_digests(request: Request, limits: Limits) -> list[bytes]:
    """Return the digests of the full pages of a request's prompt, under which the prefix cache has them."""
    digests: list[bytes] = []
    tokens = request.prompt_token_ids
    assert isinstance(tokens, array), "a request stores its prompt as an array"
    longrope_after = sys.maxsize if limits.longrope_after is None else limits.longrope_after
    extend_digests(digests, tokens, limits.page_size, _chain_start(request, len(tokens), longrope_after))
    return digests


def _chain_start(request: Request, num_tokens: int, longrope_after: int) -> bytes:
    """Return the salt with which the chain of digests begins, if a sequence of this request has `num_tokens` tokens."""
    factors = _LONG if num_tokens > longrope_after else _SHORT
    return factors + request.cache_salt.encode()
