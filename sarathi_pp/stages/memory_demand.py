"""The memory that ranks need together, compared with the free memory of the pools on which they draw.

Each rank reports what it needs and its pools: the memory of its host and the cgroups that limit it, or the memory of
its GPU. Then every rank computes the same sums, before any of them takes memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sarathi_pp.errors import CapacityError
from sarathi_pp.model.memory import in_gib
from sarathi_pp.process.host import MemoryPool


@dataclass(frozen=True, slots=True)
class Demand:
    """The memory that one rank is going to take.

    Attributes:
        num_bytes: size of the memory.
        pools: memory pools that count this memory. Each of them must have room for it.
    """

    num_bytes: int
    pools: tuple[MemoryPool, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Demand:
        return cls(facts["num_bytes"], tuple(MemoryPool(**pool) for pool in facts["pools"]))


def require_room(demands: Sequence[Demand], hosts: Sequence[str], what: str, remedy: str) -> None:
    """Raise CapacityError if several ranks together need more than a pool has free.

    A pool that only one rank uses is not checked here, because that rank checks it itself.

    Args:
        demands: demand of every rank.
        hosts: name of every rank's host.
        what: the things to store, such as "the weights", for the message.
        remedy: advice for the user. `{each}` in it becomes the MiB that each rank has if all get the same.
    """
    tightest: dict[tuple[int, ...], MemoryPool] = {}
    for ranks, pool in _pools(demands):
        if len(ranks) > 1 and (ranks not in tightest or pool.free_bytes < tightest[ranks].free_bytes):
            tightest[ranks] = pool
    short, each = [], 1 << 60
    for ranks, pool in tightest.items():
        needed = sum(demands[rank].num_bytes for rank in ranks)
        if needed > pool.free_bytes:
            short.append(
                f"host {hosts[ranks[0]]}: ranks {', '.join(map(str, ranks))} need {in_gib(needed)} for {what}, and "
                f"{in_gib(pool.free_bytes)} are available in {pool.title}"
            )
            each = min(each, pool.free_bytes // len(ranks))
    if short:
        raise CapacityError("; ".join(short) + f"\n  try  {remedy.format(each=f'{max(each >> 20, 1)}MiB')}")


def room_for(rank: int, demands: Sequence[Demand]) -> int:
    """Return the bytes that a rank may take if all other ranks take what they need."""
    return min(
        pool.free_bytes - sum(demands[other].num_bytes for other in ranks if other != rank)
        for ranks, pool in _pools(demands)
        if rank in ranks
    )


def sharers_of(rank: int, demands: Sequence[Demand]) -> dict[str, int]:
    """Return the number of ranks that draw on each memory pool of this rank, by the pool's id."""
    return {pool.id: len(ranks) for ranks, pool in _pools(demands) if rank in ranks}


def _pools(demands: Sequence[Demand]) -> list[tuple[tuple[int, ...], MemoryPool]]:
    """Return every pool with the ranks that draw on it. Its free memory is the least that these ranks found."""
    ranks: dict[str, list[int]] = {}
    pools: dict[str, MemoryPool] = {}
    for rank, demand in enumerate(demands):
        for pool in demand.pools:
            ranks.setdefault(pool.id, []).append(rank)
            pools[pool.id] = min(pools.get(pool.id, pool), pool, key=lambda one: one.free_bytes)
    return [(tuple(ranks[id]), pool) for id, pool in pools.items()]
