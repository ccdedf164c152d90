"""Which directed edges a run has, in the one order in which every rank sets them up.

    0 -> 1 -> 2 -> ... -> P-1     activations, behind their microbatch's header: from shard to like shard
    ^-----------------------'     token ids (the return edge), to the rank that leads the replica
    leader -> shards 1, 2 ...     headers, to the other shards of its stage
    rank 0 <-> other leaders      requests and their answers

One communicator per directed edge and one order per edge: no two messages can ever be matched crosswise.
"""

from __future__ import annotations

from itertools import chain

from sarathi_pp.wire.mesh import Mesh, Seat

Edges = tuple[tuple[int, int], ...]


def edges(mesh: Mesh) -> Edges:
    """(sender, receiver) of every edge between different ranks."""
    return (*stage_edges(mesh), *_request_edges(mesh))


def stage_edges(mesh: Mesh) -> Edges:
    """Those that microbatches and their results take."""
    return (*forward_edges(mesh), *_return_edges(mesh), *_header_edges(mesh))


def forward_edges(mesh: Mesh) -> Edges:
    """Those that carry activations."""
    return tuple(
        (mesh.rank(replica, stage, shard), mesh.rank(replica, stage + 1, shard))
        for replica in range(mesh.replicas)
        for shard in range(mesh.shards)
        for stage in range(mesh.stages - 1)
    )


def upstream(mesh: Mesh, seat: Seat) -> int:
    """The rank from which microbatches come; for a leader that of the results, itself where it is the last stage."""
    if seat.stage > 0:
        return mesh.rank(seat.replica, seat.stage - 1, seat.shard)
    return mesh.rank(seat.replica, 0 if seat.shard else mesh.stages - 1)


def downstream(mesh: Mesh, seat: Seat) -> int | None:
    """The rank to which microbatches go; for a last stage the leader, who hears of results from one shard alone."""
    if seat.stage < mesh.stages - 1:
        return mesh.rank(seat.replica, seat.stage + 1, seat.shard)
    return None if seat.shard else mesh.leader(seat.replica)


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
