"""The console, on which this process reports errors to its user."""

from __future__ import annotations

from typing import Protocol


class Console(Protocol):
    def error(self, text: str) -> None:
        """Show an error, which may have several lines."""
