"""A stand-in for the prefix cache in a rerun: each request finds as many tokens as it found in the recorded run.

A trace holds no token ids, so it is unknown which requests shared pages. Here each request has pages of its own for all
its tokens, and waits for no other request that is about to compute the same page. So the simulated run needs more pages
than the recorded one. It is shorter if many requests had to wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf

from sarathi_pp.core.pages import PagePool
from sarathi_pp.core.prefix_cache import PrefixCache
from sarathi_pp.core.sequence import Sequence


class FixedHits(PrefixCache):
    """The numbers of tokens that requests find.

    Args:
        hits: number of tokens for each request. The index of a request, modulo the length, is its place in this list.
    """

    def __init__(self, pool: PagePool, hits: ListOf[int]) -> None:
        super().__init__(pool, "prompts")
        self._hits = hits

    def digest(self, sequence: Sequence) -> None:
        """Do nothing, because no page is looked up."""

    def find(self, sequence: Sequence, next_pages: set[bytes]) -> bool:
        """Set the cursors of a waiting sequence to the end of the tokens that it finds. It need not wait."""
        sequence.num_found = sequence.done = sequence.issued = self._hits[sequence.index % len(self._hits)]
        return False

    def begin(self, sequence: Sequence) -> int:
        """Return the number of tokens that the sequence's own pages hold from the start."""
        sequence.num_entered = sequence.num_found // self._pool.page_size
        self._count(sequence)
        return sequence.num_found
