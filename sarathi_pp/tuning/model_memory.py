"""The memory that the stages of a model need on their devices, computed with the functions that a run uses.

weights     stage_bytes, from the headers of the weight files, or from config.json if they are missing
working     estimate_working_bytes, for the largest microbatch; a run on a GPU measures it
KV pages    page_bytes
states      stage_state_bytes, for all sequences that may run at once
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sarathi_pp.checkpoint.facts.mlp import read_mlp
from sarathi_pp.checkpoint.facts.support import ModelFacts, check_model, check_shards, describe_config
from sarathi_pp.checkpoint.fetch import find_config
from sarathi_pp.checkpoint.files import Checkpoint, indexed_files, open_checkpoint
from sarathi_pp.checkpoint.kind import INDEX_FILE, SINGLE_FILE
from sarathi_pp.config import RunConfig
from sarathi_pp.core.policy import Limits, parse_policy
from sarathi_pp.errors import MissingError
from sarathi_pp.model.dtypes import Dtypes, choose_dtypes, stored_code_bits
from sarathi_pp.model.kv import page_bytes, page_dtype
from sarathi_pp.model.tensor_parallel import TensorShard
from sarathi_pp.model.weights import HeldTypes
from sarathi_pp.stages.capacity import resolve_limits, stage_state_bytes
from sarathi_pp.stages.working_memory import LargestMicrobatch, edge_bytes, estimate_working_bytes

if TYPE_CHECKING:
    from sarathi_pp.model.loader import StageSizes

# Tokens per page: the default of every attention backend except flash and varlen.
_PAGE_SIZE = 16
Span = tuple[int, int]


@dataclass(frozen=True)
class PlannedModel:
    """A model for which a plan is computed. Its weights may be on another host.

    Attributes:
        facts: facts of the whole model, such as its number of layers.
        checkpoint: its tensors, which are stored here or only described.
        from_config: the sizes come from config.json alone.
    """

    directory: Path
    facts: ModelFacts
    checkpoint: Checkpoint
    from_config: bool

    @classmethod
    def find(cls, name: str) -> PlannedModel:
        """Return the model with this name or directory. Raise the errors of `check_model`.

        The sizes come from the headers of the weight files if all of them exist, otherwise from config.json alone.
        """
        directory = find_config(name)
        facts = describe_config(directory)
        if _has_weights(directory):
            return cls(directory, check_model(directory), open_checkpoint(directory), from_config=False)
        from sarathi_pp.checkpoint.shapes import describe_tensors  # takes seconds

        return cls(directory, facts, describe_tensors(directory, facts.dtype), from_config=True)

    def notes(self, config: RunConfig, device: str) -> list[str]:
        """Return notes for the user about the source of the sizes."""
        dtypes = self.dtypes(config, device)
        notes = []
        if dtypes.coded:
            notes.append(
                f"weights of layers stay as they are stored ({self.facts.quantised}), and products of more than 16 "
                f"rows expand them to {dtypes.compute}; weights include the memory for that"
            )
        elif self.facts.quantised is not None:
            notes.append(
                f"the published weights are quantised ({self.facts.quantised}); a run dequantises them when it loads "
                f"them, so they take the memory of {dtypes.weights}"
            )
        if self.from_config:
            notes.append(f"the weights are not on this host; sizes are those of config.json in {dtypes.weights}")
            if dtypes.code_bits == 8:
                notes.append("which of the weights are quantised is not known; the memory is at most that of this plan")
        return notes

    def dtypes(self, config: RunConfig, device: str) -> Dtypes:
        """Return the float types of a run on "cpu" or "cuda". All CPUs are taken to be like the one here."""
        quantised = self.facts.quantised
        bits = stored_code_bits(config.weights, quantised, device)
        return choose_dtypes(config.dtype, self.facts.dtype, device, quantised=quantised is not None, code_bits=bits)


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights that one rank of a stage loads, for any range of layers.

    Attributes:
        held: the types in which they are held.
        shards: number of ranks that share each stage.
    """

    model: PlannedModel
    held: HeldTypes
    shards: int

    def num_bytes(self, layers: Span) -> int:
        """Return the bytes of the layers [first, end), with the embedding and the LM head at the ends.

        The memory into which coded weights are expanded is included. For an empty range at the model's end, only the
        LM head counts.
        """
        first, end = layers
        if first == end or end - first == self.model.facts.num_layers:
            return sum(self._sizes(layers))  # a tied embedding serves both ends, and counts once
        return self._sums[end] - self._sums[first] + max(size.scratch for size in self._layers[first:end])

    def stored_bytes(self, layers: Span) -> int | None:
        """Return the bytes that are read from files for the layers [first, end); None if the files are not known."""
        from sarathi_pp.model.loader import stage_stored_bytes  # takes seconds

        if self.model.from_config:
            return None
        shard = TensorShard(0, self.shards, _no_sum)
        return stage_stored_bytes(self.model.directory, layers, self.held, shard, self.model.checkpoint)

    @cached_property
    def _sums(self) -> list[int]:
        """Entry i is the bytes of the layers before layer i, and the last entry is the bytes of all layers.

        The first layer is counted with the embedding, the last layer with the LM head.
        """
        return [0, *accumulate(size.weights for size in self._layers)]

    @cached_property
    def _layers(self) -> list[StageSizes]:
        """The sizes of a stage with one layer, for each layer."""
        return [self._sizes((layer, layer + 1)) for layer in range(self.model.facts.num_layers)]

    def _sizes(self, layers: Span) -> StageSizes:
        from sarathi_pp.model.loader import stage_sizes  # takes seconds

        shard = TensorShard(0, self.shards, _no_sum)
        return stage_sizes(self.model.directory, layers, self.held, shard, self.model.checkpoint)


