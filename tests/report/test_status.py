"""The status line: the times at which it shows, and its silence while something else is shown."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO

from rich.console import Console

from sarathi_pp.process.activity import Activity
from sarathi_pp.report.status import StatusLine
from sarathi_pp.trace.clock import ManualClock


@contextmanager
def shown(file: StringIO, activity: Activity, *, terminal: bool = False) -> Iterator[tuple[StatusLine, ManualClock]]:
    """Yield a status line whose thread looks at each step of a clock, since the test calls its look itself."""
    clock = ManualClock()
    console = Console(file=file, width=60, force_terminal=terminal)
    line = StatusLine(console, activity, shown=False, clock=clock)
    yield line, clock
    line.close()


def looks(line: StatusLine, clock: ManualClock, seconds: float) -> None:
    """Look eight times per second: fractions that floating point holds exactly."""
    for _ in range(round(8 * seconds)):
        line.look()
        clock.sleep(0.125)


def test_a_phase_has_a_line_at_once_and_every_four_seconds() -> None:
    file, activity = StringIO(), Activity()
    with shown(file, activity) as (line, clock), activity.phase("loading its layers", "1 of 2 GiB"):
        looks(line, clock, 10)
    assert file.getvalue().splitlines() == [
        "loading its layers: 1 of 2 GiB",
        "loading its layers: 1 of 2 GiB (4 s)",
        "loading its layers: 1 of 2 GiB (8 s)",
    ]


def test_phases_that_are_short_are_left_out() -> None:
    file, activity = StringIO(), Activity()
    with shown(file, activity) as (line, clock):
        for number in range(24):
            with activity.phase(f"phase {number}"):
                looks(line, clock, 0.125)
    assert file.getvalue().splitlines() == ["phase 0", "phase 8", "phase 16"]


def test_a_phase_that_comes_back_has_no_second_line_for_four_seconds() -> None:
    file, activity = StringIO(), Activity()
    with shown(file, activity) as (line, clock):
        looks(line, clock, 1.5)
        for name in ("loading libraries", "compiling kernels"):
            with activity.phase(name):
                looks(line, clock, 1.5)
            looks(line, clock, 1.5)
        looks(line, clock, 3)
    lines = ["setting up", "loading libraries", "compiling kernels", "setting up"]
    assert file.getvalue().splitlines() == lines


def test_a_phase_without_text_does_not_delay_its_first_line() -> None:
    file, activity, texts = StringIO(), Activity(), [""]
    with shown(file, activity) as (line, clock), activity.phase("", LastOf(texts)):
        looks(line, clock, 5)
        texts.append("3 of 8")
        line.look()
    assert file.getvalue().splitlines() == ["3 of 8"]


class LastOf:
    """A detail that shows the last of some texts."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def __str__(self) -> str:
        return self._texts[-1]


def test_a_wait_names_who_is_awaited_and_gives_the_phase_back() -> None:
    file, activity = StringIO(), Activity()
    with shown(file, activity) as (line, clock), activity.phase("loading its layers"):
        activity.awaited = "waiting for rank 1 of 2"
        looks(line, clock, 1.5)
        activity.awaited = ""
        looks(line, clock, 1)
    assert file.getvalue().splitlines() == ["waiting for rank 1 of 2", "loading its layers"]
    assert activity.own == "setting up"


def test_a_detail_is_read_when_it_is_shown() -> None:
    class Counter:
        number = 0

        def __str__(self) -> str:
            self.number += 1
            return f"{self.number} of 9"

    activity = Activity()
    with activity.phase("", Counter()):
        assert [activity.own, activity.text] == ["1 of 9", "2 of 9"]


def test_on_a_terminal_the_line_is_rewritten_and_removed() -> None:
    file, activity = StringIO(), Activity()
    with shown(file, activity, terminal=True) as (line, clock):
        with activity.phase("x" * 100):
            looks(line, clock, 1)
        assert file.getvalue() == "\r" + "x" * 59 + "\x1b[K"
        with line.hidden():
            file.write("warning\n")
            looks(line, clock, 1)
        looks(line, clock, 0.125)
    assert file.getvalue().endswith("\r\x1b[Kwarning\n\rsetting up\x1b[K\r\x1b[K")


def test_a_command_that_ends_soon_shows_no_line() -> None:
    file = StringIO()
    with StatusLine(Console(file=file), Activity()):
        pass
    assert file.getvalue() == ""


def test_its_thread_shows_the_first_line_within_a_second() -> None:
    file = StringIO()
    with StatusLine(Console(file=file), Activity()):
        deadline_s = time.monotonic() + 30
        while not file.getvalue() and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert file.getvalue() == "setting up\n"
