"""Times of a GPU's work, told from its events: a made-up device that runs behind the program, on a clock of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.runtime.cuda_timer import CudaTimer
from sarathi_pp.trace.clock import ManualClock

RECORDING_S = 5e-6


@dataclass
class Device:
    """Takes work in order; its own clock runs `drift` faster than the host's."""

    clock: ManualClock
    drift: float = 0.0
    free_s: float = 0.0
    waited: int = 0
    events: list[FakeEvent] = field(default_factory=list)

    def launch(self, seconds: float) -> None:
        self.free_s = max(self.free_s, self.clock.now()) + seconds

    def new_event(self) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.passed_s = -1.0

    def record(self) -> None:
        self.device.clock.sleep(RECORDING_S)
        self.passed_s = self.device.free_s = max(self.device.free_s, self.device.clock.now())

    def query(self) -> bool:
        assert self.passed_s >= 0, "never recorded"
        return self.passed_s <= self.device.clock.now()

    def synchronize(self) -> None:
        self.device.waited += 1
        self.device.clock.sleep(max(0.0, self.passed_s - self.device.clock.now()))

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.query() and end_event.query(), "torch raises for events that are not done"
        return 1e3 * (end_event.passed_s - self.passed_s) * (1 + self.device.drift)


def test_a_span_is_told_when_the_device_has_ended_it_and_not_before() -> None:
    clock = ManualClock(100.0)
    device = Device(clock)
    timer = CudaTimer(clock, device.new_event)
    start = timer.mark()
    device.launch(0.5)
    end = timer.mark()
    assert start.at_s() == pytest.approx(100.0, abs=1e-4) and end.at_s() is None
    clock.sleep(0.4)
    assert end.at_s() is None
    clock.sleep(0.2)
    assert end.at_s() == pytest.approx(100.5, abs=1e-4)
    assert end.at_s() == end.at_s()
    assert device.waited == 1, "only while the timer was made"


work = st.lists(
    st.tuples(st.floats(0.0, 0.02), st.floats(0.0, 0.05), st.integers(0, 3)),  # pause, work, marks left unasked
    min_size=1,
    max_size=60,
)


@given(work=work, drift=st.sampled_from([0.0, 1e-5, -1e-5, 1e-3, -1e-3]))
def test_times_stay_true_however_far_the_device_runs_behind(work, drift) -> None:
    clock = ManualClock(5.0)
    device = Device(clock, drift)
    timer = CudaTimer(clock, device.new_event)
    unasked, told = [], []
    for pause_s, work_s, left in work:
        clock.sleep(pause_s)
        for launched_s in (0.0, work_s):
            device.launch(launched_s)
            mark = timer.mark()
            unasked.append((mark, device.free_s))
        while len(unasked) > left and unasked[0][0].at_s() is not None:
            mark, true_s = unasked.pop(0)
            told.append((mark.at_s(), true_s, clock.now()))
    clock.sleep(10.0)
    told += [(mark.at_s(), true_s, clock.now()) for mark, true_s in unasked]
    assert [at_s for at_s, _, _ in told] == sorted(at_s for at_s, _, _ in told)
    assert all(at_s <= seen_s for at_s, _, seen_s in told)
    most_off = 2 * RECORDING_S + abs(drift) * (sum(pause + busy for pause, busy, _ in work) + 1e-3 * len(work))
    assert all(abs(at_s - true_s) <= most_off for at_s, true_s, _ in told)


def test_a_drifting_clock_is_put_right_wherever_the_device_waits_for_work() -> None:
    """An hour of work with a device clock 20 ppm off would end 72 ms off."""
    clock = ManualClock()
    for drift in (2e-5, -2e-5):
        device = Device(clock, drift)
        timer = CudaTimer(clock, device.new_event)
        for _ in range(36_000):
            clock.sleep(0.01)
            start, began_s = timer.mark(), device.free_s
            device.launch(0.09)
            end, ended_s = timer.mark(), device.free_s
            clock.sleep(ended_s - clock.now())
            off_s = [abs((mark.at_s() or 0) - true_s) for mark, true_s in ((start, began_s), (end, ended_s))]
            assert max(off_s) < 2e-5, off_s
