from __future__ import annotations

import threading
from io import StringIO

import pytest
from rich.console import Console

from sarathi_pp.engine.progress import Progress
from sarathi_pp.report.progress import ProgressDisplay, duration


def snapshot(elapsed_s: float, done: int = 3, failed: int = 0, window_s: float = 10.0) -> Progress:
    return Progress(
        elapsed_s=elapsed_s,
        requests_done=done,
        requests_failed=failed,
        running=8,
        waiting=5,
        prompt_tokens=900,
        output_tokens=100,
        tokens_computed=1000,
        chunks_done=40,
        microbatches_done=7,
        stage_busy=(0.91, 0.5),
        stage_compute_s=(8.8, 4.0),
        window_s=window_s,
        kv_fragmentation=0.25,
    )


def log_lines(*snapshots: Progress, total: int | None = 20, done_before: int = 0, **options: bool) -> list[str]:
    file = StringIO()
    with ProgressDisplay(Console(file=file, width=40), total, done_before, **options) as display:
        for one in snapshots:
            display.update(one)
    return file.getvalue().splitlines()


def test_the_last_state_is_one_line_on_any_width() -> None:
    assert log_lines(snapshot(5.0), snapshot(10.0, failed=1)) == [
        "4 of 20 (20%), 1 failed, 8 running  100 tokens/s  stages now 91% 50% busy  bubble so far 36.0%  40 s left"
    ]
    assert log_lines() == []


def test_a_calibration_counts_microbatches() -> None:
    """Its requests may all run until the end. Then a share of requests would stay at 0%."""
    (line,) = log_lines(snapshot(10.0, done=0), total=28, counts_microbatches=True)
    assert line.startswith("7 of 28 microbatches (25%), 8 running") and line.endswith("30 s left")


def test_an_unknown_total_has_no_share_and_no_time_left() -> None:
    (line,) = log_lines(snapshot(10.0), total=None)
    assert line == "3 done, 8 running  100 tokens/s  stages now 91% 50% busy  bubble so far 36.0%"


def test_requests_of_earlier_starts_are_counted_and_their_time_is_not() -> None:
    (line,) = log_lines(snapshot(30.0), total=3000, done_before=2000)
    assert line.startswith("2,003 of 3,000 (67%), 8 running") and line.endswith("2 h 46 min left")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.0, "59 s"), (61, "1 min"), (3569, "59 min"), (3600, "1 h 0 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_no_time_passed_is_no_rate() -> None:
    assert snapshot(0.0).tokens_per_s == 0.0
    assert snapshot(1.0, window_s=0.0).chunk_throughput == 0.0


def test_before_the_first_result_there_is_no_bubble() -> None:
    (line,) = log_lines(snapshot(10.0, window_s=0.0))
    assert "stages now 91% 50% busy  57 s left" in line


def test_compute_beyond_the_window_is_no_negative_bubble() -> None:
    """Each rank times itself, so that a busy stage can come out a little above the window."""
    assert snapshot(10.0, window_s=8.0).bubble_ratios == (0.0, 0.5)


def terminal(file: StringIO) -> Console:
    return Console(file=file, width=80, height=25, force_terminal=True)


def test_terminal_shows_counts_and_a_bar_for_each_stage() -> None:
    threads_before = threading.active_count()
    file = StringIO()
    with ProgressDisplay(terminal(file), 20) as display:
        display.update(snapshot(1.0))
        text = file.getvalue()
        first, *bars = text.splitlines()
        assert "3 of 20 (15%), 8 running  1,000 tokens/s  bubble so far 36.0%  6 s left" in first
        assert [bar.split()[0] for bar in bars] == ["requests", "stage", "stage"]
        assert bars[0].split()[-2:] == ["1", "s"]
        assert [bar.split()[-3:] for bar in bars[1:]] == [["91%", "busy", "now"], ["50%", "busy", "now"]]
        display.update(snapshot(1.01))
        assert file.getvalue() == text
        display.update(snapshot(1.2, done=7))
        assert "7 of 20" in file.getvalue()
    assert threading.active_count() == threads_before


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    def output() -> str:
        file = StringIO()
        with ProgressDisplay(terminal(file), 20) as display:
            display.update(snapshot(1.0, failed=2))
        return file.getvalue()

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[31m2 failed" in output()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in output()
    assert "2 failed" in output()


def test_terminal_is_given_back_when_a_run_fails() -> None:
    file = StringIO()
    with pytest.raises(RuntimeError, match="boom"), ProgressDisplay(terminal(file), None) as display:
        display.update(snapshot(1.0))
        raise RuntimeError("boom")
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1
