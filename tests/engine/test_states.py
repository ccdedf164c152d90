"""Naps in each of five places must show in that place's figure and in no other.

The runtime's own engine, runners and channels run two stages in two threads. The stages sleep instead of computing.
Only sleeping moves the clock, so every second is accounted for.
"""

import math
import threading

import pytest
import torch

from sarathi_pp.analysis.summary import summarise
from sarathi_pp.core.plan import SampledToken
from sarathi_pp.core.policy.sarathi import Sarathi
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.request import Request
from sarathi_pp.engine.engine import Engine
from sarathi_pp.inputs.row import Row
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.stages.runner import StageRunner
from sarathi_pp.stages.stage import StageOutput
from sarathi_pp.trace.events import TraceEnd, TraceStart
from sarathi_pp.trace.timer import HostTimer
from sarathi_pp.wire.channel import QueueChannel
from tests.engine.pipeline import ListRecorder, ListSink, ListSource
from tests.machine import patient

NAP_S = 0.05
NUM_NAPS = 4
NUM_REQUESTS = 12
STATES = ("compute_s", "recv_wait_s", "send_wait_s", "host_s", "no_work_s")
NUM_THREADS = 2


class SharedTime:
    """One clock for all threads.

    When each of them sleeps or waits, it moves to the time at which the first sleeper wakes.
    """

    def __init__(self):
        self._now_s = 0.0
        self._changed = threading.Condition()
        self._blocked = []  # (may it continue?, when its sleep ends) for each thread

    def now(self):
        return self._now_s

    def thread_cpu(self):
        return self._now_s

    def wall(self):
        return self._now_s

    def sleep(self, seconds):
        wakes_s = self._now_s + seconds
        self._block(lambda: self._now_s >= wakes_s, wakes_s)

    def wait_for(self, ready):
        self._block(ready, math.inf)

    def notify(self):
        with self._changed:
            self._changed.notify_all()

    def _block(self, ready, wakes_s):
        with self._changed:
            entry = ready, wakes_s
            self._blocked.append(entry)
            while not ready():
                if len(self._blocked) == NUM_THREADS and not any(ready() for ready, _ in self._blocked):
                    self._now_s = min(wakes_s for _, wakes_s in self._blocked)
                    assert self._now_s < math.inf, "every thread waits for another"
                    self._changed.notify_all()
                else:
                    self._changed.wait()
            self._blocked.remove(entry)


class SleepingStage:
    """A stage that takes 2 ms per microbatch; the last one answers token 1."""

    counts_cpu = True
    bytes_read = 0
    steps = 0

    def __init__(self, last, clock, nap, prepare_nap):
        self.last = last
        self.clock = clock
        self.nap = nap
        self.prepare_nap = prepare_nap

    def prepare(self, microbatch):
        self.prepare_nap()
        return lambda hidden: self.compute(microbatch)

    def compute(self, microbatch):
        self.clock.sleep(0.002)
        self.nap()
        if not self.last:
            return StageOutput(hidden=torch.zeros(microbatch.num_tokens, 1))
        ends = [chunk for chunk in microbatch.chunks if chunk.sampling is not None]
        return StageOutput(tokens=tuple(SampledToken(chunk.sequence, chunk.epoch, 1) for chunk in ends))


class NappingChannel(QueueChannel):
    """A channel that sleeps at the chosen point.

    The point is while the sender holds a message, while it reserves, or after the receiver has received one.
    """

    def __init__(self, clock, naps):
        super().__init__(clock, 3)
        self.clock = clock
        self.naps = naps

    def _nap(self, place):
        self.naps.get(place, quiet)()

    def reserve(self):
        self._nap("reserve")
        super().reserve()

    def send(self, frame, payload=None):
        self._nap("transfer")
        super().send(frame, payload)
        self.clock.notify()

    def receive(self, timeout_s=None):
        if timeout_s != 0:
            self.clock.wait_for(lambda: not self._messages.empty())
        message = super().receive(0)
        if message is not None:
            self._nap("received")
        return message


class NappingSource(ListSource):
    """A source that has a row after each wait and then sleeps, while nothing is in flight."""

    def __init__(self, rows, nap):
        super().__init__(rows, per_take=1)
        self._nap = nap
        self._due = True

    def take(self, limit):
        due, self._due = self._due, False
        return super().take(limit) if due else []

    def wait(self, timeout_s):
        self._nap()
        self._due = True


def quiet():
    pass


def run(place):
    """Run one request after the other through two stages, asleep NUM_NAPS times at `place` on stage 1's side."""
    left = [NUM_NAPS]
    clock = SharedTime()

    def nap():
        if left[0]:
            left[0] -= 1
            clock.sleep(NAP_S)

    def nap_at(asked):
        return nap if place == asked else quiet

    forward = NappingChannel(clock, {"transfer": nap_at("recv_wait_s"), "received": nap_at("host_s")})
    back = NappingChannel(clock, {"reserve": nap_at("send_wait_s")})
    recorders = [ListRecorder(), ListRecorder()]
    stages = [
        SleepingStage(False, clock, quiet, quiet),
        SleepingStage(True, clock, nap_at("compute_s"), nap_at("prepare")),
    ]
    runners = [
        StageRunner(stage, downstream, recorder, clock, HostTimer(clock))
        for stage, downstream, recorder in zip(stages, (forward, back), recorders, strict=True)
    ]
    for rank, recorder in enumerate(recorders):
        recorder.record(
            TraceStart(at_s=clock.now(), unix_s=0.0, rank=rank, stage=rank, num_stages=2, layers=(rank, rank + 1),
                       host="h", pid=1, device="cpu", policy="sarathi", chunk_size=8, inflight=1, num_pages=64,
                       page_size=16)
        )  # fmt: skip
    thread = threading.Thread(target=runners[1].serve, args=(forward,), daemon=True)
    thread.start()
    engine = Engine(
        Limits(2, 8, 4, 64, 16, 64, 1), Sarathi(), runners[0], back, recorders[0], clock,
        eos_token_ids=(), stop_checkers=lambda stop: None,
    )  # fmt: skip
    params = SamplingParams(max_new_tokens=2, seed=0)
    rows = [Row(i + 1, i, "own", Request(i, (1, 2, 3), params, clock.now())) for i in range(NUM_REQUESTS)]
    engine.run(NappingSource(rows, nap_at("no_work_s")), ListSink())
    engine.close()
    thread.join(patient(5))
    assert place is None or left == [0], "not all naps were taken"
    for recorder in recorders:
        recorder.record(TraceEnd(at_s=clock.now()))
    return summarise([recorder.events for recorder in recorders])


@pytest.fixture(scope="module")
def undisturbed():
    return run(None)["per_stage"][1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("place", "state"), [*zip(STATES, STATES, strict=True), ("prepare", "host_s")])
def test_a_sleep_shows_in_its_own_state_and_no_other(place, state, undisturbed):
    report = run(place)
    stage = report["per_stage"][1]
    grown = {state: stage[state] - undisturbed[state] for state in STATES}
    assert grown == pytest.approx({**dict.fromkeys(STATES, 0.0), state: NAP_S * NUM_NAPS}, abs=1e-9)
    assert sum(stage[state] for state in STATES) == pytest.approx(stage["wall_s"], abs=1e-9)
    assert report["closing_error"] == pytest.approx(0.0, abs=1e-9)
