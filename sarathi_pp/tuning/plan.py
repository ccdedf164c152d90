"""`sarathi-pp plan`: how to cut a model and its prompts, from its files and, where there is one, a profile.

chunk size   SARATHI's P:D = C/(B-1) (arXiv 2308.16369, section 5.1.3) read backwards: b decodes a microbatch use up
             prompts as fast as outputs end when b * P:D prompt tokens ride with them, so C = b * (1 + P:D), in whole
             tiles and not below saturation. Of the two tile counts around it, the one with more predicted tokens/s.
layer split  the one whose slowest stage takes least, at that microbatch
KV pages     what the profile's stages had, or --kv-cache-memory, or what this machine would give

Where several ranks hold a stage together, memory is of each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from sarathi_pp.config import ResolvedRun, RunConfig
from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.core.cost.profile import NO_DRIFT, Profile
from sarathi_pp.core.cost.repartition import repartition, stage_seconds
from sarathi_pp.core.cost.sizing import MOST_TOKENS, inflight, saturation, whole_tiles
from sarathi_pp.core.head_placement import moves_head
from sarathi_pp.core.partition import Layers, partition, partition_by_time
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.distributed.devices import choose_device
from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.errors import ConfigError
from sarathi_pp.model.checkpoint.fetch import find_model
from sarathi_pp.model.checkpoint.files import open_checkpoint, read_json
from sarathi_pp.model.checkpoint.support import ConfigFile, ModelFacts, check_model, check_shards, find_family
from sarathi_pp.model.checkpoint.weights import ReadCount, stage_tensors
from sarathi_pp.model.kv import page_bytes
from sarathi_pp.model.tensor_parallel import Split, TensorShard
from sarathi_pp.outputs.profile_file import read_profile
from sarathi_pp.run.auto_options import estimated_cost, profile_mismatch, tuned
from sarathi_pp.sim.workload import Workload
from sarathi_pp.stages.capacity import count_pages, kv_budget_bytes, pools_of, resolve
from sarathi_pp.tuning.prediction import Demand, Prediction, predict

SCHEMA = "sarathi-pp/plan/1"
# A link that nobody measured: gloo over loopback, or through host memory.
_LINK_LATENCY_S = 1e-3
_LINK_BYTES_PER_S = 1e9
_PAGE_SIZE = 16


def make_plan(config: RunConfig, workload: Workload) -> dict[str, Any]:
    """The plan as one document. Loads no weights and starts no process; without a profile it looks at this machine.

    Raises ConfigError, PartitionError or CapacityError for what cannot work, MissingError and InputError for files.
    """
    model_dir = find_model(config.model)
    check_shards(model_dir, config.tensor_parallel_size)
    model = _Model(model_dir, check_model(model_dir), config)
    model.require_room(workload)
    basis = _measured(model) if config.profile is not None else _estimated(model)

    def tokens_per_s(cut: _Cut) -> float:
        """Of stages whose speed does not drift: it would favour one cut or another by chance."""
        return predict(replace(cut.profile, drift=NO_DRIFT), workload, cut.run).total_tokens_per_s

    cut = max(_cuts(model, basis, Demand.of(workload)), key=tokens_per_s)
    return _document(model, basis, workload, cut, predict(cut.profile, workload, cut.run))


@dataclass(frozen=True)
class _Model:
    """What is to be run. The sizes of its stages follow from its files."""

    directory: Path
    facts: ModelFacts
    config: RunConfig

    @property
    def dtype(self) -> str:
        return self.facts.dtype if self.config.dtype == "auto" else self.config.dtype

    @property
    def held(self) -> ModelFacts:
        """Of what one rank holds of its stage's layers."""
        return self.facts.sharded(self.config.tensor_parallel_size)

    @property
    def page_size(self) -> int:
        return self.config.page_size or _PAGE_SIZE

    def require_room(self, workload: Workload) -> None:
        room = self.config.max_model_len or self.facts.max_position_embeddings
        if workload.max_tokens > room:
            raise ConfigError(
                f"--workload {workload.spec} has requests of up to {workload.max_tokens} tokens, and "
                f"{self.config.model} takes {room}: name one with shorter requests"
            )

    def page_bytes(self, layers: tuple[int, int]) -> int:
        facts, dtype = self.held, getattr(torch, self.dtype)
        return page_bytes(layers[1] - layers[0], self.page_size, facts.num_kv_heads, facts.head_dim, dtype)

    def weights_bytes(self, layers: tuple[int, int]) -> int:
        """In this dtype, embedding and head where they belong; of no layers at the end the head alone."""
        facts, dtype = self.facts, getattr(torch, self.dtype)
        checkpoint = open_checkpoint(self.directory)
        family = find_family(ConfigFile(self.directory, read_json(self.directory, "config.json")))
        tied = facts.tie_word_embeddings
        tensors = stage_tensors(checkpoint, family, layers, facts.num_layers, tied, dtype, ReadCount())
        if (shards := self.config.tensor_parallel_size) > 1:
            tensors = Split(self._split, family, layers, TensorShard(0, shards, lambda summand: summand)).take(tensors)
        return sum(prod(tensor.shape) for tensor in tensors.values()) * int(dtype.itemsize)

    @cached_property
    def _split(self) -> dict[str, str] | None:
        from sarathi_pp.model.checkpoint.pretrained import load_config  # takes seconds

        plan: dict[str, str] | None = load_config(self.directory)[1].base_model_tp_plan
        return plan

    def pages(self, layers: tuple[int, int], kv_bytes: int) -> int:
        return count_pages(kv_bytes, self.held, layers, self.page_size, getattr(torch, self.dtype))


