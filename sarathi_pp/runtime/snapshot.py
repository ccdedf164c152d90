"""How far a run is, for whoever watches it."""

from __future__ import annotations

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
