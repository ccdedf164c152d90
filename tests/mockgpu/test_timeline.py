"""Races on the simulated GPUs: an occasional error of a real device happens here every time."""

from __future__ import annotations

import pytest
import torch

from tests.mockgpu.timeline import MockGpuError, Timeline

COMPUTING, SIDE = 0, 1


def test_a_read_on_another_stream_waits_for_the_write():
    timeline, x = Timeline(), torch.zeros(4)
    timeline.launch(COMPUTING, "write", (), (x,))
    with pytest.raises(MockGpuError, match="read reads what is being written by write on stream 0"):
        timeline.launch(SIDE, "read", (x,), ())
    timeline.follow(SIDE, timeline.point(COMPUTING))
    timeline.launch(SIDE, "read", (x,), ())


def test_a_write_waits_for_reads_and_for_writes():
    timeline, x = Timeline(), torch.zeros(4)
    timeline.launch(COMPUTING, "write", (), (x,))
    timeline.launch(COMPUTING, "read", (x,), ())
    with pytest.raises(MockGpuError, match="writes what is being written"):
        timeline.launch(SIDE, "write", (), (x,))
    point = timeline.point(COMPUTING)
    timeline.launch(COMPUTING, "another read", (x,), ())
    timeline.follow(SIDE, point)
    with pytest.raises(MockGpuError, match="writes what is being read by another read"):
        timeline.launch(SIDE, "write", (), (x,))


def test_what_the_host_has_seen_is_over_for_all_streams():
    timeline, x = Timeline(), torch.zeros(4)
    timeline.launch(COMPUTING, "write", (), (x,))
    point = timeline.point(COMPUTING)
    assert not timeline.is_seen(point)
    timeline.wait(point, "an event")
    assert timeline.is_seen(point) and timeline.waits == {"an event": 1}
    timeline.launch(SIDE, "read", (x,), ())


def test_waiting_is_handed_on_from_stream_to_stream():
    timeline, x = Timeline(), torch.zeros(4)
    timeline.launch(COMPUTING, "write", (), (x,))
    timeline.follow(2, timeline.point(COMPUTING))
    timeline.follow(SIDE, timeline.point(2))
    timeline.launch(SIDE, "read", (x,), ())


def test_views_are_the_memory_that_they_are_of():
    timeline, x = Timeline(), torch.zeros(4)
    timeline.launch(COMPUTING, "write", (), (x[:2],))
    with pytest.raises(MockGpuError, match="being written"):
        timeline.launch(SIDE, "read", (x.view(2, 2),), ())


def test_memory_must_not_be_freed_while_another_stream_uses_it():
    timeline, x = Timeline(), torch.zeros(4)
    timeline.allocate(x, COMPUTING)
    timeline.follow(SIDE, timeline.point(COMPUTING))
    timeline.launch(SIDE, "a send", (x,), ())
    assert timeline.live_bytes() == 16
    del x
    with pytest.raises(MockGpuError, match="freed before a send on stream 1 was over"):
        timeline.live_bytes()


def test_memory_may_be_freed_when_its_own_stream_has_waited():
    timeline, x = Timeline(), torch.zeros(4)
    timeline.allocate(x, COMPUTING)
    timeline.follow(SIDE, timeline.point(COMPUTING))
    timeline.launch(SIDE, "a send", (x,), ())
    timeline.follow(COMPUTING, timeline.point(SIDE))
    del x
    assert timeline.live_bytes() == 0 and timeline.peak == 16


def test_new_memory_may_still_be_in_use_by_what_its_stream_did_before():
    timeline, x = Timeline(), torch.zeros(4)
    timeline.launch(COMPUTING, "write", (), (torch.zeros(8),))
    timeline.allocate(x, COMPUTING)
    with pytest.raises(MockGpuError, match="by whoever had the memory before"):
        timeline.launch(SIDE, "a receive", (), (x,))


def test_pinned_memory_has_other_bits_until_the_host_has_waited_for_a_copy_to_it():
    timeline, x = Timeline(), torch.tensor([3, 4])
    timeline.launch(COMPUTING, "copy", (), ())
    timeline.writes_later(COMPUTING, x)
    point = timeline.point(COMPUTING)
    timeline.launch(COMPUTING, "later work", (), ())
    assert x.tolist() != [3, 4]
    timeline.wait(point, "an event")
    assert x.tolist() == [3, 4]


def test_pinned_memory_stays_as_it_is_until_it_is_copied(tmp_path, monkeypatch):
    monkeypatch.setenv("MOCK_GPU_HAZARDS", str(tmp_path / "hazards"))
    timeline, x = Timeline(), torch.zeros(4)
    timeline.pin(x)
    assert timeline.is_pinned(x) and timeline.is_pinned(x[1:]) and not timeline.is_pinned(torch.zeros(4))
    timeline.launch(COMPUTING, "copy", (), ())
    timeline.reads_later(COMPUTING, x)
    timeline.wait(timeline.point(COMPUTING), "copy")
    x += 1  # it is over
    timeline.launch(COMPUTING, "copy", (), ())
    timeline.reads_later(COMPUTING, x)
    x += 1
    with pytest.raises(MockGpuError, match="pinned memory was changed"):
        timeline.wait(timeline.point(COMPUTING), "copy")
    assert "pinned memory" in (tmp_path / "hazards").read_text()
