"""One rank's ends of the edges that a mesh gives it, see wire/order.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from sarathi_pp.config import ResolvedRun
from sarathi_pp.distributed.control_plane import Topology
from sarathi_pp.wire import byte_stream, codec
from sarathi_pp.wire.byte_stream import PostReceiver, PostSender, Remote
from sarathi_pp.wire.channel import NoSender, QueueChannel, Receiver, Sender, edge_buffers
from sarathi_pp.wire.edge_options import EdgeOptions
from sarathi_pp.wire.message import Payloads
from sarathi_pp.wire.order import downstream, forward_edges, upstream

# Parcels under way between rank 0 and the leader of another replica.
_POST_BUFFERS = 8


@dataclass(frozen=True, slots=True)
class Wires:
    """Where microbatches come from, on a leader results, and where they go.

    shards: a leader's ways to the other ranks of its stage, which get headers alone.
    """

    way_in: Receiver[Tensor]
    way_out: Sender[Tensor]
    shards: tuple[Sender[Tensor], ...]


def open_wires(
    topology: Topology,
    run: ResolvedRun,
    activations: Payloads,
    head_size: int,
    options: EdgeOptions,
) -> Wires:
    """activations: of the largest microbatch. head_size: of the rows that a head takes.

    A leader that is the last stage too is its own neighbour.
    """
    mesh, rank = topology.mesh, topology.place.rank
    seat, buffers = mesh.seat(rank), edge_buffers(run.inflight)
    returning = mesh.rank(seat.replica, mesh.stages - 1), mesh.leader(seat.replica)
    frame_bytes = codec.max_frame_bytes(
        max_tokens=run.max_microbatch_tokens,
        max_seqs=run.max_num_seqs,
        page_size=run.page_size,
        num_stages=run.num_stages,
    )
    forward = forward_edges(mesh)
    # A sequence draws at most one token of a microbatch.
    rows = replace(activations, max_tokens=run.max_num_seqs, row_shape=(head_size,))

    def payloads(edge: tuple[int, int]) -> Payloads:
        if edge in forward:
            return activations
        return rows if edge == returning and run.moves_head else Payloads.none()

    def sender(to: int) -> Sender[Tensor]:
        return topology.sender(to, frame_bytes, payloads((rank, to)), buffers, options)

    source, target = upstream(mesh, seat), downstream(mesh, seat)
    if source == rank:
        channel: QueueChannel[Tensor] = QueueChannel(options.clock, buffers)
        way_in: Receiver[Tensor] = channel
        way_out: Sender[Tensor] = channel
    else:
        way_in = topology.receiver(source, frame_bytes, payloads((source, rank)), buffers, options)
        way_out = NoSender() if target is None else sender(target)
    others = mesh.shard_ranks(seat.replica, 0)[1:] if seat.leads else ()
    return Wires(way_in, way_out, tuple(sender(other) for other in others))


def open_post(topology: Topology, rank: int, options: EdgeOptions) -> Remote:
    """The edges of requests and answers between rank 0 and the leader of another replica; rank: of the other end."""
    outgoing = topology.sender(rank, byte_stream.FRAME_BYTES, byte_stream.PAYLOADS, _POST_BUFFERS, options)
    incoming = topology.receiver(rank, byte_stream.FRAME_BYTES, byte_stream.PAYLOADS, _POST_BUFFERS, options)
    return Remote(topology.name(rank), PostSender(outgoing), PostReceiver(incoming))
