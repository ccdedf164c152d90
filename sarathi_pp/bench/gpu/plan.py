"""What `sarathi-pp bench gpu` measures, how large, and what its parts share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sarathi_pp.bench.gpu.stage import LLAMA_3_8B, Extents, GpuStage, ModelShape
from sarathi_pp.model.memory import give_back
from sarathi_pp.trace.clock import Clock

Figures = dict[str, Any]

# What is promised of a GPU.
PREFILL_SHARE, DECODE_SHARE, PIGGYBACK_FACTOR, ATTENTION_SHARE, CONTEST_FACTOR = 0.6, 0.7, 10.0, 0.8, 2.0

# Of one layer's attention.
_SHAPES: dict[str, Extents] = {
    "chunk 512 at 0": ((0, 512),),
    "chunk 512 at 4096": ((4096, 512),),
    "64 decodes at 1024": ((1024, 1),) * 64,
    "4 decodes at 8000": ((8000, 1),) * 4,
    "chunk 448 at 1024, 64 decodes at 512": ((1024, 448), *(((512, 1),) * 64)),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """large: what is timed. small: what is compared with transformers. rows: prompts of that comparison.

    middle: what answers `requests` mixed requests, with up to `longest` tokens of prompt, here and in transformers;
    serving: options of ours meanwhile. prefill: tokens of a microbatch. decodes: of another, each behind `context`
    tokens. chunk: tokens of those in which decodes ride along, the numbers `piggybacked`. attention: sequences of a
    microbatch, by what it is called; layers: whose keys and values it goes through, more than a device's cache holds.
    warm_s: of each measurement, so that clocks are up.
    """

    large: ModelShape = LLAMA_3_8B
    small: ModelShape = ModelShape(512, 1536, 4, 8, 4, 2048)
    middle: ModelShape = ModelShape(2048, 8192, 16, 32, 8, 128256)
    rows: int = 12
    requests: int = 64
    longest: int = 1024
    serving: tuple[str, ...] = ()
    matrix: int = 8192
    array_bytes: int = 4 << 30
    prefill: int = 2048
    decodes: int = 64
    context: int = 1024
    chunk: int = 512
    piggybacked: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    attention: Mapping[str, Extents] = field(default_factory=lambda: _SHAPES)
    layers: int = 32
    repeats: int = 20
    warm_s: float = 0.3

    @property
    def kv_tokens(self) -> int:
        """What the microbatches take, at pages of any backend's size."""
        return self.decodes * (self.context + 256)


@dataclass(slots=True)
class Bench:
    """device: where. dtype: of what is timed. end_s: when its time is over. checks: of all parts so far.

    rates: of the device, as its first part has found them.
    """

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    clock: Clock
    end_s: float
    checks: list[Figures] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    stage: GpuStage | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def check(self, what: str, seen: float | bool, wanted: float | bool) -> None:
        """wanted: the least that is to be seen."""
        self.checks.append({"what": what, "seen": seen, "wanted": wanted, "met": seen >= wanted})

    def large(self) -> GpuStage:
        """Made when the first part asks."""
        if self.stage is None:
            self.stage = GpuStage(self.sizes.large, self.dtype, self.device, self.sizes.kv_tokens)
        return self.stage

    def forget(self) -> None:
        """The large stage is not needed any more, or not now."""
        self.stage = None
        give_back()

    @torch.inference_mode()
    def seconds(self, *calls: Callable[[], object]) -> list[Figures]:
        """What each takes: the median, and the quartiles.

        They are taken in turn, so that a device that slows down slows all of them. Before that they run unmeasured
        until its clocks are up.
        """
        warm_until_s = self.clock.now() + self.sizes.warm_s
        while True:
            for call in calls:
                call()
            if self.on_gpu:
                torch.cuda.synchronize(self.device)
            if self.clock.now() >= warm_until_s:
                break
        spans: list[list[float]] = [[] for _ in calls]
        for _ in range(self.sizes.repeats):
            for call, taken in zip(calls, spans, strict=True):
                taken.append(_once_s(self.device, self.clock, call))
        found = (sorted(taken) for taken in spans)
        return [{"s": one[len(one) // 2], "quartiles_s": [one[len(one) // 4], one[3 * len(one) // 4]]} for one in found]


def _once_s(device: torch.device, clock: Clock, call: Callable[[], object]) -> float:
    if device.type != "cuda":
        begin_s = clock.now()
        call()
        return clock.now() - begin_s
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(1e-3 * begin.elapsed_time(end))
