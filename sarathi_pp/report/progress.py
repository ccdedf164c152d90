"""The progress of a run: a live display on a terminal, a text for a status line elsewhere.

    1,412 of 3,000 (47%), 2 failed, 31 running  4,271 tokens/s  stages now 97% 95% busy  bubble so far 3.9%  6 min left

"busy" is the share of the last moments in which each stage computed. Tokens per second and the bubble are those of the
whole run so far, so the bubble contains the time in which the pipeline filled.
"""

from __future__ import annotations

from contextlib import suppress
from statistics import mean
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sarathi_pp.engine.progress import Progress

_REDRAW_S = 0.1
_BAR_WIDTH = 30


class ProgressDisplay:
    """A display of a run's progress on a console. `update` may be called at any rate. Use it as a context manager.

    On a terminal the display is removed at the end. Elsewhere a status line shows its text during the run, and the last
    state is printed at the end.

    Args:
        total: number of input lines of the whole job. None: unknown, because the input is a stream.
        done_before: number of the job's input lines that earlier starts have finished.
        counts_microbatches: show the number of microbatches instead of input lines. `total` is that of them too.
    """

    def __init__(
        self, console: Console, total: int | None, done_before: int = 0, *, counts_microbatches: bool = False
    ) -> None:
        self._console = console
        self._total = total
        self._done_before = done_before
        self._counts_microbatches = counts_microbatches
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
        elif self._last is not None:
            with suppress(OSError):
                self._console.print(str(self), markup=False, highlight=False, soft_wrap=True)

    def __str__(self) -> str:
        progress = self._last
        if progress is None:
            return "waiting for the first result"
        parts = [self._headline(progress).plain, f"stages now {_shares(progress.stage_busy)} busy"]
        return "  ".join([*parts, *self._bubble_and_time(progress)])

    def update(self, progress: Progress) -> None:
        self._last = progress
        if self._live is None:
            return
        if self._shown_s is None or progress.elapsed_s - self._shown_s >= _REDRAW_S:
            self._shown_s = progress.elapsed_s
            self._live.update(self._panel(progress), refresh=True)

    def _panel(self, progress: Progress) -> RenderableType:
        bars = Table.grid(padding=(0, 1))
        if self._total:
            name = "microbatches" if self._counts_microbatches else "requests"
            bars.add_row(name, _bar(self._ended(progress) / self._total), f"{progress.elapsed_s:.0f} s")
        for stage, share in enumerate(progress.stage_busy):
            bars.add_row(f"stage {stage}", _bar(share), f"{share:4.0%} busy now")
        line = self._headline(progress)
        for part in self._bubble_and_time(progress):
            line.append(f"  {part}")
        return Group(line, bars)

    def _headline(self, progress: Progress) -> Text:
        ended = self._ended(progress)
        done, unit = f"{ended:,} done", " microbatches" if self._counts_microbatches else ""
        if self._total:
            done = f"{ended:,} of {self._total:,}{unit} ({ended / self._total:.0%})"
        line = Text(done)
        if progress.requests_failed:
            line.append(", ").append(f"{progress.requests_failed:,} failed", "red")
        return line.append(f", {progress.running:,} running  {progress.tokens_per_s:,.0f} tokens/s")

    def _ended(self, progress: Progress) -> int:
        return self._done_before + self._ended_now(progress)

    def _ended_now(self, progress: Progress) -> int:
        return progress.microbatches_done if self._counts_microbatches else progress.rows_ended

    def _bubble_and_time(self, progress: Progress) -> list[str]:
        bubble = [f"bubble so far {mean(progress.bubble_ratios):.1%}"] if progress.bubble_ratios else []
        ended_now = self._ended_now(progress)
        if not self._total or not ended_now:
            return bubble
        left = self._total - self._ended(progress)
        return [*bubble, f"{duration(progress.elapsed_s / ended_now * left)} left"] if left > 0 else bubble


def duration(seconds: float) -> str:
    """Return a time as people say it: 40 s, 6 min, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def _shares(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.0%}" for value in values)


def _bar(share: float) -> ProgressBar:
    return ProgressBar(total=1.0, completed=min(1.0, share), width=_BAR_WIDTH)
