"""The lines of an input, as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

MAX_LINE_BYTES = 64 * 2**20
_BOM = b"\xef\xbb\xbf"
_SKIP_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line without its line end. `number` counts from 1. `cut`: longer than allowed, only its head is here."""

    number: int
    data: bytes
    cut: bool = False


def read_lines(stream: BinaryIO, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[RawLine]:
    """The non-blank lines of a stream; never holds more than max_line_bytes of one.

    Accepts a leading byte-order mark, CRLF, and a last line without its end. A line of nothing but white space
    is blank in both formats; blank lines count for the numbers.
    """
    number = 0
    while data := stream.readline(max_line_bytes + 2):
        number += 1
        if number == 1:
            data = data.removeprefix(_BOM)
        body = data.removesuffix(b"\n").removesuffix(b"\r")
        cut = len(body) > max_line_bytes
        if cut:
            body = body[:_SKIP_BYTES]
            while data and not data.endswith(b"\n"):
                data = stream.readline(_SKIP_BYTES)
        if cut or body.strip():
            yield RawLine(number, body, cut)
