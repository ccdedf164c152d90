"""Compare the memory that stages need with the memory of their devices, by the same rules as the checks of a run.

room      bytes that a rank may take of its device if all others take what they need (room_for)
budget    bytes that a rank may give its KV pages after all weights are loaded (kv_budget_bytes)
excess    bytes by which a stage exceeds its room or its budget
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from sarathi_pp.config import RunConfig
from sarathi_pp.core.cost.cards import CARDS
from sarathi_pp.core.partition import Layers, StageSeconds, partition
from sarathi_pp.errors import ConfigError
from sarathi_pp.stages.capacity import DeviceMemory, kv_budget_bytes
from sarathi_pp.stages.memory_demand import Demand, room_for, sharers_of
from sarathi_pp.tuning.hardware import CONTEXT_BYTES
from sarathi_pp.tuning.model_memory import ModelMemory

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Rooms:
    """The memory that the stages of a run have.

    Attributes:
        config: the options of the run.
        memories: memory of each rank, stage by stage; empty if only the KV cache of a profile is known.
        profiled_bytes: size of each stage's KV cache in the profile, in bytes; used if memories is empty.
    """

    config: RunConfig
    memories: tuple[DeviceMemory, ...]
    profiled_bytes: int = 0

    def kv_budgets(self, weights: Sequence[int], working: Sequence[int]) -> list[int]:
        """Return the bytes that each stage may give its KV pages, as `ModelStages.count_pages` computes them.

        Args:
            weights: bytes that one rank of each stage loads.
            working: bytes of working memory of one rank of each stage.
        """
        if not self.memories:
            given = self.config.kv_cache_memory_bytes
            return [self.profiled_bytes if given is None else given] * len(weights)
        demands = self._demands(weights)
        loaded: dict[str, int] = {}
        for demand in demands:
            for pool in demand.pools:
                loaded[pool.id] = loaded.get(pool.id, 0) + demand.num_bytes
        budgets = []
        for rank, memory in enumerate(self.memories):
            left = (replace(pool, free_bytes=max(0, pool.free_bytes - loaded[pool.id])) for pool in memory.pools)
            own = replace(memory, pools=tuple(left))
            stage = rank // self._shards
            budgets.append(kv_budget_bytes(self.config, own, sharers_of(rank, demands), working[stage]))
        return self._least_of_stages(budgets)

    def rooms(self, totals: Sequence[int]) -> list[int] | None:
        """Return the bytes that one rank of each stage may take; None if the memory is unknown.

        Args:
            totals: bytes that one rank of each stage needs.
        """
        if not self.memories:
            return None
        demands = self._demands(totals)
        return self._least_of_stages([room_for(rank, demands) for rank in range(len(demands))])

    def separate(self) -> list[int] | None:
        """Return the room of each stage; None if ranks share memory or the memory is unknown."""
        pools = [pool.id for memory in self.memories for pool in memory.pools]
        if not pools or len(set(pools)) < len(pools):
            return None
        return self.rooms([0] * (len(self.memories) // self._shards))

    @property
    def _shards(self) -> int:
        return self.config.tensor_parallel_size

    def _demands(self, stages: Sequence[int]) -> list[Demand]:
        """Return the demand of each rank, on pools from which the memory that a run leaves free is subtracted.

        Args:
            stages: bytes that one rank of each stage takes.
        """
        demands = []
        for rank, memory in enumerate(self.memories):
            kept = memory.kept_bytes(self.config)
            pools = tuple(replace(pool, free_bytes=pool.free_bytes - kept) for pool in memory.pools)
            demands.append(Demand(stages[rank // self._shards], pools))
        return demands

    def _least_of_stages(self, ranks: Sequence[int]) -> list[int]:
        """Return for each stage the smallest value of its ranks."""
        return [min(ranks[start : start + self._shards]) for start in range(0, len(ranks), self._shards)]


def within_memory(
    seconds: StageSeconds, memory: ModelMemory, rooms: Sequence[int], chunk_size: int, num_requests: int
) -> StageSeconds:
    """Return stage times with a penalty for a stage that does not fit its device. The penalty grows with the excess.

    Any stage that fits takes less time than any stage that does not. So a split by these times fits if any split does.

    Args:
        seconds: time of a stage with the layers [first, end), without the penalty.
        memory: memory that a stage needs.
        rooms: for each stage, the bytes that one of its ranks may take.
        num_requests: number of requests of the longest length for which a stage must have KV pages.
    """
    slowest_s = max(seconds(stage, 0, memory.num_layers) for stage in range(len(rooms)))

    def limited(stage: int, first: int, end: int) -> float:
        excess = memory.excess_bytes((first, end), chunk_size, rooms[stage], num_requests)
        return seconds(stage, first, end) + (slowest_s * (1 + excess / _GIB) if excess > 0 else 0.0)

    return limited


def fill(memory: ModelMemory, rooms: Sequence[int], chunk_size: int) -> Layers | None:
    """Return the layer split in which each stage, from the first on, takes the most layers that fit.

    Each stage gets at least one layer. Return None if no split fits.

    Args:
        rooms: for each stage, the bytes that one of its ranks may take.
    """
    split, first = [], 0
    for stage, room in enumerate(rooms):
        last_end = memory.num_layers - (len(rooms) - stage - 1)
        end = first
        while end < last_end and memory.excess_bytes((first, end + 1), chunk_size, room) <= 0:
            end += 1
        if end == first:
            return None
        split.append((first, end))
        first = end
    return tuple(split) if first == memory.num_layers else None


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of options with which the model would fit.

    Attributes:
        options: options of `plan` with their values, one after the other.
        text: what the change needs, for the user, such as "on 2 hosts like this one".
    """

    options: tuple[str, ...]
    text: str


