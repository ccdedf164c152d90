"""A journal over the files of an earlier start: nothing lost, nothing answered twice, no foreign file touched."""

import fcntl
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_pp.errors import ConfigError, InputError, OutputError
from sarathi_pp.inputs.done import Done
from sarathi_pp.outputs.journal import Journal, LateJournal
from sarathi_pp.outputs.output_line import encode_line
from tests.machine import patient
from tests.thinning import examples


def answer(id: object) -> bytes:
    return encode_line({"id": id, "text": "a\u2028b", "token_ids": [1, 2], "finish_reason": "stop"})


def openai(id: object, line: int, code: str | None = None) -> bytes:
    error = {"code": code, "message": "m"} if code else None
    return encode_line({"id": f"batch_req_{line}", "custom_id": id, "response": None, "error": error})


def failed(id: object, code: str = "invalid_json") -> bytes:
    return encode_line({"id": id, "error": {"code": code, "message": "line 3: no"}})


def resumed(path: Path, **options: bool) -> Done:
    journal = Journal.open(str(path), "resume", **options)
    journal.close()
    return journal.done


def test_what_is_there_is_done_and_goes_on(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(answer("a") + failed(["b", 1]) + openai("c", 3) + openai("a", 4, "duplicate_id"))
    journal = Journal.open(str(path), "resume")
    done = journal.done
    assert (done.num_rows, done.num_errors) == (4, 2)
    assert done.take("a", first=True) and not done.take("a", first=True)
    assert done.take("a", first=False) and not done.take("a", first=False)
    assert done.take(["b", 1], first=True) and done.take("c", first=True)
    assert not done.take("batch_req_3", first=True) and not done.take("d", first=True)
    before = path.read_bytes()
    journal.append(answer("d"))
    journal.close()
    assert path.read_bytes() == before + answer("d")


def test_ids_are_told_apart_by_type(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"".join(map(answer, [1, "1", True, 1.5])))
    done = resumed(path)
    assert [done.take(id, first=True) for id in (1.0, False, 1, "1", True, 1.5)] == [
        False,
        False,
        True,
        True,
        True,
        True,
    ]


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), ids=st.lists(st.text() | st.integers(), unique=True, min_size=1, max_size=4))
def test_a_kill_at_any_byte_loses_at_most_the_torn_line(data, ids, tmp_path_factory):
    lines = [failed(id) if data.draw(st.booleans()) else answer(id) for id in ids]
    whole = b"".join(lines)
    cut = data.draw(st.integers(0, len(whole)))
    path = tmp_path_factory.mktemp("journal") / "out.jsonl"
    path.write_bytes(whole[:cut])
    done = resumed(path)
    kept = whole[:cut].count(b"\n")
    assert path.read_bytes() == b"".join(lines[:kept])
    assert [done.take(id, first=True) for id in ids] == [number < kept for number in range(len(ids))]


