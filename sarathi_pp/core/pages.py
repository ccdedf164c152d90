"""The pool of KV page ids. It alone decides which pages of the KV cache are free, and which ones sequences share.

A page holds the keys and values of `page_size` tokens. Every rank stores the pages of its own layers, under the same
ids. The coordinator sends these ids with each microbatch, so a rank decides nothing.

A full page may be entered in the index, under a digest of its tokens and of all tokens before them. Then other
sequences that begin with the same tokens may hold it too. Its content never changes while it is in the index. Each page
is in one of three states:

    free     no sequence holds it, and its content has no meaning
    held     by one sequence, or by several if it is in the index
    idle     no sequence holds it, but it is in the index, so that sequences can hold it again

Free pages are taken first, then the idle page that was given back longest ago, which leaves the index.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

_DIGEST_BYTES = 16
# Most pages that the sequences of one microbatch may start with, so that messages have a bound.
MOST_SHARED_PAGES = 1 << 14
# Most idle pages that a run on a CPU keeps, as a share of all.
_CPU_IDLE_SHARE = 0.25


def most_idle_pages(device: str, num_pages: int) -> int | None:
    """Return the most idle pages of a run; None for no limit.

    On a CPU, a page takes memory from its first use on. Free pages that were used before are taken first.
    """
    return int(_CPU_IDLE_SHARE * num_pages) if device == "cpu" else None


def extend_digests(digests: list[bytes], tokens: array[int], page_size: int, salt: bytes = b"") -> None:
    """Append the digests of the full pages of `tokens` that have none yet.

    Each digest covers the one before it, so it stands for all tokens up to the end of its page.

    Args:
        salt: begins the chain. Chains with different salts share no page.
    """
    before = digests[-1] if digests else blake2b(salt, digest_size=_DIGEST_BYTES).digest()
    for first in range(len(digests) * page_size, len(tokens) - page_size + 1, page_size):
        page = tokens[first : first + page_size].tobytes()
        before = blake2b(before + page, digest_size=_DIGEST_BYTES).digest()
        digests.append(before)


class KVUse(NamedTuple):
    """The use of the KV pages when a microbatch was issued, and what the prefix cache did for it.

    Attributes:
        pages_used: number of pages that sequences hold.
        tokens_held: number of tokens in these pages.
        idle_pages: number of pages that no sequence holds and that are kept for sharing.
        cached_tokens: tokens in pages that were found, of the requests that start in this microbatch.
        resumed_tokens: the same of the requests that start again in it, after they had lost their pages.
        evictions: number of pages that left the index since the microbatch before.
    """

    pages_used: int
    tokens_held: int
    idle_pages: int = 0
    cached_tokens: int = 0
    resumed_tokens: int = 0
    evictions: int = 0


class PagePool:
    """Page ids [0, num_pages), and the index of the pages that may be shared.

    The state has no object per page but its digest, so the garbage collector has little to walk. It takes 65 bytes per
    page, and up to 210 more for each page in the index (measured on CPython 3.11). Low ids are given out
    first. On a CPU, pages that were never written then take no physical memory. An assertion fails if a page is given
    back that no sequence holds, because that is a bug of sarathi-pp.

    Two rules hold at any time. If a digest is in the index, so are those before it in its chain. And of two idle pages
    of a chain, the earlier one was given back later. So the page that leaves the index first is the last of its chain.

    Args:
        page_size: tokens per page.
        most_idle: most idle pages; None for no limit. Beyond it, the oldest ones become free.

    Attributes:
        evictions: number of pages that left the index, because they were taken or too many were idle.
    """

    def __init__(self, num_pages: int, page_size: int, most_idle: int | None = None) -> None:
        assert num_pages > 0 and page_size > 0, (num_pages, page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self.evictions = 0
        self._most_idle = num_pages if most_idle is None else most_idle
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = array("l", bytes(array("l").itemsize * num_pages))
        self._digests: list[bytes | None] = [None] * num_pages
        # The number of the entry by which a page is in the index, which no other entry ever has; 0 for none.
        self._entries = array("q", bytes(array("q").itemsize * num_pages))
        self._num_entries = 0
        self._index: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # given back longest ago first

    @property
    def num_free(self) -> int:
        """Number of pages that can be taken: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_tokens(self) -> int:
        """Number of tokens for which the whole pool has room, free or not."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that a sequence of `num_tokens` tokens needs."""
        return -(-num_tokens // self.page_size)

    def take(self, count: int) -> tuple[int, ...]:
        """Take pages and return their ids. The caller has checked that `num_free` is at least `count`."""
        assert count <= self.num_free, f"took {count} of {self.num_free} free pages"
        while len(self._free) < count:
            self._evict()
        pages = tuple(self._free.pop() for _ in range(count))
        for page in pages:
            self._holders[page] = 1
        return pages

    def give_back(self, pages: Sequence[int]) -> int:
        """Give back a sequence's pages, which are in the order of its tokens.

        Returns:
            Number of these pages that no sequence holds now.
        """
        released = 0
        for page in reversed(pages):
            holders = self._holders[page] - 1
            assert holders >= 0, f"page {page} is free already"
            self._holders[page] = holders
            if holders == 0:
                released += 1
                if self._digests[page] is None:
                    self._free.append(page)
                else:
                    self._idle[page] = None
        while len(self._idle) > self._most_idle:
            self._evict()
        return released

    def match(self, digests: Sequence[bytes], most: int, found: list[int], entry: int) -> int:
        """Bring the shared pages with which a chain begins up to date. This is quick unless something has changed.

        Args:
            digests: the chain of a sequence's pages.
            most: most pages to find.
            found: the pages that were found before. It is changed in place.
            entry: what the last call returned for them.

        Returns:
            The entry of the last page; 0 if none is found.
        """
        if found and not self.has(found[-1], entry):
            found.clear()
        del found[most:]
        while len(found) < most and (page := self._index.get(digests[len(found)])) is not None:
            found.append(page)
        return self._entries[found[-1]] if found else 0

    def has(self, page: int, entry: int) -> bool:
        """Return whether a page has been in the index all the time since this entry.

        If it has, so have the pages before it in its chain.
        """
        return self._entries[page] == entry

    def num_held(self, found: Sequence[int]) -> int:
        """Return how many of the pages that `match` found are held by a sequence. They are the first of them."""
        return bisect_left(found, True, key=lambda page: self._holders[page] == 0)

    def share(self, found: Sequence[int]) -> int:
        """Hold pages that `match` found. Return how many of them were idle."""
        woken = 0
        for page in found:
            if self._holders[page] == 0:
                del self._idle[page]
                woken += 1
            self._holders[page] += 1
        return woken

    def enter(self, page: int, digest: bytes) -> bool:
        """Enter a held page in the index. Return False if another page is there under this digest.

        The caller has entered, or shares, all pages before it.
        """
        if digest in self._index:
            return False
        self._num_entries += 1
        self._entries[page] = self._num_entries
        self._index[digest] = page
        self._digests[page] = digest
        return True

    def forget(self) -> None:
        """Empty the index. Idle pages become free."""
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        for page in self._index.values():
            self._digests[page], self._entries[page] = None, 0
        self._index.clear()

    def _evict(self) -> None:
        page, _ = self._idle.popitem(last=False)
        digest = self._digests[page]
        assert digest is not None
        del self._index[digest]
        self._digests[page], self._entries[page] = None, 0
        self._free.append(page)
        self.evictions += 1
