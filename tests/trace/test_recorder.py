from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from sarathi_pp.errors import InputError, MissingError, OutputError
from sarathi_pp.trace.events import Cut, Event, Returned, SendWait, Totals, TraceEnd, encode
from sarathi_pp.trace.recorder import MOST_WAITING, Recorder, read_trace, trace_name
from tests.machine import patient


def wait_for_lines(path: Path, count: int) -> list[Event]:
    give_up = time.monotonic() + patient(10)
    while len(events := list(read_trace(path))) < count and time.monotonic() < give_up:
        time.sleep(0.01)
    return events


def test_name() -> None:
    assert trace_name(0, 2) == "trace-00000-of-00002.jsonl"


def test_close_writes_everything_in_order(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    events: list[Event] = [Returned(index, index / 8) for index in range(1000)]
    with Recorder(path, flush_interval_s=60) as recorder:
        for event in events:
            recorder.record(event)
        assert path.stat().st_size == 0
    assert list(read_trace(path)) == events
    recorder.close()


def test_a_running_trace_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with Recorder(path, flush_interval_s=0.01) as recorder:
        recorder.record(Returned(0, 1.0))
        assert wait_for_lines(path, 1) == [Returned(0, 1.0)]
        recorder.record(Returned(1, 2.0))
        assert wait_for_lines(path, 2) == [Returned(0, 1.0), Returned(1, 2.0)]


def test_many_threads_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with Recorder(path, flush_interval_s=0.001) as recorder:

        def work(thread: int) -> None:
            for index in range(500):
                recorder.record(Returned(thread * 1000 + index, 0.0))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = [event.microbatch for event in read_trace(path) if isinstance(event, Returned)]
    for number in range(4):
        assert [i for i in found if i // 1000 == number] == [number * 1000 + i for i in range(500)]


def test_killed_process_leaves_a_readable_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    code = (
        "import pathlib, sys, time\n"
        "from sarathi_pp.trace.events import Returned\n"
        "from sarathi_pp.trace.recorder import Recorder\n"
        "recorder = Recorder(pathlib.Path(sys.argv[1]), flush_interval_s=0.01)\n"
        "index = 0\n"
        "while True:\n"
        "    recorder.record(Returned(index, 0.0))\n"
        "    index += 1\n"
        "    time.sleep(0.0005)\n"
    )
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], env=env)
    try:
        give_up = time.monotonic() + patient(30)
        while not path.exists() and time.monotonic() < give_up:
            time.sleep(0.01)
        wait_for_lines(path, 100)
    finally:
        process.kill()
        process.wait()
    events = list(read_trace(path))
    assert len(events) >= 100
    assert events == [Returned(index, 0.0) for index in range(len(events))]


def test_torn_last_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    whole: list[Event] = [Returned(0, 1.0), SendWait(1.0, 2.0)]
    text = "".join(encode(event) + "\n" for event in whole)
    for torn in ("", '{"e":"retu', encode(Returned(1, 2.0)), "\0" * 20):
        path.write_text(text + torn)
        assert list(read_trace(path)) == whole


def test_damage_elsewhere_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(encode(Returned(0, 1.0)) + '\n{"e":"retu\n' + encode(Returned(1, 2.0)) + "\n")
    with pytest.raises(InputError, match=r"t\.jsonl, line 2: not a line of JSON"):
        list(read_trace(path))


