"""What a stage does with a microbatch: compute, record, pass on. The same on every rank.

Rank 0's engine calls a StageRunner for the microbatches it issues; every other rank lets a StageRunner loop
over what its upstream neighbour sends.
"""

from __future__ import annotations

from torch import Tensor

from sarathi_pp.core.plan import StepResult
from sarathi_pp.runtime.stage import Stage
from sarathi_pp.trace.clock import Clock
from sarathi_pp.trace.events import Compute, SendWait
from sarathi_pp.trace.recorder import Recorder
from sarathi_pp.wire.channel import Receiver, Sender
from sarathi_pp.wire.codec import Goodbye, MicroBatchFrame, ResultFrame

# A reservation that takes less than this found a free buffer at once; only longer ones are a state of their own.
_INSTANT_S = 20e-6


class StageRunner:
    def __init__(self, stage: Stage, downstream: Sender[Tensor], recorder: Recorder, clock: Clock) -> None:
        self._stage = stage
        self._downstream = downstream
        self._recorder = recorder
        self._clock = clock
        self._num_done = 0
        self._busy = False

    def progress(self) -> tuple[int, bool]:
        """Microbatches finished, and whether one is in hand: what this rank's heartbeats say."""
        return self._num_done, self._busy

    def run(self, frame: MicroBatchFrame, hidden: Tensor | None, arrived_s: float) -> None:
        """Compute one microbatch and hand its output to the next stage, or its tokens to the coordinator."""
        self._busy = True
        clock, microbatch = self._clock, frame.microbatch
        start_cpu_s, start_s = clock.thread_cpu(), clock.now()
        output = self._stage.compute(microbatch, hidden)
        end_s = clock.now()
        cpu_s = clock.thread_cpu() - start_cpu_s if self._stage.counts_cpu else None
        self._recorder.record(Compute(microbatch.index, microbatch.issued_s, arrived_s, start_s, end_s, cpu_s))
        stage_compute_s = (*frame.stage_compute_s, end_s - start_s)
        self._reserve()
        if output.hidden is not None:
            self._downstream.send(MicroBatchFrame(microbatch, stage_compute_s), output.hidden)
        else:
            self._downstream.send(ResultFrame(StepResult(microbatch.index, output.tokens, stage_compute_s)))
        self._num_done += 1
        self._busy = False

    def _reserve(self) -> None:
        asked_s = self._clock.now()
        self._downstream.reserve()
        got_s = self._clock.now()
        if got_s - asked_s > _INSTANT_S:
            self._recorder.record(SendWait(asked_s, got_s))

    def close(self) -> None:
        """Say goodbye downstream, behind everything else that was sent."""
        self._downstream.close()

    def serve(self, upstream: Receiver[Tensor]) -> None:
        """Run what comes from upstream until it says goodbye, then say goodbye too."""
        while True:
            message = upstream.receive()
            assert message is not None
            if isinstance(message.frame, Goodbye):
                break
            assert isinstance(message.frame, MicroBatchFrame), message.frame
            self.run(message.frame, message.payload, message.arrived_s)
            message.release()
        self.close()
        upstream.close()
