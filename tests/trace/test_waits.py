"""What the coordinator waited for, in small runs whose every event is written out."""

from __future__ import annotations

import pytest

from sarathi_pp.trace.events import (
    Compute,
    Event,
    Issued,
    RequestArrived,
    RequestFinished,
    Returned,
    Starved,
)
from sarathi_pp.trace.timeline import Timeline
from sarathi_pp.trace.waits import Waits, measure_waits
from tests.trace.schedules import start


def test_what_the_coordinator_waited_for_is_summed_by_reason() -> None:
    events: list[Event] = [
        start(0, 1),
        Starved(-5.0, "no_arrivals"),  # before the window
        Issued(0, 0.0, "m0[s0:0+8]", 8, 0, 0, 0.0, 1, 8),
        Starved(0.5, "tokens_in_flight"),
        Starved(0.75, "full"),
        Compute(0, 0.0, 0.0, 0.0, 2.0),
        Returned(0, 2.0),
        Issued(1, 2.25, "m1[d s0:8]", 0, 1, 9, 0.0, 1, 9),
        Starved(3.0, "held"),
        Compute(1, 2.25, 2.25, 2.25, 4.0),
        Returned(1, 4.0),
        Starved(4.5, "no_arrivals"),  # and after it
    ]
    waits = {"full": 1.5, "held": 1.0, "no_arrivals": 0.0, "no_kv": 0.0, "tokens_in_flight": 0.25}
    found = measure_waits(Timeline.read([events]))
    assert found.issue_s == waits
    assert found.limited_s == 1.0, "s0 was in flight; what is held could have been computed"


def waits_of(*events: Event) -> Waits:
    return measure_waits(Timeline.read([[start(0, 1), *events]]))


def issued(microbatch: int, at_s: float, text: str) -> list[Event]:
    """A microbatch of one second, and its result."""
    return [
        Issued(microbatch, at_s, f"m{microbatch}[{text}]", 8, 0, 0, 0.0, 1, 8),
        Compute(microbatch, at_s, at_s, at_s, at_s + 1),
        Returned(microbatch, at_s + 1),
    ]


def finished(index: int, at_s: float) -> RequestFinished:
    return RequestFinished(index, 0.0, 0.0, at_s, at_s, 8, 1, "length")


@pytest.mark.parametrize(
    ("second", "limited_s"),
    [
        ("s0:8+8", 0.0),  # both that run are in flight: one more microbatch would be empty
        ("s1:0+8", 0.0),
        ("s2:0+8", 0.5),  # s1 runs and is in none, once its first microbatch is back
    ],
)
def test_a_full_pipeline_is_a_limit_where_a_sequence_was_ready(second: str, limited_s: float) -> None:
    arrived = [RequestArrived(index, 0.0, 16) for index in range(3)]
    first = issued(0, 0.0, "s0:0+8 s1:0+8") if second != "s1:0+8" else issued(0, 0.0, "s0:0+8")
    events = [*arrived, *first, *issued(1, 1.0, second), Starved(1.25, "full"), *issued(2, 1.75, "s0:16+1")]
    if second == "s0:8+8":
        events.insert(0, finished(1, 1.0))
    if second == "s1:0+8":
        events.insert(0, finished(0, 1.0))
    if second != "s2:0+8":
        events.insert(0, finished(2, 0.5))
    assert waits_of(*events).limited_s == limited_s


def test_one_that_waits_for_a_seat_is_not_ready_and_one_beside_a_free_seat_is() -> None:
    arrived = [RequestArrived(index, 0.0, 16) for index in range(3)]
    seats_taken = [*arrived, *issued(0, 0.0, "s0:0+8 s1:0+8"), Starved(0.5, "full"), *issued(1, 1.0, "s0:8+1 s1:8+1")]
    assert waits_of(*seats_taken).limited_s == 0.0
    one_left = [*seats_taken, finished(1, 2.0), *issued(2, 2.0, "s0:9+1"), Starved(2.5, "full")]
    assert waits_of(*one_left).limited_s == 0.5
    assert waits_of(*one_left).peak_running == 2


def test_a_run_is_paced_by_the_last_arrival_that_found_nobody_waiting() -> None:
    def run(*arrivals_s: float) -> float:
        arrived = [RequestArrived(index, at_s, 8) for index, at_s in enumerate(arrivals_s)]
        one_by_one = [event for index in range(3) for event in issued(index, 10.0 + index, f"s{index}:0+8")]
        return waits_of(*arrived, *one_by_one).paced_until_s

    assert run(10.0, 10.0, 10.0) == 0.0
    assert run(10.0, 10.5, 10.75) == 0.5  # the third found the second waiting
    assert run(10.0, 10.5, 11.5) == 1.5
    assert run(9.0, 9.5, 9.75) == 0.0
