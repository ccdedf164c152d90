"""The format of an input, decided by its head: prompts as text, JSON Lines, or something to convert first.

    head (64 KiB, of a stream the bytes that came with its first line) -> "text" | "jsonl" | InputError with a command

The error comes before any line is answered. Any line can be a prompt. So a table, an archive or a JSON document would
be answered line by line, if it were treated as text.
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
_CONTINUED = bytes(range(0x80, 0x100))
_WHOLE_LINE = re.compile(rb"\S[^\n]*\n")

# Formats without input lines: name, first bytes, and the command that prints the contents.
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
_PROMPTS = frozenset(("prompt", "prompt_token_ids", "messages", "body"))
# Column names in tables of prompts.
_COLUMNS = frozenset(
    "id prompt prompts text messages question questions query instruction input inputs output answer response "
    "completion label target source content custom_id system user context title".split()
)
_CELL = re.compile(r"[\w.\-/]+(?: [\w.\-/]+){0,5}")
_LOOKED_AT = 16  # lines below a header
_JSONL_NAMES = (".jsonl", ".ndjson", ".json")
_AS_TEXT = "--input-format text takes each line as a prompt"


def read_head(file: io.BufferedReader, *, stream: bool) -> tuple[bytes, BinaryIO]:
    """Return the first bytes of a file that was not read before, and a reader that starts with them again.

    Args:
        stream: do not wait for more than one line, because its writer may wait for the answer.
    """
    head = b""
    while len(head) < HEAD_BYTES and not (stream and _WHOLE_LINE.search(head)):
        piece = file.raw.read(HEAD_BYTES - len(head))
        if not piece:
            break
        head += piece
    return head, io.BufferedReader(_Rejoined(head, file), HEAD_BYTES)


class _Rejoined(io.RawIOBase):
    """A reader of the bytes that were read ahead, and then of all others."""

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
    """Return the format of all lines of an input.

    .txt is text, and .jsonl, .ndjson and .json are JSON Lines. If a stream has no such name, its lines decide. If a
    file has no such name, it is JSON Lines or is refused.

    Args:
        asked: the format that the user named. It decides instead of the name.

    Raises:
        InputError: the input is neither, or contradicts its name. The message shows what to do.
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
    """Return the lines that are not blank. The last one may be cut, so it is left out unless it is the only one."""
    whole, _, rest = head.rpartition(b"\n")
    if len(head) >= HEAD_BYTES:
        rest = rest.rstrip(_CONTINUED)  # part of a character
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
            raise InputError(f"{source} is {what}; write its rows as JSON Lines, such as " + '{"prompt": "..."}')
    for encoding, begins in _UNICODE:
        if begins.match(head):
            raise InputError(f"{source} is {encoding.upper()}: {_iconv(encoding, file)}")
    if 10 * head[:1024].count(0) > len(head[:1024]):
        raise InputError(f"{source} is binary data, and not lines of text or JSON")


def _refuse_legacy_encoding(source: str, file: str | None, lines: Sequence[bytes]) -> None:
    """Refuse a file in another encoding. A few damaged lines are legal, because only these lines get errors."""
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
    """Refuse JSON that spans lines, or whose lines are not requests."""
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
    """Return the JSON value at the start of a text, and its end position; (None, 0) without one."""
    try:
        return json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0


def _refuse_table(source: str, file: str | None, lines: Sequence[bytes]) -> None:
    """Refuse a table, whose header is a line of column names.

    Prompts have commas too, and may have such a name between them. So a header has only known names. Or it has one, no
    space next to a delimiter, and most lines below have at least the same number of cells.
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
