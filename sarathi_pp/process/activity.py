"""The current activity of this process, as text: for its user, and for the ranks that wait for it.

with activity.phase("loading its layers", count):       status line    loading its layers: 3.1 of 35.8 GiB
    load(count)                                         heartbeats     the same text, for other ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Activity:
    """The phase that this process is in. One thread changes it, any thread reads it.

    Attributes:
        awaited: text that names the ranks that this one waits for, with their phase; empty if it does not wait.
    """

    def __init__(self) -> None:
        self._phases: list[tuple[str, object]] = [("setting up", "")]
        self.awaited = ""

    @contextmanager
    def phase(self, name: str, detail: object = "") -> Iterator[None]:
        """Set the phase inside the block.

        Args:
            name: continues "it is ...", such as "loading its layers". Empty: the detail says everything.
            detail: shown after the name. It is formatted each time the text is read, so it may be a counter.
        """
        self._phases.append((name, detail))
        try:
            yield
        finally:
            self._phases.pop()

    @property
    def name(self) -> str:
        """The name of the phase, or of the wait for other ranks, without the detail, which changes meanwhile."""
        return self.awaited.partition(": ")[0] or self._phases[-1][0]

    @property
    def own(self) -> str:
        """The phase of this process with its detail. It does not show the ranks that this process waits for."""
        name, detail = self._phases[-1]
        return ": ".join(filter(None, (name, str(detail))))

    @property
    def text(self) -> str:
        """The text for the user: the ranks that this one waits for if there are any; otherwise its own phase."""
        return self.awaited or self.own
