"""The number of threads for a stage's layers, by measured times."""

from __future__ import annotations

import pytest

from sarathi_pp.model.fuse.team_size import TeamSize, measured_team


def times(few: dict[int, float], many: dict[int, float], *, slow_at_first: bool = False) -> tuple[list[int], TeamSize]:
    """Return the numbers of threads that were timed with few rows, and the team that was found.

    Args:
        few: the time for each number of threads, with few rows; `many` likewise.
        slow_at_first: the first two calls take ten times as long.
    """
    asked: list[tuple[int, int]] = []

    def seconds(rows: int, count: int) -> float:
        asked.append((rows, count))
        slow = slow_at_first and len(asked) <= 2
        return (few if rows <= 16 else many)[count] * (10 if slow else 1)

    team = measured_team(seconds, max(few))
    return sorted({count for rows, count in asked if rows <= 16}, reverse=True), team


def test_more_threads_are_taken_if_they_are_faster_and_no_others_are_timed_then() -> None:
    asked, team = times({8: 1.0, 4: 1.5}, {8: 1.0, 4: 1.04})
    assert asked == [8, 4] and team == TeamSize(8, 8)


def test_fewer_threads_are_taken_if_they_are_about_as_fast() -> None:
    """Few rows may wait for memory that two threads keep busy, while more rows need all threads to compute."""
    asked, team = times({8: 1.0, 4: 1.02, 2: 1.01, 1: 1.9}, {8: 1.0, 4: 1.9})
    assert asked == [8, 4, 2, 1] and team == TeamSize(2, 8)
    assert team.threads(1) == team.threads(16) == 2 and team.threads(17) == team.threads(2048) == 8


def test_more_threads_than_cores_are_not_taken() -> None:
    assert times({6: 9.0, 3: 4.0, 1: 1.0}, {6: 9.0, 3: 4.0, 1: 3.9})[1] == TeamSize(1, 1)


def test_small_losses_do_not_add_up() -> None:
    """Each half is compared with the shortest time so far, not only with the time before it."""
    assert times({8: 1.0, 4: 1.02, 2: 1.04, 1: 1.06}, {8: 1.0, 4: 1.02, 2: 1.04, 1: 1.06})[1] == TeamSize(4, 4)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_slow_begin_decides_nothing(most: int) -> None:
    found = {count: 1.0 / count for count in range(1, most + 1)}
    assert times(found, found, slow_at_first=True)[1] == TeamSize(most, most)
