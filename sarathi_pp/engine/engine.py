"""The loop that drives a pipeline: input lines in, microbatches through the first stage, results back, answers out.

It runs on the pipeline's leader (its first rank), which is rank 0 in a run of one pipeline.

    source --lines--> coordinator --microbatch--> stage 0 ...> last stage --tokens--> coordinator --> sink
                                                                    `--rows--> LM head on stage 0 --tokens--^

For some microbatches the last stage sends rows (the output vectors of its layers) instead of tokens. Then the first
stage computes the LM head. One thread does all of this in turn, so the coordinator needs no lock. Reading and
tokenising, writing and syncing, and the wire have their own threads.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Protocol

from torch import Tensor

from sarathi_pp.core.coordinator import Coordinator
from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.core.head_placement import HeadPlacement
from sarathi_pp.core.plan import IdleReason, MicroBatch, StepResult
from sarathi_pp.core.policy.view import Limits, Policy
from sarathi_pp.core.request import MAX_WAITING_TOKENS, Completion, Request
from sarathi_pp.engine.progress import IgnoreReports, Progress, RunListener
from sarathi_pp.errors import PeerLostError, ProtocolError, RowError, StoppedError
from sarathi_pp.inputs.prompt_limits import kv_cache_exhausted
from sarathi_pp.inputs.row import Row
from sarathi_pp.inputs.source import Source
from sarathi_pp.outputs.sink import Sink
from sarathi_pp.process.signals import NEVER_ASKED, Asked, StopRequests
from sarathi_pp.stages.runner import StageRunner
from sarathi_pp.trace.clock import Clock
from sarathi_pp.trace.events import Issued, RequestArrived, Returned, RowRefused, Starved, Totals
from sarathi_pp.trace.latency import RequestLatency
from sarathi_pp.trace.recorder import Recorder
from sarathi_pp.trace.timer import Instant
from sarathi_pp.trace.token_times import TokenTimes
from sarathi_pp.wire.channel import Message, Receiver
from sarathi_pp.wire.codec import HeadFrame, MicroBatchFrame

# Least seconds between two progress reports.
_PROGRESS_EVERY_S = 0.2
# Most seconds that the engine waits for new input lines when no microbatch is in flight.
_IDLE_WAIT_S = 1.0
# Seconds between two checks for new input lines, while there is room for another microbatch in flight.
_ARRIVAL_CHECK_S = 0.005
# Seconds between two checks for a signal, while the engine can only wait for a result.
_SIGNAL_CHECK_S = 0.2
# After a signal, the engine abandons the microbatches in flight if no result comes for this number of seconds. It waits
# at least three times its longest earlier wait for a result.
_SILENT_S = 5.0
# Most input lines taken from the source at a time. In between, the engine checks the number of waiting tokens.
_ROWS_AT_A_TIME = 16


class StopChecker(Protocol):
    """A search for the stop strings of one request in its output."""

    def push(self, token_id: int) -> bool:
        """Add the next token of the output, and return whether the output so far holds a stop string."""
        ...


# Makes the checker of a request; None if the request has no stop strings.
StopCheckers = Callable[[Request], "StopChecker | None"]


@dataclass(slots=True)
class _Live:
    """One unfinished request.

    Attributes:
        times: the times at which its tokens came.
        prompt_computed: number of its prompt tokens that have been computed.
    """

    row: Row
    stop_checker: StopChecker | None
    times: TokenTimes = field(default_factory=TokenTimes)
    prompt_computed: int = 0

    def chunk_came(self, end: int) -> int:
        """Return the number of prompt tokens that a chunk has computed for the first time.

        After a preemption, a chunk computes tokens again, and these do not count.

        Args:
            end: position after the last token of the chunk.
        """
        before = self.prompt_computed
        self.prompt_computed = max(before, min(end, self.row.num_prompt_tokens))
        return self.prompt_computed - before


class Engine:
    """The driver of one pipeline.

    `run` may be called again with more input lines. Between two calls, the stages keep running. After an exception in
    `run`, the requests of that call are forgotten, and `run` may be called again. If the exception has ended the
    pipeline for good, the next call raises PeerLostError at once.

    Args:
        runner: computes microbatches on the first stage, and sends its output to the next stage.
        results: the receiving end of the edge from the last stage, on which results come back.
        stop_checkers: makes the checker for a request's stop strings.
        listener: receives progress and warnings.
        cost: cost model of the stages, as far as it is known before the run. Results refine it. None if the policy
            needs none.
        heads: decides for which microbatches the first stage computes the LM head. None: for no microbatch.
    """

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        runner: StageRunner,
        results: Receiver[Tensor],
        recorder: Recorder,
        clock: Clock,
        *,
        eos_token_ids: Collection[int],
        stop_checkers: StopCheckers,
        listener: RunListener | None = None,
        cost: CostModel | None = None,
        heads: HeadPlacement | None = None,
    ) -> None:
        self._coordinator = Coordinator(
            limits,
            policy,
            eos_token_ids=eos_token_ids,
            stop_rule=self._token_came,
            clock=clock.now,
            cost=cost,
            heads=heads,
        )
        self._runner = runner
        self._results = results
        self._recorder = recorder
        self._clock = clock
        self._stop_checkers = stop_checkers
        self._listener = listener or IgnoreReports()
        self._live: dict[int, _Live] = {}
        self._token_s = 0.0  # arrival of the result that the coordinator handles now
        self._starved: IdleReason | None = None
        self._started_s = clock.now()
        self._reported_s = self._started_s
        self._requests_seen = self._requests_done = self._requests_failed = self._chunks_done = self._later_choices = 0
        self._prompt_tokens = self._output_tokens = self._tokens_computed = 0
        self._stage_compute_s = (0.0,) * limits.num_stages
        self._reported_compute_s = self._stage_compute_s
        self._first_issue_s = math.inf
        self._last_result_s = 0.0
        self._longest_wait_s = 0.0  # the longest time between two results
        self._shrunk_at = 0  # index of the first microbatch that was issued after the limits shrank
        self._inflight: deque[MicroBatch] = deque()  # microbatches whose output the first stage has sent or will send
        self._cause: BaseException | None = None

    def run(self, source: Source, sink: Sink, stop: StopRequests = NEVER_ASKED) -> Asked | None:
        """Answer every input line of the source.

        After a request to stop, no new request starts, and the running ones are finished.

        Args:
            stop: shows whether, and when, the run was asked to stop.

        Returns:
            The signal that stopped the run; None if there was none.

        Raises:
            StoppedError: finishing the running requests takes longer than the signal allows.
            SarathiError: another error ended the run early, such as the loss of a rank or a full disk.
        """
        if self._cause is not None:
            what = f"{type(self._cause).__name__}: {self._cause}"
            raise PeerLostError(
                f"the pipeline was lost in an earlier call ({what}) and cannot be used again; start a new one"
            ) from self._cause
        try:
            return self._run(source, sink, stop)
        except BaseException as error:
            self._abort(error)
            raise

    @property
    def is_lost(self) -> bool:
        """Return whether an exception has ended the pipeline for good."""
        return self._cause is not None

    def report_progress(self) -> None:
        """Report the progress now. A new display needs the counts from before its run, to subtract them."""
        self._report_progress(force=True)

    def _abort(self, error: BaseException) -> None:
        """Forget every request of this call. Results of microbatches in flight are dropped when they come."""
        if isinstance(error, (PeerLostError, ProtocolError)) or not self._runner.in_step:
            self._cause = error
        self._live.clear()
        self._starved = None
        self._coordinator.abort(self._inflight)

    def _run(self, source: Source, sink: Sink, stop: StopRequests) -> Asked | None:
        told: Asked | None = None
        while True:
            before, told = told, stop.asked()
            if told is not None:
                if before is None:
                    self._withdraw(source)
            self._admit(source, sink)
            self._collect(sink, timeout_s=0)
            if told is not None and self._coordinator.unfinished and self._clock.now() > self._given_up_s(told):
                unfinished = self._coordinator.num_running
                raise StoppedError.by(told.number, f"the run, with {unfinished} requests unfinished,")
            if self._issue():
                continue
            if self._coordinator.num_inflight:
                if self._runner.num_unsent == self._coordinator.num_inflight:
                    self._runner.send_results()  # no microbatch follows that would send them
                self._collect(sink, timeout_s=self._patience_s(source))
            elif source.exhausted:
                pool = self._coordinator.pool
                assert pool.num_free == pool.num_pages, f"{pool.num_free} of {pool.num_pages} pages came back"
                return told
            else:
                source.wait(_IDLE_WAIT_S)
                self._report_progress(force=False)

    def _patience_s(self, source: Source) -> float:
        """Return the seconds to wait for a result, before the next check for signals and new input lines."""
        return _SIGNAL_CHECK_S if self._coordinator.idle_reason == "full" or source.exhausted else _ARRIVAL_CHECK_S

    def close(self) -> None:
        """End the stages, and wait until the last one has said goodbye, which is its last message."""
        if self._cause is None:
            self._runner.send_results()
        end_s = self._clock.now() + _SILENT_S
        while self._inflight and self._clock.now() < end_s:  # a call of `run` that raised left them in flight
            if (message := self._receive(_SIGNAL_CHECK_S)) is not None:
                self._take(message)
        self._report_progress(force=True)
        self._recorder.record(self._totals())
        self._runner.close()
        self._results.close()

    def _totals(self) -> Totals:
        ran = self._last_result_s > 0
        return Totals(
            microbatches=self._coordinator.num_issued,
            requests=self._requests_seen,
            completed=self._requests_done,
            failed=self._requests_failed,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            first_issue_s=self._first_issue_s if ran else None,
            last_result_s=self._last_result_s if ran else None,
        )

    def _given_up_s(self, told: Asked) -> float:
        """Return the time, on the engine's clock, at which a stopped run gives up its running requests.

        It is the deadline of the signal. It is earlier if no results come (see _SILENT_S).
        """
        return min(told.until_s, max(told.at_s, self._last_result_s) + max(_SILENT_S, 3 * self._longest_wait_s))

    def _withdraw(self, source: Source) -> None:
        """Take no more input lines, and forget the requests that have not started."""
        source.close()
        for request in self._coordinator.withdraw():
            del self._live[request.index]

    def _admit(self, source: Source, sink: Sink) -> None:
        """Take input lines that have arrived, until max_num_seqs requests or MAX_WAITING_TOKENS tokens wait."""
        room = self._coordinator.limits.max_num_seqs - self._coordinator.num_waiting
        while room > 0 and self._coordinator.waiting_tokens < MAX_WAITING_TOKENS:
            rows = source.take(limit := min(room, _ROWS_AT_A_TIME))
            for row in rows:
                self._admit_row(row, sink)
            if len(rows) < limit:
                return
            room -= limit

    def _admit_row(self, row: Row, sink: Sink) -> None:
        self._requests_seen += 1
        if row.request is None:
            assert row.error is not None
            self._refuse(row, row.error, sink)
            return
        request = row.request
        self._recorder.record(RequestArrived(request.index, request.arrival_s, len(request.prompt_token_ids)))
        self._live[request.index] = _Live(row, self._stop_checkers(request) if request.sampling.stop else None)
        answered = self._coordinator.submit(request)
        if answered is not None:
            self._finish(answered, self._clock.now(), sink)

    def _issue(self) -> bool:
        """Issue the next microbatch, and compute it on the first stage. Return False if there is none to issue."""
        microbatch = self._coordinator.next_microbatch()
        if microbatch is None:
            if self._starved != self._coordinator.idle_reason:
                self._starved = self._coordinator.idle_reason
                self._recorder.record(Starved(self._clock.now(), self._starved))
            return False
        self._starved = None
        use = self._coordinator.take_kv_use()
        for chunk in microbatch.chunks:
            if chunk.decode:
                break  # prompts come first
            self._live[chunk.sequence].times.issued(microbatch.issued_s)
        self._first_issue_s = min(self._first_issue_s, microbatch.issued_s)
        num_taken = self._runner.num_taken
        try:
            self._runner.run(MicroBatchFrame(microbatch), None, Instant(microbatch.issued_s))
        finally:
            # If the stage has not taken the microbatch, another one gets its index.
            if self._runner.num_taken > num_taken:
                self._inflight.append(microbatch)
                # The recorder's thread makes the text of the schedule, because this takes longer with every sequence in
                # the microbatch.
                self._recorder.record(partial(Issued.of, microbatch, use))
        return True

    def _collect(self, sink: Sink, timeout_s: float) -> None:
        """Wait up to timeout_s for a result, and handle all results that have come."""
        while (message := self._receive(timeout_s)) is not None:
            for completion in self._take(message):
                self._finish(completion, self._last_result_s, sink)
            self._report_progress(force=False)
            timeout_s = 0

    def _receive(self, timeout_s: float) -> Message[Tensor] | None:
        try:
            return self._results.receive(timeout_s)
        except BaseException as error:  # from now on, the engine cannot know which results will still come
            self._cause = error
            raise

    def _take(self, message: Message[Tensor]) -> list[Completion]:
        """Handle the result of the oldest microbatch, and return the requests that it finished."""
        microbatch = self._inflight.popleft() if self._inflight else None
        head_s, arrived_s = 0.0, message.arrived_s
        try:
            if isinstance(message.frame, HeadFrame):
                result, head_s, arrived_s = self._compute_head(message.frame, microbatch, message)
            else:
                assert isinstance(message.frame, StepResult), message.frame
                result = message.frame
                if microbatch is None or microbatch.head_on_first:
                    due = "its LM head belongs to the first stage" if microbatch else "no microbatch is in flight"
                    raise ProtocolError(f"the last stage sent tokens of microbatch {result.index}, although {due}")
            if len(result.stage_times) != len(self._stage_compute_s):
                raise ProtocolError(
                    f"the result of microbatch {result.index} has times of {len(result.stage_times)} stages; the "
                    f"pipeline has {len(self._stage_compute_s)}"
                )
        finally:
            message.release()
        assert microbatch is not None, "a result without one was refused"
        self._count_prompt(microbatch)
        # If the result came while this thread computed an earlier LM head, its time is the end of that LM head.
        return self._complete(result, head_s, max(arrived_s, self._last_result_s))

    def _count_prompt(self, microbatch: MicroBatch) -> None:
        """Count the chunks of a microbatch whose result is back, and their prompt tokens."""
        for chunk in microbatch.chunks:
            if chunk.decode:
                break  # prompts come first
            self._chunks_done += 1
            if (live := self._live.get(chunk.sequence)) is not None:
                self._tokens_computed += live.chunk_came(chunk.end)

    def _compute_head(
        self, frame: HeadFrame, microbatch: MicroBatch | None, message: Message[Tensor]
    ) -> tuple[StepResult, float, float]:
        """Compute the LM head of a microbatch on the first stage, from the rows that the last stage has sent.

        Returns:
            The result, the seconds that the LM head took, and the time at which it was done.
        """
        if microbatch is None or not microbatch.head_on_first or frame.index != microbatch.index:
            raise ProtocolError(
                f"rows of microbatch {frame.index} came for an LM head on the first stage, which waits for "
                f"{microbatch or 'nothing'}"
            )
        if frame.num_rows != microbatch.num_drawn:
            raise ProtocolError(
                f"{frame.num_rows} rows came for the LM head of microbatch {frame.index}, which draws "
                f"{microbatch.num_drawn} tokens"
            )
        return self._runner.finish(frame, microbatch, message.payload, message.arrived_s)

    def _complete(self, result: StepResult, head_s: float, arrived_s: float) -> list[Completion]:
        """Give a result to the coordinator, and return the requests that it finished.

        Args:
            head_s: seconds for which the first stage computed the microbatch's LM head; 0 if the last stage did.
            arrived_s: time at which the result was complete, on the engine's clock.
        """
        self._recorder.record(Returned(result.index, arrived_s))
        first, *others = (time.seconds for time in result.stage_times)
        computed_s = first + head_s, *others
        self._stage_compute_s = tuple(
            total + seconds for total, seconds in zip(self._stage_compute_s, computed_s, strict=True)
        )
        self._longest_wait_s = max(self._longest_wait_s, arrived_s - max(self._last_result_s, self._first_issue_s))
        self._last_result_s = self._token_s = arrived_s
        completions = self._coordinator.complete(result, head_s)
        if result.short and result.index >= self._shrunk_at:
            limits = self._coordinator.shrink()
            self._shrunk_at = self._coordinator.num_issued
            self._listener.warn(
                f"a stage had no memory for microbatch {result.index} at first; from here on chunks of "
                f"{limits.chunk_size} tokens, if the policy uses chunks, and {limits.max_num_seqs} running sequences"
            )
        return completions

    def _token_came(self, request: Request, token_id: int) -> bool:
        """Record a new token of a request. Return whether a stop string ends the request at this token.

        The coordinator calls this for every token that it keeps. It drops tokens from before a preemption.
        """
        live = self._live[request.index]
        live.times.token_came(self._token_s)
        self._tokens_computed += 1
        return live.stop_checker is not None and live.stop_checker.push(token_id)

    def _finish(self, completion: Completion, at_s: float, sink: Sink) -> None:
        request = completion.request
        live = self._live.pop(request.index)
        num_prompt, num_output = len(request.prompt_token_ids), len(completion.token_ids)
        finished = live.times.finished(completion, at_s)
        self._recorder.record(finished)
        self._later_choices += live.row.choice > 0
        if completion.finish_reason == "error":
            self._requests_failed += 1
            sink.fail(live.row, self._error(completion))
            return
        self._requests_done += 1
        self._prompt_tokens += num_prompt
        self._output_tokens += num_output
        metrics = asdict(RequestLatency.of(finished)) | {"cached_tokens": completion.cached_tokens}
        sink.finish(live.row, completion, metrics)

    def _error(self, completion: Completion) -> RowError:
        num_prompt, num_output = len(completion.request.prompt_token_ids), len(completion.token_ids)
        if completion.error_code == "kv_cache_exhausted":
            pool = self._coordinator.pool
            needed = f"the prompt has {num_prompt} tokens and its output {num_output} so far"
            return kv_cache_exhausted(needed, pool.num_pages, pool.page_size)
        if completion.error_code == "invalid_grammar":
            what = f"the grammar of the request cannot be followed at output token {num_output + 1}"
            return RowError("invalid_grammar", f"{what}; simplify it. The log of the stage has the reason")
        if completion.error_code == "no_allowed_token":
            return RowError(
                "no_allowed_token",
                f"the parameters of the request ban every token as output token {num_output + 1}; allow more tokens",
            )
        return RowError("non_finite_logits", _not_finite(num_output + 1, completion.first_bad))

    def _refuse(self, row: Row, error: RowError, sink: Sink) -> None:
        self._recorder.record(RowRefused(self._clock.now(), error.code))
        self._requests_failed += 1
        sink.fail(row, error)

    def _report_progress(self, *, force: bool) -> None:
        now = self._clock.now()
        since_s = now - self._reported_s
        if not force and since_s < _PROGRESS_EVERY_S:
            return
        computed_s = [
            total - before for total, before in zip(self._stage_compute_s, self._reported_compute_s, strict=True)
        ]
        self._reported_s, self._reported_compute_s = now, self._stage_compute_s
        self._listener.report_progress(
            Progress(
                elapsed_s=now - self._started_s,
                requests_done=self._requests_done,
                requests_failed=self._requests_failed,
                later_choices=self._later_choices,
                microbatches_done=self._coordinator.num_issued - self._coordinator.num_inflight,
                running=self._coordinator.num_running,
                waiting=self._coordinator.num_waiting,
                prompt_tokens=self._prompt_tokens,
                output_tokens=self._output_tokens,
                tokens_computed=self._tokens_computed,
                chunks_done=self._chunks_done,
                stage_busy=tuple(min(1.0, seconds / since_s) if since_s > 0 else 0.0 for seconds in computed_s),
                stage_compute_s=self._stage_compute_s,
                window_s=max(0.0, self._last_result_s - self._first_issue_s),
                kv_fragmentation=self._kv_fragmentation(),
                prefix_queried_tokens=self._coordinator.prefixes.prompt_tokens,
                prefix_cached_tokens=self._coordinator.prefixes.cached_tokens,
            )
        )

    def _kv_fragmentation(self) -> float | None:
        pool = self._coordinator.pool
        room = (pool.num_pages - pool.num_free) * pool.page_size
        return 1 - self._coordinator.held_tokens / room if room else None


def _not_finite(token: int, first_bad: int) -> str:
    text = f"token {token} had NaN or infinite logits"
    if first_bad < 0:
        return f"{text}; --debug-nan names the first stage with such values"
    return f"{text}; stage {first_bad} was the first with such values"
