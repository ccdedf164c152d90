import fcntl
import json
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from sarathi_pp.core.request import Completion, Request
from sarathi_pp.errors import ConfigError, OutputError, PeerLostError, RowError
from sarathi_pp.inputs.row import Form, Row
from sarathi_pp.outputs.journal import Journal, Start, read_done
from sarathi_pp.outputs.output_line import encode_line
from sarathi_pp.outputs.sink import FileSink, OutputClosedError, check_output
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.text.tokenizer import Tokenizer
from sarathi_pp.trace.clock import ManualClock, SystemClock
from tests.machine import patient


class Letters:
    """The part of a tokenizer that the sink needs: id n is the n-th letter."""

    vocab_size = 26
    all_special_ids = ()
    added_tokens_decoder: dict[int, object] = {}
    bos_token_id = None
    is_fast = False

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str, **kwargs: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") for letter in text]}

    def convert_tokens_to_ids(self, text: str) -> None:
        return None

    def decode(self, ids: list[int], **kwargs: object) -> str:
        if ids[2:] == [25]:  # after the prompt
            raise RuntimeError("the tokenizer is broken")
        return "".join(chr(ord("a") + token_id) for token_id in ids)


LETTERS = Tokenizer(Letters(), vocab_size=26, eos_token_ids=[0])


def ended(
    line: int = 1, name: object = "r", form: Form = "own", ids: tuple[int, ...] = (1, 2, 0)
) -> tuple[Row, Completion]:
    request = Request(line - 1, (5, 6), SamplingParams(stop=("xyz",), seed=0))
    return Row(line, name, form, request=request), Completion(request, ids, "stop")


def opened(path: object, **kwargs: object) -> FileSink:
    """Open a sink. start: as Journal.open takes it; the other arguments are the sink's."""
    journal = Journal.open(str(path), kwargs.pop("start", "new"))
    return FileSink(journal, **{"tokenizer": LETTERS, "clock": SystemClock(), "model": "tiny", **kwargs})


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_own_lines(tmp_path):
    sink = opened(tmp_path / "out.jsonl")
    row, completion = ended(name=["any", 1])
    sink.finish(row, completion, {"ttft_s": 0.5})
    sink.fail(row, RowError("empty_prompt", "nothing"))
    sink.close()
    assert records(tmp_path / "out.jsonl") == [
        {
            "id": ["any", 1],
            "text": "bc",
            "token_ids": [1, 2, 0],
            "finish_reason": "stop",
            "num_prompt_tokens": 2,
            "num_output_tokens": 3,
            "metrics": {"ttft_s": 0.5},
        },
        {"id": ["any", 1], "error": {"code": "empty_prompt", "message": "nothing"}},
    ]
    assert (sink.num_finished, sink.num_failed) == (1, 1)


