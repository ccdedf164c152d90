"""The order of a batch in which prompts that begin with the same tokens follow each other.

A pool of KV pages that is too small for the whole batch keeps shared pages only for a while. In this order they are
found more often before they are taken:

    input    a1 b1 c1 a2 b2 c2        prefix    a1 a2 b1 b2 c1 c2

Pages and their digests make a tree: the parent of a page is the page before it in the prompt. A window of prompts is
yielded depth-first, and the children of a page in the order of their first appearance in the window.
BatchLLM (arXiv 2412.03594) orders the whole batch. A window has a largest size, so an input of any length takes
limited memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Protocol, TypeVar

from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.prefix_cache import prompt_digests
from sarathi_pp.core.request import Request

# Most rows of a window, if the user sets no other number.
ROWS_OF_WINDOW = 2048
# Most tokens that the rows of a window hold. They take 4 MiB.
TOKENS_OF_WINDOW = 1 << 20


class Row(Protocol):
    """The part of an input line that the order depends on."""

    @property
    def request(self) -> Request | None:
        """The request; None if the line cannot run."""

    @property
    def held_tokens(self) -> int:
        """Memory of the line, in tokens of 4 bytes."""


AnyRow = TypeVar("AnyRow", bound=Row)


class PrefixOrder:
    """The depth-first order of the prefix trees of one window of rows after the other.

    Args:
        limits: its page size and its rotary embeddings decide the digests of pages.
        most_rows: most rows of a window.
    """

    def __init__(self, limits: Limits, most_rows: int = ROWS_OF_WINDOW) -> None:
        assert most_rows > 0, most_rows
        self._limits = limits
        self.most_rows = most_rows

    def arranged(self, rows: Iterable[AnyRow | None]) -> Iterator[AnyRow]:
        """Yield the rows in this order. A row that cannot run is yielded at once.

        If `rows` raises an exception, the rows before it are yielded first. A row of more than TOKENS_OF_WINDOW tokens
        is alone in its window.

        Args:
            rows: the rows in the order of the input. None among them closes the window, because its rows are needed.
        """
        window: list[AnyRow] = []
        num_tokens = 0
        try:
            for row in rows:
                if row is not None and row.request is None:
                    yield row
                    continue
                held = row.held_tokens if row is not None else 0
                if row is None or len(window) == self.most_rows or num_tokens + held > TOKENS_OF_WINDOW:
                    yield from self._depth_first(window)
                    num_tokens = 0
                if row is not None:
                    window.append(row)
                    num_tokens += held
        except Exception:
            yield from self._depth_first(window)
            raise
        yield from self._depth_first(window)

    def _depth_first(self, window: list[AnyRow]) -> Iterator[AnyRow]:
        """Yield the rows of a window, which becomes empty. They are dropped as soon as they are yielded."""
        paths = self._paths(window)
        rows = [window[index] for index in sorted(range(len(window)), key=paths.__getitem__, reverse=True)]
        window.clear()
        del paths
        while rows:
            yield rows.pop()

    def _paths(self, window: list[AnyRow]) -> list[list[int]]:
        """Return the path of each row from the root of the tree, as numbers in the order of first appearance."""
        numbers: dict[bytes, int] = {}  # of pages
        numbering = count()
        paths: list[list[int]] = []
        for row in window:
            assert row.request is not None, "a row that cannot run is in no window"
            path = [numbers.setdefault(digest, next(numbering)) for digest in prompt_digests(row.request, self._limits)]
            # The end of a prompt counts as a child too. So all paths differ, and equal prompts keep their order.
            paths.append([*path, next(numbering)])
        return paths