def find_remedies(memory: ModelMemory, rooms: Rooms, chunk_size: int) -> Iterator[Remedy]:
    """Yield changes of stages, shards, devices or hosts with which the model fits. Each is tested before."""
    if memory.device == "cpu":
        if rooms.memories and (count := _more_hosts(memory, rooms.memories[0], chunk_size)) is not None:
            hosts = count * memory.config.tensor_parallel_size
            yield Remedy(("--stages", str(count)), f"on {hosts} hosts like this one")
        return
    separate = rooms.separate()
    if separate is None:
        return
    yield from _weights_as_stored(memory, separate, chunk_size)
    if (count := _more_stages(memory, separate, chunk_size)) is not None:
        added = (count - len(separate)) * memory.config.tensor_parallel_size
        yield Remedy(("--stages", str(count)), f"with {added} more devices like the smallest one")
    yield from _more_shards(memory, separate, chunk_size)
    yield from _larger_devices(memory, len(separate), chunk_size)


def _more_hosts(memory: ModelMemory, host: DeviceMemory, chunk_size: int) -> int | None:
    """Return the fewest stages that fit if each rank is on a host of its own; None if no number fits."""
    for count in range(2, memory.num_layers + 1):
        hosts = (
            replace(host, pools=tuple(replace(pool, id=f"{pool.id} {rank}") for pool in host.pools))
            for rank in range(count * memory.config.tensor_parallel_size)
        )
        split, layers = _split_into(memory, count), partition(memory.num_layers, count)
        rooms = Rooms(split.config, tuple(hosts))
        weights = [split.weights.num_bytes(stage) for stage in layers]
        working = [split.working_bytes(stage, chunk_size) for stage in layers]
        separate, budgets = rooms.separate(), rooms.kv_budgets(weights, working)
        assert separate is not None, "each rank has a host of its own"
        if all(
            split.excess_bytes(stage, chunk_size, room) <= 0 and split.least_kv_bytes(stage) <= budget
            for stage, room, budget in zip(layers, separate, budgets, strict=True)
        ):
            return count
    return None


def _weights_as_stored(memory: ModelMemory, rooms: Sequence[int], chunk_size: int) -> Iterator[Remedy]:
    """Yield the option that keeps weights as they are stored, if the model then fits the same devices."""
    if memory.device != "cuda" or memory.config.weights != "dtype":
        return
    with suppress(ConfigError):
        kept = memory.with_options(weights="stored", layer_split=None)
        if fill(kept, rooms, chunk_size) is not None:
            yield Remedy(("--weights", "stored"), "on the same devices, with slower products of few tokens")


def _more_stages(memory: ModelMemory, rooms: Sequence[int], chunk_size: int) -> int | None:
    """Return the fewest stages with which the model fits, if devices like the smallest one are added.

    Return None if no number of stages fits.

    Args:
        rooms: for each stage, the bytes that one of its ranks may take now.
    """
    for count in range(len(rooms) + 1, memory.num_layers + 1):
        enough = [*rooms, *[min(rooms)] * (count - len(rooms))]
        if fill(_split_into(memory, count), enough, chunk_size) is not None:
            return count
    return None


def _more_shards(memory: ModelMemory, rooms: Sequence[int], chunk_size: int) -> Iterator[Remedy]:
    """Yield the fewest ranks per stage with which the model fits the same devices, if any number does."""
    now = memory.config.tensor_parallel_size
    for factor in (2, 4, 8):
        count, left = divmod(len(rooms), factor)
        if left or count > memory.num_layers:
            continue
        with suppress(ConfigError):
            sharded = _split_into(memory, count, tensor_parallel_size=now * factor)
            least = [min(rooms[start : start + factor]) for start in range(0, len(rooms), factor)]
            if fill(sharded, least, chunk_size) is not None:
                options = ("--tensor-parallel-size", str(now * factor), "--stages", str(count))
                yield Remedy(options, "on the same devices")
                return


def _larger_devices(memory: ModelMemory, count: int, chunk_size: int) -> Iterator[Remedy]:
    """Yield the smallest known card with which `count` stages fit. If no card is large enough, yield a memory size."""
    whole = (0, memory.num_layers)
    low, high = 0, memory.least_bytes(whole, chunk_size) + memory.working_bytes((0, 1), chunk_size)
    if fill(memory, [high] * count, chunk_size) is None:
        return  # more memory would not help
    while high - low > _GIB // 10:
        middle = (low + high) // 2
        low, high = (low, middle) if fill(memory, [middle] * count, chunk_size) is not None else (middle, high)
    kept = 1.0 if memory.config.kv_cache_memory_bytes is not None else memory.config.gpu_memory_utilization
    needed = int((high + CONTEXT_BYTES) / kept)
    cards = sorted((card.memory_bytes, name) for name, card in CARDS.items() if card.memory_bytes >= needed)
    size = f"{-(-needed // _GIB)}GiB"
    options = ("--device-memory", size) if not cards else ("--card", cards[0][1])
    yield Remedy(options, f"{count * memory.config.tensor_parallel_size} devices of at least {size}")


def _split_into(memory: ModelMemory, count: int, **options: Any) -> ModelMemory:
    """Return the memory of the same model in `count` stages."""
    return memory.with_options(stages=count, layer_split=None, **options)
