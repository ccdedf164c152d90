"""The output of an LLM on a terminal. Elsewhere it shows nothing."""

from __future__ import annotations

import io
import logging
from dataclasses import replace

import pytest
from rich.console import Console

from sarathi_pp.api.arguments import Arguments
from sarathi_pp.api.terminal import Terminal
from sarathi_pp.engine.progress import Progress

NOTHING = Progress.nothing(2)
ARGUMENTS = Arguments("m", None, {})


def progress(done: int, elapsed_s: float, compute_s: float) -> Progress:
    return replace(
        NOTHING,
        requests_done=done,
        elapsed_s=elapsed_s,
        window_s=elapsed_s,
        output_tokens=10 * done,
        tokens_computed=10 * done,
        stage_compute_s=(compute_s, compute_s),
    )


def terminal(monkeypatch: pytest.MonkeyPatch, *, real: bool) -> tuple[Terminal, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=real, width=150, color_system=None)
    monkeypatch.setattr("sarathi_pp.api.terminal.Console", lambda stderr: console)
    return Terminal(ARGUMENTS, shown=True), out


def test_a_call_shows_its_own_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    made, out = terminal(monkeypatch, real=True)
    made.report_progress(progress(30, 100.0, 20.0))
    with made.calling(50, shown=True):
        made.report_progress(progress(40, 110.0, 20.0))
        made.report_progress(progress(50, 120.0, 25.0))
    shown = out.getvalue()
    assert "10 of 50 (20%), 0 running  10 tokens/s" in shown and "bubble so far 50.0%" in shown and "40 s left" in shown


@pytest.mark.parametrize(("real", "shown"), [(False, True), (True, False)])
def test_nothing_is_shown_elsewhere(monkeypatch: pytest.MonkeyPatch, real: bool, shown: bool) -> None:
    made, out = terminal(monkeypatch, real=real)
    with made.calling(50, shown=shown):
        made.report_progress(progress(10, 10.0, 1.0))
    assert out.getvalue() == ""


def test_warnings_go_to_the_log_and_name_arguments(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = terminal(monkeypatch, real=False)
    with caplog.at_level(logging.WARNING):
        made.warn("Raise --kv-cache-memory")
    assert caplog.messages == ["Raise kv_cache_memory_bytes"]
