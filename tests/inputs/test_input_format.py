"""The input format, chosen by name and first bytes; JSON is never taken for prose."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import shlex
import sqlite3
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.errors import InputError
from sarathi_pp.inputs.input_format import HEAD_BYTES, choose_format, read_head
from tests.machine import patient

ROWS = [{"prompt": "hi", "id": 1}, {"prompt": "ho", "id": 2}, {"prompt": "h\u00e9", "id": 3}]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
PROSE = b"Tell me, please, about rivers.\nAnd about lakes.\n"
NAMES = ["a.txt", "a.jsonl", "a.json", "a", "a.csv", "-"]


def chosen(name: str, head: bytes, asked: str = "auto") -> str:
    return choose_format(name, head, asked, stream=name == "-")  # type: ignore[arg-type]


def refused(name: str, head: bytes, asked: str = "auto") -> str:
    with pytest.raises(InputError) as caught:
        chosen(name, head, asked)
    assert str(caught.value).startswith(f"--input {name} ")
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "head", "format"),
    [
        ("a.txt", PROSE, "text"),
        ("a.TXT", b"\n\n" + PROSE, "text"),
        ("a.txt", b"{name}, greet the guests\n", "text"),
        ("a.txt", b'"Hello," he said.\n', "text"),
        ("a.txt", b"42\n43\n", "text"),
        ("a.txt", PROSE + b'{"a": 1}\n', "text"),
        ("a.JSONL", PROSE, "jsonl"),
        ("a.json", JSONL, "jsonl"),
        ("a.ndjson", b"[1, 2]\n" + JSONL, "jsonl"),
        ("a.jsonl", b'{"prompt": "' + b"x" * 2 * HEAD_BYTES, "jsonl"),
        ("a", JSONL, "jsonl"),
        ("a", b"\xef\xbb\xbf\r\n  " + JSONL, "jsonl"),
        ("a", b"# made by hand\n" + JSONL, "jsonl"),
        ("a", b"{broken\n" + JSONL, "jsonl"),
        ("-", JSONL, "jsonl"),
        ("-", b"\n// a comment\n" + JSONL, "jsonl"),
        ("-", b'[{"role": "user", "content": "hi"}]\n' * 2, "jsonl"),
        ("-", PROSE, "text"),
        ("-", b"[INST] Hello, you. [/INST]\n", "text"),
        ("-", b"17+26=\n", "text"),
        ("-", b"name, please: Ann, then the title\n", "text"),
        ("-", b"caf\xc3\xa9\n", "text"),
        ("-", b"x" * (HEAD_BYTES - 1) + b"\xc3", "text"),
        ("-", b"", "jsonl"),
    ],
)
def test_the_format_is_that_of_the_whole_file(name, head, format):
    assert chosen(name, head[:HEAD_BYTES]) == format


def archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("rows.jsonl", JSONL)
    return file.getvalue()


def database(folder: Path) -> bytes:
    with sqlite3.connect(folder / "made.db") as made:
        made.execute("create table rows (prompt text)")
    made.close()
    return (folder / "made.db").read_bytes()


@pytest.mark.parametrize("asked", ["auto", "text", "jsonl"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_text_is_named_whatever_its_name(name, asked, tmp_path):
    for made, words in (
        (gzip.compress(JSONL, mtime=0), "gzip-compressed: |zcat"),
        (bz2.compress(JSONL), "bzip2-compressed: |bzcat"),
        (lzma.compress(JSONL), "xz-compressed: |xzcat"),
        (b"\x28\xb5\x2f\xfd\x24\x00", "zstd-compressed: |zstdcat"),
        (archive(), "a zip archive: |unzip -p"),
        (database(tmp_path), "an SQLite database|JSON Lines"),
        (pickle.dumps(ROWS), "a Python pickle|JSON Lines"),
        (b"PAR1\x15\x04\x15\x00\x00\x01\x02PAR1", "a Parquet file|JSON Lines"),
        (b"ARROW1\x00\x00\xff\xff\xff\xff", "an Arrow file|JSON Lines"),
        (b"\x93NUMPY\x01\x00v\x00{'descr'", "a numpy array|JSON Lines"),
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "a PDF document|JSON Lines"),
        (bytes(range(8)) * 99, "binary data|with lines of text"),
        *(("hello\nworld\n".encode(f"utf-{width}"), f"UTF-{width}: |iconv -f utf-{width}") for width in (16, 32)),
        *(("hello\n".encode(f"utf-16-{end}"), f"UTF-16{end.upper()}: |iconv -f utf-16{end}") for end in ("le", "be")),
        (b"caf\xe9\n" * 3, "not UTF-8|iconv -f latin1 -t utf-8"),
    ):
        said = refused(name, made, asked)
        assert all(word in said for word in words.split("|")), (words, said)
        assert (f"{name} |" in said) == ("|" in said and name != "-"), said


DOCUMENTS = [
    (json.dumps(ROWS).encode(), "a JSON array", "jq -c '.[]'"),
    (json.dumps(ROWS, indent=2).encode(), "a JSON array", "jq -c '.[]'"),
    (json.dumps(ROWS * 9999).encode(), "a JSON array", "jq -c '.[]'"),
    (json.dumps(["hi", "ho"]).encode(), "a JSON array", "jq -c '.[]'"),
    (b"\n[\n]\n", "a JSON array", "jq -c '.[]'"),
    (json.dumps({"rows": ROWS}, indent=1).encode(), "JSON over several lines", "jq -c ."),
    (json.dumps({"rows": ROWS * 9999}, indent=1).encode(), "JSON over several lines", "jq -c ."),
    (b'"hi"\n"ho"\n', "JSON strings", "jq -c '{prompt: .}'"),
    (b'{"id": 1, "text": "a", "token_ids": [3], "finish_reason": "stop"}\n', "answers of a run", "file of prompts"),
    (b'{"id": 1, "error": {"code": "x"}}\n', "answers of a run", "file of prompts"),
    (b'{"id": "b", "custom_id": 1, "response": null, "error": {}}\n', "answers of a run", "file of prompts"),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("made", "what", "remedy"), DOCUMENTS)
def test_json_that_is_not_lines_is_named_with_the_way_to_them(made, what, remedy, name):
    for asked in ("auto", "jsonl"):
        said = refused(name, made[:HEAD_BYTES], asked)
        assert what in said and remedy in said, said


@pytest.mark.parametrize("name", ["a.csv", "a", "-", "a.txt", "a.tsv"])
@pytest.mark.parametrize(("between", "kind"), [(",", "CSV"), ("\t", "TSV"), (";", "a table with columns between ';'")])
def test_a_table_is_named_with_the_way_to_rows(between, kind, name, tmp_path):
    table = between.join(("id", "Prompt", "split")) + "\n" + between.join(("1", '"a, b"', "x")) + "\n"
    said = refused(name, table.encode())
    assert f"is {kind}: " in said and "--input-format text" in said
    assert chosen(name, table.encode(), "text") == "text"
    command = said.partition("python -c ")[2].partition(". --input-format")[0].partition(" > ")[0].partition(" < ")[0]
    program = shlex.split(command)[0]
    done = subprocess.run((sys.executable, "-c", program), input=table, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"id": "1", "Prompt": "a, b", "split": "x"}


def test_a_file_that_says_nothing_of_its_lines_is_asked_about():
    for name in ("prompts", "prompts.md"):
        assert "--input-format text takes each line as a prompt" in refused(name, PROSE)
        assert chosen(name, PROSE, "text") == "text"
    assert "is CSV" in refused("a.csv", b"one, two\nthree\n")


def test_rows_in_a_file_that_is_named_as_text_are_no_prompts():
    assert "--input-format jsonl" in refused("a.txt", b"# a comment\n" + JSONL)
    assert chosen("a.txt", JSONL, "jsonl") == "jsonl" and chosen("a.txt", JSONL, "text") == "text"


@pytest.mark.parametrize(
    "prompts",
    [
        b"Yes or no, answer\n",
        b"Context, please\n",
        b"Title; subtitle\n",
        b"Name, title, and more\nfoo, bar\n",
        b"Yes or no, answer\nTrue or false, please\nNow or later, answer\n",
        b"Title; subtitle\nFoo; bar\n",
        b"Answer, briefly\nSay it\nSing it\n",
        b"Context, please\nSo, what\nNo, thanks\n",
    ],
)
def test_prompts_with_commas_are_no_table(prompts):
    assert chosen("a.txt", prompts) == "text"


@pytest.mark.parametrize(
    "table",
    [
        b"id,prompt,category,difficulty,lang\n1,hi,math,1,en\n",
        b"prompt,expected,other\n1+1,2,x\n2+2,4,y\n",
        b"question,level,type\na,b,c\n",
        b'question,level\n"why, and\nhow?",1\nx,2\ny,3\n',
        b"text|score\na|1\nb|2\n",
        b"Prompt,Expected Answer\n1+1,2\n2+2,4\n",
        b"id,prompt,expected answer\n1,a,b\n",
        b"Question,Correct answer\na,b\n",
        b"input,max_tokens\nhi,5\n",
        b'"id","prompt"\n"1","a, b"\n',
    ],
)
def test_a_table_with_columns_of_its_own_is_one(table):
    for name in ("a.txt", "a"):
        with pytest.raises(InputError, match="is CSV|is a table"):
            choose_format(name, table)
    with pytest.raises(InputError, match="is CSV|is a table"):
        choose_format("-", table, stream=True)


def test_two_documents_in_the_first_line_are_that_lines_error_alone():
    assert chosen("a.jsonl", b'{"prompt":"a"} {"prompt":"b"}\n{"prompt":"c"}\n') == "jsonl"


def test_a_few_lines_that_are_not_utf8_cost_themselves_alone():
    assert chosen("a.jsonl", JSONL + b'{"prompt": "\xff"}\n') == "jsonl"
    assert chosen("a.txt", b"caf\xe9\none\ntwo\n") == "text"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(st.dictionaries(st.text(max_size=6), json_values, max_size=4) | st.lists(json_values), min_size=1),
    st.sampled_from([None, 1]),
    st.sampled_from(NAMES),
    st.sampled_from([b"", b"\n \n", b"\xef\xbb\xbf", b"# comment\n"]),
)
def test_no_json_is_ever_prose(values, indent, name, before):
    lines = before + "".join(json.dumps(value, indent=indent) + "\n" for value in values).encode()
    document = before + json.dumps(values, indent=indent).encode() + b"\n"
    # A comment before a document of several lines leaves no line of JSON. Then only a name can decide the format.
    for head in (lines, document) if before != b"# comment\n" or indent is None else ():
        try:
            assert chosen(name, head[:HEAD_BYTES]) == "jsonl"
        except InputError:
            continue


@given(st.binary(max_size=300), st.sampled_from(NAMES), st.sampled_from(["auto", "text", "jsonl"]))
def test_any_bytes_are_lines_or_an_input_error(head, name, asked):
    try:
        assert chosen(name, head, asked) in ("text", "jsonl")
    except InputError as error:
        assert name in str(error)


@pytest.mark.parametrize("size", [0, 1, 100, HEAD_BYTES - 1, HEAD_BYTES, 3 * HEAD_BYTES + 5])
def test_reading_ahead_loses_nothing(size, tmp_path):
    data = (b"line %d\n" * (size // 7 + 1))[:size]
    (tmp_path / "file").write_bytes(data)
    for stream in (False, True):
        with (tmp_path / "file").open("rb") as file:
            head, whole = read_head(file, stream=stream)
            assert data.startswith(head) and whole.read() == data


def test_a_stream_is_decided_on_its_first_line_while_its_writer_waits():
    reader, writer = os.pipe()
    received = threading.Event()

    def write() -> None:
        for piece in (b"\n", b'{"pro', b'mpt": "a"}\n{"pr'):
            os.write(writer, piece)
        assert received.wait(patient(30))
        os.write(writer, b'ompt": "b"}\n')
        os.close(writer)

    thread = threading.Thread(target=write)
    thread.start()
    with open(reader, "rb") as file:
        head, whole = read_head(file, stream=True)
        assert chosen("-", head) == "jsonl" and head.endswith(b'"a"}\n{"pr')
        assert whole.readline() + whole.readline() == b'\n{"prompt": "a"}\n'
        received.set()
        assert whole.read() == b'{"prompt": "b"}\n'
    thread.join()