@dataclass(frozen=True, slots=True)
class _Basis:
    """Where times and memory are known from.

    profile: of some split of the layers; its pages count for nothing. cut: the same stages with other layers. kv_bytes:
    what a stage may give its KV cache, from what its weights take.
    """

    source: str
    profile: Profile
    cut: Callable[[Layers], CostModel]
    kv_bytes: Callable[[int], int]


def _measured(model: _Model) -> _Basis:
    """From a profile: its times, and as much KV cache as its stages had."""
    config = model.config
    assert config.profile is not None
    tuned(config, model.facts)  # refuses another model's
    profile = read_profile(config.profile)
    had_bytes = profile.pages * max(stage.page_bytes for stage in profile.cost.stages)
    most = max(partition(model.facts.num_layers, len(profile.cost.stages)), key=lambda layers: layers[1] - layers[0])
    # A profile written by hand may not say how large a page is.
    had_bytes = had_bytes or profile.pages * model.page_bytes(most)
    given = config.kv_cache_memory_bytes
    kv_bytes = had_bytes if given is None else given
    return _Basis("profile", profile, lambda layers: repartition(profile.cost, layers), lambda weights_bytes: kv_bytes)


def _estimated(model: _Model) -> _Basis:
    """From the model's shape, and the memory of this machine."""
    config, facts = model.config, model.facts
    device = choose_device(config.device, RankEnvironment())

    def cut(layers: Layers) -> CostModel:
        return estimated_cost(
            model.directory,
            facts,
            layers,
            dtype=model.dtype,
            device=device.type,
            page_size=model.page_size,
            shards=config.tensor_parallel_size,
        )

    def kv_bytes(weights_bytes: int) -> int:
        """On a GPU of its own, beside the weights; a CPU's stages share a part that weights do not come near."""
        if device.type == "cuda" and config.kv_cache_memory_bytes is None:
            return max(0, kv_budget_bytes(config, device, {}) - weights_bytes)
        return kv_budget_bytes(config, device, {pool.id: config.num_ranks for pool in pools_of(device)})

    profile = Profile(
        model=config.model,
        device=device.type,
        dtype=model.dtype,
        hidden_size=facts.hidden_size,
        num_layers=facts.num_layers,
        cost=cut(partition(facts.num_layers, config.stages)),
        link_latency_s=_LINK_LATENCY_S,
        link_bytes_per_s=_LINK_BYTES_PER_S,
        jitter_cv=0.0,
        pages=1,
        max_num_seqs=1,
    )
    return _Basis("estimate", profile, cut, kv_bytes)


