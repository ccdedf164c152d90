"""The ranks of a run: replicas of a pipeline, stages of a replica, shards of a stage.

    replica 0   (stage 0: shards 0 1) (stage 1: shards 2 3)        replica 1   (stage 0: shards 4 5) ...

Replicas share the requests, stages share the layers, and the shards of a stage share each layer. Ranks of one host are
neighbours, whatever numbers a launcher gave them. So as few edges as possible go from host to host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Coordinate(NamedTuple):
    """Position of one rank in the mesh, as indices from 0. The rank that leads a replica holds its coordinator."""

    replica: int
    stage: int
    shard: int

    @property
    def leads(self) -> bool:
        return self.stage == 0 and self.shard == 0


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks of a run by coordinate: replicas x stages x shards.

    Attributes:
        replicas: number of pipelines.
        stages: number of stages per pipeline.
        shards: number of ranks per stage; 1 without tensor parallelism.
        ranks: rank of each coordinate: first all shards of a stage, then the next stage, then the next replica. If
            empty, ranks follow in this order: 0, 1, 2 and so on. Rank 0 always leads replica 0.
    """

    replicas: int = 1
    stages: int = 1
    shards: int = 1
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(self.size)))
        assert sorted(self.ranks) == list(range(self.size)) and self.ranks[0] == 0, self

    @property
    def size(self) -> int:
        return self.replicas * self.stages * self.shards

    def over(self, hosts: Sequence[str]) -> Mesh:
        """Return this mesh with ranks of one host as neighbours.

        Args:
            hosts: the host of each rank. Hosts follow in the order of their first ranks.
        """
        first = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
        return replace(self, ranks=tuple(sorted(range(self.size), key=lambda rank: (first[hosts[rank]], rank))))

    def rank(self, replica: int, stage: int, shard: int = 0) -> int:
        return self.ranks[(replica * self.stages + stage) * self.shards + shard]

    def coordinate(self, rank: int) -> Coordinate:
        stage, shard = divmod(self.ranks.index(rank), self.shards)
        return Coordinate(*divmod(stage, self.stages), shard)

    def leader(self, replica: int) -> int:
        return self.rank(replica, 0)

    def members(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of a replica, the leader first."""
        size = self.stages * self.shards
        return self.ranks[replica * size : (replica + 1) * size]

    def shard_ranks(self, replica: int, stage: int) -> tuple[int, ...]:
        """Return the ranks that hold one stage together."""
        return tuple(self.rank(replica, stage, shard) for shard in range(self.shards))

    def title(self, rank: int) -> str:
        """Return the name of a rank in messages to the user."""
        coordinate = self.coordinate(rank)
        shard = f"shard {coordinate.shard} of " if self.shards > 1 else ""
        replica = f" of replica {coordinate.replica}" if self.replicas > 1 else ""
        return f"{shard}stage {coordinate.stage}{replica} (rank {rank})"
