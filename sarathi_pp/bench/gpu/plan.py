"""The plan of `sarathi-pp bench gpu`: the sizes of its measurements, and the state that its parts share."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from sarathi_pp.bench.gpu.document import Figures
from sarathi_pp.bench.gpu.stage import LLAMA_3_8B, Extents, GpuStage, ModelShape
from sarathi_pp.model.memory import give_back
from sarathi_pp.outputs.atomic_file import atomic_write
from sarathi_pp.trace.clock import Clock

# The least shares and factors that a GPU must reach, so that a check is met.
PREFILL_SHARE, DECODE_SHARE, PIGGYBACK_FACTOR, ATTENTION_SHARE, CONTEST_FACTOR = 0.6, 0.7, 10.0, 0.8, 2.0

# Microbatches whose attention is timed, by name. For each sequence: (number of earlier tokens, number of new tokens).
_SHAPES: dict[str, Extents] = {
    "chunk 512 at 0": ((0, 512),),
    "chunk 512 at 4096": ((4096, 512),),
    "chunk 2048 at 0": ((0, 2048),),
    "64 decodes at 1024": ((1024, 1),) * 64,
    "4 decodes at 8000": ((8000, 1),) * 4,
    "chunk 448 at 1024, 64 decodes at 512": ((1024, 448), *(((512, 1),) * 64)),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of all measurements.

    Attributes:
        large: model whose microbatches are timed.
        wide: model with wide heads, whose attention is timed with several tiles. Only its heads matter.
        small: model whose tokens and logits are compared with those of transformers.
        middle: model of the contest with transformers.
        rows: number of prompts whose output tokens are compared with those of transformers.
        requests: number of requests of the contest with transformers.
        longest: most prompt tokens of these requests.
        serving: further options of `generate` in this contest.
        matrix: rows and columns of the matrices whose product is timed.
        array_bytes: size of the array whose reading is timed.
        prefill: number of tokens of the timed prompt chunk.
        decodes: number of decodes in the timed microbatch of decodes.
        context: number of earlier tokens per decode.
        chunk: number of tokens of a microbatch that has a prompt chunk and decodes.
        piggybacked: numbers of decodes in such microbatches, one microbatch for each.
        attention: microbatches whose attention is timed, by name.
        layers: number of layers whose attention is timed one after another. Their keys and values together must be too
            large for a GPU's cache.
        repeats: number of timed calls of each function.
        warm_s: seconds of warm-up before each measurement, so that the device's clock rate is up.
    """

    large: ModelShape = LLAMA_3_8B
    wide: ModelShape = ModelShape(4096, 14336, 32, 16, 8, 128256)
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
        """Tokens of KV cache that the microbatches need, with the page size of any backend."""
        return self.decodes * (self.context + 256)

    @classmethod
    def from_json(cls, sizes: Figures) -> Sizes:
        """Return the sizes that `to_json` has written."""
        shapes = {name: ModelShape(**sizes[name]) for name in ("large", "wide", "small", "middle")}
        lists = {name: tuple(sizes[name]) for name in ("serving", "piggybacked")}
        attention = {what: tuple((start, count) for start, count in some) for what, some in sizes["attention"].items()}
        return cls(**{**sizes, **shapes, **lists, "attention": attention})

    def to_json(self) -> Figures:
        return {**asdict(self), "attention": dict(self.attention)}


class OutOfTimeError(RuntimeError):
    """The time of a part was over before it had all its figures. The part is left out, and a second call runs it."""


@dataclass(slots=True)
class Bench:
    """The state that the parts of one process share.

    Attributes:
        dtype: dtype of the timed model.
        end_s: time at which the current part must have ended, on `clock`.
        parts: figures of the parts so far, by name. Those of earlier processes and runs are included.
        folder: folder for the file of each part, which the watching process reads; None for no files.
        part: name of the current part.
        figures: figures of the current part.
        checks: results of the current part's checks.
        stage: the large model while it is loaded; None otherwise.
    """

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    clock: Clock
    end_s: float = math.inf
    parts: dict[str, Figures] = field(default_factory=dict)
    folder: Path | None = None
    part: str = ""
    figures: Figures = field(default_factory=dict)
    checks: list[Figures] = field(default_factory=list)
    stage: GpuStage | None = None

    def begin(self, part: str, end_s: float) -> None:
        """Begin a part. Figures and checks of the part before it are forgotten here."""
        self.part, self.end_s = part, end_s
        self.figures, self.checks = {}, []
        self.parts[part] = self.figures
        self.save()

    def save(self, *, ended: bool = False) -> None:
        """Write the figures and checks of the current part to its file, so that they outlive this process.

        Args:
            ended: the part has ended.
        """
        if self.folder is not None:
            result = {"figures": self.figures, "checks": self.checks, "ended": ended}
            atomic_write(self.folder / f"{self.part}.json", json.dumps(result), synced=False)

    @property
    def rates(self) -> Figures:
        """Measured rates of the device: `flops` and `bytes_per_s`."""
        found = self.parts.get("rates", {})
        if "bytes_per_s" not in found:
            raise RuntimeError("the part rates has no figures, so nothing can be compared with them")
        return found

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def check(self, what: str, seen: float | bool, wanted: float | bool) -> None:
        """Record the result of a check of the current part.

        Args:
            what: name of the check.
            seen: the measured value.
            wanted: the least value that meets the check.
        """
        self.checks.append({"part": self.part, "what": what, "seen": seen, "wanted": wanted, "met": seen >= wanted})
        self.save()

    def large(self) -> GpuStage:
        """Return the stage with the large model. It is made at the first call."""
        if self.stage is None:
            self.stage = GpuStage(self.sizes.large, self.dtype, self.device, self.sizes.kv_tokens)
        return self.stage

    def forget(self) -> None:
        """Free the memory of the large stage. The next call of `large` makes it again."""
        self.stage = None
        give_back()

    @torch.inference_mode()
    def seconds(self, *calls: Callable[[], object]) -> list[Figures]:
        """Time some calls. Return for each its median `s` and its two quartiles `quartiles_s`, in seconds.

        The calls take turns, so that a device that slows down affects all of them. Before that they run unmeasured for
        `warm_s` seconds.
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
