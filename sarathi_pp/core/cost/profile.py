"""The file profile.json: a cost model with the facts of its measurement, and the checks when it is read."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sarathi_pp.core.cost.model import CostModel, LayerCost, StageCost
from sarathi_pp.errors import InputError

SCHEMA = "sarathi-pp/profile/1"
_DTYPES = ("float32", "bfloat16", "float16")
_KV_CACHE_DTYPES = ("auto", "fp8")


@dataclass(frozen=True, slots=True)
class Drift:
    """The slow change of a stage's speed while it runs.

    Attributes:
        cv: coefficient of variation (standard deviation / mean) of the speed; 0 means no change.
        seconds: time after which the speed's correlation with its earlier value has fallen to 1/e.
    """

    cv: float = 0.0
    seconds: float = 1.0


NO_DRIFT = Drift()


@dataclass(frozen=True, slots=True)
class EdgeLink:
    """The speed of one edge, the directed connection from a stage to the next one.

    Attributes:
        added_latency_s: seconds that emulated stages wait in addition to the time of their own transport.
    """

    latency_s: float
    bytes_per_s: float
    added_latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """A cost model with the facts of its measurement: profile.json.

    Attributes:
        link_latency_s: seconds from a stage to the next one, in one direction.
        link_bytes_per_s: bytes per second from a stage to the next one, in one direction.
        jitter_cv: coefficient of variation (standard deviation / mean) of the times of equal microbatches that run
            shortly after each other. If there are several stages, variation that all of them share is left out.
        pages: KV pages of the stage that has room for fewest, each of page_size tokens.
        max_num_seqs: most sequences that run at once.
        error: mean absolute relative error of the fit; None if the model was not fitted.
        drift: slow change of the stages' speed, also without the part that all stages share.
        links: one per edge, from each stage to the next and at last from the last to the first. Empty if all are alike.
            With another number of stages they are not used, and every edge has link_latency_s and link_bytes_per_s.
        tensor_parallel_size: number of ranks that computed each stage together. Stage times include adding up their
            results, and `pages` are those of one rank.
        host_s: seconds from the time when a stage could start a microbatch until it computes it.
        kv_cache_dtype: the option with which the stages were measured.
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
    drift: Drift = NO_DRIFT
    page_size: int = 16
    links: tuple[EdgeLink, ...] = ()
    tensor_parallel_size: int = 1
    host_s: float = 0.0
    kv_cache_dtype: str = "auto"

    def edge_links(self, num_stages: int) -> tuple[EdgeLink, ...]:
        """Return one link per edge of a pipeline with `num_stages` stages."""
        if len(self.links) == num_stages:
            return self.links
        return (EdgeLink(self.link_latency_s, self.link_bytes_per_s),) * num_stages

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "model": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "tile": self.cost.tile,
            "ridge": self.cost.ridge,
            "stages": [{**asdict(stage), "layers": list(stage.layers)} for stage in self.cost.stages],
            "link": {"latency_s": self.link_latency_s, "bytes_per_s": self.link_bytes_per_s},
            "jitter_cv": self.jitter_cv,
            "drift": asdict(self.drift),
            "host_s": self.host_s,
            "pages": self.pages,
            "page_size": self.page_size,
            "max_num_seqs": self.max_num_seqs,
            "error": self.error,
            **(
                {"layer_costs": [asdict(layer) for layer in layer_costs]}
                if (layer_costs := self.cost.layer_costs)
                else {}
            ),
            **({"links": [asdict(link) for link in self.links]} if self.links else {}),
            **({"tensor_parallel_size": self.tensor_parallel_size} if self.tensor_parallel_size > 1 else {}),
            **({"kv_cache_dtype": self.kv_cache_dtype} if self.kv_cache_dtype != "auto" else {}),
        }

    @classmethod
    def from_json(cls, data: object) -> Profile:
        """Return the profile of a JSON object in the form of `to_json`.

        Raises:
            InputError: a value is missing or not legal. The message gives its key, the value and the legal values.
        """
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise InputError(f"the profile's schema is {found!r}; this version reads {SCHEMA!r}: measure a new profile")
        stages = data.get("stages")
        if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages) or not stages:
            raise InputError("the profile's 'stages' must be a list with one object for each stage")
        link = data.get("link")
        if not isinstance(link, dict):
            raise InputError("the profile's 'link' must be an object with latency_s and bytes_per_s")
        profile = cls(
            model=_text(data, "model"),
            device=_text(data, "device"),
            dtype=_chosen(data, "dtype", _DTYPES),
            hidden_size=_whole(data, "hidden_size"),
            num_layers=_whole(data, "num_layers"),
            cost=CostModel(
                _whole(data, "tile"),
                tuple(_stage(stage) for stage in stages),
                ridge=_whole(data, "ridge", least=0) if "ridge" in data else 0,
                layer_costs=_layer_costs(data.get("layer_costs", []), _whole(data, "num_layers")),
            ),
            link_latency_s=_real(link, "latency_s"),
            link_bytes_per_s=_real(link, "bytes_per_s", above=0.0),
            jitter_cv=_real(data, "jitter_cv"),
            pages=_whole(data, "pages"),
            max_num_seqs=_whole(data, "max_num_seqs"),
            error=None if data.get("error") is None else _real(data, "error"),
            drift=_drift(data.get("drift")),
            page_size=_whole(data, "page_size") if "page_size" in data else 16,
            links=_links(data.get("links", []), len(stages)),
            tensor_parallel_size=_whole(data, "tensor_parallel_size") if "tensor_parallel_size" in data else 1,
            host_s=_real(data, "host_s") if "host_s" in data else 0.0,
            kv_cache_dtype=_chosen(data, "kv_cache_dtype", _KV_CACHE_DTYPES) if "kv_cache_dtype" in data else "auto",
        )
        _require_contiguous([stage.layers for stage in profile.cost.stages], profile.num_layers)
        return profile


