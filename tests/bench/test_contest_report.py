"""The report over the runs of a contest."""

from __future__ import annotations

from typing import Any

import pytest

from sarathi_pp.bench.contest_report import contest_document


def run(entrant: str, number: int, wall_s: float, **more: Any) -> dict[str, Any]:
    tokens = {"prompt_tokens": 900, "output_tokens": 100, "total_tokens_per_s": 1000 / wall_s}
    facts = {"stolen": 0.0, "command_s": wall_s + 1, "peak_memory_bytes": 10, "same_tokens": 1.0}
    return {"entrant": entrant, "round": number, "wall_s": wall_s, **tokens, **facts, **more}


def test_each_is_held_against_the_first_of_its_own_round() -> None:
    # The machine is twice as slow in the second round, and the ratio must not show it.
    runs = [run("a", 0, 10.0), run("b", 0, 5.0), run("a", 1, 20.0), run("b", 1, 10.0)]
    document = contest_document(runs, floor_s=4.0, model="m")
    summary = document["summary"]
    assert list(summary) == ["a", "b"]
    assert summary["a"]["tokens_per_s_against_first"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert summary["b"]["tokens_per_s_against_first"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert summary["b"]["of_floor"] == {"median": pytest.approx(0.6), "min": 0.4, "max": 0.8}
    assert summary["b"]["wall_s"] == {"median": 7.5, "min": 5.0, "max": 10.0}
    assert (document["floor_tokens_per_s"], document["model"], document["runs"]) == (250.0, "m", runs)


def test_a_round_that_is_not_over_counts_as_far_as_it_went() -> None:
    summary = contest_document([run("a", 0, 10.0), run("b", 0, 5.0), run("a", 1, 20.0)], floor_s=4.0)["summary"]
    assert summary["a"]["wall_s"]["median"] == 15.0 and summary["b"]["wall_s"]["median"] == 5.0
    assert summary["b"]["tokens_per_s_against_first"]["median"] == 2.0


def test_what_an_entrant_does_not_tell_is_none() -> None:
    runs = [
        run("ours", 0, 10.0, bubble_ratio_steady=0.05, ttft_s={"p50": 1.0, "p99": 2.0}),
        run("theirs", 0, 10.0, ttft_s={"p50": None, "p99": None}),
    ]
    ours, theirs = contest_document(runs, floor_s=4.0)["summary"].values()
    assert ours["bubble_ratio_steady"]["median"] == 0.05 and ours["ttft_p99_s"]["median"] == 2.0
    assert theirs["bubble_ratio_steady"] is None and theirs["ttft_p50_s"] is None


def test_tokens_are_the_same_where_they_are_in_every_round() -> None:
    runs = [run("a", 0, 1.0), run("b", 0, 1.0, same_tokens=1.0), run("a", 1, 1.0), run("b", 1, 1.0, same_tokens=0.9)]
    assert contest_document(runs, floor_s=1.0)["summary"]["b"]["same_tokens"] == 0.9
