"""What a microbatch costs on each stage: a formula with few coefficients, and the profile that holds them.

    t = a0  +  a1 * tiles(n)  +  a2 * sum(x*L + x*x/2)  +  a3 * sum(KV)  +  (a4 + head) * decodes
        fixed  linear layers     attention of chunks       attention of      per row
                                                           decodes

n: tokens in the microbatch, tiles(n) = ceil(n / tile); a chunk of x tokens behind L earlier ones; KV: tokens that
a decode reads. Seconds throughout. The form is SARATHI's own reading of where time goes (arXiv 2308.16369,
sections 3 and 4.4: linear layers move in whole tiles, attention grows with the context).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sarathi_pp.core.plan import MicroBatch
from sarathi_pp.errors import InputError

SCHEMA = "sarathi-pp/profile/1"
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Load:
    """What a microbatch's time depends on; the counts are those of MicroBatch."""

    prefill_tokens: int
    prefill_attention: float
    decodes: int
    decode_context: int

    @classmethod
    def of(cls, microbatch: MicroBatch) -> Load:
        prefill_tokens = decodes = decode_context = 0
        prefill_attention = 0.0
        for chunk in microbatch.chunks:
            if chunk.decode:
                decodes += 1
                decode_context += chunk.end
            else:
                prefill_tokens += chunk.num_tokens
                prefill_attention += chunk.attention
        return cls(prefill_tokens, prefill_attention, decodes, decode_context)

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decodes


