"""The file, pipe or standard input that holds the rows: what it is, and its lines one by one."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from sarathi_pp.errors import InputError, MissingError, RowError
from sarathi_pp.inputs.done import Done
from sarathi_pp.inputs.ids import DUPLICATE_ID, SeenIds
from sarathi_pp.inputs.input_format import HEAD_BYTES, InputFormat, choose_format, read_head
from sarathi_pp.inputs.lines import read_lines
from sarathi_pp.inputs.parse import ParsedLine, parse_line


def check_input(path: str) -> None:
    """Refuses an input that cannot be read, without opening it (a pipe can be opened only once).

    Raises MissingError or InputError.
    """
    if path == "-":
        if sys.stdin is None:
            raise InputError("--input - is standard input, which is closed; redirect a file or a pipe to it")
        return
    if not os.path.exists(path):
        if path.startswith(("/dev/fd/", "/proc/self/fd/")):
            raise MissingError(
                f"--input {path} is a stream of another process, which this one was not given; name a file, or a pipe "
                f"that mkfifo has made"
            )
        raise MissingError(f"--input {path} does not exist")
    if os.path.isdir(path):
        raise InputError(f"--input {path} is a directory; give a file of JSON Lines or of one prompt a line")
    if not os.access(path, os.R_OK):
        raise InputError(f"--input {path} cannot be read: permission denied")


def is_regular(path: str) -> bool:
    """Whether it is a file that can be read again, and not standard input, a pipe or a device."""
    return path != "-" and os.path.isfile(path)


def is_stream(path: str) -> bool:
    """Whether it is there, or is a standard stream, and is neither file nor directory."""
    return path == "-" or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


def open_input(path: str) -> io.BufferedReader:
    """Open it for reading bytes. Raises InputError."""
    try:
        if path == "-":
            # A reader of its own on the descriptor: the interpreter takes the lock of sys.stdin when it ends,
            # and dies of it where a thread is blocked in a read.
            return open(sys.stdin.fileno(), "rb", closefd=False)
        return Path(path).open("rb")
    except (OSError, ValueError, AttributeError) as error:  # sys.stdin is None where descriptor 0 is closed
        raise InputError(f"--input {path} cannot be read: {error}") from error


def count_rows(path: str) -> int:
    """Return the number of input lines that are not blank. Raises InputError."""
    with open_input(path) as stream:
        try:
            return sum(1 for _ in read_lines(stream))
        except OSError as error:
            raise InputError(f"--input {path} cannot be read on: {error}") from error


def check_redirected(asked: InputFormat) -> None:
    """Refuse a standard input that a file was redirected to and that has no rows, before anything is loaded.

    Looks at the file without moving the place from which it is read next; a pipe's format is found when it is read.
    Raises InputError.
    """
    try:
        descriptor = sys.stdin.fileno()
        head = os.pread(descriptor, HEAD_BYTES, os.lseek(descriptor, 0, os.SEEK_CUR))
    except (OSError, ValueError, AttributeError):  # no file, or closed
        return
    choose_format("-", head, asked, stream=True)


def has_every_row(path: str, done: Done, asked: InputFormat = "auto") -> bool:
    """Return whether each row of an input has its line, which is taken from `done`. Raises InputError."""
    with open_input(path) as stream:
        try:
            return all(take_done(done, parsed) for parsed in parsed_lines(path, stream, asked))
        except OSError as error:
            raise InputError(f"--input {path} cannot be read on: {error}") from error


def take_done(done: Done, parsed: ParsedLine) -> bool:
    """Return whether the row has a line from an earlier start, which is taken out of `done`."""
    if parsed.nameless:
        return done.take_nameless(parsed.line)
    return done.take(parsed.id, first=parsed.error is None or parsed.error.code != DUPLICATE_ID)


def parsed_lines(path: str, stream: io.BufferedReader, asked: InputFormat) -> Iterator[ParsedLine]:
    """Yield each line; an id that an earlier line has is an error.

    Raises InputError for an input that has no rows.
    """
    unnamed = not is_regular(path)
    head, whole = read_head(stream, stream=unnamed)
    plain_text = choose_format(path, head, asked, stream=unnamed) == "text"
    # Default ids are line numbers and cannot collide with one another.
    seen = None if plain_text else SeenIds()
    for number, data in read_lines(whole):
        parsed = parse_line(number, data, plain_text=plain_text)
        if seen is not None and not parsed.nameless:
            first_line = seen.first_line(parsed.id, number)
            if first_line is not None:
                duplicate = RowError(DUPLICATE_ID, f"id {parsed.id!r} is already that of line {first_line}")
                parsed = ParsedLine(number, parsed.id, parsed.form, extra=parsed.extra, error=duplicate)
        yield parsed
