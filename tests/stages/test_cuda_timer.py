"""Times of GPU work from its events: a simulated device that runs after the program, on a clock of its own."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.stages.cuda_timer import CudaTimer
from sarathi_pp.trace.clock import ManualClock

RECORDING_S = 5e-4


@dataclass
class Device:
    """A device that works in order; its own clock runs `drift` faster than the host's."""

    clock: ManualClock
    drift: float = 0.0
    free_s: float = 0.0
    waited: int = 0

    def launch(self, seconds: float) -> None:
        self.free_s = max(self.free_s, self.clock.now()) + seconds

    def new_event(self) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.passed_s = -1.0

    def record(self) -> None:
        self.passed_s = self.device.free_s = max(self.device.free_s, self.device.clock.now())
        self.device.clock.sleep(RECORDING_S)

    def query(self) -> bool:
        assert self.passed_s >= 0, "never recorded"
        return self.passed_s <= self.device.clock.now()

    def synchronize(self) -> None:
        self.device.waited += 1
        self.device.clock.sleep(max(0.0, self.passed_s - self.device.clock.now()))

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.query() and end_event.query(), "torch raises for events that are not done"
        exact_ms = 1e3 * (end_event.passed_s - self.passed_s) * (1 + self.device.drift)
        (ms,) = struct.unpack("f", struct.pack("f", exact_ms))
        return float(ms)


def test_a_span_is_told_when_the_device_has_ended_it_and_not_before() -> None:
    clock = ManualClock(99.0)
    device = Device(clock)
    device.launch(1.0)  # its earlier work
    timer = CudaTimer(clock, device.new_event)
    began_s = clock.now()
    start = timer.mark()
    device.launch(0.5)
    end = timer.mark()
    assert start.at_s() == pytest.approx(began_s, abs=1e-6) and end.at_s() is None
    clock.sleep(0.4)
    assert end.at_s() is None
    clock.sleep(0.2)
    assert end.at_s() == pytest.approx(began_s + RECORDING_S + 0.5, abs=1e-6)
    assert end.at_s() == end.at_s()
    assert device.waited == 2, "only while the timer was made"


work = st.lists(
    st.tuples(st.floats(0.0, 0.02), st.floats(0.0, 0.05), st.integers(0, 3)),  # pause, work, marks without a query
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
    most_off = 1e-6 * len(work) + abs(drift) * (
        sum(pause + busy for pause, busy, _ in work) + 3 * RECORDING_S * len(work)
    )
    assert all(abs(at_s - true_s) <= most_off for at_s, true_s, _ in told)


@pytest.mark.parametrize("drift", [2e-5, -2e-5])
def test_a_drifting_clock_is_put_right_by_when_it_was_asked(drift: float) -> None:
    """Without queries, an hour of work with a device clock 20 ppm off would end 72 ms off.

    StageRunner queries it after the launch of the next microbatch, and after waiting for the device to send the output.
    """
    clock = ManualClock()
    device = Device(clock, drift)
    timer = CudaTimer(clock, device.new_event)
    off_s: list[float] = []
    for _ in range(36_000):
        clock.sleep(0.01)
        start, began_s = timer.mark(), device.free_s
        device.launch(0.08)
        clock.sleep(0.01)  # Python launches while the device computes
        end, ended_s = timer.mark(), device.free_s
        start.at_s()
        end.at_s()
        end.wait()
        told_s = [start.at_s(), end.at_s()]
        off_s += [abs(at_s - true_s) for at_s, true_s in zip(told_s, (began_s, ended_s), strict=True) if at_s]
    assert len(off_s) == 72_000 and max(off_s) < 5e-5, max(off_s)
