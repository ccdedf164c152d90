"""Naps in each of five places must show in that place's figure and in no other.

The runtime's own engine, runners and channels, two stages in two threads; the stages sleep instead of computing.
"""

import threading
import time

import pytest
import torch

from sarathi_pp.config import SamplingParams
from sarathi_pp.core.plan import SampledToken
from sarathi_pp.core.policy.sarathi import Sarathi
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.request import Request
from sarathi_pp.runtime.engine import Engine
from sarathi_pp.runtime.rows import Row
from sarathi_pp.runtime.stage import StageOutput
from sarathi_pp.runtime.worker import StageRunner
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.trace.events import TraceEnd, TraceStart
from sarathi_pp.trace.summary import summarise
from sarathi_pp.trace.timer import HostTimer
from sarathi_pp.wire.channel import QueueChannel
from tests.runtime.pipeline import ListRecorder, ListSink, ListSource

NAP_S = 0.05
NUM_NAPS = 4
NUM_REQUESTS = 12
STATES = ("compute_s", "recv_wait_s", "send_wait_s", "host_s", "no_work_s")


class SleepingStage:
    """Takes 2 ms a microbatch; the last one answers token 1."""

    counts_cpu = True
    bytes_read = 0

    def __init__(self, last, nap, prepare_nap):
        self.last = last
        self.nap = nap
        self.prepare_nap = prepare_nap

    def prepare(self, microbatch):
        self.prepare_nap()
        return lambda hidden: self.compute(microbatch)

    def compute(self, microbatch):
        time.sleep(0.002)
        self.nap()
        if not self.last:
            return StageOutput(hidden=torch.zeros(microbatch.num_tokens, 1))
        ends = [chunk for chunk in microbatch.chunks if chunk.sampling is not None]
        return StageOutput(tokens=tuple(SampledToken(chunk.sequence, chunk.epoch, 1) for chunk in ends))


class NappingChannel(QueueChannel):
    """Sleeps where told: while the sender holds a message, while it reserves, or after the receiver has got one."""

    naps = {}

    def reserve(self):
        self.naps.get("reserve", lambda: None)()
        super().reserve()

    def send(self, frame, payload=None):
        self.naps.get("transfer", lambda: None)()
        super().send(frame, payload)

    def receive(self, timeout_s=None):
        message = super().receive(timeout_s)
        if message is not None:
            self.naps.get("received", lambda: None)()
        return message


class NappingSource(ListSource):
    """Sleeps between rows, with nothing in flight; not before the first, where the run has not begun."""

    def __init__(self, rows, nap):
        super().__init__(rows, per_take=1)
        self.nap = nap

    def take(self, limit):
        if len(self._rows) < NUM_REQUESTS:
            self.nap()
        return super().take(limit)


def run(place):
    """One request after the other through two stages, asleep NUM_NAPS times at `place` on stage 1's side."""
    left = [NUM_NAPS]

    def nap():
        if left[0]:
            left[0] -= 1
            time.sleep(NAP_S)

    def quiet():
        pass

    clock = SystemClock()
    forward, back = NappingChannel(clock.now, 3), NappingChannel(clock.now, 3)
    forward.naps = {"transfer": nap} if place == "recv_wait_s" else {"received": nap} if place == "host_s" else {}
    last = SleepingStage(True, nap if place == "compute_s" else quiet, nap if place == "prepare" else quiet)
    back.naps = {"reserve": nap} if place == "send_wait_s" else {}
    recorders = [ListRecorder(), ListRecorder()]
    runners = [
        StageRunner(SleepingStage(False, quiet, quiet), forward, recorders[0], clock, HostTimer(clock)),
        StageRunner(last, back, recorders[1], clock, HostTimer(clock)),
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
    engine.run(NappingSource(rows, nap if place == "no_work_s" else quiet), ListSink())
    engine.close()
    thread.join(5)
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
    asleep_s = NAP_S * NUM_NAPS
    # Dominance, not precision: two runs are compared, and the machine may be busy with other things in one.
    assert grown.pop(state) >= asleep_s * 0.75, (grown, stage)
    assert max(grown.values()) < asleep_s * 0.5, grown
    assert abs(sum(stage[state] for state in STATES) - stage["wall_s"]) <= 0.01 * stage["wall_s"]
    assert report["closing_error"] <= 0.01