def _stage(data: Mapping[str, Any]) -> StageCost:
    layers = data.get("layers")
    if not isinstance(layers, list) or len(layers) != 2 or not all(type(bound) is int for bound in layers):
        raise InputError(f"a stage's 'layers' is {layers!r}; it must be [first, end), two integers")
    a0, a1, a2, a3, a4 = (_real(data, name) for name in ("a0", "a1", "a2", "a3", "a4"))
    head_s = _real(data, "head_s") if "head_s" in data else 0.0
    page_bytes = _whole(data, "page_bytes", least=0) if "page_bytes" in data else 0
    return StageCost((layers[0], layers[1]), a0, a1, a2, a3, a4, head_s, page_bytes)


def _layer_costs(data: object, num_layers: int) -> tuple[LayerCost, ...]:
    """Return the relative costs of the layers. They are empty if the profile has none, because all layers are alike."""
    if not isinstance(data, list) or not all(isinstance(layer, dict) for layer in data):
        raise InputError("the profile's 'layer_costs' must be a list with one object for each layer")
    if len(data) not in (0, num_layers):
        raise InputError(f"the profile's 'layer_costs' has {len(data)} entries; the model has {num_layers} layers")
    return tuple(
        LayerCost(
            _text(layer, "kind"),
            _real(layer, "a0", above=0.0),
            _real(layer, "a1", above=0.0),
            _real(layer, "a2"),
            _real(layer, "a3"),
            _real(layer, "a4"),
            _whole(layer, "page_bytes", least=0),
        )
        for layer in data
    )


def _links(data: object, num_stages: int) -> tuple[EdgeLink, ...]:
    """Return the links of a profile. They are empty if the profile has none, because all edges are alike."""
    if not isinstance(data, list) or not all(isinstance(link, dict) for link in data):
        raise InputError("the profile's 'links' must be a list with one object for each edge")
    if len(data) not in (0, num_stages):
        raise InputError(
            f"the profile's 'links' has {len(data)} entries; {num_stages} stages have {num_stages}: from each to the "
            f"next, and from the last to the first"
        )
    return tuple(
        EdgeLink(
            _real(link, "latency_s"),
            _real(link, "bytes_per_s", above=0.0),
            _real(link, "added_latency_s") if "added_latency_s" in link else 0.0,
        )
        for link in data
    )


def _drift(data: object) -> Drift:
    """Return the drift of a profile. It is NO_DRIFT if the profile has none, as one that was written manually."""
    if data is None:
        return NO_DRIFT
    if not isinstance(data, dict):
        raise InputError(f"the profile's 'drift' is {data!r}; it must be an object with cv and seconds")
    return Drift(_real(data, "cv"), _real(data, "seconds", above=0.0))


def _require_contiguous(layers: Sequence[tuple[int, int]], num_layers: int) -> None:
    bounds = [0, *(end for _, end in layers)]
    if [first for first, _ in layers] != bounds[:-1] or bounds[-1] != num_layers or sorted(set(bounds)) != bounds:
        raise InputError(f"the profile's stages have the layers {list(layers)}; they must cover [0, {num_layers})")


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str):
        raise InputError(f"the profile's {key!r} is {value!r}; it must be a string")
    return value


def _chosen(data: Mapping[str, Any], key: str, choices: Sequence[str]) -> str:
    value = _text(data, key)
    if value not in choices:
        raise InputError(f"the profile's {key!r} is {value!r}; it must be one of {', '.join(choices)}")
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
