from __future__ import annotations

import threading
from io import StringIO

import pytest
from rich.console import Console

from sarathi_pp.engine.progress import Progress
from sarathi_pp.report.progress import ProgressDisplay


def snapshot(elapsed_s: float, done: int = 3, failed: int = 0, window_s: float = 10.0) -> Progress:
    return Progress(
        elapsed_s=elapsed_s,
        requests_done=done,
        requests_failed=failed,
        running=8,
        waiting=5,
        prompt_tokens=900,
        output_tokens=100,
        chunks_done=40,
        stage_busy=(0.91, 0.5),
        stage_compute_s=(8.8, 4.0),
        window_s=window_s,
        kv_fragmentation=0.25,
    )


def log_lines(*snapshots: Progress, total: int | None = 20) -> list[str]:
    file = StringIO()
    with ProgressDisplay(Console(file=file, width=40), total) as display:
        for one in snapshots:
            display.update(one)
    return file.getvalue().splitlines()


def test_log_line_is_whole_on_any_width() -> None:
    assert log_lines(snapshot(10.0, failed=1)) == [
        "10 s: 3/20 done, 1 failed, 8 running, 5 waiting, 100.0 tokens/s, stages busy 91% 50%, bubble 12% 60%"
    ]
    assert log_lines(snapshot(10.0), total=None)[0].startswith("10 s: 3 done, 0 failed")


def test_log_has_a_line_every_few_seconds_and_the_last_snapshot() -> None:
    every_tenth = [snapshot(tenths / 10) for tenths in range(1, 118)]
    starts = [line.split(":")[0] for line in log_lines(*every_tenth)]
    assert starts == ["0 s", "5 s", "10 s", "12 s"]
    assert log_lines() == []


def test_no_time_passed_is_no_rate() -> None:
    assert snapshot(0.0).tokens_per_s == 0.0
    assert snapshot(1.0, window_s=0.0).chunk_throughput == 0.0


def test_before_the_first_result_there_is_no_bubble() -> None:
    (line,) = log_lines(snapshot(10.0, window_s=0.0))
    assert line.endswith("stages busy 91% 50%")
    file = StringIO()
    with ProgressDisplay(terminal(file), 20) as display:
        display.update(snapshot(1.0, window_s=0.0))
        assert [bar.split()[-2:] for bar in file.getvalue().splitlines()[2:]] == [["91%", "busy"], ["50%", "busy"]]


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
        assert "1 s: 3/20 done, 0 failed, 8 running, 5 waiting, 1,000.0 tokens/s" in first
        assert [bar.split()[0] for bar in bars] == ["requests", "stage", "stage"]
        assert bars[0].split()[-2:] == ["15%", "done"]
        assert [bar.split()[-4:] for bar in bars[1:]] == [
            ["91%", "busy", "12%", "bubble"],
            ["50%", "busy", "60%", "bubble"],
        ]
        display.update(snapshot(1.01))
        assert file.getvalue() == text
        display.update(snapshot(1.2, done=7))
        assert "7/20 done" in file.getvalue()
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
