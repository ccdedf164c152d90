"""The format of an input, decided by its first bytes: prompts as text, JSON Lines, or a format that must be converted.

    head -> "text" | "jsonl" | InputError with the command that converts the file

    head: the first 64 KiB of a file. Of a stream: the bytes that arrived together with its first line.

The error is raised before any line is answered. Without it, a table, an archive or a JSON document would be answered
line by line, because any line of text can be a prompt.
"""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Sequence
from typing import Any, BinaryIO, Literal

from sarathi_pp.errors import InputError

LineFormat = Literal["text", "jsonl"]
InputFormat = Literal["auto", "text", "jsonl"]
INPUT_FORMATS: tuple[InputFormat, ...] = ("auto", "text", "jsonl")

HEAD_BYTES = 64 * 2**10
_BOM = b"\xef\xbb\xbf"
# All bytes of UTF-8 characters that take several bytes.
_CONTINUED = bytes(range(0x80, 0x100))
# A line that is not blank, with its end.
_WHOLE_LINE = re.compile(rb"\S[^\n]*\n")

# Compressed formats: name for the message, first bytes, and the command that prints the contents.
_COMPRESSED = (
    ("gzip-compressed", re.compile(rb"\x1f\x8b"), "zcat"),
    ("zstd-compressed", re.compile(rb"\x28\xb5\x2f\xfd"), "zstdcat"),
    ("bzip2-compressed", re.compile(rb"BZh[1-9]1AY&SY"), "bzcat"),
    ("xz-compressed", re.compile(rb"\xfd7zXZ\x00"), "xzcat"),
    ("lz4-compressed", re.compile(rb"\x04\x22\x4d\x18"), "lz4cat"),
    ("a zip archive", re.compile(rb"PK(?:\x03\x04|\x05\x06)"), "unzip -p"),
)
_BINARY = (
    ("a Parquet file", re.compile(rb"PAR[1E][\x00-\x1f\x80-\xff]")),
    ("an Arrow file", re.compile(rb"ARROW1|\xff\xff\xff\xff[^\xff]\x00?")),
    ("an SQLite database", re.compile(rb"SQLite format 3\x00")),
    ("an HDF5 file", re.compile(rb"\x89HDF\r\n")),
    ("an Avro file", re.compile(rb"Obj\x01")),
    ("a numpy array", re.compile(rb"\x93NUMPY")),
    ("a Python pickle, which is not loaded because it could run any code", re.compile(rb"\x80[\x02-\x05]")),
    ("a PDF document", re.compile(rb"%PDF-\d\.\d")),
)
_UNICODE = (
    ("utf-32", re.compile(rb"\xff\xfe\x00\x00|\x00\x00\xfe\xff|(?:[^\x00]\x00{3}){2}|(?:\x00{3}[^\x00]){2}")),
    ("utf-16", re.compile(rb"\xff\xfe|\xfe\xff")),
    ("utf-16le", re.compile(rb"(?:[^\x00]\x00){2}")),
    ("utf-16be", re.compile(rb"(?:\x00[^\x00]){2}")),
)
# Keys of an input line that hold a prompt.
_PROMPTS = frozenset(("prompt", "prompt_token_ids", "messages", "body"))
# Column names in tables of prompts.
_COLUMNS = frozenset(
    "id prompt prompts text messages question questions query instruction input inputs output answer response "
    "completion label target source content custom_id system user context title".split()
)
_CELL = re.compile(r"[\w.\-/]+(?: [\w.\-/]+){0,5}")
_LOOKED_AT = 16  # lines below a table's header that are compared with it
_JSONL_NAMES = (".jsonl", ".ndjson", ".json")
_AS_TEXT = "--input-format text takes each line as a prompt"


def read_head(file: io.BufferedReader, *, stream: bool) -> tuple[bytes, BinaryIO]:
    """Read the first bytes of an input. Return them, and a reader that begins with the same bytes again.

    Args:
        file: the input, of which nothing was read before.
        stream: True for a pipe or standard input. Then do not wait for more than one line, because the writer may wait
            for an answer before it sends the next line.
    """
    head = b""
    while len(head) < HEAD_BYTES and not (stream and _WHOLE_LINE.search(head)):
        piece = file.raw.read(HEAD_BYTES - len(head))
        if not piece:
            break
        head += piece
    return head, io.BufferedReader(_Rejoined(head, file), HEAD_BYTES)


