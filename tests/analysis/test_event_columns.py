"""Events kept as columns: the same sequence as a list of events, in less memory."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.analysis import event_columns as log_module
from sarathi_pp.analysis.event_columns import Log
from sarathi_pp.errors import InputError
from sarathi_pp.trace.events import Issued, Returned


def issued(index: int, text: str = "") -> Issued:
    return Issued(index, 0.5 * index, text or f"m{index}[d s1:{index}]", 3, 1, index, 4.5, 7, 8)


ANY = st.text(st.characters(exclude_categories=()).filter(lambda c: c < "\udc00" or c > "\udfff"), max_size=3)


@given(st.lists(ANY, max_size=20), st.slices(20), st.lists(st.integers(-20, 19), max_size=9))
def test_it_is_the_sequence_of_what_was_appended(texts: list[str], part: slice, places: list[int]) -> None:
    """Texts include half a surrogate pair, and the first text of a block that is compressed together."""
    with mock.patch.object(log_module, "_TEXTS", 3):
        check_log([issued(index, text) for index, text in enumerate(texts)], part, places)


def check_log(events: list[Issued], part: slice, places: list[int]) -> None:
    log = Log(Issued, events)
    assert len(log) == len(events) and list(log) == events and log == events
    assert [log[index] for index in range(-len(events), len(events))] == events * 2
    assert list(log[part]) == events[part] and list(log[part][1:]) == events[part][1:]
    within = [place for place in places if -len(events) <= place < len(events)]
    assert [log[place] for place in within] == [events[place] for place in within]
    texts = log.column("text")
    assert [texts[place] for place in within] == [events[place].text for place in within]
    assert list(texts) == list(texts[:]) == [event.text for event in events]
    assert list(log.column("at_s")) == [event.at_s for event in events]
    for beyond in (len(events), -len(events) - 1):
        with pytest.raises(IndexError):
            log[beyond]


def test_what_no_run_counts_is_damage() -> None:
    log = Log(Returned)
    with pytest.raises(InputError, match="damaged: microbatch of an event Returned does not fit into 64 bits"):
        log.append(Returned(2**70, 1.0))


def test_it_takes_a_fraction_of_the_memory_of_its_events() -> None:
    def event(index: int) -> Issued:
        rows = " ".join(f"s{sequence}:{sequence % 50 + index}" for sequence in range(64))
        return replace(issued(index), text=f"m{index}[d {rows}]")

    def bytes_of(make: type[list[Issued]] | type[Log[Issued]], *arguments: object) -> int:
        tracemalloc.start()
        kept = make(*arguments)
        for index in range(1024):
            kept.append(event(index))
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(kept) == 1024
        return held

    assert bytes_of(Log, Issued) < bytes_of(list) / 5