def test_zeros_that_a_crash_has_left_are_no_line(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(answer("a") + bytes(700))
    assert resumed(path).num_rows == 1
    assert path.read_bytes() == answer("a")


@pytest.mark.parametrize(
    "content",
    [b"a letter\n", b"a letter without an end", b'{"id": 1\n', b"[1]\n", b'{"text": "no id"}\n', b"\xff\n", b"\n{}\n"],
)
@pytest.mark.parametrize("before", [b"", answer("a")])
def test_what_no_run_wrote_is_left_alone(content, before, tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(before + content)
    with pytest.raises(InputError, match="cannot be resumed"):
        Journal.open(str(path), "resume")
    assert path.read_bytes() == before + content


def test_two_answers_for_one_id_are_not_gone_on_with(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(answer("a") + answer("a"))
    with pytest.raises(InputError, match="line 2 .* an earlier line answers the same id"):
        Journal.open(str(path), "resume")


def test_errors_are_run_again_where_that_is_asked_for(tmp_path):
    """A row with an earlier row's id stays an error in every run."""
    path = tmp_path / "out.jsonl"
    twice = failed("a", "duplicate_id")
    path.write_bytes(answer("a") + failed("b") + twice + answer("c") + b'{"id":"d')
    path.chmod(0o640)
    journal = Journal.open(str(path), "resume", retry_errors=True)
    done = journal.done
    assert (done.num_rows, done.num_errors) == (3, 1)
    assert not done.take("b", first=True) and done.take("a", first=False)
    journal.append(answer("b"))
    with pytest.raises(ConfigError, match="another run"):  # the new file is locked like the old one
        Journal.open(str(path), "resume")
    journal.close()
    assert path.read_bytes() == answer("a") + twice + answer("c") + answer("b")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_what_a_kill_leaves_of_that_is_removed_and_nothing_else(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"")
    left = tmp_path / "out.jsonl.0123456789abcdef.part"
    others = [tmp_path / name for name in ("out.jsonl.part", "out.jsonl.0123.part", f"x{left.name}", f"{left.name}.gz")]
    for file in (left, *others):
        file.write_bytes(b"half a line")
    Journal.open(str(path), "resume").close()
    assert sorted(tmp_path.iterdir()) == sorted([path, *others])


def test_a_link_to_an_output_stays_one(tmp_path):
    path, link = tmp_path / "out.jsonl", tmp_path / "link"
    path.write_bytes(answer("a") + failed("b"))
    link.symlink_to(path)
    assert resumed(link, retry_errors=True).num_rows == 1
    assert link.is_symlink() and path.read_bytes() == answer("a")


def test_a_file_that_was_replaced_meanwhile_is_not_written(tmp_path, monkeypatch):
    """Another run has just removed errors from it, so the open file is no longer the output."""
    path = tmp_path / "out.jsonl"
    path.write_bytes(answer("a"))

    def flock_late(fd: int, how: int) -> None:
        other = tmp_path / "other"
        other.write_bytes(answer("a"))
        other.replace(path)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    with pytest.raises(ConfigError, match="another run"):
        Journal.open(str(path), "resume")


def test_without_errors_nothing_is_copied(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(answer("a"))
    inode = path.stat().st_ino
    assert resumed(path, retry_errors=True).num_rows == 1
    assert path.stat().st_ino == inode


def test_a_full_disk_while_errors_are_taken_out_leaves_all_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    path.write_bytes(answer("a") + failed("b"))

    def full(old: str, new: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutputError, match="No space left"):
        Journal.open(str(path), "resume", retry_errors=True)
    assert path.read_bytes() == answer("a") + failed("b")
    assert os.listdir(tmp_path) == ["out.jsonl"]
    assert resumed(path).num_rows == 2  # and it is not locked


def test_a_new_journal_answers_nothing(tmp_path):
    path = tmp_path / "out.jsonl"
    assert resumed(path).num_rows == 0
    path.write_bytes(answer("a"))
    with pytest.raises(ConfigError, match="--resume, or replace"):
        Journal.open(str(path))
    Journal.open(str(path), "replace").close()
    assert path.read_bytes() == b""


def test_an_answer_is_what_a_sink_writes(tmp_path):
    """The tests above make lines of their own."""
    for line in (answer("x"), failed("x"), openai("x", 1)):
        assert line.startswith(b'{"id":') and json.loads(line)


# Two starts of one job on hosts that do not see each other's locks; each takes one action per line that it reads.
APART = """
import errno, fcntl, sys
from sarathi_pp.errors import PeerLostError
from sarathi_pp.outputs.journal import Journal

def no_locks(fd, how):
    raise OSError(errno.ENOLCK, "no locks")

fcntl.flock = no_locks
journal = None
for line in sys.stdin:
    what, *rows = line.split()
    try:
        if what == "open":
            journal = Journal.open(sys.argv[1], "resume")
            print("done", *(row for row in map(str, range(12)) if journal.done.take(row, first=True)), flush=True)
        else:
            journal.append("".join('{"id":"%s","text":"t"}\\n' % row for row in rows).encode())
            print("appended", flush=True)
    except PeerLostError as error:
        print(error, flush=True)
journal.close()
"""


class Apart:
    def __init__(self, path: Path) -> None:
        command = (sys.executable, "-c", APART, str(path))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, *words: str) -> str:
        assert self._process.stdin and self._process.stdout
        print(*words, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().rstrip()

    def end(self) -> None:
        self._process.communicate(timeout=patient(60))
        assert self._process.returncode == 0


def test_without_locks_an_earlier_start_writes_nothing_more(tmp_path):
    """It was cut off from the others, and does not know that another host has resumed its job."""
    path = tmp_path / "out.jsonl"
    old, new, newest = Apart(path), Apart(path), Apart(path)
    assert old.do("open") == "done"
    assert old.do("append", "0", "1") == "appended"
    with path.open("ab") as file:
        file.write(b'{"id":"2","te')  # it was in the middle of a line
    assert new.do("open") == "done 0 1"
    assert "was taken over by a later start" in old.do("append", "2", "3")
    assert new.do("append", "2", "3") == "appended"
    assert newest.do("open") == "done 0 1 2 3"
    assert "was taken over" in new.do("append", "4") and "was taken over" in old.do("append", "4")
    new.end()
    assert newest.do("append", "4", "5") == "appended"
    newest.end()
    assert "was taken over" in old.do("append", "5")
    old.end()
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == list("012345")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_folder_that_takes_no_file_needs_no_fence(tmp_path, monkeypatch):
    monkeypatch.setattr("sarathi_pp.outputs.output_fence.os.replace", Mock(side_effect=PermissionError))
    journal = Journal.open(str(tmp_path / "out.jsonl"))
    journal.append(answer("a"))
    journal.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_lock_of_a_lost_host_is_waited_for(tmp_path):
    """NFS keeps such a lock until its lease is over."""
    path = tmp_path / "out.jsonl"
    held = Journal.open(str(path))
    held.append(answer("a"))
    with pytest.raises(ConfigError, match="being written by another run"):
        Journal.open(str(path), "resume", patience_s=0.0)
    waits = Mock()
    waits.side_effect = lambda: held.close() if waits.call_count == 2 else None
    journal = Journal.open(str(path), "resume", patience_s=60.0, wait=waits)
    journal.close()
    assert waits.call_count == 2 and journal.done.num_rows == 1


def test_a_late_journal_is_opened_once_for_its_first_line(tmp_path):
    opened = []

    def begin():
        opened.append(Journal.open(str(tmp_path / "out.jsonl")))
        return opened[-1]

    late = LateJournal("out.jsonl", Mock(open=begin))
    late.append(b"")
    late.sync()
    assert not opened and not (tmp_path / "out.jsonl").exists()
    late.append(b"{}\n")
    assert late.open() is opened[0] and len(opened) == 1
    late.close()
    assert (tmp_path / "out.jsonl").read_bytes() == b"{}\n"


def test_a_late_journal_that_cannot_be_opened_is_not_tried_again(tmp_path):
    tries = []

    def begin():
        tries.append(1)
        raise ConfigError("another run has it")

    late = LateJournal("out.jsonl", Mock(open=begin))
    for call in (lambda: late.append(b"{}\n"), late.open):
        with pytest.raises(ConfigError, match="another run has it"):
            call()
    late.close()
    assert len(tries) == 1
