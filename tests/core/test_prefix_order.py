"""The order of prefixes: a permutation of each window, in which every group of equal beginnings stays together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.core import prefix_order
from sarathi_pp.core.coordinator import Coordinator
from sarathi_pp.core.policy import make_policy
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.prefix_cache import prompt_digests
from sarathi_pp.core.prefix_order import PrefixOrder
from sarathi_pp.core.request import Request
from sarathi_pp.sampling_params import SamplingParams

PAGE = 2
LIMITS = Limits(1, 8, 4, 4096, PAGE, 4096, 1, prefix_cache="all")


@dataclass(frozen=True)
class Line:
    """A row as the order sees it. A line without tokens cannot run."""

    number: int
    tokens: tuple[int, ...]
    salt: str = ""
    extra: int = 0

    @property
    def request(self) -> Request | None:
        if not self.tokens:
            return None
        return Request(self.number, self.tokens, SamplingParams(seed=0), cache_salt=self.salt)

    @property
    def held_tokens(self) -> int:
        return len(self.tokens) + self.extra


def lines(*prompts: str) -> list[Line]:
    return [Line(number, tuple(map(ord, prompt))) for number, prompt in enumerate(prompts)]


def arranged(rows: Iterable[Line], window: int = 100, limits: Limits = LIMITS) -> list[int]:
    return [row.number for row in PrefixOrder(limits, window).arranged(rows)]


def common_pages(one: Line, other: Line) -> int:
    """Return the number of full pages with which both prompts begin."""
    if one.salt != other.salt:
        return 0
    equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.tokens, other.tokens, strict=False)))
    return equal // PAGE


PROMPTS = st.lists(st.integers(1, 2), max_size=9).map(tuple)
ROWS = st.lists(st.tuples(PROMPTS, st.sampled_from(["", "", "other"])), max_size=40).map(
    lambda drawn: [Line(number, *each) for number, each in enumerate(drawn)]
)


@given(ROWS)
def test_groups_stay_together_and_begin_in_the_order_of_the_input(rows: list[Line]) -> None:
    found = arranged(rows)
    assert sorted(found) == [row.number for row in rows]
    runnable = [rows[number] for number in found if rows[number].tokens]
    if runnable:
        assert runnable[0] == next(row for row in rows if row.tokens)
    for depth in range(5):
        for row in runnable:
            group = [at for at, each in enumerate(runnable) if common_pages(row, each) >= depth]
            if len(row.tokens) // PAGE >= depth and group:
                assert group == [*range(group[0], group[-1] + 1)], "another row is inside the group"
                # The group begins with its first row of the input.
                assert runnable[group[0]].number == min(runnable[at].number for at in group)
    places = {row.number: at for at, row in enumerate(runnable)}
    for row in runnable:  # equal prompts keep their order, and so do groups
        for other in runnable:
            if row.number < other.number and (row.tokens, row.salt) == (other.tokens, other.salt):
                assert places[row.number] < places[other.number]


@given(ROWS, st.integers(1, 10))
def test_each_window_is_ordered_alone(rows: list[Line], size: int) -> None:
    rows = [row for row in rows if row.tokens]
    windows = [rows[first : first + size] for first in range(0, len(rows), size)]
    assert arranged(rows, size) == [number for window in windows for number in arranged(window)]


@given(ROWS, st.integers(1, 10), st.integers(1, 30))
def test_a_window_holds_few_rows_and_few_tokens(rows: list[Line], size: int, most: int) -> None:
    held: list[Line] = []

    def read() -> Iterator[Line]:
        for row in rows:
            if row.tokens:
                held.append(row)
            yield row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_order, "TOKENS_OF_WINDOW", most)
        seen = []
        for row in PrefixOrder(LIMITS, size).arranged(read()):
            # The row that was read last may be in hand, because it found no place in the window.
            *window, _ = held or [row]
            assert len(window) <= size and (sum(each.held_tokens for each in window) <= most or len(window) == 1)
            if row.tokens:
                held.remove(row)
            seen.append(row.number)
        assert sorted(seen) == [row.number for row in rows] and not held


def test_a_row_that_is_longer_than_a_window_passes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_order, "TOKENS_OF_WINDOW", 10)
    assert arranged(lines("aabb", "c" * 25, "aacc", "dd", "aadd")) == [0, 1, 2, 4, 3]


def test_the_memory_of_other_keys_counts() -> None:
    rows = [Line(number, (number % 2 + 1,) * 4, extra=300_000) for number in range(6)]
    assert arranged(rows) == [0, 2, 1, 3, 5, 4]


def test_a_small_tree() -> None:
    """The children of a page come in the order of the input, and the end of a prompt is a child too."""
    rows = lines("aabbcc", "x", "aadd", "zz", "aabb", "aabbcc", "aa", "x", "zzaa", "aaddee")
    assert arranged(rows) == [0, 5, 4, 2, 9, 6, 1, 3, 8, 7]


def test_none_closes_the_window() -> None:
    first, second = lines("aa", "bb", "aa"), lines("bb", "aa", "bb")
    order = PrefixOrder(LIMITS).arranged([None, *first, None, None, *second])
    assert [row.number for row in order] == [0, 2, 1, 0, 2, 1]


def test_a_row_that_cannot_run_waits_for_no_other() -> None:
    rows = lines("aa", "bb", "", "aa")
    order = PrefixOrder(LIMITS).arranged(rows)
    assert [row.number for row in order] == [2, 0, 3, 1]


def test_rows_before_an_error_are_yielded_before_it_is_raised() -> None:
    def read() -> Iterator[Line]:
        yield from lines("aa", "bb", "aa")
        raise OSError("the disk is gone")

    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        for row in PrefixOrder(LIMITS).arranged(read()):
            seen.append(row.number)
    assert seen == [0, 2, 1]


@pytest.mark.parametrize("longrope_after", [None, 5])
def test_prompts_group_as_their_pages_are_shared(longrope_after: int | None) -> None:
    """With the long factors, a prompt shares no page with a short one. The digests are those of the prefix cache."""
    limits = Limits(1, 8, 4, 64, PAGE, 64, 1, longrope_after, prefix_cache="all")
    rows = [Line(0, (1,) * 4), Line(1, (2,) * 4), Line(2, (1,) * 9), Line(3, (1,) * 4, salt="b"), Line(4, (1,) * 5)]
    assert arranged(rows, limits=limits) == ([0, 2, 4, 1, 3] if longrope_after is None else [0, 4, 1, 2, 3])
    coordinator = Coordinator(limits, make_policy("sarathi"))
    for row in rows:
        assert row.request is not None
        coordinator.submit(row.request)
    for sequence in coordinator._waiting:
        assert sequence.digests == prompt_digests(sequence.request, limits)
