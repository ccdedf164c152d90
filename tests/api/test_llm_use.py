"""The Python API in a long-lived program: after failures and interrupts, from several threads, several at once."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from sarathi_pp import LLM, SamplingParams
from sarathi_pp.api.call import Answers
from sarathi_pp.distributed import launcher
from sarathi_pp.errors import ConfigError, MemoryLostError, PeerLostError
from sarathi_pp.process.call_thread import CallThread
from tests.machine import patient

pytestmark = pytest.mark.timeout(180)

ADDER = str(Path(__file__).parents[2] / "examples" / "tiny-adder")
FEW = SamplingParams(max_new_tokens=8)
LONG = SamplingParams(max_new_tokens=200, ignore_eos=True)
BOUND_S = 30.0


class FaultError(Exception):
    pass


def fails_once(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, error: BaseException) -> None:
    """Fail at the third call, so that some requests run and others wait."""
    real, calls = getattr(owner, name), []

    def call(*args, **options):
        calls.append(name)
        if len(calls) == 3:
            raise error
        return real(*args, **options)

    monkeypatch.setattr(owner, name, call)


def answers(model: LLM) -> list[str | None]:
    return [output.outputs[0].text for output in model.generate(["12+30=", "40+2=", "1+2="], FEW)]


@pytest.fixture(scope="module")
def alone():
    with LLM(ADDER, max_num_seqs=2) as model:
        yield model


@pytest.mark.parametrize("where", ["request", "sink", "stage", "clock"])
@pytest.mark.parametrize("error", [FaultError("a bug"), KeyboardInterrupt(), MemoryLostError("no memory")], ids=type)
def test_after_an_exception_the_next_call_answers(alone, where, error, monkeypatch) -> None:
    owners = {
        "request": (alone, "_row"),
        "sink": (Answers, "finish"),
        "stage": (alone._rank._stage, "prepare"),
        "clock": (alone._answering.driver._clock, "now"),
    }
    with monkeypatch.context() as patched:
        if where == "clock":  # a frozen value with slots
            patched.setattr(alone._answering.driver, "_clock", _Clock(alone._clock))
            fails_once(patched, alone._answering.driver._clock, "now", error)
        else:
            fails_once(patched, *owners[where], error)
        with pytest.raises(type(error)):
            answers(alone)
    assert answers(alone) == ["42", "42", "3"]


class _Clock:
    def __init__(self, clock) -> None:
        self._clock = clock

    def now(self) -> float:
        return self._clock.now()


def interrupted(model: LLM, after_s: float) -> float:
    """Generate for long, and interrupt with SIGINT. Return the time from the interrupt to the end of the call."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(after_s, send)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        model.generate(["1+1="] * 50, LONG)
        timer.join()  # it had ended before
    return time.monotonic() - sent[0]


def test_an_interrupt_at_any_instant_harms_nothing(alone) -> None:
    for number in range(8):
        assert interrupted(alone, random.Random(number).uniform(0.0, 0.3)) < BOUND_S
        began_s = time.monotonic()
        assert answers(alone) == ["42", "42", "3"]
        assert time.monotonic() - began_s < BOUND_S, "what was given up was computed to its end"


def test_an_interrupt_of_two_stages_harms_nothing_and_a_lost_stage_is_told_at_once() -> None:
    with LLM(ADDER, stages=2) as model:
        for number in range(4):
            interrupted(model, random.Random(number).uniform(0.0, 0.5))
            assert answers(model) == ["42", "42", "3"]
        (worker,) = [process for process in psutil.Process().children() if process.pid in _workers_of(model)]
        worker.kill()
        with pytest.raises(PeerLostError, match="stage 1"):
            answers(model)
        began_s = time.monotonic()
        with pytest.raises(PeerLostError, match="lost in an earlier call .*stage 1.*start a new one"):
            answers(model)
        assert time.monotonic() - began_s < patient(5.0)
        assert model.close() is None


def _workers_of(model: LLM) -> list[int]:
    return [process.pid for process in model._workers._processes.values()]


