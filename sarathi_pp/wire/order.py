"""The directed edges of a run, in the one order in which every rank sets them up.

    0 -> 1 -> 2 -> ... -> P-1     activations, after their microbatch's header: from each shard to the same shard
    ^-----------------------'     token ids (the return edge), to the rank that leads the replica
    leader -> shards 1, 2 ...     headers, to the other shards of its stage
    rank 0 <-> other leaders      requests and their answers

Each directed edge has a communicator of its own, which keeps messages in order. So no message can end up in the receive
that waits for another one.
"""

from __future__ import annotations

from itertools import chain

from sarathi_pp.wire.mesh import Coordinate, Mesh

Edges = tuple[tuple[int, int], ...]


def edges(mesh: Mesh) -> Edges:
    """Return (sender, receiver) of every edge between different ranks."""
    return (*stage_edges(mesh), *_request_edges(mesh))


def stage_edges(mesh: Mesh) -> Edges:
    """Return the edges that carry microbatches and their results."""
    return (*forward_edges(mesh), *_return_edges(mesh), *_header_edges(mesh))


def forward_edges(mesh: Mesh) -> Edges:
    """Return the edges that carry activations."""
    return tuple(
        (mesh.rank(replica, stage, shard), mesh.rank(replica, stage + 1, shard))
        for replica in range(mesh.replicas)
        for shard in range(mesh.shards)
        for stage in range(mesh.stages - 1)
    )


def upstream(mesh: Mesh, coordinate: Coordinate) -> int:
    """Return the rank from which this rank receives microbatches.

    The leader of a replica instead receives results, from the last stage, which may be its own.
    """
    if coordinate.stage > 0:
        return mesh.rank(coordinate.replica, coordinate.stage - 1, coordinate.shard)
    return mesh.rank(coordinate.replica, 0 if coordinate.shard else mesh.stages - 1)


def downstream(mesh: Mesh, coordinate: Coordinate) -> int | None:
    """Return the rank to which this rank sends its output; None if it sends none.

    On the last stage, only shard 0 sends the results to the leader. The other shards have the same results.
    """
    if coordinate.stage < mesh.stages - 1:
        return mesh.rank(coordinate.replica, coordinate.stage + 1, coordinate.shard)
    return None if coordinate.shard else mesh.leader(coordinate.replica)


def _return_edges(mesh: Mesh) -> Edges:
    if mesh.stages == 1:
        return ()
    return tuple((mesh.rank(replica, mesh.stages - 1), mesh.leader(replica)) for replica in range(mesh.replicas))


def _header_edges(mesh: Mesh) -> Edges:
    return tuple(
        (mesh.leader(replica), shard) for replica in range(mesh.replicas) for shard in mesh.shard_ranks(replica, 0)[1:]
    )


def _request_edges(mesh: Mesh) -> Edges:
    leaders = map(mesh.leader, range(1, mesh.replicas))
    return tuple(chain.from_iterable(((0, leader), (leader, 0)) for leader in leaders))