class _Rejoined(io.RawIOBase):
    """A reader that first gives the head of a file, which was read ahead, and then the remaining bytes."""

    def __init__(self, head: bytes, file: io.BufferedReader) -> None:
        self._head = head
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        if not self._head:
            return self._file.raw.readinto(buffer)
        size = min(len(buffer), len(self._head))
        buffer[:size], self._head = self._head[:size], self._head[size:]
        return size


def choose_format(name: str, head: bytes, asked: InputFormat = "auto", *, stream: bool = False) -> LineFormat:
    """Return the format of all lines of an input: "text" or "jsonl".

    The ending of the name decides: .txt is text, and .jsonl, .ndjson and .json are JSON Lines. A stream with another
    name is decided by its first lines. A file with another name must be JSON Lines.

    Args:
        name: path of the input.
        head: its first bytes.
        asked: the format that the user named with --input-format. It decides instead of the name.
        stream: True for a pipe or standard input.

    Raises:
        InputError: the input has neither format, or contradicts its name. The message shows the remedy.
    """
    source = f"--input {name}"
    file = None if stream else shlex.quote(name)
    _refuse_binary(source, file, head)
    head = head.removeprefix(_BOM)
    lines = _whole_lines(head, stream=stream)
    if not lines:
        return "text" if asked == "text" or name.lower().endswith(".txt") else "jsonl"
    _refuse_legacy_encoding(source, file, lines)
    if asked == "text":
        return "text"
    _refuse_json_document(source, file, head, lines)
    named_text, named_jsonl = name.lower().endswith(".txt"), name.lower().endswith(_JSONL_NAMES)
    if asked == "jsonl" or named_jsonl:
        return "jsonl"
    num_json = sum(isinstance(_parsed(line), dict | list) for line in lines)
    mostly_json = 2 * num_json >= len(lines)
    if named_text:
        if mostly_json or isinstance(_parsed(lines[0]), dict | list):
            raise InputError(f"{source} is named .txt and holds JSON; give --input-format jsonl. {_AS_TEXT}")
        _refuse_table(source, file, lines)
        return "text"
    if mostly_json or lines[0].startswith(b"{") or isinstance(_parsed(lines[0]), list):
        return "jsonl"
    _refuse_table(source, file, lines)
    if name.lower().endswith((".csv", ".tsv")):
        raise _table(source, file, "\t" if name.lower().endswith(".tsv") else ",")
    if not stream:
        raise InputError(
            f"{source} is neither JSON Lines nor named .txt: its first line is not a JSON object; {_AS_TEXT}"
        )
    return "text"


def _whole_lines(head: bytes, *, stream: bool) -> list[bytes]:
    """Return the lines of the head that are not blank.

    The head may end within a line. That line is left out, unless it is the only one.
    """
    whole, _, rest = head.rpartition(b"\n")
    if len(head) >= HEAD_BYTES:
        rest = rest.rstrip(_CONTINUED)  # the head may end within a character
    lines = [line.strip() for line in whole.split(b"\n")]
    if not whole.strip() or (len(head) < HEAD_BYTES and not stream):
        lines.append(rest.strip())
    return [line for line in lines if line]


def _refuse_binary(source: str, file: str | None, head: bytes) -> None:
    for what, begins, command in _COMPRESSED:
        if begins.match(head):
            how = f"{command} {file} | sarathi-pp generate --input - ..." if file else f"pipe it through {command}"
            raise InputError(f"{source} is {what}: {how}")
    for what, begins in _BINARY:
        if begins.match(head):
            raise InputError(f"{source} is {what}; write its prompts as JSON Lines, such as " + '{"prompt": "..."}')
    for encoding, begins in _UNICODE:
        if begins.match(head):
            raise InputError(f"{source} is {encoding.upper()}: {_iconv(encoding, file)}")
    if 10 * head[:1024].count(0) > len(head[:1024]):
        raise InputError(f"{source} is binary data; give a file with lines of text or JSON")


def _refuse_legacy_encoding(source: str, file: str | None, lines: Sequence[bytes]) -> None:
    """Refuse an input of which at least half the lines are not UTF-8: it has another encoding, such as Latin-1.

    An input with fewer such lines is accepted. Then only these lines get errors.
    """
    if 2 * sum(not _is_utf8(line) for line in lines) >= len(lines):
        raise InputError(f"{source} is not UTF-8. If it is Latin-1: {_iconv('latin1', file)}")


