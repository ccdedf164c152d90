"""The pool of KV page ids. It alone decides which pages of the KV cache are free.

A page holds the keys and values of `page_size` tokens of one sequence. Every rank stores the pages of its own layers,
under the same ids. The coordinator sends these ids with each microbatch, so a rank decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Page ids [0, num_pages), each either free or held by one sequence.

    Low ids are given out first. On a CPU, pages that were never written then take no physical memory.
    An assertion fails if a page is given back that no sequence holds, because that is a bug of sarathi-pp.

    Args:
        page_size: tokens per page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages > 0 and page_size > 0, (num_pages, page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._held = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_tokens(self) -> int:
        """Number of tokens for which the whole pool has room, free or not."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that a sequence of `num_tokens` tokens needs."""
        return -(-num_tokens // self.page_size)

    def take(self, count: int) -> tuple[int, ...]:
        """Take free pages and return their ids. The caller has checked that at least `count` pages are free."""
        assert count <= len(self._free), f"took {count} of {len(self._free)} free pages"
        pages = tuple(self._free.pop() for _ in range(count))
        for page in pages:
            self._held[page] = 1
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        for page in reversed(tuple(pages)):
            assert self._held[page], f"page {page} is free already"
            self._held[page] = 0
            self._free.append(page)