@pytest.mark.parametrize(
    ("form", "kind", "answer"),
    [
        ("openai-chat", "chat.completion", {"message": {"role": "assistant", "content": "bc"}}),
        ("openai-completion", "text_completion", {"text": "bc"}),
    ],
)
def test_openai_lines(tmp_path, form, kind, answer):
    sink = opened(tmp_path / "out.jsonl", clock=ManualClock(wall_offset_s=1700.9))
    row, completion = ended(line=4, name="mine", form=form)
    sink.finish(row, completion, {})
    sink.fail(row, RowError("unsupported_parameter", "n"))
    sink.close()
    good, bad = records(tmp_path / "out.jsonl")
    body = good["response"].pop("body")
    assert good == {
        "id": "batch_req_4",
        "custom_id": "mine",
        "response": {"status_code": 200, "request_id": "req_4"},
        "error": None,
    }
    assert body.pop("id")
    assert body == {
        "object": kind,
        "created": 1700,
        "model": "tiny",
        "choices": [{"index": 0, **answer, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert bad == {
        "id": "batch_req_4",
        "custom_id": "mine",
        "response": None,
        "error": {"code": "unsupported_parameter", "message": "n"},
    }


OWN = {"id": 0, "text": "mine", "error": None, "custom_id": 1, "metrics": [1.0], "\ud800": "\xe4"}


@pytest.mark.parametrize("form", ["own", "openai-chat", "openai-completion"])
def test_keys_of_the_users_own_come_back_beside_an_answer_and_an_error(form, tmp_path):
    """The keys may have any name. All are under one key, and the line otherwise equals that of a row without them."""
    extra = json.dumps(OWN).encode()
    for name, given in (("with", extra), ("without", b"")):
        sink = opened(tmp_path / name, clock=ManualClock())
        row, completion = ended(name="a", form=form)
        sink.finish(replace(row, extra=given), completion, {})
        sink.fail(Row(2, "b", form, error=RowError("c", "m"), extra=given), RowError("c", "m"))
        sink.close()
    found, plain = records(tmp_path / "with"), records(tmp_path / "without")
    assert [line.pop("extra") for line in found] == [OWN, OWN]
    assert found == plain
    assert read_done(str(tmp_path / "with")).num_rows == 2


def test_text_is_cut_at_the_stop_string_and_null_without_a_tokenizer(tmp_path):
    ids = (1, 23, 24, 25, 3)
    for name, tokenizer, text in (("a", LETTERS, "b"), ("b", Tokenizer(None, vocab_size=26), None)):
        sink = opened(tmp_path / name, tokenizer=tokenizer)
        sink.finish(*ended(ids=ids), {})
        sink.close()
        (record,) = records(tmp_path / name)
        assert (record["text"], record["token_ids"]) == (text, list(ids))


def test_lines_are_utf8_and_an_id_of_half_a_surrogate_pair_is_escaped():
    assert encode_line({"text": "\u65e5\u672c"}) == '{"text":"\u65e5\u672c"}\n'.encode()
    assert json.loads(encode_line({"id": "\ud800", "text": "\u65e5\u2028\u672c"})) == {
        "id": "\ud800",
        "text": "\u65e5\u2028\u672c",
    }
    assert encode_line({"text": "a\nb"}).count(b"\n") == 1


def test_what_is_refused_before_anything_runs(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("kept")
    output.write_text("kept")
    (tmp_path / "link").symlink_to(source)

    def refused(kind: type[Exception], path: object, words: str, start: Start = "replace") -> None:
        with pytest.raises(kind, match=words):
            check_output(str(path), str(source), start)

    refused(ConfigError, tmp_path, "directory")
    refused(ConfigError, source, "same file as --input")
    refused(ConfigError, tmp_path / "link", "same file as --input")
    refused(ConfigError, output, "--overwrite", "new")
    refused(ConfigError, "-", "needs an --output file", "resume")
    refused(ConfigError, "/dev/null", "is not a file", "resume")
    refused(OutputError, tmp_path / "no" / "out", "does not exist; make it first")
    for path in ("-", "/dev/null", str(tmp_path / "new"), str(output)):
        check_output(path, "-", "replace" if path == str(output) else "new")
    for path in (tmp_path / "new", output):
        check_output(str(path), "-", "resume")
    assert source.read_text() == output.read_text() == "kept"
    assert not (tmp_path / "new").exists()


def test_standard_input_from_the_output_file_is_seen(tmp_path, monkeypatch):
    path = tmp_path / "both"
    path.write_text("kept")
    with path.open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        with pytest.raises(ConfigError, match="same file"):
            check_output(str(path), "-", "replace")


def test_an_output_that_is_not_writable(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OutputError, match="cannot be written"):
        check_output(str(tmp_path / "new"), "-", "new")


def test_a_new_file_is_private_and_an_old_one_is_only_replaced_on_request(tmp_path):
    path = tmp_path / "out.jsonl"
    opened(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("old\n")
    with pytest.raises(ConfigError, match="--overwrite"):
        opened(path)
    assert path.read_text() == "old\n"
    sink = opened(path, start="replace")
    sink.finish(*ended(), {})
    sink.close()
    assert len(records(path)) == 1


def test_two_runs_do_not_write_one_file(tmp_path):
    path = tmp_path / "out.jsonl"
    first = opened(path)
    first.finish(*ended(), {})
    with pytest.raises(ConfigError, match="another run"):
        opened(path, start="replace")
    first.close()
    assert len(records(path)) == 1
    opened(path, start="replace").close()


def test_a_file_system_without_locks_goes_without(tmp_path, monkeypatch):
    def unsupported(fd: int, how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    opened(tmp_path / "out").close()


def test_rows_are_on_disk_soon_without_more_rows(tmp_path, monkeypatch):
    synced = threading.Event()
    fsync = os.fsync

    def seen(fd: int) -> None:
        fsync(fd)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            synced.set()

    monkeypatch.setattr(os, "fsync", seen)
    sink = opened(tmp_path / "out")
    sink.finish(*ended(), {})
    assert synced.wait(patient(10))
    assert len(records(tmp_path / "out")) == 1
    sink.close()


def test_syncs_are_shared_by_the_rows_of_a_group(tmp_path, monkeypatch):
    syncs = []
    fsync = os.fsync
    sink = opened(tmp_path / "out", clock=ManualClock())
    monkeypatch.setattr(os, "fsync", lambda fd: syncs.append(fsync(fd)))
    for line in range(1, 1001):
        sink.finish(*ended(line, line), {})
    sink.close()
    assert [record["id"] for record in records(tmp_path / "out")] == list(range(1, 1001))
    # Time does not move on this clock, so only full groups and the end sync.
    assert 1 <= len(syncs) <= 4
    assert sink.num_finished == 1000


def test_a_trickle_of_rows_syncs_once_a_group(tmp_path, monkeypatch):
    syncs, written = [], threading.Semaphore(0)
    fsync, write = os.fsync, os.write
    sink = opened(tmp_path / "out", clock=ManualClock())

    def counted(fd: int, data: bytes) -> int:
        written.release()
        return write(fd, data)

    monkeypatch.setattr(os, "fsync", lambda fd: syncs.append(fsync(fd)))
    monkeypatch.setattr(os, "write", counted)
    for line in range(1, 301):
        sink.finish(*ended(line), {})
        assert written.acquire(timeout=patient(10))
    assert len(syncs) == 1
    sink.close()
    assert len(syncs) == 2


def test_a_failure_frees_a_caller_that_waits_for_room(tmp_path, monkeypatch):
    failing = threading.Event()

    def fail(fd: int, data: bytes) -> int:
        failing.wait(patient(10))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    sink = opened(tmp_path / "out")
    timer = threading.Timer(0.1, failing.set)
    timer.start()
    with pytest.raises(OutputError):
        for line in range(1, 5000):
            sink.finish(*ended(line), {})
    sink.close()
    timer.join()


def test_a_full_disk_surfaces_and_nobody_hangs():
    sink = opened("/dev/full")
    with pytest.raises(OutputError, match=r"/dev/full.*No space left"):
        for line in range(1, 5000):
            sink.finish(*ended(line), {})
        sink.close()
    sink.close()
    assert sink.num_finished == 0


def test_a_write_that_stops_half_way_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "out"
    sink = opened(path)
    write, room = os.write, [250]

    def limited(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = write(fd, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", limited)
    for line in range(1, 9):
        sink.finish(*ended(line, line), {})
    with pytest.raises(OutputError, match="No space left"):
        sink.close()
    assert path.read_bytes().endswith(b"\n")
    assert [record["id"] for record in records(path)] == [1, 2]


def test_a_reader_that_goes_away_is_a_quiet_error(monkeypatch):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        sink = opened("-")
        sink.finish(*ended(), {})
        with pytest.raises(OutputClosedError):
            sink.close()


def test_standard_output_gets_the_same_lines(monkeypatch, tmp_path):
    with (tmp_path / "out").open("w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        sink = opened("-")
        sink.finish(*ended(), {})
        sink.close()
    assert records(tmp_path / "out")[0]["text"] == "bc"


def test_an_error_of_the_writer_thread_is_raised_by_the_caller(tmp_path):
    sink = opened(tmp_path / "out")
    sink.finish(*ended(ids=(25,)), {})
    with pytest.raises(RuntimeError, match="the tokenizer is broken"):
        sink.close()
    sink.close()


def test_what_a_later_start_has_taken_over_is_a_lost_peer_and_no_full_disk(tmp_path, monkeypatch):
    """It ends with 75, which replaces no exit code of the later start."""
    monkeypatch.setattr("fcntl.flock", lambda descriptor, how: None)  # it is on another host
    path = tmp_path / "out.jsonl"
    earlier = opened(path)
    later = opened(path, start="resume")
    earlier.finish(*ended(), {})
    with pytest.raises(PeerLostError, match="taken over by a later start"):
        earlier.close()
    later.finish(*ended(), {})
    later.close()
    assert len(records(path)) == 1
