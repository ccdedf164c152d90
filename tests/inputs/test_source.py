import errno
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.prefix_order import PrefixOrder
from sarathi_pp.core.request import Request
from sarathi_pp.errors import InputError, MissingError, RowError
from sarathi_pp.inputs.done import Done, DoneLine
from sarathi_pp.inputs.generation_config import GenerationDefaults
from sarathi_pp.inputs.ids import id_key
from sarathi_pp.inputs.input_file import check_input
from sarathi_pp.inputs.prompt_limits import PromptLimits
from sarathi_pp.inputs.request_maker import RequestMaker, row_seed
from sarathi_pp.inputs.row import Row
from sarathi_pp.inputs.source import FileSource, MemorySource, Source
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.text.tokenizer import Tokenizer
from sarathi_pp.trace.clock import ManualClock, SystemClock
from tests.machine import patient

CLOCK = SystemClock()
LIMITS = PromptLimits(max_model_len=8, num_pages=3, page_size=2, vocab_size=100)


class Words:
    """The part of a tokenizer that the source needs: an id for each word, which is its length."""

    vocab_size = 100
    all_special_ids = ()
    added_tokens_decoder: dict[int, object] = {}
    bos_token_id = None
    unk_token_id = None
    eos_token_id = None
    chat_template = None
    is_fast = False

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str, **kwargs: object) -> dict[str, list[int]]:
        if text == "crash":
            raise RuntimeError("the tokenizer is broken")
        return {"input_ids": [len(word) for word in text.split()]}


def maker(
    *, backend: object | None = None, limits: PromptLimits = LIMITS, seed: int = 5, **sampling: object
) -> RequestMaker:
    return RequestMaker(Tokenizer(backend, vocab_size=100), GenerationDefaults(sampling), limits, seed)


def write(folder: Path, *records: object, name: str = "in.jsonl") -> str:
    path = folder / name
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
    return str(path)


def opened(path: str, capacity: int = 100, **kwargs: object) -> FileSource:
    made = maker(**{"backend": Words(), **kwargs})
    return FileSource(path, made, clock=SystemClock(), capacity=capacity)


def drain(source: Source) -> list[Row]:
    rows: list[Row] = []
    while not source.exhausted:
        source.wait(None)
        rows += source.take(1000)
    return rows


def test_rows_come_in_order_with_errors_among_them(tmp_path):
    path = write(
        tmp_path,
        {"id": "a", "prompt": "one three"},
        "\n",
        "{\n",
        {"prompt_token_ids": [7, 99], "temperature": 0.5, "seed": 3},
        {"prompt_token_ids": [100]},
        {"prompt": "x", "top_p": 2},
    )
    rows = drain(opened(path, max_new_tokens=4))
    assert [(row.line, row.id, row.error and row.error.code) for row in rows] == [
        (1, "a", None),
        (3, "3", "invalid_json"),
        (4, "4", None),
        (5, "5", "invalid_token_id"),
        (6, "6", "invalid_parameter"),
    ]
    good = [row.request for row in rows if row.request]
    assert [(request.index, [*request.prompt_token_ids]) for request in good] == [(0, [3, 5]), (3, [7, 99])]
    assert good[0].sampling == SamplingParams(max_new_tokens=4, seed=row_seed(5, "a"))
    assert good[1].sampling == SamplingParams(max_new_tokens=4, temperature=0.5, seed=3)
    assert rows[1].error.message.startswith("line 3: ")
    assert rows[0].num_prompt_tokens == 2


def test_a_seed_depends_on_run_and_id_only():
    assert row_seed(5, "1") == row_seed(5, "1") != row_seed(5, 1)
    assert len({row_seed(run, id) for run in range(4) for id in range(50)}) == 200
    assert 0 <= row_seed(-1, 1) < 2**63


def test_a_row_keeps_its_seed_wherever_it_stands(tmp_path):
    records = [{"id": name, "prompt": "one three"} for name in "abcd"]
    found = [
        drain(opened(write(tmp_path, *order))) for order in (records, records[::-1], [records[0], "\n", records[3]])
    ]
    seeds = [{row.id: row.request.sampling.seed for row in rows if row.request} for rows in found]
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == 4
    assert seeds[2] == {"a": seeds[0]["a"], "d": seeds[0]["d"]}


