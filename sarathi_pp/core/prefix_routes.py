"""The replica to which prompts with the same beginning went last. Its prefix cache may still have their KV pages.

The record has the digests of a prompt's pages at depths 1, 2, 4, 8, ... So it finds at least half of the pages that a
prompt shares with an earlier one. It is a guess, because rank 0 does not know which pages a replica has evicted. A lost
replica stays in it until its digests are the oldest ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Self

from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.prefix_cache import prompt_digests
from sarathi_pp.core.request import Request

# Most digests in the record. They take about 9 MB.
MOST_DIGESTS = 1 << 16


class PrefixRoutes:
    """A record of the replica to which each beginning of a prompt went last.

    Args:
        limits: its page size and its rotary embeddings decide the digests of pages.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._replicas: OrderedDict[bytes, int] = OrderedDict()  # by digest, the one that was used last at the end

    @classmethod
    def of(cls, limits: Limits) -> Self | None:
        """Return an empty record; None if the prefix cache is off, so that replicas share no pages."""
        return None if limits.prefix_cache == "off" else cls(limits)

    @property
    def slack(self) -> int:
        """Most tokens of work that a replica may have more than another one because it knows a prompt: one chunk."""
        return self._limits.chunk_size

    def marks(self, request: Request) -> list[bytes]:
        """Return the digests by which a prompt is known, the deepest first."""
        digests = prompt_digests(request, self._limits)
        return [digests[(1 << power) - 1] for power in reversed(range(len(digests).bit_length()))]

    def known(self, marks: Sequence[bytes]) -> Iterator[int]:
        """Yield the replicas to which prompts with these digests went last, that of the deepest one first.

        Some of them may be lost.
        """
        for mark in marks:
            if (replica := self._replicas.get(mark)) is not None:
                yield replica

    def add(self, marks: Sequence[bytes], replica: int) -> None:
        """Record that a prompt with these digests goes to a replica."""
        for mark in marks:
            self._replicas[mark] = replica
            self._replicas.move_to_end(mark)
        while len(self._replicas) > MOST_DIGESTS:
            self._replicas.popitem(last=False)

    def clear(self) -> None:
        """Forget everything, because the replicas have emptied their caches."""
        self._replicas.clear()
