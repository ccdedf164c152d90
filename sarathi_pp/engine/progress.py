"""Progress of a run, for displays and metrics."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run at one moment.

    Counts and seconds are since the run's start, except those of `running`, `waiting`, `stage_busy` and
    `kv_fragmentation`.

    Args:
        elapsed_s: time since the run's start.
        later_choices: ended requests that are not the first choice of their input line.
        microbatches_done: number of microbatches whose result is back.
        running: number of requests that run at this moment, and so hold KV pages.
        waiting: number of requests that are read and have not started at this moment.
        prompt_tokens: prompt tokens of finished requests.
        output_tokens: output tokens of finished requests.
        tokens_computed: prompt and output tokens of results that are back, each counted once, also if it was computed
            again after a preemption. Unlike prompt_tokens and output_tokens, it counts unfinished requests. Prompt
            tokens that were found in the prefix cache count when the first chunk after them is back.
        chunks_done: prefill chunks of microbatches whose result is back.
        stage_busy: per stage, the share (0 to 1) of the time since the last report in which it computed.
        stage_compute_s: per stage, the compute time of all microbatches whose times are back.
        window_s: time from the first issue to the last result so far; 0 before the first result.
        kv_fragmentation: 1 - tokens held / room in the pages held, at this moment; None if no page is held.
        prefix_queried_tokens: prompt tokens of the requests that have started; 0 without a prefix cache.
        prefix_cached_tokens: number of these tokens that were found in the prefix cache.
    """

    elapsed_s: float
    requests_done: int
    requests_failed: int
    running: int
    waiting: int
    prompt_tokens: int
    output_tokens: int
    tokens_computed: int
    chunks_done: int
    stage_busy: tuple[float, ...]
    stage_compute_s: tuple[float, ...]
    window_s: float
    kv_fragmentation: float | None
    later_choices: int = 0
    microbatches_done: int = 0
    prefix_queried_tokens: int = 0
    prefix_cached_tokens: int = 0

    @classmethod
    def nothing(cls, num_stages: int) -> Progress:
        """Return a progress of zeros, for stages that have reported nothing yet."""
        zeros = (0.0,) * num_stages
        return cls(
            elapsed_s=0.0,
            requests_done=0,
            requests_failed=0,
            running=0,
            waiting=0,
            prompt_tokens=0,
            output_tokens=0,
            tokens_computed=0,
            chunks_done=0,
            stage_busy=zeros,
            stage_compute_s=zeros,
            window_s=0.0,
            kv_fragmentation=None,
        )

    @classmethod
    def of_replicas(cls, replicas: Sequence[Progress]) -> Progress:
        """Return the progress of a whole run from the progress of each of its replicas.

        Counts are added up, times are the longest ones, and the fragmentation is the mean. The values per stage follow
        one another, those of replica 0 first.
        """
        wasted = [one.kv_fragmentation for one in replicas if one.kv_fragmentation is not None]
        return cls(
            elapsed_s=max(one.elapsed_s for one in replicas),
            requests_done=sum(one.requests_done for one in replicas),
            requests_failed=sum(one.requests_failed for one in replicas),
            later_choices=sum(one.later_choices for one in replicas),
            microbatches_done=sum(one.microbatches_done for one in replicas),
            running=sum(one.running for one in replicas),
            waiting=sum(one.waiting for one in replicas),
            prompt_tokens=sum(one.prompt_tokens for one in replicas),
            output_tokens=sum(one.output_tokens for one in replicas),
            tokens_computed=sum(one.tokens_computed for one in replicas),
            chunks_done=sum(one.chunks_done for one in replicas),
            stage_busy=tuple(share for one in replicas for share in one.stage_busy),
            stage_compute_s=tuple(seconds for one in replicas for seconds in one.stage_compute_s),
            window_s=max(one.window_s for one in replicas),
            kv_fragmentation=sum(wasted) / len(wasted) if wasted else None,
            prefix_queried_tokens=sum(one.prefix_queried_tokens for one in replicas),
            prefix_cached_tokens=sum(one.prefix_cached_tokens for one in replicas),
        )

    def since(self, earlier: Progress) -> Progress:
        """Return the progress from an earlier moment of the same run until now."""
        tokens = ("prompt_tokens", "output_tokens", "tokens_computed", "prefix_queried_tokens", "prefix_cached_tokens")
        results = ("microbatches_done", "chunks_done")
        counts = ("requests_done", "requests_failed", "later_choices", *tokens, *results, "elapsed_s")
        computed_s = zip(self.stage_compute_s, earlier.stage_compute_s, strict=True)
        elapsed_s = self.elapsed_s - earlier.elapsed_s
        return replace(
            self,
            **{name: getattr(self, name) - getattr(earlier, name) for name in counts},
            stage_compute_s=tuple(now_s - before_s for now_s, before_s in computed_s),
            window_s=min(self.window_s, elapsed_s),
        )

    @property
    def rows_ended(self) -> int:
        """The number of input lines whose first choice has ended."""
        return self.requests_done + self.requests_failed - self.later_choices

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_computed / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def chunk_throughput(self) -> float:
        """Prefill chunks per second over the window."""
        return self.chunks_done / self.window_s if self.window_s > 0 else 0.0

    @property
    def bubble_ratios(self) -> tuple[float, ...]:
        """Per stage, the share of the window in which it did not compute; empty before the first result.

        The compute time of microbatches in flight is not known yet. Until then the ratio is too high by their share.
        """
        if self.window_s <= 0:
            return ()
        return tuple(max(0.0, 1 - compute_s / self.window_s) for compute_s in self.stage_compute_s)


