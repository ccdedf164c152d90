"""Links: the two hosts of each edge, and the time to cross it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sarathi_pp.analysis.summary import Report, summarise
from sarathi_pp.trace.events import Head, Returned
from tests.analysis.schedules import Schedule, constant, on_hosts, start

NOTHING = {"mean": None, "p50": None, "p90": None, "p99": None}


def joined(report: Report) -> list[tuple[list[int], list[str], bool]]:
    return [(link["stages"], link["hosts"], link["between_hosts"]) for link in report["links"]]


def test_every_edge_names_its_hosts_the_way_back_last() -> None:
    traces = Schedule(8, 3, constant(1.0)).events()
    report = summarise(on_hosts(traces, "a", "a", "b"))
    assert [stage["host"] for stage in report["per_stage"]] == ["a", "a", "b"]
    assert joined(report) == [
        ([0, 1], ["a", "a"], False),
        ([1, 2], ["a", "b"], True),
        ([2, 0], ["b", "a"], True),
    ]


def test_a_transfer_is_from_the_end_of_one_stage_to_the_arrival_at_the_next() -> None:
    """Half a second into stage 1, a quarter into stage 2 on every second microbatch, an eighth back."""
    transfer = {1: lambda m: 0.5, 2: lambda m: 0.25 * (m % 2)}
    traces = Schedule(9, 3, constant(1.0), transfer=lambda m, s: transfer[s](m) if s else 0.0).events()
    traces[0] = [replace(one, at_s=one.at_s + 0.125) if isinstance(one, Returned) else one for one in traces[0]]
    first, second, back = (link["transfer_s"] for link in summarise(traces)["links"])
    assert first == pytest.approx({"mean": 0.5, "p50": 0.5, "p90": 0.5, "p99": 0.5})
    assert second == pytest.approx({"mean": 1 / 9, "p50": 0.0, "p90": 0.25, "p99": 0.25})
    assert back == pytest.approx({"mean": 0.125, "p50": 0.125, "p90": 0.125, "p99": 0.125})


def test_a_single_stage_has_no_edge_and_nothing_is_measured_before_a_result() -> None:
    assert summarise(Schedule(8, 1, constant(1.0)).events())["links"] == []
    assert [link["transfer_s"] for link in summarise([[start(0, 2)], [start(1, 2)]])["links"]] == [NOTHING] * 2


def test_the_way_back_ends_where_the_rows_of_a_head_are_here() -> None:
    """Waits and compute of the head do not count. A result that waits for the head counts as arrived at once."""
    traces = Schedule(4, 2, constant(1.0)).events()
    results = {event.microbatch: event.at_s for event in traces[0] if isinstance(event, Returned)}
    moved = {0: results[0] + 3.0, 1: results[0] + 3.0}
    traces[0] = [
        replace(event, at_s=moved.get(event.microbatch, event.at_s + 2.5)) if isinstance(event, Returned) else event
        for event in traces[0]
    ]
    traces[0].append(Head(0, results[0] + 0.25, results[0] + 2.0, results[0] + 3.0))
    back = summarise(traces)["links"][-1]["transfer_s"]
    assert back["mean"] == pytest.approx((0.25 + 0.0 + 2.5 + 2.5) / 4)
