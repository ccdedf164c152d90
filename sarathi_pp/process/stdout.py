"""Standard output of a command, for any encoding and any redirection."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from sarathi_pp.errors import OutputError


def replace_unencodable() -> None:
    """Print a question mark for a character that standard output cannot encode.

    Standard error prints the escape of such a character.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def flush() -> None:
    """Write the printed text that is still buffered.

    The buffer keeps text that could not be written. So this call raises an error again after a failed print.

    Raises:
        OutputError: the text cannot be written, for example on a full disk.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        forget()
        raise OutputError(f"standard output cannot be written: {error.strerror}") from error


def forget() -> None:
    """Discard the buffered text. Otherwise the interpreter writes it again at its end, and changes the exit code."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextmanager
def utf8() -> Iterator[TextIO]:
    """Yield standard output as a UTF-8 file for a page, a trace or a CSV, whatever the terminal's encoding is."""
    with open(sys.stdout.fileno(), "w", encoding="utf-8", newline="", closefd=False) as file:
        yield file
