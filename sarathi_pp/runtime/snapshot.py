"""How far a run is, for whoever watches it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counts and tokens since the run's start, elapsed_s after it.

    stage_busy: per stage, the share (0 to 1) of the time since the last snapshot in which it computed.
    """

    elapsed_s: float
    requests_done: int
    requests_failed: int
    running: int
    waiting: int
    prompt_tokens: int
    output_tokens: int
    stage_busy: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        tokens = self.prompt_tokens + self.output_tokens
        return tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0
