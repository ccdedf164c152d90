"""A runner that computes microbatches on a stage, records them and passes them on. It is the same on every rank.

On the leader of a replica, the engine calls the StageRunner for each microbatch that it issues. On every other rank,
the StageRunner loops over the microbatches that arrive, most often from the stage before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from sarathi_pp.core.plan import MicroBatch, SampledToken, StageTime, StepResult
from sarathi_pp.errors import MemoryLostError
from sarathi_pp.model.memory import give_back, is_out_of_memory
from sarathi_pp.stages.stage import Compute, Stage, StageOutput
from sarathi_pp.trace.clock import Clock
from sarathi_pp.trace.events import Compute as ComputeSpan
from sarathi_pp.trace.events import Head as HeadSpan
from sarathi_pp.trace.events import SendWait
from sarathi_pp.trace.recorder import Recorder
from sarathi_pp.trace.timer import Instant, Mark, Timer
from sarathi_pp.wire.channel import Receiver, Sender
from sarathi_pp.wire.codec import Frame, Goodbye, HeadFrame, MicroBatchFrame
from sarathi_pp.wire.shard_group import ShardGroup
from sarathi_pp.wire.stage_progress import StageProgress

# If reserving a send buffer takes less than this, a buffer was free. Only longer waits are recorded as send waits.
_INSTANT_S = 20e-6


class _Span(NamedTuple):
    """A microbatch that was launched on the device. Its times may not be known yet.

    Attributes:
        arrived: point at which its input was complete on this rank.
        start, end: points just before and after its computation.
        cpu_s: CPU time of the computing thread, in seconds; None if it has no meaning.
        collective_s: seconds of sums over the ranks of this stage; None without tensor parallelism.
        mask_s: seconds in which drawing waited for masks; None if no row has a grammar.
        release: releases the buffer that holds its input.
    """

    microbatch: MicroBatch
    arrived: Mark
    start: Mark
    end: Mark
    cpu_s: float | None
    collective_s: float | None
    mask_s: float | None
    release: Callable[[], None]


class _Launched(NamedTuple):
    """A microbatch whose output is not handed on yet.

    Attributes:
        retried: the stage ran out of memory, and computed it at a second attempt.
    """

    frame: MicroBatchFrame
    output: StageOutput
    retried: bool
    span: _Span


class StageRunner:
    """A runner of microbatches on this rank's stage, which sends the results to the next one.

    A GPU may still compute a microbatch when the stage has returned its output. Then the times of the microbatch are
    recorded, and its input buffer is released, while a later microbatch runs. Only the last stage waits for the GPU,
    because its result says that every stage has completed the microbatch. So the number of microbatches without times
    never exceeds the number in flight.

    If tokens are read later (StageOutput.later), the host first launches the next microbatch, and then waits for this
    one. So a device that draws tokens always has work.

    Args:
        downstream: sends to the next stage, or from the last stage to the coordinator.
        timer: marks points in the work of the stage's device.
        progress: counts that heartbeats report.
        index: index of the stage in its pipeline.
        name: name of this rank in messages.
        debug_nan: check every output and report the first stage with NaN or infinity.
        shards: edges to the other ranks of this stage; empty without tensor parallelism.
        shard_group: adds up partial results over the ranks of this stage; None if this rank holds the stage alone.
        keeps_states: layers of the stage may keep states. A second attempt would apply its tokens to them twice.
    """

    def __init__(
        self,
        stage: Stage,
        downstream: Sender[Tensor],
        recorder: Recorder,
        clock: Clock,
        timer: Timer,
        *,
        progress: StageProgress | None = None,
        index: int = 0,
        name: str | None = None,
        debug_nan: bool = False,
        shards: Sequence[Sender[Tensor]] = (),
        shard_group: ShardGroup | None = None,
        keeps_states: bool = False,
    ) -> None:
        self._stage = stage
        self._index = index
        self._name = name or f"stage {index} (rank {index})"
        self._shards = shards
        self._shard_group = shard_group
        self._keeps_states = keeps_states
        self._debug_nan = debug_nan
        self._downstream = downstream
        self._recorder = recorder
        self._clock = clock
        self._timer = timer
        self._launched: deque[_Launched] = deque()
        self._unsettled: deque[_Span] = deque()
        self._settled: deque[tuple[Callable[[], None], Callable[[], ComputeSpan]]] = deque()
        self._untold: deque[StageTime] = deque()
        self._progress = progress or StageProgress(stage)
        self._in_step = True
        self._num_sent = 0

    @property
    def in_step(self) -> bool:
        """False during the sending of a microbatch, and after an error has interrupted it.

        Other ranks may then have only a part of the microbatch.
        """
        return self._in_step

    @property
    def num_unsent(self) -> int:
        """Number of microbatches that were launched, and whose result is not sent yet."""
        return len(self._launched)

    @property
    def num_taken(self) -> int:
        """Number of microbatches whose output was handed to the next stage, or will be."""
        return self._num_sent + len(self._launched)

    def run(
        self,
        frame: MicroBatchFrame,
        hidden: Tensor | None,
        arrived: Mark,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Compute one microbatch and hand its output to the next stage, or its tokens to the coordinator.

        If its tokens are read later, they are handed on by the next call, or by `send_results`.

        Args:
            hidden: input activations; None on the first stage.
            arrived: point at which the input was complete on this rank.
            release: releases the buffer of the input.
        """
        self._progress.busy = True
        try:
            launched = self._launch(frame, hidden, arrived, release)
            self._launched.append(launched)
            self._hand_on(0 if launched.output.later is None else 1)
        finally:  # after an error this rank may do other work, and its heartbeats must not say that it hangs here
            self._progress.busy = False

    def send_results(self) -> None:
        """Wait for the microbatches that were launched, and hand on their tokens."""
        self._progress.busy = True
        try:
            self._hand_on(0)
        finally:
            self._progress.busy = False

    def finish(
        self, frame: HeadFrame, microbatch: MicroBatch, rows: Tensor | None, arrived_s: float
    ) -> tuple[StepResult, float, float]:
        """Compute the LM head of a microbatch on the first stage, because the last stage has left it out.

        Use it only with stages that compute on a CPU, or are emulated. Their times are known when they return.

        Args:
            frame: the message of the last stage.
            rows: inputs of the LM head, which came with the message.
            arrived_s: time at which the message was complete on this rank.

        Returns:
            The result, the seconds that it took, and the time at which it was ready.
        """
        self._progress.busy = True
        try:
            clock = self._clock
            compute = self._stage.prepare_head(microbatch)
            start_cpu_s, start_s = clock.thread_cpu(), clock.now()
            output, retried = self._compute(compute, rows, microbatch)
            end_s = clock.now()
            cpu_s = clock.thread_cpu() - start_cpu_s if self._stage.counts_cpu else None
            arrived_s = min(arrived_s, start_s)
            self._recorder.record(HeadSpan(microbatch.index, arrived_s, start_s, end_s, cpu_s, output.mask_s))
            last = len(frame.stage_times) - 1
            tokens = _blamed(output.tokens, dict(frame.bad), last) if self._debug_nan else output.tokens
            short = frame.short or retried
            return StepResult(microbatch.index, tokens, frame.stage_times, short), end_s - start_s, end_s
        finally:
            self._progress.busy = False

    def _launch(
        self, frame: MicroBatchFrame, hidden: Tensor | None, arrived: Mark, release: Callable[[], None]
    ) -> _Launched:
        clock, microbatch = self._clock, frame.microbatch
        for shard in self._shards:
            self._in_step = False
            shard.reserve()
            shard.send(frame)
        compute = self._stage.prepare(microbatch)
        before_s = self._shard_group.spent_s if self._shard_group is not None else 0.0
        start_cpu_s, start = clock.thread_cpu(), self._timer.mark()
        output, retried = self._compute(compute, hidden, microbatch)
        end = self._timer.mark()
        if output.hidden is None and output.later is None:
            end.wait()
        cpu_s = clock.thread_cpu() - start_cpu_s if self._stage.counts_cpu else None
        summed_s = self._shard_group.spent_s - before_s if self._shard_group is not None else None
        span = _Span(microbatch, arrived, start, end, cpu_s, summed_s, output.mask_s, release)
        return _Launched(frame, output, retried, span)

    def _hand_on(self, num_left: int) -> None:
        """Hand on the output of the oldest launched microbatches, all but `num_left`."""
        while len(self._launched) > num_left:
            oldest = self._launched[0]
            if oldest.output.later is not None:
                oldest = oldest._replace(output=self._read(oldest))
            self._in_step = False
            self._launched.popleft()
            self._send(oldest)

    def _read(self, launched: _Launched) -> StageOutput:
        """Wait for the tokens that the device draws. After an interrupt, it can be called again."""
        output = launched.output
        assert output.later is not None
        try:
            launched.span.end.wait()
            return replace(output, tokens=output.later(), later=None)
        except RuntimeError:
            self._in_step = False  # an error of the device: the tokens never come
            raise

    def _send(self, launched: _Launched) -> None:
        """Hand the output of a microbatch to the next stage."""
        frame, output, retried, span = launched
        self._unsettled.append(span)
        self._settle()
        own = self._untold.popleft() if self._untold else StageTime(frame.microbatch.index, 0.0)
        stage_times = (*frame.stage_times, own)
        try:
            self._reserve()
            self._downstream.send(*self._message(frame, output, stage_times, frame.short or retried))
            self._num_sent += 1
            self._progress.num_done += 1
            self._in_step = True
        finally:  # record what was computed, even if a neighbour is lost
            # Sending may have waited for the device, so its times are known now, with the least uncertainty.
            self._settle()
            self._record()

    def _message(
        self, frame: MicroBatchFrame, output: StageOutput, stage_times: tuple[StageTime, ...], short: bool
    ) -> tuple[Frame, Tensor | None]:
        """Return the message for the next rank: activations, inputs of an LM head on the first stage, or tokens."""
        microbatch = frame.microbatch
        if output.hidden is not None:
            known = {sequence for sequence, _ in frame.bad}
            bad = (*frame.bad, *((sequence, self._index) for sequence in output.bad if sequence not in known))
            return MicroBatchFrame(microbatch, stage_times, bad, short), output.hidden
        if output.rows is not None:
            return HeadFrame(microbatch.index, len(output.rows), stage_times, frame.bad, short), output.rows
        tokens = _blamed(output.tokens, dict(frame.bad), self._index) if self._debug_nan else output.tokens
        return StepResult(microbatch.index, tokens, stage_times, short, output.prompt_logprobs), None

    def _compute(self, compute: Compute, hidden: Tensor | None, microbatch: MicroBatch) -> tuple[StageOutput, bool]:
        """Compute a microbatch. If memory runs out, free unused memory and try once more.

        The second attempt writes the same keys and values to the same places. With tensor parallelism there is none,
        since the other ranks of the stage would not know about it. Nor is there one if layers keep states: the first
        attempt may have changed them.

        Returns:
            The output, and True if it took a second attempt. The coordinator then issues smaller microbatches.

        Raises:
            MemoryLostError: there is no memory for the microbatch.
        """
        try:
            return compute(hidden), False
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._hand_on(0)  # an earlier result is complete, whatever becomes of this microbatch
            if self._shard_group is not None or self._keeps_states:
                raise self._no_memory(microbatch, "", error) from error
        # Not inside the except block: there, the traceback still holds the tensors of the failed attempt.
        give_back()
        try:
            return compute(hidden), True
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise self._no_memory(microbatch, ", also at a second attempt", error) from error

    def _no_memory(self, microbatch: MicroBatch, attempts: str, error: RuntimeError) -> MemoryLostError:
        return MemoryLostError(
            f"{self._name} has no memory for a microbatch of {microbatch.num_tokens} tokens{attempts}: "
            f"{str(error).splitlines()[0]}. Try a smaller --chunk-size, --max-num-seqs or --kv-cache-memory, and "
            f"run again with --resume",
            at_start=self._progress.num_done == 0,
        )

    def _settle(self) -> None:
        """Read the times of the microbatches that the device has completed, and queue them for `_record`."""
        while self._unsettled:
            span = self._unsettled[0]
            start_s, end_s = span.start.at_s(), span.end.at_s()
            arrived_s = span.arrived.at_s()
            if arrived_s is None or start_s is None or end_s is None:
                return
            self._unsettled.popleft()
            index, issued_s = span.microbatch.index, span.microbatch.issued_s
            arrived_s = min(arrived_s, start_s)
            times = issued_s, arrived_s, start_s, end_s
            told = partial(ComputeSpan, index, *times, span.cpu_s, span.collective_s, span.mask_s)
            self._settled.append((span.release, told))
            self._untold.append(StageTime(index, end_s - start_s))

    def _record(self) -> None:
        """Release the input buffers of completed microbatches, and record their compute spans in the trace.

        This happens after the output was sent, so no stage waits for it.
        """
        while self._settled:
            release, told = self._settled.popleft()
            release()
            self._recorder.record(told)

    def _reserve(self) -> None:
        asked_s = self._clock.now()
        self._downstream.reserve()
        got_s = self._clock.now()
        if got_s - asked_s > _INSTANT_S:
            self._recorder.record(SendWait(asked_s, got_s))

    def close(self) -> None:
        """Send a goodbye, the last message of an edge, to the next ranks. Record the remaining compute spans.

        The coordinator ends a run when it has all results, so the device has no work left.
        """
        for shard in self._shards:
            shard.close()
        self._downstream.close()
        for span in self._unsettled:
            span.end.wait()
        self._settle()
        self._record()

    def serve(self, upstream: Receiver[Tensor]) -> None:
        """Run the microbatches that arrive from `upstream` until a goodbye comes. Then send a goodbye too."""
        while True:
            message = upstream.receive()
            assert message is not None
            if isinstance(message.frame, Goodbye):
                break
            assert isinstance(message.frame, MicroBatchFrame), message.frame
            arrived = message.landed or Instant(message.arrived_s)
            self.run(message.frame, message.payload, arrived, message.release)
        self.close()
        upstream.close()


def _blamed(tokens: tuple[SampledToken, ...], bad: dict[int, int], last: int) -> tuple[SampledToken, ...]:
    """Return the tokens. Each failed one gets the index of the first stage that had NaN or infinity.

    Args:
        bad: for each sequence, the first stage that reported such values.
        last: index of the last stage. It is taken if no earlier stage reported the sequence.
    """
    return tuple(
        token._replace(first_bad=bad.get(token.sequence, last)) if token.failure else token for token in tokens
    )
