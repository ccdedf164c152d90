"""The lines of an input, as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

MAX_LINE_BYTES = 64 * 2**20
_BOM = b"\xef\xbb\xbf"
_SKIP_BYTES = 64 * 2**10


def read_lines(stream: BinaryIO, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield (number, bytes) of each line of a stream that is not blank. Numbers start at 1 and count blank lines too.

    The bytes do not include the line's end. A leading byte-order mark, CRLF, and a last line without its end are
    accepted. A line of only white space is blank in both formats, text and JSON Lines.

    Args:
        max_line_bytes: of a longer line, only the beginning is yielded, with one or two bytes more than this limit. So
            the caller sees that the line is too long.
    """
    number = 0
    while data := stream.readline(max_line_bytes + 2):
        number += 1
        if number == 1:
            data = data.removeprefix(_BOM)
        body = data.removesuffix(b"\n").removesuffix(b"\r")
        too_long = len(body) > max_line_bytes
        if too_long:
            while data and not data.endswith(b"\n"):
                data = stream.readline(_SKIP_BYTES)
        if too_long or body.strip():
            yield number, body
