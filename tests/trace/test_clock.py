from __future__ import annotations

import time

import pytest

from sarathi_pp.trace.clock import Clock, ManualClock, SystemClock


def test_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(now_s=5.0, wall_offset_s=100.0)
    clock.sleep(2.0)
    clock.work(0.5)
    assert (clock.now(), clock.wall(), clock.thread_cpu()) == (7.5, 107.5, 0.5)
    with pytest.raises(ValueError, match="-1"):
        clock.sleep(-1)


def test_system_clock_sleeps_without_using_the_cpu() -> None:
    clock: Clock = SystemClock()
    now, cpu = clock.now(), clock.thread_cpu()
    clock.sleep(0.02)
    assert clock.now() - now >= 0.02
    assert clock.thread_cpu() - cpu < 0.015
    assert clock.wall() == pytest.approx(time.time(), abs=5)
