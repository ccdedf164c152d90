"""The search for the chunk size and the layer split of a plan.

chunk size   SARATHI's P:D = C/(B-1) (arXiv 2308.16369, section 5.1.3), solved for C: b decodes per microbatch use up
             prompts as fast as outputs end if b * P:D prompt tokens come with them. So C = b * (1 + P:D), in whole
             tiles and not below saturation. Two tile counts are next to it. The one with more predicted tokens/s wins.
layer split  the one whose slowest stage takes least, at that microbatch, among the splits that fit
KV pages     those of the profile's stages, or --kv-cache-memory, or those for which the devices have room
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sarathi_pp.config import ResolvedRun
from sarathi_pp.core.cost.model import Load
from sarathi_pp.core.cost.profile import NO_DRIFT, Profile
from sarathi_pp.core.cost.repartition import stage_seconds
from sarathi_pp.core.cost.sizing import MOST_TOKENS, inflight, saturation, whole_tiles
from sarathi_pp.core.head_placement import moves_head
from sarathi_pp.core.partition import Layers, partition, partition_by_time
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.sim.workload import Workload
from sarathi_pp.stages.capacity import count_pages, resolve, shard_bytes
from sarathi_pp.tuning.basis import Basis
from sarathi_pp.tuning.fitting import within_memory
from sarathi_pp.tuning.model_memory import ModelMemory
from sarathi_pp.tuning.prediction import Demand, Prediction, predict

# Requests for which a layer split may reserve KV pages on every device. More pages run more requests at once. Fewer
# pages leave room for a faster split.
_RESERVES = (1, 8, 32)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The memory that one rank of each stage takes, in bytes and in the order of the stages.

    Attributes:
        least_kv: KV pages of one request of the longest length, and the states of all sequences.
        kv: KV pages and states of the run.
        states: states of all sequences, which are a part of `kv`.
        budgets: bytes that are left for KV pages and states.
        rooms: bytes that the rank may take; None if the memory of the devices is unknown.
    """

    weights: list[int]
    working: list[int]
    least_kv: list[int]
    kv: list[int]
    states: list[int]
    budgets: list[int]
    rooms: list[int] | None

    @property
    def totals(self) -> list[int]:
        return [sum(parts) for parts in zip(self.weights, self.working, self.kv, strict=True)]

    @property
    def short(self) -> list[int]:
        """The bytes that each stage lacks. At most 0 if it fits."""
        short = [least - budget for least, budget in zip(self.least_kv, self.budgets, strict=True)]
        if self.rooms is None:
            return short
        return [max(one, total - room) for one, total, room in zip(short, self.totals, self.rooms, strict=True)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a workload.

    Attributes:
        chunk_size: the size for which memory is counted. That of the run is smaller if its KV cache holds fewer tokens.
        profile: costs of its stages.
        pages: KV pages for which each stage has room.
        microbatch_s: time of each stage for a typical microbatch.
    """

    run: ResolvedRun
    chunk_size: int
    profile: Profile
    memory: StageMemory
    pages: list[int]
    microbatch_s: list[float]

    @property
    def fits(self) -> bool:
        return max(self.memory.short) <= 0


@dataclass(frozen=True, slots=True)
class Planner:
    """Compares ways to run a workload. Times come from the basis."""

    memory: ModelMemory
    basis: Basis
    workload: Workload

    def best(self) -> Candidate:
        """Return the candidate with the most predicted tokens/s, or the one that lacks least memory if none fits."""
        candidates = self._candidates()
        fitting = [candidate for candidate in candidates if candidate.fits]
        if len(fitting) > 1:
            return max(fitting, key=self._tokens_per_s)
        return fitting[0] if fitting else min(candidates, key=lambda candidate: max(candidate.memory.short))

    def predict(self, candidate: Candidate) -> Prediction:
        return predict(candidate.profile, self.workload, candidate.run)

    def _tokens_per_s(self, candidate: Candidate) -> float:
        """Predict the rate of stages whose speed does not drift. Drift would favour a candidate by chance."""
        steady = replace(candidate, profile=replace(candidate.profile, drift=NO_DRIFT))
        return self.predict(steady).total_tokens_per_s

    def _candidates(self) -> list[Candidate]:
        """Return candidates for the tile counts around the ideal chunk size. If none fits, add smaller chunk sizes."""
        cost, demand = self.basis.profile.cost, Demand.of(self.workload)
        least = saturation(cost)
        first = self._candidate(least)
        if not first.fits:
            # The smallest microbatch takes the least memory. So it has the best chance to fit.
            first = self._candidate(cost.tile)
        at_once = demand.decodes_at_once(first.run)
        ideal = at_once * (1 + demand.prompt_tokens / max(1, demand.decodes))
        sizes = {max(least, size) for size in whole_tiles(cost, min(ideal, MOST_TOKENS))}
        candidates = [candidate for size in sorted(sizes) for candidate in self._splits(size)]
        while not any(candidate.fits for candidate in candidates) and least > cost.tile:
            least = max(cost.tile, least // 2 // cost.tile * cost.tile)
            candidates.append(self._candidate(least))
        return candidates

    def _splits(self, chunk_size: int) -> list[Candidate]:
        """Return the best layer split for each reserve of KV pages, without repetitions."""
        candidates = (self._candidate(chunk_size, num_requests) for num_requests in _RESERVES)
        return list({candidate.run.layers: candidate for candidate in candidates}.values())

    def _candidate(self, chunk_size: int, num_requests: int = 1) -> Candidate:
        """Split the layers for a chunk size, and count the memory of the stages.

        Args:
            num_requests: requests for which each device reserves KV pages.
        """
        memory, basis, config = self.memory, self.basis, self.memory.config
        load = self._load(chunk_size)
        layers = self._layers(chunk_size, load, num_requests)
        moves = moves_head(config.head, basis.device, config.stages, config.tensor_parallel_size)
        weights = [memory.weights.num_bytes(stage) for stage in layers]
        if moves:
            weights[0] += memory.weights.num_bytes((memory.num_layers, memory.num_layers))
        working = [memory.working_bytes(stage, chunk_size) for stage in layers]
        least_kv = [memory.least_kv_bytes(stage) for stage in layers]
        budgets = basis.rooms.kv_budgets(weights, working)
        # A stage without room is counted with the pages of one request. The total then shows what it lacks.
        pages = [
            count_pages(
                max(pair), memory.rank_facts, stage, memory.limits(chunk_size), memory.dtype, config.kv_cache_dtype
            )
            for stage, *pair in zip(layers, budgets, least_kv, strict=True)
        ]
        run = self._resolve(chunk_size, layers, pages, moves=moves)
        kv = [shard_bytes(run, memory.rank_facts, stage, memory.dtype) for stage in layers]
        states = [memory.state_bytes(stage) for stage in layers]
        stages = StageMemory(weights, working, least_kv, kv, states, budgets, rooms=None)
        stages = replace(stages, rooms=basis.rooms.rooms(stages.totals))
        profile = replace(basis.profile, cost=basis.cost_of(layers), pages=run.num_pages, max_num_seqs=run.max_num_seqs)
        times = [profile.cost.seconds(stage, load) for stage in range(run.num_stages)]
        return Candidate(run, chunk_size, profile, stages, pages, times)

    def _load(self, chunk_size: int) -> Load:
        """Return a typical microbatch of this size: decodes and prompt tokens as the workload has them."""
        demand = Demand.of(self.workload)
        decodes = min(chunk_size - 1, chunk_size * demand.decodes / (demand.prompt_tokens + demand.decodes))
        return demand.load(chunk_size - decodes, decodes)

    def _layers(self, chunk_size: int, load: Load, num_requests: int) -> Layers:
        config, num_layers = self.memory.config, self.memory.num_layers
        if config.layer_split is not None:
            return partition(num_layers, config.stages, config.layer_split)
        seconds = stage_seconds(self.basis.profile.cost, load, config.stages)
        if (rooms := self.basis.rooms.separate()) is not None:
            seconds = within_memory(seconds, self.memory, rooms, chunk_size, num_requests)
        return partition_by_time(num_layers, config.stages, seconds)

    def _resolve(self, chunk_size: int, layers: Layers, pages: Sequence[int], *, moves: bool) -> ResolvedRun:
        memory, basis, config = self.memory, self.basis, self.memory.config
        num_inflight = config.inflight or inflight(basis.profile, parse_policy(config.policy), config.stages)
        return resolve(
            replace(config, chunk_size=chunk_size, inflight=num_inflight),
            memory.model.facts,
            layers,
            pages,
            page_size=memory.page_size,
            dtype=memory.dtypes.compute,
            device=basis.device,
            attention=config.attention,
            moves_head=moves,
        )