def test_an_empty_file_is_exhausted_at_once(tmp_path):
    assert drain(opened(write(tmp_path, "\n \n"))) == []


def test_a_text_file_holds_one_prompt_a_line(tmp_path):
    rows = drain(opened(write(tmp_path, "a bb\r\n\nccc", name="in.txt")))
    assert [(row.id, [*row.request.prompt_token_ids]) for row in rows] == [("1", [1, 2]), ("3", [3])]


def test_an_id_that_was_seen_gives_an_error_with_both_lines(tmp_path):
    path = write(tmp_path, {"id": "2", "prompt": "x"}, {"prompt": "y"}, {"id": 2, "prompt": "z"}, {"id": "2"})
    rows = drain(opened(path))
    assert [row.error and row.error.code for row in rows] == [None, "duplicate_id", None, "duplicate_id"]
    assert "line 2: " in rows[1].error.message and "line 1" in rows[1].error.message


@pytest.mark.parametrize(
    ("max_model_len", "num_pages", "fits", "code", "words"),
    [
        (8, 9, 8, "context_length_exceeded", "9 tokens and max_model_len is 8"),
        (99, 3, 6, "kv_cache_exhausted", r"7 tokens.* 6 \(3 pages of 2\).*--kv-cache"),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_and_one_that_just_fits_is_not(max_model_len, num_pages, fits, code, words):
    limits = PromptLimits(max_model_len, num_pages, page_size=2, vocab_size=100)
    limits.check_prompt(fits)
    with pytest.raises(RowError, match=words) as caught:
        limits.check_prompt(fits + 1)
    assert caught.value.code == code


def test_numbers_beyond_every_limit_become_ordinary(tmp_path):
    path = write(tmp_path, {"prompt": "x", "max_tokens": 10**30, "top_k": 10**30}, {"prompt": "x", "top_k": 99})
    first, second = (row.request.sampling for row in drain(opened(path)))
    assert (first.max_new_tokens, first.top_k, second.top_k) == (8, 0, 99)


def test_a_message_does_not_repeat_a_whole_line(tmp_path):
    (row,) = drain(opened(write(tmp_path, {"prompt": "x", "stop": ["", "y" * 10_000]})))
    assert len(row.error.message) < 1000


def test_without_a_tokenizer_only_token_ids_run(tmp_path):
    path = write(tmp_path, {"prompt_token_ids": [1]}, {"prompt": "x"}, {"prompt_token_ids": [1], "stop": "x"})
    rows = drain(opened(path, backend=None))
    assert [row.error and row.error.code for row in rows] == [None, "no_tokenizer", "no_tokenizer"]


class PlacedWords(Words):
    """Words with their positions in the text, as the Rust library's tokenizers report them."""

    is_fast = True
    clean_up_tokenization_spaces = False
    backend_tokenizer = Backend(WordLevel())

    def __call__(self, text: str, *, return_offsets_mapping: bool = False, **kwargs: object) -> dict[str, list]:
        offsets = [match.span() for match in re.finditer(r"\S+", text)]
        return {"input_ids": [end - first for first, end in offsets], "offset_mapping": offsets}


def test_requests_say_where_paragraphs_end_only_if_asked_and_known(tmp_path):
    path = write(tmp_path, {"prompt": "a bb\n\nccc"}, {"prompt_token_ids": [1, 2, 3]})

    def ends(backend: object, asked: bool) -> list[tuple[int, ...]]:
        source = FileSource(path, replace(maker(backend=backend), paragraphs=asked), clock=SystemClock(), capacity=9)
        return [row.request.paragraph_ends for row in drain(source)]

    assert ends(PlacedWords(), True) == [(2,), ()]
    assert ends(PlacedWords(), False) == [(), ()]
    assert ends(Words(), True) == [(), ()]


@pytest.mark.parametrize(("spec", "wants"), [("chunkllm", True), ("chunkllm:overlap=0.1", True), ("sarathi", False)])
def test_chunkllm_asks_for_paragraphs(spec, wants):
    assert parse_policy(spec).kind.wants_paragraphs == wants


def test_the_reader_stays_within_its_capacity(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    written = []

    def feed() -> None:
        with open(path, "wb", buffering=0) as stream:
            for number in range(200):
                # A pipe holds 64 KiB: lines of this length let the writer run only a few lines ahead.
                stream.write(json.dumps({"prompt": "x" + " " * 65536}).encode() + b"\n")
                written.append(number)

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    source = opened(str(path), capacity=3)
    for _ in range(10):
        source.wait(None)
        assert len(source.take(1)) == 1
    assert source.take(0) == []
    feeder.join(0.3)
    assert len(written) < 10 + 3 + 5
    assert len(drain(source)) == 190
    feeder.join()


@pytest.mark.parametrize("tokens", [1, 7, 20])
def test_long_prompts_are_read_ahead_up_to_a_number_of_tokens(tokens, tmp_path, monkeypatch):
    monkeypatch.setattr("sarathi_pp.inputs.source.MAX_WAITING_TOKENS", tokens)
    path = write(tmp_path, *({"id": n, "prompt": "word " * 5} for n in range(40)))
    source = opened(path)
    taken = 0
    while not source.exhausted:
        source.wait(None)
        assert source._num_tokens == sum(row.num_prompt_tokens for row in source._rows)
        assert source._num_tokens < tokens + 5, "one prompt more than the bound at the most"
        taken += len(source.take(2))
    assert taken == 40 and source._num_tokens == 0


def test_memory_does_not_grow_with_the_file(tmp_path):
    """100,000 lines of 500 bytes: only the hash of each line's id stays in memory."""
    path = tmp_path / "in.jsonl"
    with open(path, "w") as file:
        for number in range(100_000):
            file.write(json.dumps({"id": f"row-{number:06}", "prompt": "word " * 95}) + "\n")
    assert path.stat().st_size > 50e6
    source = opened(str(path), capacity=1024, limits=replace(LIMITS, max_model_len=500, num_pages=500))
    process = psutil.Process()
    before = most = process.memory_info().rss
    taken = 0
    while not source.exhausted:
        source.wait(1.0)
        taken += len(source.take(1024))
        most = max(most, process.memory_info().rss)
    assert taken == 100_000
    assert most - before < 30e6


def test_take_gives_no_more_than_asked_and_never_waits(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    holder = os.open(path, os.O_RDWR)
    source = opened(str(path))
    try:
        assert source.take(5) == [] and not source.exhausted
        source.wait(0.01)
        os.write(holder, b'{"prompt": "a"}\n{"prompt": "b"}\n')
        source.wait(None)
        assert len(source.take(1)) == 1
        source.wait(None)
        assert len(source.take(5)) == 1 and not source.exhausted
    finally:
        source.close()
        os.close(holder)
    assert source.exhausted
    source.wait(None)


def test_what_stops_the_reader_is_raised_after_the_rows_before_it(tmp_path):
    source = opened(write(tmp_path, {"prompt": "fine"}, {"prompt": "crash"}, {"prompt": "late"}))
    rows: list[Row] = []
    with pytest.raises(RuntimeError, match="the tokenizer is broken"):
        while True:
            source.wait(None)
            rows += source.take(1)
    assert len(rows) == 1 and not source.exhausted


def test_what_stops_the_reader_waits_for_the_arrivals_before_it(tmp_path):
    clock = ManualClock()
    path = write(tmp_path, {"prompt": "fine"}, {"prompt": "crash"})
    source = FileSource(path, maker(backend=Words()), clock=clock, capacity=9, request_rate=1.0)
    source._thread.join(patient(10))
    assert source.take(1) == []
    clock.sleep(100)
    assert len(source.take(1)) == 1
    with pytest.raises(RuntimeError):
        source.take(1)


def test_a_read_that_fails_is_an_input_error():
    # Opening the process's own memory works, and the first read at address 0 fails.
    source = opened("/proc/self/mem")
    source.wait(None)
    with pytest.raises(InputError, match="/proc/self/mem"):
        source.take(1)


def test_a_path_that_does_not_open_is_an_input_error(tmp_path, monkeypatch):
    """Some paths pass every check and fail only when they are opened."""
    path = write(tmp_path, {"prompt": "x"})

    def refused(self, mode):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    source = opened(path)
    source.wait(None)
    with pytest.raises(InputError, match=r"--input .*/in\.jsonl cannot be read: .*Permission denied"):
        source.take(1)


def test_drawn_arrivals_hold_rows_back_until_their_time(tmp_path):
    path = write(tmp_path, *({"prompt": "x"} for _ in range(50)))
    arrivals = []
    for _ in range(2):
        clock = ManualClock(100.0)
        source = FileSource(path, maker(backend=Words()), clock=clock, capacity=50, request_rate=2.0)
        times = []
        while not source.exhausted:
            before = clock.now()
            if rows := source.take(50):
                assert all(row.arrival_s <= before for row in rows)
                times += [row.arrival_s for row in rows]
                assert all(row.request.arrival_s == row.arrival_s for row in rows)
            else:
                clock.sleep(0.25)
                source.wait(0)
        arrivals.append(times)
    assert arrivals[0] == arrivals[1] == sorted(arrivals[0])
    assert arrivals[0][0] > 100
    assert 15 < arrivals[0][-1] - 100 < 40


def test_wait_ends_at_the_arrival_and_at_the_timeout(tmp_path):
    path = write(tmp_path, {"prompt": "x"})
    clock = SystemClock()
    slow = FileSource(path, maker(backend=Words()), clock=clock, capacity=1, request_rate=1e-6)
    slow.wait(0.02)
    assert slow.take(1) == []
    slow.close()
    quick = FileSource(path, maker(backend=Words()), clock=clock, capacity=1, request_rate=20)
    quick.wait(None)
    assert len(quick.take(1)) == 1 and quick.exhausted


def test_an_infinite_rate_arrives_when_read(tmp_path):
    clock = ManualClock(3.0)
    source = FileSource(
        write(tmp_path, {"prompt": "x"}), maker(backend=Words()), clock=clock, capacity=1, request_rate=math.inf
    )
    source.wait(None)
    assert source.take(1)[0].arrival_s == 3.0


def ordered(path: str, clock: ManualClock | SystemClock, window: int = 100, **kwargs: object) -> FileSource:
    """Open a file whose prompts come in the order of their prefixes. Pages have one token."""
    limits = Limits(1, 8, 4, 64, 1, 64, 1, prefix_cache="all")
    made = maker(backend=Words())
    return FileSource(path, made, clock=clock, capacity=100, order=PrefixOrder(limits, window), **kwargs)  # type: ignore[arg-type]


def prompt(name: str, words: str) -> dict[str, str]:
    return {"id": name, "prompt": words}


A, B = ("x yy", "x yyy", "x yy"), ("zzz", "zzz")
GROUPS = (prompt("a1", A[0]), prompt("b1", B[0]), "{\n", prompt("a2", A[1]), prompt("b2", B[1]), prompt("a3", A[2]))


def test_prompts_come_in_the_order_of_their_prefixes_and_keep_their_names(tmp_path):
    path = write(tmp_path, *GROUPS)
    plain, rows = drain(opened(path)), drain(ordered(path, SystemClock()))
    assert [row.id for row in rows] == ["3", "a1", "a3", "a2", "b1", "b2"]
    assert rows[0].error is not None and rows[0].error.message.startswith("line 3: ")

    same = {row.id: row.arriving(0.0) for row in plain if row.request}
    assert same == {row.id: row.arriving(0.0) for row in rows if row.request}


def test_lines_that_are_done_take_no_place_in_a_window(tmp_path):
    done = Done()
    for name in ("b1", "a2"):
        done.add(DoneLine(id_key(name), None, None))
    rows = drain(ordered(write(tmp_path, *GROUPS), SystemClock(), window=2, done=done))
    # The windows are a1 b2 and a3.
    assert [row.id for row in rows] == ["3", "a1", "b2", "a3"]


def test_the_outputs_of_one_line_follow_each_other_and_are_one_row_of_the_window(tmp_path):
    records = [{"id": name, "prompt": name * 2, "n": 3, "temperature": 1} for name in ("a b", "a bb", "a b")]
    for number, record in enumerate(records):
        record["id"] = str(number)
    rows = drain(ordered(write(tmp_path, *records), SystemClock(), window=3))
    assert [(row.id, row.choice) for row in rows] == [(name, choice) for name in ("0", "2", "1") for choice in range(3)]
    assert rows[0].request and rows[2].request
    assert rows[0].request.prompt_token_ids is rows[2].request.prompt_token_ids


def test_a_row_arrives_when_it_leaves_the_window(tmp_path):
    class Counting(ManualClock):
        """A clock that advances with each reading."""

        def now(self) -> float:
            self.sleep(1.0)
            return super().now()

    source = ordered(write(tmp_path, *GROUPS), Counting())
    source._thread.join(patient(10))
    rows = source.take(10)
    arrivals = [row.arrival_s for row in rows]
    # Each of six rows is read at another time. The five that can run leave their window after all of them are read.
    assert len(rows) == 6 and arrivals == sorted({*arrivals}) and arrivals[1] > 6
    assert all(row.request is None or row.request.arrival_s == row.arrival_s for row in rows)


def test_two_windows_are_all_that_is_read_ahead(tmp_path):
    path = tmp_path / "in.jsonl"
    with open(path, "w") as file:
        for number in range(300):
            file.write(json.dumps({"id": number, "prompt": "word " * 5}) + "\n")
    read = []

    class Watched(Words):
        def __call__(self, text: str, **kwargs: object) -> dict[str, list[int]]:
            if text.startswith("word"):
                read.append(text)
            return super().__call__(text, **kwargs)

    made = maker(backend=Watched())
    order = PrefixOrder(Limits(1, 8, 4, 64, 1, 64, 1, prefix_cache="all"), 20)
    source = FileSource(str(path), made, clock=SystemClock(), capacity=10, order=order)
    taken = 0
    while not source.exhausted:
        source.wait(None)
        taken += len(source.take(1))
        # In the queue, ahead of it, in the next window, and the row that was read last.
        assert len(read) <= taken + 10 + 20 + 20 + 1
    assert taken == len(read) == 300


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ((True, 0.2), (False, 0.0), "024135"),
        ((False, 0.3), (False, 0.0), "024135"),
        ((True, 0.3), (False, 0.3), "01 2435"),
        ((True, 0.3), (True, 0.2), "01 2435"),
        ((True, 0.3), (True, 0.3), "01 2354"),
    ],
)
def test_a_window_ends_early_if_the_engine_lacks_rows(first, second, found, tmp_path):
    """After two rows of six, and after three, the engine lacks rows or does not, and seconds pass.

    A window ends early if the engine lacks rows, and the window was opened at least 0.25 s before.
    """
    words = ("x", "yy") * 3
    path = write(tmp_path, *(prompt(str(number), word) for number, word in enumerate(words)))
    clock, read, go_on = ManualClock(), threading.Semaphore(0), threading.Semaphore(0)

    class Slow(Words):
        def __call__(self, text: str, **kwargs: object) -> dict[str, list[int]]:
            if text in words:
                read.release()
                assert go_on.acquire(timeout=patient(10))
            return super().__call__(text, **kwargs)

    order = PrefixOrder(Limits(1, 8, 4, 64, 1, 64, 1, prefix_cache="all"))
    source = FileSource(path, maker(backend=Slow()), clock=clock, capacity=10, order=order)
    taken = []
    for number in range(6):
        assert read.acquire(timeout=patient(10))
        lacks_rows, seconds = {2: first, 3: second}.get(number, (False, 0.0))
        if number == 3:
            arrived = [row.id for row in source._rows]
        if lacks_rows:
            taken += [row.id for row in source.take(10)]
        clock.sleep(seconds)
        go_on.release()
    source._thread.join(patient(10))
    taken += [row.id for row in source.take(10)]
    assert "".join(taken) == found.replace(" ", "") and arrived == (["0", "1"] if " " in found else [])


def test_the_next_window_is_read_while_the_rows_of_one_wait(tmp_path):
    """4 rows wait for the engine and 6 are ahead of them, and two more of the second window could not be put."""
    path = write(tmp_path, *(prompt(str(number), "x") for number in range(100)))
    read: list[str] = []

    class Counted(Words):
        def __call__(self, text: str, **kwargs: object) -> dict[str, list[int]]:
            if text == "x":
                read.append(text)
            return super().__call__(text, **kwargs)

    order = PrefixOrder(Limits(1, 8, 4, 64, 1, 64, 1, prefix_cache="all"), 6)
    source = FileSource(path, maker(backend=Counted()), clock=CLOCK, capacity=4, order=order)
    end_s = time.monotonic() + patient(10)
    while len(read) < 12 and time.monotonic() < end_s:
        time.sleep(0.001)
    assert 12 <= len(read) <= 13 and len(source._rows) == 4
    taken = []
    while not source.exhausted:
        source.wait(None)
        taken += source.take(3)
        assert len(source._rows) <= 4 and len(source._ahead) <= 6
    assert [row.line for row in taken] == list(range(1, 101))


def test_what_stops_the_reader_is_raised_after_the_rows_of_the_window(tmp_path):
    source = ordered(write(tmp_path, {"prompt": "x"}, {"prompt": "yy"}, {"prompt": "x"}, {"prompt": "crash"}), CLOCK)
    rows: list[Row] = []
    with pytest.raises(RuntimeError, match="the tokenizer is broken"):
        while True:
            source.wait(None)
            rows += source.take(1)
    assert [row.line for row in rows] == [1, 3, 2]


def test_a_source_that_is_closed_reads_no_further_window(tmp_path):
    path = write(tmp_path, *({"id": number, "prompt": "x"} for number in range(50)))
    started, go_on, read = threading.Event(), threading.Event(), []

    class Slow(Words):
        def __call__(self, text: str, **kwargs: object) -> dict[str, list[int]]:
            if text == "x":
                read.append(text)
                started.set()
                go_on.wait(patient(10))
            return super().__call__(text, **kwargs)

    order = PrefixOrder(Limits(1, 8, 4, 64, 1, 64, 1, prefix_cache="all"))
    source = FileSource(path, maker(backend=Slow()), clock=CLOCK, capacity=10, order=order)
    assert started.wait(patient(10))
    source.close()
    go_on.set()
    source._thread.join(patient(10))
    assert len(read) == 1 and source.exhausted and not source._thread.is_alive()


def test_inputs_that_cannot_be_read_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(MissingError, match="no.jsonl"):
        check_input(str(tmp_path / "no.jsonl"))
    with pytest.raises(InputError, match="directory"):
        opened(str(tmp_path))
    check_input("-")


CHILD = """
import sys
sys.path[:0] = {path!r}
from tests.inputs.test_source import opened
source = opened("-")
source.wait(None)
print(*source.take(5)[0].request.prompt_token_ids, flush=True)
"""


def test_a_process_ends_while_its_reader_waits_for_standard_input():
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(path=[".", "kernels"])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdin and child.stdout and child.stderr
    child.stdin.write(b'{"prompt": "four"}\n')
    child.stdin.flush()
    # The input stays open: only the end of the main thread can end the process.
    assert child.wait(timeout=patient(60)) == 0
    assert child.stdout.read() == b"4\n"
    assert child.stderr.read() == b""
    for stream in (child.stdin, child.stdout, child.stderr):
        stream.close()


def test_the_memory_of_a_row_is_all_that_grows_with_its_line():
    rules = DrawRules(num_prompt=2, grammar="x" * 400)
    request = Request(0, (1, 2), SamplingParams(seed=0), rules=rules)
    assert Row(1, "1", "own", request, extra=b"y" * 40, tools=b"z" * 8).held_tokens == 2 + 100 + 10 + 2
    assert Row(1, "1", "own", error=RowError("invalid_json", "no"), extra=b"y" * 40).held_tokens == 10


def test_rows_in_memory_have_the_same_interface(tmp_path):
    rows = drain(opened(write(tmp_path, {"prompt": "x"}, {"prompt": "y"})))
    source: Source = MemorySource(rows)
    assert source.take(1) == rows[:1] and not source.exhausted
    source.wait(None)
    assert source.take(9) == rows[1:] and source.exhausted
    source.close()