# What the coefficients a0 .. a4 are multiplied with.
Row = tuple[float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class Terms:
    """One microbatch's seconds on one stage, by what they come from; they add up to its time.

    fixed: every microbatch pays it. prefill: linear layers over all tokens, and attention of chunks. context:
    attention of decodes. decode: what each decode costs whatever its context.
    """

    fixed: float
    prefill: float
    context: float
    decode: float

    @property
    def total(self) -> float:
        return self.fixed + self.prefill + self.context + self.decode


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage's coefficients. layers: [first, end). head_s: seconds a sampled row costs, on the last stage.

    page_bytes: of one KV page over the stage's layers, 0 where unknown.
    """

    layers: tuple[int, int]
    a0: float
    a1: float
    a2: float
    a3: float
    a4: float
    head_s: float = 0.0
    page_bytes: int = 0

    def seconds(self, row: Row) -> float:
        """Of a microbatch that asks `row`: see CostModel.row."""
        fixed, tiles, attention, context, decodes = row
        linear = self.a0 * fixed + self.a1 * tiles + self.a2 * attention
        return linear + self.a3 * context + (self.a4 + self.head_s) * decodes


@dataclass(frozen=True, slots=True)
class CostModel:
    """The stages of one pipeline, first to last. tile: tokens that linear layers take at once."""

    tile: int
    stages: tuple[StageCost, ...]

    def terms(self, stage: int, load: Load) -> Terms:
        cost = self.stages[stage]
        return Terms(
            fixed=cost.a0,
            prefill=cost.a1 * math.ceil(load.num_tokens / self.tile) + cost.a2 * load.prefill_attention,
            context=cost.a3 * load.decode_context,
            decode=(cost.a4 + cost.head_s) * load.decodes,
        )

    def row(self, load: Load) -> Row:
        """What a stage's coefficients are multiplied with."""
        tiles = math.ceil(load.num_tokens / self.tile)
        return 1.0, float(tiles), load.prefill_attention, float(load.decode_context), float(load.decodes)

    def seconds(self, stage: int, load: Load) -> float:
        return self.stages[stage].seconds(self.row(load))

    def split(self, layers: Sequence[tuple[int, int]]) -> CostModel:
        """The same model cut into other stages: each layer takes its share of what its stage costs, head excepted.

        layers: [first, end) of each stage, contiguous over the same layers.
        """
        if tuple(layers) == tuple(stage.layers for stage in self.stages):
            return self
        head_s = sum(stage.head_s for stage in self.stages)
        cuts = [_recut(self.stages, first, end) for first, end in layers]
        return CostModel(self.tile, (*cuts[:-1], replace(cuts[-1], head_s=head_s)))


class CostRefiner:
    """A cost model that learns from each microbatch of a run.

    Least squares on relative errors with coefficients of at least 0, each stage by itself. What it starts from
    counts as a few observations of it; old observations fade, so that a machine that slows down is noticed.
    """

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self._stages = [_Regression(_coefficients(stage)) for stage in model.stages]
        self._since = 0
        for load in _TYPICAL_LOADS:
            self._add(load, [model.seconds(stage, load) for stage in range(len(model.stages))])

    @property
    def model(self) -> CostModel:
        """Solved anew every few microbatches."""
        if self._since >= _SOLVE_EVERY:
            self._since = 0
            solved = zip(self._model.stages, (regression.solve() for regression in self._stages), strict=True)
            stages = tuple(_with_coefficients(stage, values) for stage, values in solved)
            self._model = CostModel(self._model.tile, stages)
        return self._model

    def observe(self, load: Load, stage_s: Sequence[float]) -> None:
        """One microbatch and the seconds that each stage computed."""
        self._add(load, stage_s)
        self._since += 1

    def _add(self, load: Load, stage_s: Sequence[float]) -> None:
        row = self._model.row(load)
        for regression, seconds in zip(self._stages, stage_s, strict=True):
            if seconds > 0:
                regression.add(row, seconds)


class _Regression:
    """Weighted normal equations of one stage, kept as sums; solved by coordinate descent from the last solution.

    Old observations fade by the new ones' weight growing, which leaves the sums of the old ones alone.
    """

    def __init__(self, start: list[float]) -> None:
        self._values = start
        self._gram = [[0.0] * len(start) for _ in start]
        self._target = [0.0] * len(start)
        self._weight = 1.0

    def add(self, row: Sequence[float], seconds: float) -> None:
        self._weight /= _FADE
        if self._weight > _MOST_WEIGHT:
            self._target = [value / self._weight for value in self._target]
            self._gram = [[value / self._weight for value in gram] for gram in self._gram]
            self._weight = 1.0
        share = self._weight / seconds
        for i, value in enumerate(row):
            if value:
                left = share * value
                self._target[i] += left
                left /= seconds
                gram = self._gram[i]
                for j, right in enumerate(row):
                    gram[j] += left * right

    def solve(self) -> list[float]:
        """The coefficients, at least 0 each."""
        values = self._values
        for _ in range(_SWEEPS):
            for i, gram in enumerate(self._gram):
                if gram[i] > 0:
                    off = self._target[i]
                    for weight, value in zip(gram, values, strict=True):
                        off -= weight * value
                    values[i] = max(0.0, values[i] + off / gram[i])
        return values


_FADE = 0.998
_MOST_WEIGHT = 1e9
_SOLVE_EVERY = 16
_SWEEPS = 12
# What a starting model is asked about: chunks early and late in a prompt, decodes alone, both together.
_TYPICAL_LOADS = (
    Load(128, 128 * 64, 0, 0),
    Load(512, 512 * 256, 0, 0),
    Load(512, 512 * 2048, 0, 0),
    Load(0, 0, 8, 8 * 256),
    Load(0, 0, 32, 32 * 1024),
    Load(224, 224 * 512, 32, 32 * 512),
)


def _coefficients(stage: StageCost) -> list[float]:
    return [stage.a0, stage.a1, stage.a2, stage.a3, stage.a4 + stage.head_s]


def _with_coefficients(stage: StageCost, values: Sequence[float]) -> StageCost:
    """The head's share of what a decode costs cannot be told from the rest; it stays what it was."""
    a0, a1, a2, a3, decode = values
    head_s = min(stage.head_s, decode)
    return replace(stage, a0=a0, a1=a1, a2=a2, a3=a3, a4=decode - head_s, head_s=head_s)


@dataclass(frozen=True, slots=True)
class Profile:
    """A cost model with what it was measured on: profile.json.

    link_latency_s, link_bytes_per_s: one way between neighbouring stages. jitter_cv: coefficient of variation of
    equal microbatches. pages: KV pages of the stage that holds fewest. error: mean absolute relative error of the
    fit, None where it was not fitted.
    """

    model: str
    device: str
    dtype: str
    hidden_size: int
    num_layers: int
    cost: CostModel
    link_latency_s: float
    link_bytes_per_s: float
    jitter_cv: float
    pages: int
    max_num_seqs: int
    error: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "model": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "tile": self.cost.tile,
            "stages": [{**asdict(stage), "layers": list(stage.layers)} for stage in self.cost.stages],
            "link": {"latency_s": self.link_latency_s, "bytes_per_s": self.link_bytes_per_s},
            "jitter_cv": self.jitter_cv,
            "pages": self.pages,
            "max_num_seqs": self.max_num_seqs,
            "error": self.error,
        }

    @classmethod
    def from_json(cls, data: object) -> Profile:
        """The inverse of `to_json`. Raises InputError naming the key, its value and what it must be."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise InputError(f"the profile's schema is {found!r}; this version reads {SCHEMA!r}")
        stages = data.get("stages")
        if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages) or not stages:
            raise InputError("the profile's 'stages' must be a list with one object for each stage")
        link = data.get("link")
        if not isinstance(link, dict):
            raise InputError("the profile's 'link' must be an object with latency_s and bytes_per_s")
        profile = cls(
            model=_text(data, "model"),
            device=_text(data, "device"),
            dtype=_dtype(data),
            hidden_size=_whole(data, "hidden_size"),
            num_layers=_whole(data, "num_layers"),
            cost=CostModel(_whole(data, "tile"), tuple(_stage(stage) for stage in stages)),
            link_latency_s=_real(link, "latency_s"),
            link_bytes_per_s=_real(link, "bytes_per_s", above=0.0),
            jitter_cv=_real(data, "jitter_cv"),
            pages=_whole(data, "pages"),
            max_num_seqs=_whole(data, "max_num_seqs"),
            error=None if data.get("error") is None else _real(data, "error"),
        )
        _require_contiguous([stage.layers for stage in profile.cost.stages], profile.num_layers)
        return profile


def _recut(stages: Sequence[StageCost], first: int, end: int) -> StageCost:
    """The cost of layers [first, end), without the head."""
    cost = StageCost((first, end), 0.0, 0.0, 0.0, 0.0, 0.0)
    for stage in stages:
        shared = max(0, min(end, stage.layers[1]) - max(first, stage.layers[0]))
        share = shared / (stage.layers[1] - stage.layers[0])
        cost = replace(
            cost,
            a0=cost.a0 + share * stage.a0,
            a1=cost.a1 + share * stage.a1,
            a2=cost.a2 + share * stage.a2,
            a3=cost.a3 + share * stage.a3,
            a4=cost.a4 + share * stage.a4,
            page_bytes=cost.page_bytes + round(share * stage.page_bytes),
        )
    return cost


def _stage(data: Mapping[str, Any]) -> StageCost:
    layers = data.get("layers")
    if not isinstance(layers, list) or len(layers) != 2 or not all(type(bound) is int for bound in layers):
        raise InputError(f"a stage's 'layers' is {layers!r}; it must be [first, end)")
    a0, a1, a2, a3, a4 = (_real(data, name) for name in ("a0", "a1", "a2", "a3", "a4"))
    head_s = _real(data, "head_s") if "head_s" in data else 0.0
    page_bytes = _whole(data, "page_bytes", least=0) if "page_bytes" in data else 0
    return StageCost((layers[0], layers[1]), a0, a1, a2, a3, a4, head_s, page_bytes)


def _require_contiguous(layers: Sequence[tuple[int, int]], num_layers: int) -> None:
    bounds = [0, *(end for _, end in layers)]
    if [first for first, _ in layers] != bounds[:-1] or bounds[-1] != num_layers or sorted(set(bounds)) != bounds:
        raise InputError(f"the profile's stages have the layers {list(layers)}; they must cover [0, {num_layers})")


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str):
        raise InputError(f"the profile's {key!r} is {value!r}; it must be a string")
    return value


def _dtype(data: Mapping[str, Any]) -> str:
    value = _text(data, "dtype")
    if value not in _DTYPES:
        raise InputError(f"the profile's 'dtype' is {value!r}; it must be one of {', '.join(_DTYPES)}")
    return value


def _whole(data: Mapping[str, Any], key: str, *, least: int = 1) -> int:
    value = data.get(key)
    if type(value) is not int or value < least:
        raise InputError(f"the profile's {key!r} is {value!r}; it must be an integer of at least {least}")
    return value


def _real(data: Mapping[str, Any], key: str, *, above: float | None = None) -> float:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise InputError(f"the profile's {key!r} is {value!r}; it must be a number of at least 0")
    if above is not None and value <= above:
        raise InputError(f"the profile's {key!r} is {value!r}; it must be above {above:g}")
    return float(value)


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """What one stage's device sustains. flops: of linear layers, by bytes a weight; attention gets a quarter of it.

    tile: tokens that linear layers take at once. layer_s: of launching a layer's operations, whatever they compute.
    """

    flops: Mapping[int, float]
    bytes_per_s: float
    tile: int
    layer_s: float


# cpu: one AVX512-BF16 core of a shared server, as measured on the model of examples/measure_300m.py. cuda: an A100-80GB
# at 60 % of its 312 TFLOP/s (19.5 in float32) and 80 % of its 2.04 TB/s, layers launched one operation at a time.
DEVICE_SPEEDS: Mapping[str, DeviceSpeed] = {
    "cpu": DeviceSpeed({2: 3e11, 4: 1e11}, 1.5e10, 1, 2e-4),
    "cuda": DeviceSpeed({2: 1.9e14, 4: 1.2e13}, 1.6e12, 128, 2e-4),
}
_ATTENTION_SHARE = 0.25


def estimate_cost(
    layers: Sequence[tuple[int, int]],
    *,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    weight_bytes: int,
    device: str,
    mlp_matrices: int = 3,
    num_experts: int = 1,
    experts_per_token: int = 1,
    page_size: int = 16,
) -> CostModel:
    """A cost model from a model's shape, for when nothing was measured: right in kind, off by a factor in size.

    layers: [first, end) of each stage. weight_bytes: of one weight, and of one key or value. device: of DEVICE_SPEEDS.
    mlp_matrices: 3 with a gate, 2 without. experts: of intermediate_size each.

        weights of a layer   w = h*(heads + 2*kv_heads)*d + heads*d*h + experts * mlp_matrices*h*i
        a0   every weight is read once               layers * (w * bytes / bandwidth + launching)
        a1   a tile of tokens, 2 FLOP a weight       layers * 2 * w_active * tile / flops
        a2   4 FLOP a channel, query and key         layers * 4 * heads*d / (flops / 4)
        a3   a key and a value are read              layers * 2 * kv_heads*d * bytes / bandwidth
        head: its weights are read with a0 of the last stage, and a row costs 2 * h * vocabulary / flops

    Reading and computing are added up, where they overlap on a real device: at worst that is twice the time. The
    embedding is a lookup and costs nothing.
    """
    speed = DEVICE_SPEEDS[device]
    flops = speed.flops[2 if weight_bytes <= 2 else 4]
    attention = hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)
    expert = mlp_matrices * hidden_size * intermediate_size
    read_s = (attention + num_experts * expert) * weight_bytes / speed.bytes_per_s
    token_s = 2 * (attention + experts_per_token * expert) / flops
    kv_bytes = 2 * num_kv_heads * head_dim * weight_bytes
    stages = [
        StageCost(
            (first, end),
            a0=(end - first) * (read_s + speed.layer_s),
            a1=(end - first) * token_s * speed.tile,
            a2=(end - first) * 4 * num_heads * head_dim / (_ATTENTION_SHARE * flops),
            a3=(end - first) * kv_bytes / speed.bytes_per_s,
            a4=0.0,
            page_bytes=(end - first) * kv_bytes * page_size,
        )
        for first, end in layers
    ]
    head_weights = hidden_size * vocab_size
    head_read_s = head_weights * weight_bytes / speed.bytes_per_s
    stages[-1] = replace(stages[-1], a0=stages[-1].a0 + head_read_s, head_s=2 * head_weights / flops)
    return CostModel(speed.tile, tuple(stages))