@dataclass(frozen=True, slots=True)
class Working:
    """Bytes of working memory of a rank, for the largest microbatch.

    Attributes:
        layers: working memory of a stage without the LM head.
        lm_head: working memory of a stage with the LM head.
        edge: buffers of one edge (connection to a neighbouring stage).
    """

    layers: int
    lm_head: int
    edge: int


@dataclass(frozen=True)
class ModelMemory:
    """Bytes that one rank of a stage needs under the options of a run, for any range of layers.

    Attributes:
        config: the options.
        device: "cpu" or "cuda".
        longest: tokens of the longest request. Each stage must have KV pages for one such request.
    """

    weights: Weights
    config: RunConfig
    device: str
    longest: int

    @property
    def model(self) -> PlannedModel:
        return self.weights.model

    @property
    def num_layers(self) -> int:
        return self.model.facts.num_layers

    @property
    def dtypes(self) -> Dtypes:
        return self.model.dtypes(self.config, self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The float type of the computation."""
        return self.weights.held.compute

    @property
    def page_size(self) -> int:
        return self.config.page_size or _PAGE_SIZE

    @cached_property
    def rank_facts(self) -> ModelFacts:
        """The model's facts, with the number of attention heads that one rank of a stage computes."""
        return self.model.facts.sharded(self.config.tensor_parallel_size)

    @classmethod
    def of(cls, model: PlannedModel, config: RunConfig, device: str, longest: int) -> ModelMemory:
        dtypes = model.dtypes(config, device)
        compute, weights = (getattr(torch, name) for name in (dtypes.compute, dtypes.weights))
        held = HeldTypes.on(device, compute, weights, coded=dtypes.coded)
        return cls(Weights(model, held, config.tensor_parallel_size), config, device, longest)

    def with_options(self, **options: Any) -> ModelMemory:
        """Return the memory of the same model under changed options of the run.

        Raises:
            ConfigError: the model cannot be divided among this number of tensor-parallel ranks.
        """
        config = replace(self.config, **options)
        check_shards(self.model.directory, config.tensor_parallel_size)
        if config.weights != self.config.weights:
            return ModelMemory.of(self.model, config, self.device, self.longest)
        same = config.tensor_parallel_size == self.weights.shards
        weights = self.weights if same else replace(self.weights, shards=config.tensor_parallel_size)
        return replace(self, weights=weights, config=config)

    def page_bytes(self, layers: Span) -> int:
        stored = page_dtype(self.config.kv_cache_dtype, self.dtype)
        return page_bytes(self.rank_facts.caches[slice(*layers)], self.page_size, stored)

    def state_bytes(self, layers: Span) -> int:
        """Return the bytes of the states of all sequences that may run at once; 0 if no layer keeps one."""
        return stage_state_bytes(self.rank_facts, layers, self._num_seqs, self.dtype)

    def request_bytes(self, layers: Span) -> int:
        """Return the bytes of the KV pages that one request of the longest length needs."""
        return -(-self.longest // self.page_size) * self.page_bytes(layers)

    def least_kv_bytes(self, layers: Span) -> int:
        """Return the bytes of the smallest KV shard: pages for one request of the longest length, and all states."""
        return self.request_bytes(layers) + self.state_bytes(layers)

    def least_bytes(self, layers: Span, chunk_size: int) -> int:
        """Return the least memory with which a rank of this stage can run.

        It includes the smallest KV shard, or the KV cache that the options set if that is larger.
        """
        kv_bytes = max(self.least_kv_bytes(layers), self.config.kv_cache_memory_bytes or 0)
        return self.weights.num_bytes(layers) + self.working_bytes(layers, chunk_size) + kv_bytes

    def excess_bytes(self, layers: Span, chunk_size: int, room_bytes: int, num_requests: int = 1) -> int:
        """Return the bytes by which a rank of this stage exceeds its room. The result is at most 0 if it fits.

        Args:
            room_bytes: bytes that the rank may take.
            num_requests: number of longest requests for which it must have KV pages. If the options set the size of the
                KV cache, this cache must only hold one request.
        """
        needed, least_kv = self.least_bytes(layers, chunk_size), self.least_kv_bytes(layers)
        given = self.config.kv_cache_memory_bytes
        if given is None:
            return needed + (num_requests - 1) * self.request_bytes(layers) - room_bytes
        return max(needed - room_bytes, least_kv - given)

    def working_bytes(self, layers: Span, chunk_size: int) -> int:
        """Return the bytes of memory for computing the largest microbatch, with the buffers of the stage's edges."""
        working = self._working.get(chunk_size)
        if working is None:
            working = self._working[chunk_size] = self._estimate(chunk_size)
        first, end = layers
        ends = end == self.num_layers
        return (working.lm_head if ends else working.layers) + ((first > 0) + (not ends)) * working.edge

    @cached_property
    def _num_seqs(self) -> int:
        return self.limits(self.config.chunk_size).max_num_seqs

    def limits(self, chunk_size: int | None) -> Limits:
        """Return the limits of the run before pages are counted. See `resolve_limits`."""
        config = replace(self.config, chunk_size=chunk_size)
        return resolve_limits(config, self.model.facts, config.stages, (), self.page_size)

    def _estimate(self, chunk_size: int) -> Working:
        config, facts = self.config, self.model.facts
        shards, limits = config.tensor_parallel_size, self.limits(chunk_size)
        largest = LargestMicrobatch.of(parse_policy(config.policy), limits)
        mlp = read_mlp(self.model.directory, facts)
        mlp = replace(mlp, width=-(-mlp.width // shards))
        # Tensor shards have no graphs if gloo adds up their results. A plan does not know the transport, so it is on
        # the safe side and counts the memory of graphs.
        graphed = self.device == "cuda" and not config.enforce_eager and not facts.has_states
        without, with_head = (
            estimate_working_bytes(
                self.rank_facts, mlp, largest, self.dtype.itemsize, has_lm_head=has_lm_head, graphed=graphed
            )
            for has_lm_head in (False, True)
        )
        edge = 0
        if self.device == "cuda":
            edge = edge_bytes(1, largest.num_tokens, facts.hidden_size, self.dtype.itemsize, limits.inflight)
        return Working(without, with_head, edge)

    @cached_property
    def _working(self) -> dict[int, Working]:
        """Cache of estimates, by chunk size."""
        return {}


def _no_sum(summand: Tensor) -> Tensor:
    raise AssertionError("a plan computes nothing")


def _has_weights(directory: Path) -> bool:
    """Return whether all weight files of the model exist."""
    if (directory / SINGLE_FILE).is_file():
        return True
    if not (directory / INDEX_FILE).is_file():
        return False
    try:
        return all((directory / name).is_file() for name in indexed_files(directory))
    except MissingError:
        return False