def test_missing_trace(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no trace at"):
        list(read_trace(tmp_path / "none.jsonl"))


def test_a_trace_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("precious\n")
    with pytest.raises(OutputError, match="cannot create the trace"):
        Recorder(path)
    assert path.read_text() == "precious\n"


def test_full_disk_is_reported_at_close_and_never_in_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(event: Event) -> NoReturn:
        raise OSError(28, "No space left on device")

    recorder = Recorder(tmp_path / "t.jsonl", flush_interval_s=0.005)
    monkeypatch.setattr("sarathi_pp.trace.recorder.encode", full)
    for index in range(100):
        recorder.record(Returned(index, 0.0))
    time.sleep(0.05)
    recorder.record(Returned(100, 0.0))
    with pytest.raises(OutputError, match="incomplete.*No space left"):
        recorder.close()


TOTALS = Totals(
    microbatches=5000,
    requests=1,
    completed=1,
    failed=0,
    prompt_tokens=1,
    output_tokens=5000,
    first_issue_s=0.0,
    last_result_s=1.0,
)


def test_a_file_has_a_largest_size_and_is_cut_there(tmp_path: Path) -> None:
    path, most_bytes = tmp_path / "t.jsonl", 10_000
    made = []

    def event(index: int) -> Event:
        made.append(index)
        return Returned(index, 1.0)

    with Recorder(path, flush_interval_s=60, most_bytes=most_bytes) as recorder:
        for index in range(5000):
            recorder.record(partial(event, index))
        recorder.record(TOTALS)
        recorder.record(TraceEnd(at_s=1.0))
    events = list(read_trace(path))
    count = len(events) - 3
    assert events == [*(Returned(index, 1.0) for index in range(count)), Cut("size"), TOTALS, TraceEnd(at_s=1.0)]
    assert len(made) == count + 1, "an event was made that nobody writes"
    kept_bytes = sum(len(encode(event)) + 1 for event in events[:-3])
    assert most_bytes - 100 < kept_bytes <= most_bytes


def test_where_the_disk_stands_still_the_queue_is_bounded_and_the_loss_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.jsonl"
    stalled, goes_on = threading.Event(), threading.Event()

    def encode_late(event: Event) -> str:
        stalled.set()
        assert goes_on.wait(patient(60))
        return encode(event)

    monkeypatch.setattr("sarathi_pp.trace.recorder.encode", encode_late)
    monkeypatch.setattr("sarathi_pp.trace.recorder._PATIENCE_S", 0.01)
    with Recorder(path, flush_interval_s=0.001) as recorder:
        recorder.record(Returned(0, 1.0))
        assert stalled.wait(patient(60))
        for index in range(1, 3 * MOST_WAITING):
            recorder.record(Returned(index, 1.0))
            assert len(recorder._events) <= MOST_WAITING + 1
        recorder.record(TOTALS)
        goes_on.set()
        give_up = time.monotonic() + patient(60)
        while recorder._events and time.monotonic() < give_up:
            time.sleep(0.01)
        recorder.record(Returned(4 * MOST_WAITING, 1.0))  # with a gap before it, it would be useless
    events = list(read_trace(path))
    assert events[-2:] == [Cut("queue"), TOTALS]
    assert events[:-2] == [Returned(index, 1.0) for index in range(len(events) - 2)]
    assert len(events) > MOST_WAITING


def test_a_writer_that_is_behind_is_waited_for_and_nothing_is_lost(tmp_path: Path) -> None:
    path, count = tmp_path / "t.jsonl", 3 * MOST_WAITING
    with Recorder(path, flush_interval_s=0.5) as recorder:
        for index in range(count):
            recorder.record(Returned(index, 1.0))
            assert len(recorder._events) <= MOST_WAITING
    assert list(read_trace(path)) == [Returned(index, 1.0) for index in range(count)]


def test_the_more_events_wait_the_fewer_pauses_the_writer_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pause gives a busy thread the interpreter for 5 ms. That is too long at thousands of events per second."""

    def pauses(count: int) -> int:
        recorder = Recorder(tmp_path / f"{count}.jsonl", flush_interval_s=60)
        wait, waits = recorder._closing.wait, []
        monkeypatch.setattr(recorder._closing, "wait", lambda seconds: waits.append(seconds) or wait(seconds))
        for index in range(count):
            recorder.record(partial(Returned, index, 1.0))
        recorder.close()
        return len(waits)

    assert pauses(10) == 10
    assert pauses(4000) < 1000


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    yield
    names = [thread.name for thread in threading.enumerate()]
    assert "trace-writer" not in names