@dataclass(frozen=True, slots=True)
class _Cut:
    """One way to run a workload. profile: of its stages. weights_bytes, pages: of each."""

    run: ResolvedRun
    profile: Profile
    weights_bytes: list[int]
    pages: list[int]
    microbatch_s: list[float]


def _cuts(model: _Model, basis: _Basis, demand: Demand) -> list[_Cut]:
    """Those worth comparing: the tile counts around the ideal chunk size, each with its best split."""
    least = saturation(basis.profile.cost)
    at_once = demand.decodes_at_once(_cut(model, basis, demand, least).run)
    ideal = at_once * (1 + demand.prompt_tokens / max(1, demand.decodes))
    sizes = {max(least, size) for size in whole_tiles(basis.profile.cost, min(ideal, MOST_TOKENS))}
    return [_cut(model, basis, demand, size) for size in sorted(sizes)]


def _cut(model: _Model, basis: _Basis, demand: Demand, chunk_size: int) -> _Cut:
    config, facts = model.config, model.facts
    riding = min(chunk_size - 1, chunk_size * demand.decodes / (demand.prompt_tokens + demand.decodes))
    load = demand.load(chunk_size - riding, riding)
    if config.layer_split is None:
        seconds = stage_seconds(basis.profile.cost, load, config.stages)
        layers = partition_by_time(facts.num_layers, config.stages, seconds)
    else:
        layers = partition(facts.num_layers, config.stages, config.layer_split)
    weights_bytes = [model.weights_bytes(stage) for stage in layers]
    moves = moves_head(config.head, basis.profile.device, config.stages, config.tensor_parallel_size)
    if moves:
        weights_bytes[0] += model.weights_bytes((facts.num_layers, facts.num_layers))
    kv_bytes = map(basis.kv_bytes, weights_bytes)
    pages = [model.pages(stage, own) for stage, own in zip(layers, kv_bytes, strict=True)]
    run = resolve(
        replace(
            config,
            chunk_size=chunk_size,
            inflight=config.inflight or inflight(basis.profile, parse_policy(config.policy), config.stages),
        ),
        facts,
        layers,
        pages,
        page_size=model.page_size,
        dtype=model.dtype,
        device=basis.profile.device,
        attention=config.attention,
        moves_head=moves,
    )
    profile = replace(basis.profile, cost=basis.cut(layers), pages=run.num_pages, max_num_seqs=run.max_num_seqs)
    times = [profile.cost.seconds(stage, load) for stage in range(run.num_stages)]
    return _Cut(run, profile, weights_bytes, pages, times)


def _document(model: _Model, basis: _Basis, workload: Workload, cut: _Cut, prediction: Prediction) -> dict[str, Any]:
    run, cost = cut.run, cut.profile.cost
    return {
        "schema": SCHEMA,
        "model": run.model,
        "stages": run.num_stages,
        "tensor_parallel_size": run.tensor_parallel_size,
        "device": run.device,
        "dtype": run.dtype,
        "source": basis.source,
        "workload": workload.spec,
        "prompt_to_output": workload.prompt_to_output,
        "chunk_size": run.chunk_size,
        "tile": cost.tile,
        "ridge": cost.ridge,
        "saturation_tokens": saturation(cost),
        "layer_split": [end - first for first, end in run.layers],
        "inflight": run.inflight,
        "max_num_seqs": run.max_num_seqs,
        "page_size": run.page_size,
        "pages": run.num_pages,
        "per_stage": [
            {
                "stage": stage,
                "layers": list(layers),
                "microbatch_s": cut.microbatch_s[stage],
                "weights_bytes": cut.weights_bytes[stage],
                "pages": cut.pages[stage],
                "kv_bytes": run.num_pages * model.page_bytes(layers),
            }
            for stage, layers in enumerate(run.layers)
        ],
        **asdict(prediction),
        "notes": list(profile_mismatch(model.config, model.facts)),
    }
