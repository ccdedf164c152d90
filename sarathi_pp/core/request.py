"""What was asked, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sarathi_pp.config import SamplingParams

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    index: arrival order, unique in a run; it names the sequence in schedules and traces (`s<index>`).
    prompt_token_ids: never empty. sampling.seed: already concrete.
    arrival_s: coordinator clock; latencies count from here. paragraph_ends: prompt positions, ascending, at which a
    paragraph of the text ends; empty where nobody asked.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float = 0.0
    paragraph_ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request: every generated token id, end-of-sequence token included.

    first_bad: of an error, the first stage whose output was not finite; -1 where nobody looked.
    """

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_preemptions: int = 0
    first_bad: int = -1
