"""Standard output of a command: any encoding, any place it may be redirected to."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from sarathi_pp.errors import OutputError


def replace_unencodable() -> None:
    """Print a question mark for a character that standard output cannot encode; standard error prints its escape."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def flush() -> None:
    """Write what was printed. Raises OutputError if it cannot be written, as on a full disk.

    A buffer keeps what could not be written: after a failed print this raises again.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        forget()
        raise OutputError(f"standard output cannot be written: {error.strerror}") from error


def forget() -> None:
    """Discard what is still buffered. Otherwise the interpreter tries again when it ends, and changes the exit code."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextmanager
def utf8() -> Iterator[TextIO]:
    """Standard output as the UTF-8 file that a page, a trace or a CSV is, whatever the terminal's encoding."""
    with open(sys.stdout.fileno(), "w", encoding="utf-8", newline="", closefd=False) as file:
        yield file
