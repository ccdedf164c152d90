"""The progress of an LLM on a terminal. If standard error is no terminal, nothing is shown. Warnings go to the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from sarathi_pp.api.arguments import Arguments
from sarathi_pp.engine.progress import Progress
from sarathi_pp.process.activity import Activity
from sarathi_pp.report.progress import ProgressDisplay
from sarathi_pp.report.status import StatusLine

_log = logging.getLogger("sarathi_pp.api")


class Terminal:
    """A display of an LLM's activity on standard error, if that is a terminal. See RunListener.

    Args:
        shown: False to show nothing, on ranks other than rank 0.
    """

    def __init__(self, arguments: Arguments, *, shown: bool) -> None:
        self._arguments = arguments
        self._console = Console(stderr=True)
        self._shown = shown and self._console.is_terminal
        self._display: ProgressDisplay | None = None
        self._first: Progress | None = None  # of this call
        self.activity = Activity()

    def loading(self) -> StatusLine:
        """Return a status line, which shows what the LLM does at the moment. Use it as a context manager."""
        return StatusLine(self._console, self.activity, shown=self._shown)

    @contextmanager
    def calling(self, num_prompts: int, *, shown: bool) -> Iterator[None]:
        """Show the progress of one call inside the block."""
        if not (shown and self._shown):
            yield
            return
        self._first = None
        try:
            with ProgressDisplay(self._console, num_prompts) as self._display:
                yield
        finally:
            self._display = None

    def report_progress(self, progress: Progress) -> None:
        display = self._display
        if display is None:
            return
        if self._first is None:  # the progress before the call starts
            self._first = progress
        display.update(progress.since(self._first))

    def warn(self, text: str) -> None:
        _log.warning(self._arguments.reword(text))
