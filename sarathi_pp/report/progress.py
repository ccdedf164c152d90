"""What a run shows while it is on: a live display on a terminal, one line every few seconds elsewhere.

    12 s: 3/20 done, 0 failed, 8 running, 5 waiting, 100.0 tokens/s
    stage 0  ------------------------        91% busy   12% bubble

Busy is of the last moments, the bubble ratio of the whole run so far.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sarathi_pp.engine.progress import Progress

_REDRAW_S = 0.1
_LINE_S = 5.0
_BAR_WIDTH = 30


class ProgressDisplay:
    """Shows the progress of a run on a console, as often as it is worth; `update` may be called at any rate.

    total: requests in all, None while unknown (a streamed input). Use as a context manager. On a terminal
    nothing of it is left at the end; elsewhere the last state always gets its line.
    """

    def __init__(self, console: Console, total: int | None) -> None:
        self._console = console
        self._total = total
        self._last: Progress | None = None
        self._shown_s: float | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # No refresh thread: the display changes only when there is progress to show.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            with suppress(OSError):  # of a terminal that was closed
                self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()
        elif self._last is not None and self._last.elapsed_s != self._shown_s:
            self._show(self._last)

    def update(self, progress: Progress) -> None:
        self._last = progress
        interval_s = _LINE_S if self._live is None else _REDRAW_S
        if self._shown_s is None or progress.elapsed_s - self._shown_s >= interval_s:
            self._show(progress)

    def _show(self, progress: Progress) -> None:
        self._shown_s = progress.elapsed_s
        if self._live is not None:
            self._live.update(self._panel(progress), refresh=True)
        else:
            line = self._headline(progress).append(f", stages busy {_shares(progress.stage_busy)}")
            if progress.bubble_ratios:
                line.append(f", bubble {_shares(progress.bubble_ratios)}")
            self._console.print(line, soft_wrap=True)

    def _panel(self, progress: Progress) -> RenderableType:
        bars = Table.grid(padding=(0, 1))
        if self._total:
            ended = progress.requests_done + progress.requests_failed
            share = ended / self._total
            bars.add_row("requests", _bar(share), f"{share:4.0%} done")
        bubbles = [f"{ratio:4.0%} bubble" for ratio in progress.bubble_ratios] or [""] * len(progress.stage_busy)
        for stage, (share, bubble) in enumerate(zip(progress.stage_busy, bubbles, strict=True)):
            bars.add_row(f"stage {stage}", _bar(share), f"{share:4.0%} busy", bubble)
        return Group(self._headline(progress), bars)

    def _headline(self, progress: Progress) -> Text:
        total = "" if self._total is None else f"/{self._total}"
        failed = (f"{progress.requests_failed} failed", "red" if progress.requests_failed else "")
        return Text.assemble(
            f"{progress.elapsed_s:.0f} s: {progress.requests_done}{total} done, ",
            failed,
            f", {progress.running} running, {progress.waiting} waiting, {progress.tokens_per_s:,.1f} tokens/s",
        )


def _shares(values: Iterable[float]) -> str:
    return " ".join(f"{value:.0%}" for value in values)


def _bar(share: float) -> ProgressBar:
    return ProgressBar(total=1.0, completed=share, width=_BAR_WIDTH)
