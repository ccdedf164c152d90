"""How far a run is, for whoever watches it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Counts, tokens and seconds since the run's start, elapsed_s after it.

    Tokens are those of finished requests, chunks (prefill) those of microbatches whose result is back.
    stage_busy: per stage, the share (0 to 1) of the time since the last snapshot in which it computed.
    stage_compute_s: per stage, the compute of all microbatches whose times are back.
    window_s: first issue to last result so far, 0 before there is one.
    kv_fragmentation: 1 - tokens held / room in the pages held, at this moment; None where no page is held.
    """

    elapsed_s: float
    requests_done: int
    requests_failed: int
    running: int
    waiting: int
    prompt_tokens: int
    output_tokens: int
    chunks_done: int
    stage_busy: tuple[float, ...]
    stage_compute_s: tuple[float, ...]
    window_s: float
    kv_fragmentation: float | None

    @classmethod
    def nothing(cls, num_stages: int) -> Snapshot:
        """Of stages that nobody has heard of yet."""
        zeros = (0.0,) * num_stages
        return cls(
            elapsed_s=0.0,
            requests_done=0,
            requests_failed=0,
            running=0,
            waiting=0,
            prompt_tokens=0,
            output_tokens=0,
            chunks_done=0,
            stage_busy=zeros,
            stage_compute_s=zeros,
            window_s=0.0,
            kv_fragmentation=None,
        )

    @classmethod
    def of_replicas(cls, replicas: Sequence[Snapshot]) -> Snapshot:
        """All of a run: its counts are sums, its stages those of one replica after the other."""
        wasted = [one.kv_fragmentation for one in replicas if one.kv_fragmentation is not None]
        return cls(
            elapsed_s=max(one.elapsed_s for one in replicas),
            requests_done=sum(one.requests_done for one in replicas),
            requests_failed=sum(one.requests_failed for one in replicas),
            running=sum(one.running for one in replicas),
            waiting=sum(one.waiting for one in replicas),
            prompt_tokens=sum(one.prompt_tokens for one in replicas),
            output_tokens=sum(one.output_tokens for one in replicas),
            chunks_done=sum(one.chunks_done for one in replicas),
            stage_busy=tuple(share for one in replicas for share in one.stage_busy),
            stage_compute_s=tuple(seconds for one in replicas for seconds in one.stage_compute_s),
            window_s=max(one.window_s for one in replicas),
            kv_fragmentation=sum(wasted) / len(wasted) if wasted else None,
        )

    @property
    def tokens_per_s(self) -> float:
        tokens = self.prompt_tokens + self.output_tokens
        return tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def chunk_throughput(self) -> float:
        """Prefill chunks a second over the window."""
        return self.chunks_done / self.window_s if self.window_s > 0 else 0.0

    @property
    def bubble_ratios(self) -> tuple[float, ...]:
        """Per stage, the share of the window in which it did not compute; empty before the first result.

        Compute of microbatches that are still in flight is not known yet, so that this runs up to their share
        above the final figure.
        """
        if self.window_s <= 0:
            return ()
        return tuple(max(0.0, 1 - compute_s / self.window_s) for compute_s in self.stage_compute_s)
