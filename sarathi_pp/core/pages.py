"""The one owner of KV page ids. Every stage's shard has the same pages, and stages see only ids."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Page ids [0, num_pages), each either free or held by one sequence.

    Low ids are given out first, so that a shard's untouched tail costs no resident memory.
    An assertion fails if a page is given back that is not held, because that is a bug of ours.
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
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that num_tokens tokens of one sequence fill."""
        return -(-num_tokens // self.page_size)

    def take(self, count: int) -> tuple[int, ...]:
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
