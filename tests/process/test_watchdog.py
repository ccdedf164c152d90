"""The watchdog ends the process in time, even if its own output gets stuck."""

import os
import signal
import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_pp.process import watchdog as watchdogs
from sarathi_pp.process.signals import Signals
from sarathi_pp.process.watchdog import Watchdog
from tests import thinning
from tests.commands.processes import environment, full_pipe
from tests.machine import patient

PROGRAM = """
import sys, time
from sarathi_pp.errors import PeerLostError
from sarathi_pp.process.watchdog import Watchdog

class Leaver:
    def leave(self, error):
        open(sys.argv[1], "w").write(str(error.exit_code))
        if sys.argv[2] == "speaks":
            print(error, file=sys.stderr, flush=True)

Watchdog(Leaver()).end_within(0.1, PeerLostError("lost"))
time.sleep(100)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["speaks", "is silent"])
def test_a_standard_error_that_nobody_reads_does_not_keep_it_from_ending(how: str, tmp_path: Path) -> None:
    """Neither the message blocks, nor the stacks of a silent watchdog, which are written with the interpreter's lock
    held.
    """
    reader, writer = full_pipe()
    left = tmp_path / "left"
    process = subprocess.Popen((sys.executable, "-c", PROGRAM, str(left), how), env=environment(), stderr=writer)
    os.close(writer)
    try:
        began_s = time.monotonic()
        assert process.wait(patient(3 * 5.0)) == 75
        assert time.monotonic() - began_s > 2.0
        assert left.read_text() == "75"
    finally:
        process.kill()
        process.wait()
        os.close(reader)


def test_the_stacks_are_shown_behind_the_message(tmp_path: Path) -> None:
    command = (sys.executable, "-c", PROGRAM, str(tmp_path / "left"), "speaks")
    done = subprocess.run(command, env=environment(), stderr=subprocess.PIPE, text=True, timeout=patient(60))
    assert done.returncode == 75
    assert done.stderr.startswith("lost\n") and "most recent call first" in done.stderr and "line 13" in done.stderr


class Hours:
    """A clock that the test sets, and the timers of a watchdog that are started and not cancelled."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ends_s: list[float] = []

    def now(self) -> float:
        return self.now_s

    def timer(self, grace_s: float, *rest: object) -> Any:
        return Timer(self, self.now_s + grace_s)


class Timer:
    daemon = False

    def __init__(self, hours: Hours, end_s: float) -> None:
        self._hours, self._end_s = hours, end_s

    def start(self) -> None:
        self._hours.ends_s.append(self._end_s)

    def cancel(self) -> None:
        self._hours.ends_s.remove(self._end_s)


def end_of(storm: list[tuple[float, int, str]]) -> float:
    """Return when the process ends if its main thread only receives signals at these times."""
    hours = Hours()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdogs.threading, "Timer", hours.timer)
        watchdog = Watchdog(Mock())
        signals = Signals("the rank", watchdog)
        patch.setattr(watchdog, "_clock", hours)
        patch.setattr(signals, "_clock", hours)
        for at_s, number, phase in storm:
            if min(hours.ends_s, default=at_s) < at_s:
                break
            hours.now_s = at_s
            patch.setattr(signals, "_phase", phase)
            signals._heed(number)
    return min(hours.ends_s, default=float("inf"))


NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT]
PHASES = ["starting", "running", "ending"]


@settings(max_examples=thinning.examples(300))
@given(st.data())
def test_more_signals_end_it_no_later_than_the_first_two(data: st.DataObject) -> None:
    times = [*accumulate(data.draw(st.lists(st.floats(0, 1.5), min_size=2, max_size=12)))]
    phases = sorted(data.draw(st.lists(st.sampled_from(range(3)), min_size=len(times), max_size=len(times))))
    storm = [
        (at_s, data.draw(st.sampled_from(NUMBERS)), PHASES[phase]) for at_s, phase in zip(times, phases, strict=True)
    ]
    assert end_of(storm) <= end_of(storm[:2])


def test_a_storm_is_over_two_seconds_after_the_second_signal() -> None:
    assert end_of([(float(second), signal.SIGTERM, "running") for second in range(30)]) == 3.0