def test_calls_of_several_threads_each_get_their_own_answers(alone) -> None:
    sums = [(first, second) for first in range(1, 9) for second in (10, 20, 30)]
    prompts = [f"{first}+{second}=" for first, second in sums]
    expected = [output.outputs[0].text for output in alone.generate(prompts, FEW)]
    with ThreadPoolExecutor(6) as threads:
        texts = list(threads.map(lambda prompt: alone.generate(prompt, FEW)[0].outputs[0].text, prompts))
    assert texts == expected and len(set(texts)) > 10


def test_who_closes_ends_what_another_thread_generates() -> None:
    model = LLM(ADDER)
    said: list[str] = []

    def generate() -> None:
        try:
            model.generate(["1+1="] * 200, LONG)
        except ConfigError as error:
            said.append(str(error))

    threads = [threading.Thread(target=generate) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    with ThreadPoolExecutor(3) as closers:
        reports = list(closers.map(lambda _: model.close(), range(3)))
    for thread in threads:
        thread.join(BOUND_S)
    assert said == ["this LLM is closed. Make a new one"] * 3
    assert sum(report is not None for report in reports) == 1


def test_two_at_once_and_one_beside_a_group_of_the_program() -> None:
    with LLM(ADDER, stages=2) as first:
        with ThreadPoolExecutor(2) as threads, LLM(ADDER, stages=2) as second:
            assert list(threads.map(answers, [first, second])) == [["42", "42", "3"]] * 2
        assert answers(first) == ["42", "42", "3"]
    assert not dist.is_initialized()
    store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with LLM(ADDER, stages=2) as model:
            assert answers(model) == ["42", "42", "3"]
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_one_after_the_other_leaves_nothing_behind() -> None:
    process = psutil.Process()

    def held() -> tuple[int, int, int]:
        gc.collect()  # sockets of a closed LLM are freed with its objects, which refer to each other
        return process.num_fds(), threading.active_count(), len(process.children())

    with LLM(ADDER, stages=2) as model:
        answers(model)
    before = held()
    model = LLM(ADDER, stages=2)
    answers(model)
    model.close()
    del model
    assert held() <= before


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("body", "how"), [("exit 3", "ended with exit code 3"), ("kill -9 $$", "was killed by SIGKILL")]
)
def test_workers_that_end_before_they_join_are_named(stages, body, how, tmp_path, monkeypatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    monkeypatch.setattr(launcher.sys, "executable", str(python))
    before = _num_call_threads()
    began_s = time.monotonic()
    with pytest.raises(PeerLostError, match=rf"rank \d on .*: its process {how} before it had joined"):
        LLM(ADDER, stages=stages, join_timeout_s=200)
    assert time.monotonic() - began_s < patient(60.0)
    assert _num_call_threads() == before


def _num_call_threads() -> int:
    return sum(thread.name == "LLM" for thread in threading.enumerate())


INTERRUPTED = """
import os, signal, sys, threading
from sarathi_pp import LLM
threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    LLM(sys.argv[1], stages=2).close()
except KeyboardInterrupt:
    pass
"""


@pytest.mark.parametrize("after_s", [2.5, pytest.param(4.5, marks=pytest.mark.full)])
def test_an_interrupted_start_leaves_no_worker(after_s: float, tmp_path: Path) -> None:
    """It must not hang when the interpreter ends.

    The interrupt comes before the workers, while they join, or at the end.
    """
    began_s = time.monotonic()
    with subprocess.Popen((sys.executable, "-c", INTERRUPTED, ADDER, str(after_s))) as program:
        workers: set[psutil.Process] = set()
        while program.poll() is None:
            assert time.monotonic() - began_s < patient(90.0)
            try:
                workers.update(psutil.Process(program.pid).children(recursive=True))
            except psutil.NoSuchProcess:
                break
            time.sleep(0.05)
    _, alive = psutil.wait_procs(workers, 20)
    assert not alive


def test_work_goes_on_though_who_waits_for_it_is_interrupted() -> None:
    thread, done, go_on = CallThread("test"), [], threading.Event()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        thread.call(lambda: (go_on.wait(BOUND_S), done.append(1)))
    go_on.set()
    thread.close()
    thread.join(BOUND_S)
    assert done == [1]
