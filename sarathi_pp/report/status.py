"""A line that shows the activity of a command, from its first second until the command shows something else.

    reading prompts.jsonl
    loading its layers: 12.3 of 35.8 GiB
    waiting for stage 1 (rank 1, node1, pid 812): loading its layers: 3.1 of 35.8 GiB

On a terminal the line is rewritten in place. Elsewhere each phase prints a line when it begins for the first time, at
most one line per second. A phase that continues, or comes back, prints one every few seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from rich.cells import cell_len, set_cell_size
from rich.console import Console

from sarathi_pp.process.activity import Activity
from sarathi_pp.trace.clock import Clock, SystemClock

# A command that ends within this time shows only its result.
_FIRST_S = 0.3
_LOOK_S = 0.2
# Time between two lines that are not rewritten: for a new phase, and for the same phase.
_NEW_S = 1.0
_SAME_S = 4.0
# A phase that has lasted this time shows its age.
_AGE_S = 3.0


class StatusLine:
    """A line on a console that shows an activity. Use it as a context manager.

    Args:
        shown: False to show nothing.
    """

    def __init__(self, console: Console, activity: Activity, *, shown: bool = True, clock: Clock | None = None) -> None:
        self._console = console
        self._activity = activity
        self._shown = shown
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._hidden = 0
        self._in_place = ""
        self._phase = ""
        self._phase_s = self._line_s = self._clock.now()
        self._printed: set[str] = set()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._shown:
            self._thread = threading.Thread(target=self._run, name="status", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop showing the activity, and remove the line from a terminal."""
        self._end.set()
        with self._lock:
            self._clear()
            self._hidden += 1

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Keep the line off the console inside the block, so that other text can be printed."""
        with self._lock:
            self._clear()
            self._hidden += 1
        try:
            yield
        finally:
            with self._lock:
                self._hidden -= 1
                self._line_s = self._clock.now()

    def _run(self) -> None:
        if self._end.wait(_FIRST_S):
            return
        while True:
            self.look()
            if self._end.wait(_LOOK_S):
                return

    def look(self) -> None:
        """Show the activity, unless the line is hidden."""
        with self._lock:
            if not self._hidden:
                with suppress(OSError, ValueError):  # of a console that was closed
                    self._show()

    def _show(self) -> None:
        """Show the activity if a new line is due."""
        now_s, text, phase = self._clock.now(), self._activity.text, self._activity.name
        if phase != self._phase:
            self._phase, self._phase_s = phase, now_s
        age_s = now_s - self._phase_s
        text = f"{text} ({age_s:.0f} s)" if phase and age_s >= _AGE_S else text
        if self._console.is_terminal:
            self._rewrite(text)
            return
        since_s = now_s - self._line_s
        is_new = phase not in self._printed and (since_s >= _NEW_S or not self._printed)
        if text and (is_new or since_s >= _SAME_S):
            self._printed.add(phase)
            self._line_s = now_s
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _rewrite(self, text: str) -> None:
        width = max(1, self._console.width - 1)
        text = text if cell_len(text) <= width else set_cell_size(text, width)
        if text != self._in_place:
            self._console.file.write(f"\r{text}\x1b[K")
            self._console.file.flush()
            self._in_place = text

    def _clear(self) -> None:
        if self._in_place:
            self._in_place = ""
            with suppress(OSError, ValueError):
                self._console.file.write("\r\x1b[K")
                self._console.file.flush()
