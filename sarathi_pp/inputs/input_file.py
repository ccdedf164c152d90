"""The input of a run: a file, a pipe or standard input, which is checked and then read line by line."""

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
    """Refuse an input that cannot be read. It is not opened, because a pipe can be opened only once.

    Args:
        path: path of the input; `-` is standard input.

    Raises:
        MissingError: the input does not exist.
        InputError: the input is closed, a directory, or not readable.
    """
    if path == "-":
        if sys.stdin is None:
            raise InputError("--input - is standard input, which is closed; redirect a file or a pipe to it")
        return
    if not os.path.exists(path):
        if path.startswith(("/dev/fd/", "/proc/self/fd/")):
            raise MissingError(
                f"--input {path} is a stream of another process and is not open in this one; name a file, or a pipe "
                f"made by mkfifo"
            )
        raise MissingError(f"--input {path} does not exist")
    if os.path.isdir(path):
        raise InputError(f"--input {path} is a directory; give a file with JSON Lines or one prompt per line")
    if not os.access(path, os.R_OK):
        raise InputError(f"--input {path} cannot be read: permission denied")


def is_regular(path: str) -> bool:
    """Return whether a path is a file that can be read again, and not standard input, a pipe or a device."""
    return path != "-" and os.path.isfile(path)


def is_stream(path: str) -> bool:
    """Return whether a path is a standard stream, or exists and is neither a file nor a directory."""
    return path == "-" or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


def open_input(path: str) -> io.BufferedReader:
    """Open an input for reading bytes. The path `-` is standard input.

    Raises:
        InputError: the input cannot be read.
    """
    try:
        if path == "-":
            # Use a separate reader on the descriptor. The interpreter takes the lock of sys.stdin when it ends, and
            # aborts if a thread is blocked in a read.
            return open(sys.stdin.fileno(), "rb", closefd=False)
        return Path(path).open("rb")
    except (OSError, ValueError, AttributeError) as error:  # sys.stdin is None if descriptor 0 is closed
        raise InputError(f"--input {path} cannot be read: {error}") from error


def count_rows(path: str) -> int:
    """Return the number of input lines that are not blank.

    Raises:
        InputError: the input cannot be read.
    """
    with open_input(path) as stream:
        try:
            return sum(1 for _ in read_lines(stream))
        except OSError as error:
            raise InputError(f"--input {path} cannot be read further: {error}") from error


def check_redirected(asked: InputFormat) -> None:
    """Refuse a file that is redirected to standard input (`< FILE`) if it is neither JSON Lines nor text.

    This check comes before a model is loaded. It does not move the position from which the file is read later. The
    format of a pipe cannot be checked here, because a pipe can be read only once.

    Args:
        asked: the format that the user named with --input-format.

    Raises:
        InputError: the file is neither JSON Lines nor text.
    """
    try:
        descriptor = sys.stdin.fileno()
        head = os.pread(descriptor, HEAD_BYTES, os.lseek(descriptor, 0, os.SEEK_CUR))
    except (OSError, ValueError, AttributeError):  # not a file, or closed
        return
    choose_format("-", head, asked, stream=True)


def has_every_row(path: str, done: Done, asked: InputFormat = "auto") -> bool:
    """Return whether each input line has an output line. The lines that have one are removed from `done`.

    Args:
        done: input lines that earlier starts have answered.
        asked: the format that the user named with --input-format.

    Raises:
        InputError: the input cannot be read, or is neither JSON Lines nor text.
    """
    with open_input(path) as stream:
        try:
            return all(take_done(done, parsed) for parsed in parsed_lines(path, stream, asked))
        except OSError as error:
            raise InputError(f"--input {path} cannot be read further: {error}") from error


def take_done(done: Done, parsed: ParsedLine) -> bool:
    """Return whether an earlier start has answered an input line, and remove the line from `done`."""
    if parsed.nameless:
        return done.take_nameless(parsed.line)
    return done.take(parsed.id, first=parsed.error is None or parsed.error.code != DUPLICATE_ID)


def parsed_lines(path: str, stream: io.BufferedReader, asked: InputFormat) -> Iterator[ParsedLine]:
    """Yield each input line, parsed. A line with an error is yielded too, such as one with the id of an earlier line.

    Args:
        path: path of the input, by which the format may be decided.
        stream: the open input, at its start.
        asked: the format that the user named with --input-format.

    Raises:
        InputError: the input is neither JSON Lines nor text.
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
                duplicate = RowError(DUPLICATE_ID, f"id {parsed.id!r} is already the id of line {first_line}")
                parsed = ParsedLine(number, parsed.id, parsed.form, extra=parsed.extra, error=duplicate)
        yield parsed