def _iconv(encoding: str, file: str | None) -> str:
    if file is None:
        return f"pipe it through iconv -f {encoding} -t utf-8"
    return f"iconv -f {encoding} -t utf-8 {file} | sarathi-pp generate --input - ..."


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _refuse_json_document(source: str, file: str | None, head: bytes, lines: Sequence[bytes]) -> None:
    """Refuse an input that is JSON, but not one request per line.

    It may be a JSON array, objects over several lines, answers of an earlier run, or plain strings.
    """
    begins, text = lines[0][:1], head.decode(errors="replace").strip()
    first, document, end = _parsed(lines[0]), *_decoded(text)
    whole = end == len(text)
    if begins == b"[":
        list_of_rows = isinstance(document, list) and whole and (not document or isinstance(document[0], dict | str))
        if list_of_rows or (document is None and re.match(r'\[\s*(?:\{\s*"|$)', text)) or lines[0] == b"[":
            raise InputError(f"{source} is a JSON array, and not one object per line: {_jq('.[]', file)}")
    if begins == b"{" and first is None and ((isinstance(document, dict) and "\n" in text[:end]) or lines[0] == b"{"):
        raise InputError(f"{source} is JSON over several lines, and not one object per line: {_jq('.', file)}")
    if isinstance(first, dict) and not _PROMPTS & first.keys() and _is_answer(first):
        raise InputError(f"{source} holds answers of a run; give the file of prompts that they answer")
    if all(isinstance(_parsed(line), str) for line in lines):
        raise InputError(f"{source} holds JSON strings: {_jq('{prompt: .}', file)}. {_AS_TEXT}, with its quotes")


def _jq(program: str, file: str | None) -> str:
    command = f"jq -c {shlex.quote(program)}"
    return f"{command} {file} > rows.jsonl" if file else f"pipe it through {command}"


def _is_answer(record: dict[str, object]) -> bool:
    own = {"token_ids", "finish_reason"} <= record.keys()
    error = "id" in record and isinstance(record.get("error"), dict)
    return own or error or {"custom_id", "response"} <= record.keys()


def _parsed(line: bytes) -> object:
    """Return a line's JSON value; None if it is null or not JSON."""
    text = line.decode(errors="replace")
    document, end = _decoded(text)
    return document if end == len(text) else None


def _decoded(text: str) -> tuple[object, int]:
    """Return the JSON value at the start of a text, and its end position; (None, 0) if no JSON value is there."""
    try:
        return json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0


def _refuse_table(source: str, file: str | None, lines: Sequence[bytes]) -> None:
    """Refuse a table (CSV, TSV, ...). Its first line is a header with names of columns.

    A prompt with commas must not be taken for a header. So each cell of a header must be a known column name. Or at
    least one cell is a known name, no cell has a space next to a delimiter, and at least half of the lines below have
    that number of cells or more.
    """
    header, below = lines[0].decode(errors="replace"), lines[1 : 1 + _LOOKED_AT]
    for delimiter in ",\t;|":
        cells = [cell.strip('"').lower() for cell in header.split(delimiter)]
        named = sum(cell.strip().strip('"') in _COLUMNS for cell in cells)
        if len(cells) < 2 or not named:
            continue
        alike = sum(line.count(delimiter.encode()) >= len(cells) - 1 for line in below)
        if named == len(cells) or (below and all(map(_CELL.fullmatch, cells)) and 2 * alike >= len(below)):
            raise _table(source, file, delimiter)


def _table(source: str, file: str | None, delimiter: str) -> InputError:
    kind = {",": "CSV", "\t": "TSV"}.get(delimiter, f"a table with columns between {delimiter!r}")
    reader = "csv.DictReader(sys.stdin)" if delimiter == "," else f"csv.DictReader(sys.stdin, delimiter={delimiter!r})"
    program = f'python -c "import csv, json, sys; [print(json.dumps(row)) for row in {reader}]"'
    how = f"{program} < {file} > rows.jsonl" if file else f"pipe it through {program}"
    return InputError(f"{source} is {kind}: {how}. {_AS_TEXT}, the header too")
