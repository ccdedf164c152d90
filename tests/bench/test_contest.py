"""Contests between entrants that are small scripts: turns, figures, and every possible failure of an entrant."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from sarathi_pp.analysis.summary import Report
from sarathi_pp.bench import contest
from sarathi_pp.bench.contest import PeerRun, TokenIds, Work, hold, write_prompts
from sarathi_pp.bench.footprint import Footprint
from sarathi_pp.bench.machine import measure_rates, stolen
from sarathi_pp.bench.peers import parse_peer
from sarathi_pp.errors import SarathiError
from sarathi_pp.model.fuse.float_linear import has_float_gemm
from sarathi_pp.sim.workload import parse_workload
from tests.machine import patient

LENGTHS = [3, 1, 4]


@dataclass
class Script:
    """An entrant that runs a line of Python; it prints the lengths of its answers."""

    label: str
    code: str = f"print({LENGTHS})"
    variables: dict[str, str] = field(default_factory=dict)

    def command(self, work: Work) -> list[str]:
        return [sys.executable, "-c", self.code]

    def environment(self, work: Work) -> dict[str, str]:
        return self.variables

    def outcome(self, work: Work, printed: str) -> tuple[Report, TokenIds]:
        return {"total_tokens_per_s": 1.0}, [[7] * length for length in json.loads(printed)]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    monkeypatch.setattr(contest, "wait_until_quiet", lambda: 0.0)
    requests = [
        request
        for length in LENGTHS
        for request in parse_workload(f"fixed:n=1,prompt=2,output={length}").requests(vocabulary=50)
    ]
    return Work(tmp_path, "float32", requests, 4, tmp_path)


def test_entrants_take_turns_and_each_run_is_told_when_it_is_over(work: Work) -> None:
    runs = [*hold(work, [Script("a"), Script("b")], 3)]
    assert [(run.entrant, run.round) for run in runs] == [*zip("abbaab", [0, 0, 1, 1, 2, 2], strict=True)]
    assert all(run.command_s > 0 and run.token_ids == [[7] * length for length in LENGTHS] for run in runs)


def test_an_entrant_finds_its_variables_beside_ours(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "1")
    code = f"import os; assert os.environ['OURS'] == '1' and os.environ['THEIRS'] == '2'; print({LENGTHS})"
    assert [*hold(work, [Script("a", code, {"THEIRS": "2"})], 1)]


def test_one_that_fails_is_quoted(work: Work) -> None:
    with pytest.raises(SarathiError, match=r"b ended with code 3:\n.*no such engine"):
        list(
            hold(
                work,
                [Script("a"), Script("b", "import sys; print('no such engine', file=sys.stderr); sys.exit(3)")],
                1,
            )
        )


def test_one_that_answers_less_than_it_was_asked_did_not_do_the_work(work: Work) -> None:
    with pytest.raises(
        SarathiError,
        match=r"a answered 1 of 3 requests .* request 2 \(counted from 0\) has 2 output tokens instead of 4",
    ):
        list(hold(work, [Script("a", "print([3, 1, 2])")], 1))


def test_who_interrupts_leaves_nothing_running(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    started: list[psutil.Process] = []

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None and not started:
            root = psutil.Process(process.pid)
            deadline = time.monotonic() + patient(30)
            while not root.children() and time.monotonic() < deadline:
                time.sleep(0.01)
            started.extend([root, *root.children()])
            raise KeyboardInterrupt
        return wait(process, timeout)

    wait = subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(hold(work, [Script("a", child)], 1))
    assert len(started) == 2
    _, alive = psutil.wait_procs(started, timeout=patient(10))
    assert alive == []


def test_a_peers_answer_is_the_last_object_of_what_it_prints(work: Work) -> None:
    answered = {
        "wall_s": 2.0,
        "token_ids": [[1] * length for length in LENGTHS],
        "ttft_s": [0.5, 1.5, 1.0],
        "version": "9",
    }
    printed = f'{{"noise": 1}}\n{json.dumps(answered)}\nbye\n{{"more": "noise"\n'
    report, tokens = PeerRun(parse_peer("transformers"), Path()).outcome(work, printed)
    assert tokens == answered["token_ids"]
    assert (report["prompt_tokens"], report["output_tokens"]) == (6, 8)
    assert (report["total_tokens_per_s"], report["output_tokens_per_s"]) == (7.0, 4.0)
    assert report["ttft_s"]["p50"] == 1.0 and report["version"] == "9"


def test_a_peer_is_asked_for_the_same_prompts_and_lengths(work: Work) -> None:
    command = PeerRun(parse_peer("transformers"), Path()).command(work)
    asked = json.loads(Path(command[-1]).read_text())
    write_prompts(work.prompts, work.requests)
    ours = [json.loads(line) for line in work.prompts.read_text().splitlines()]
    assert [one["prompt_token_ids"] for one in asked["requests"]] == [row["prompt_token_ids"] for row in ours]
    assert [one["output_tokens"] for one in asked["requests"]] == [row["max_new_tokens"] for row in ours] == LENGTHS


def test_a_peer_may_compute_in_a_type_of_its_own(work: Work) -> None:
    for text, dtype in (("transformers", "float32"), ("transformers:dtype=bfloat16", "bfloat16")):
        command = PeerRun(parse_peer(text), Path()).command(work)
        assert json.loads(Path(command[-1]).read_text())["dtype"] == dtype


def test_memory_of_children_counts_and_shared_pages_count_once() -> None:
    # The child of a fork shares the parent's 100 MB; its own 50 MB are extra.
    code = (
        "import os, sys, time\nheld = bytearray(100_000_000)\npid = os.fork()\n"
        "more = bytearray(50_000_000) if pid == 0 else None\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        footprint, seen = Footprint(), threading.Event()
        with footprint.watching(process.pid):
            deadline = time.monotonic() + patient(30)
            while not footprint.peak_bytes and time.monotonic() < deadline:
                seen.wait(0.05)
        assert 150e6 < footprint.peak_bytes < 200e6
    finally:
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.kill()
        process.communicate()


def test_rates_are_those_of_this_machine() -> None:
    """No exact figure can be asserted; but no core multiplies at 10 TFLOP/s, and none reads slower than a disk."""
    rates = measure_rates("bfloat16")
    assert rates.cores >= 1 and 1e8 < rates.flops < 1e13 * rates.cores and 1e8 < rates.bytes_per_s < 1e13
    assert rates.flops == max(rates.products.values()) == rates.products[rates.product]
    assert {"torch bfloat16", "torch float32"} <= rates.products.keys()
    assert has_float_gemm() == ("numba float32" in rates.products)


def test_a_floor_in_float32_has_no_product_that_rounds() -> None:
    assert all(name.endswith("float32") for name in measure_rates("float32").products)


def test_stolen_is_a_share() -> None:
    with stolen() as lost:
        time.sleep(0.05)
    assert 0 <= lost.share <= 1
