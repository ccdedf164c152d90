"""The display of a run: its activity, warnings and progress, the table after it, and on request a JSON document."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import click
from rich.console import Console, RenderableType

from sarathi_pp.engine.progress import Progress, RunListener
from sarathi_pp.errors import OutputError
from sarathi_pp.outputs.sink import OutputClosedError
from sarathi_pp.process import stdout
from sarathi_pp.process.activity import Activity
from sarathi_pp.report.progress import ProgressDisplay
from sarathi_pp.report.status import StatusLine
from sarathi_pp.report.table import render

if TYPE_CHECKING:
    from sarathi_pp.run.finished_run import FinishedRun
    from sarathi_pp.run.metrics import MetricsServer

_STDERR = 2


class RunConsole(Console):
    """Standard error of a run. The run continues when the reader of its standard error has left."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(stderr=True)
        self.quiet = quiet

    def on_broken_pipe(self) -> None:
        """Discard everything that is written to standard error from now on. The default would end the program."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _STDERR)
        os.close(nowhere)


class ConsoleDisplay:
    """A display of a run on standard error. Only the JSON document goes to standard output.

    Use it as a context manager. Inside the block, a status line shows the activity. A terminal that was closed, or a
    pipe without a reader, does not end the run.

    Args:
        kept: name of the file that keeps the report; None if the report is deleted with its run directory.
    """

    # The total of `progress` is a number of microbatches, not of requests.
    counts_microbatches: ClassVar[bool] = False

    def __init__(
        self,
        console: Console,
        *,
        quiet: bool,
        as_json: bool,
        metrics_port: int | None = None,
        kept: str | None = None,
    ) -> None:
        self._console = console
        self._metrics_port = metrics_port
        self._quiet = quiet
        self._as_json = as_json
        self._kept = kept
        self.activity = Activity()
        self._status = StatusLine(console, self.activity, shown=not (quiet or console.quiet))

    def __enter__(self) -> Self:
        self._status.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.close()

    def leave_to_workers(self, num_workers: int) -> None:
        """Stop showing the activity: the first worker shows its own, about a second after its start."""
        self.say("starting 1 process" if num_workers == 1 else f"starting {num_workers} processes")
        self._status.close()

    def warn(self, text: str) -> None:
        with suppress(OSError), self._status.hidden():
            self._console.print(f"warning: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a line, also with --quiet."""
        with suppress(OSError), self._status.hidden():
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print a line, unless the command has --quiet."""
        if not self._quiet:
            self.note(text)

    def error(self, text: str) -> None:
        with suppress(OSError), self._status.hidden():
            click.echo(text.rstrip(), err=True)

    @contextmanager
    def progress(self, num_stages: int, total: int | None = None, done_before: int = 0) -> Iterator[RunListener]:
        with ExitStack() as stack:
            views: list[MetricsServer | ProgressDisplay] = []
            if self._metrics_port is not None:
                from sarathi_pp.run.metrics import MetricsServer

                server = MetricsServer(self._metrics_port, num_stages)
                stack.callback(server.close)
                views.append(server)
                if not self._quiet:
                    self.note(f"metrics on http://127.0.0.1:{server.port}/metrics")
            if not self._quiet:
                display = ProgressDisplay(
                    self._console, total, done_before, counts_microbatches=self.counts_microbatches
                )
                if self._console.is_terminal:
                    stack.enter_context(self._status.hidden())
                else:
                    stack.enter_context(self.activity.phase("", display))
                views.append(stack.enter_context(display))
            yield _Views(self, views)

    def show(self, report: dict[str, Any]) -> None:
        if not self._quiet:
            with suppress(OSError), self._status.hidden():
                self._console.print(self.render(report))
        if self._as_json:
            self.print_document(report)

    def render(self, report: dict[str, Any]) -> RenderableType:
        """Return the table of a report."""
        return render(report)

    def print_document(self, report: dict[str, Any]) -> None:
        """Print the JSON document.

        Raises:
            OutputClosedError: the reader of standard output has left.
            OutputError: the document cannot be written.
        """
        try:
            click.echo(json.dumps(report))
        except BrokenPipeError:
            stdout.forget()
            raise OutputClosedError("standard output was closed by its reader") from None
        except OSError as error:
            stdout.forget()
            elsewhere = f"; {self._kept} holds it" if self._kept else ""
            raise OutputError(
                f"the report cannot be written to standard output: {error.strerror}{elsewhere}"
            ) from error


class BatchConsoleDisplay(ConsoleDisplay):
    """The display of `generate`, which also computes the report at the end."""

    def fold(self, finished: FinishedRun) -> dict[str, Any]:
        """Compute the report of the run from its traces, and keep it in the run directory."""
        from sarathi_pp.report.run_reader import analyse  # slow to import, and only rank 0 needs it at the end

        return finished.keep(analyse(finished.traces, finished.facts))

    def nothing_left(self, num_rows: int, num_errors: int) -> None:
        """Say that the output already has a line for each input line.

        Args:
            num_rows: number of output lines.
            num_errors: number of error lines among them.
        """
        if not self._quiet:
            errors = f" ({num_errors} of them an error; --retry-errors runs those again)" if num_errors else ""
            self.note(f"all {num_rows} rows have a line{errors}; nothing to do")
        if self._as_json:
            none = {"requests": 0, "completed": 0, "failed": 0, "stopped_by": None}
            self.print_document({"resumed": {"rows": num_rows, "failed": num_errors}, **none})


class _Views:
    """A listener that shows the progress of a run in each view. A view that cannot be shown is left out."""

    def __init__(self, display: ConsoleDisplay, views: Sequence[MetricsServer | ProgressDisplay]) -> None:
        self._views = views
        self.warn = display.warn

    def report_progress(self, progress: Progress) -> None:
        for view in self._views:
            with suppress(OSError):
                view.update(progress)