class Warner(Protocol):
    """A listener that shows warnings to the user. Any thread may call it."""

    def warn(self, text: str) -> None: ...


class RunListener(Warner, Protocol):
    """A listener that shows the progress of a run, and warnings, to the user. Any thread may call it."""

    def report_progress(self, progress: Progress) -> None: ...


class IgnoreReports:
    """A listener that ignores progress and warnings."""

    def report_progress(self, progress: Progress) -> None: ...
    def warn(self, text: str) -> None: ...


class ReplicaProgress:
    """The latest progress of each replica. Any thread may update it.

    Args:
        num_stages: number of stages of one replica.
        listener: receives the progress of all replicas each time one replica has reported its own.
    """

    def __init__(self, num_replicas: int, num_stages: int, listener: RunListener) -> None:
        self.listener = listener
        self._replicas = [Progress.nothing(num_stages)] * num_replicas
        self._lost: set[int] = set()
        self._lock = threading.Lock()

    def update(self, replica: int, progress: Progress) -> None:
        """Replace the progress of one replica, unless it is lost, and report the progress of all replicas."""
        with self._lock:
            if replica not in self._lost:
                self._replicas[replica] = progress
            self.listener.report_progress(Progress.of_replicas(self._replicas))

    def lose(self, replica: int) -> None:
        """Count only the finished requests of a lost replica. Its other requests are computed by other replicas."""
        with self._lock:
            last = self._replicas[replica]
            self._lost.add(replica)
            self._replicas[replica] = replace(
                last,
                running=0,
                waiting=0,
                tokens_computed=last.prompt_tokens + last.output_tokens,
                stage_busy=(0.0,) * len(last.stage_busy),
                kv_fragmentation=None,
            )

    def of_replica(self, replica: int) -> RunListener:
        """Return a listener for the engine of one replica, which keeps the engine's progress here."""
        return _ReplicaListener(self, replica)


@dataclass(frozen=True, slots=True)
class _ReplicaListener:
    progress: ReplicaProgress
    replica: int

    def report_progress(self, progress: Progress) -> None:
        self.progress.update(self.replica, progress)

    def warn(self, text: str) -> None:
        self.progress.listener.warn(text)
