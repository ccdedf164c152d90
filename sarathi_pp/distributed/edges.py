"""One rank's edges to other ranks: their connections, and this rank's ends of them.

wire/order.py defines the edges and their order. Each edge has its own gloo group. Ranks that share memory send their
messages through it. GPUs send activations through a communicator of the device.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor

from sarathi_pp.config import ResolvedRun
from sarathi_pp.distributed.control_plane import ControlPlane
from sarathi_pp.distributed.transport import NcclOptions
from sarathi_pp.errors import PeerLostError
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.wire import byte_stream, codec
from sarathi_pp.wire.byte_stream import ByteStreamReceiver, ByteStreamSender, Remote
from sarathi_pp.wire.channel import Clock, NoSender, QueueChannel, Receiver, Sender, edge_buffers
from sarathi_pp.wire.edge_options import EdgeOptions
from sarathi_pp.wire.group import Group
from sarathi_pp.wire.message import Payloads
from sarathi_pp.wire.nccl_channel import NcclChannel
from sarathi_pp.wire.order import downstream, edges, forward_edges, stage_edges, upstream
from sarathi_pp.wire.shard_group import ShardGroup
from sarathi_pp.wire.shared_memory import SharedReceiver, SharedSender, SlotConnection, SlotListener, connect
from sarathi_pp.wire.torch_channel import Edge, TorchReceiver, TorchSender

# Fragments in flight between rank 0 and the leader of another replica.
_FRAGMENT_BUFFERS = 8
# Buffers of a heartbeat edge: one for a heartbeat and one for a goodbye.
_HEARTBEAT_BUFFERS = 2
_POLL_S = 0.001

# The sending rank, then the receiving one.
Ranks = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Wires:
    """The edge ends that a stage uses.

    Attributes:
        way_in: receives microbatches. On a leader, it receives their results.
        shards: on a leader, senders to the other ranks of its stage, which get only headers.
    """

    way_in: Receiver[Tensor]
    way_out: Sender[Tensor]
    shards: tuple[Sender[Tensor], ...]


class Edges:
    """This rank's connected edges. `connect` makes them, and `ControlPlane.leave` closes them.

    Attributes:
        shared: all edges of the run that use shared memory.
    """

    def __init__(
        self,
        plane: ControlPlane,
        options: EdgeOptions,
        groups: Mapping[Ranks, Group],
        sockets: Mapping[Ranks, socket.socket],
        nccl: Mapping[Ranks, NcclChannel],
        shared: list[Ranks],
    ) -> None:
        self.shared = shared
        self._plane = plane
        self._options = options
        self._groups = groups
        self._sockets = sockets
        self._nccl_channels = nccl

    @classmethod
    def connect(
        cls, plane: ControlPlane, options: EdgeOptions, nccl: NcclOptions | None = None, *, share: bool = False
    ) -> Edges:
        """Connect all edges of this rank. Every rank calls it.

        Args:
            nccl: options for the channels of edges that carry activations. None: no NCCL.
            share: use shared memory between ranks that can share it.

        Raises:
            PeerLostError: another rank does not connect its end.
        """
        groups = {}
        for edge in edges(plane.mesh):
            group = plane.new_group(edge, options.peer_timeout_s, "gloo")
            if group is not None:
                groups[edge] = group
        sockets, shared = _connect_sockets(plane) if share else ({}, [])
        opened = _open_nccl_channels(plane, options, nccl) if nccl is not None else {}
        return cls(plane, options, groups, sockets, opened, shared)

    def open_wires(self, run: ResolvedRun, activations: Payloads, head_size: int) -> Wires:
        """Open the edge ends that this rank's stage uses.

        A leader that is also the last stage is its own neighbour.

        Args:
            activations: payloads of the largest microbatch.
            head_size: size of the rows that the LM head takes.
        """
        mesh, rank = self._plane.mesh, self._plane.env.rank
        coordinate, buffers = mesh.coordinate(rank), edge_buffers(run.inflight)
        returning = mesh.rank(coordinate.replica, mesh.stages - 1), mesh.leader(coordinate.replica)
        frame_bytes = codec.max_frame_bytes(
            max_tokens=run.max_microbatch_tokens,
            max_seqs=run.max_num_seqs,
            page_size=run.page_size,
            num_stages=run.num_stages,
        )
        forward = forward_edges(mesh)
        # A microbatch draws at most one token per sequence.
        rows = replace(activations, max_tokens=run.max_num_seqs, row_shape=(head_size,))

        def payloads(edge: Ranks) -> Payloads:
            if edge in forward:
                return activations
            return rows if edge == returning and run.moves_head else Payloads.none()

        def sender(to: int) -> Sender[Tensor]:
            return self._sender(to, frame_bytes, payloads((rank, to)), buffers)

        source, target = upstream(mesh, coordinate), downstream(mesh, coordinate)
        if source == rank:
            channel: QueueChannel[Tensor] = QueueChannel(self._options.clock, buffers)
            way_in: Receiver[Tensor] = channel
            way_out: Sender[Tensor] = channel
        else:
            way_in = self._receiver(source, frame_bytes, payloads((source, rank)), buffers)
            way_out = NoSender() if target is None else sender(target)
        others = mesh.shard_ranks(coordinate.replica, 0)[1:] if coordinate.leads else ()
        return Wires(way_in, way_out, tuple(sender(other) for other in others))

    def open_byte_stream(self, rank: int) -> Remote:
        """Open the edges of requests and answers between rank 0 and the leader of another replica.

        Args:
            rank: rank of the other end.
        """
        outgoing = self._sender(rank, byte_stream.FRAME_BYTES, byte_stream.PAYLOADS, _FRAGMENT_BUFFERS)
        incoming = self._receiver(rank, byte_stream.FRAME_BYTES, byte_stream.PAYLOADS, _FRAGMENT_BUFFERS)
        return Remote(self._plane.name(rank), ByteStreamSender(outgoing), ByteStreamReceiver(incoming))

    def _sender(self, target: int, frame_bytes: int, payloads: Payloads, num_buffers: int) -> Sender[Tensor]:
        edge, options = (self._plane.env.rank, target), self._options
        if edge not in self._sockets:
            return TorchSender(self._gloo_edge(edge, target, frame_bytes, payloads), num_buffers, options)
        connection = SlotConnection(self._sockets[edge], self._plane.name(target), options.losses)
        heartbeats = TorchSender(self._heartbeat_edge(edge, target), 1, replace(options, losses=connection))
        return SharedSender(
            connection,
            heartbeats,
            options.clock,
            num_slots=num_buffers,
            slot_bytes=payloads.max_bytes(frame_bytes),
            timeout_s=self._plane.patience_s,
        )

    def _receiver(self, source: int, frame_bytes: int, payloads: Payloads, num_buffers: int) -> Receiver[Tensor]:
        edge, options = (source, self._plane.env.rank), self._options
        if edge not in self._sockets:
            return TorchReceiver(self._gloo_edge(edge, source, frame_bytes, payloads), num_buffers, options)
        connection = SlotConnection(self._sockets[edge], self._plane.name(source), options.losses)
        heartbeats = TorchReceiver(
            self._heartbeat_edge(edge, source), _HEARTBEAT_BUFFERS, replace(options, losses=connection)
        )
        return SharedReceiver(
            connection, heartbeats, options.clock, num_slots=num_buffers, frame_bytes=frame_bytes, payloads=payloads
        )

    def _gloo_edge(self, edge: Ranks, peer: int, frame_bytes: int, payloads: Payloads) -> Edge:
        group, name, channel = self._groups[edge], self._plane.name(peer), self._nccl_channels.get(edge)
        return Edge(group, edge.index(peer), name, frame_bytes, payloads, channel)

    def _heartbeat_edge(self, edge: Ranks, peer: int) -> Edge:
        return self._gloo_edge(edge, peer, codec.SMALL_FRAME_BYTES, Payloads.none())


def open_shard_group(plane: ControlPlane, peer_timeout_s: float, backend: str) -> ShardGroup | None:
    """Connect the ranks that hold one stage. Every rank calls it.

    Returns:
        This rank's group; None if it holds its stage alone.
    """
    mesh, own = plane.mesh, plane.mesh.coordinate(plane.env.rank)
    shards: ShardGroup | None = None
    for replica in range(mesh.replicas) if mesh.shards > 1 else ():
        for stage in range(mesh.stages):
            ranks = mesh.shard_ranks(replica, stage)
            group = plane.new_group(ranks, peer_timeout_s, backend)
            if group is not None:
                others = tuple(plane.name(rank) for rank in ranks if rank != plane.env.rank)
                shards = ShardGroup(own.shard, mesh.shards, others, group, SystemClock())
    return shards


def _connect_sockets(plane: ControlPlane) -> tuple[dict[Ranks, socket.socket], list[Ranks]]:
    """Connect ranks that reach each other's sockets.

    Returns:
        The sockets of this rank's edges, and all edges of the run that have one.
    """
    own, wanted = plane.env.rank, stage_edges(plane.mesh)
    sockets: dict[Ranks, socket.socket] = {}
    listeners: dict[int, SlotListener] = {}
    for source, target in wanted:
        with suppress(OSError):  # a host without such sockets
            if target == own:
                listeners[source] = SlotListener()
    answers = plane.exchange({"listeners": {source: listener.name for source, listener in listeners.items()}})
    reached = []
    for source, target in wanted:
        name = answers[target]["listeners"].get(str(own)) if source == own else None
        if name is not None and (end := connect(name)) is not None:
            plane.resources.callback(end.close)
            sockets[source, target] = end
            reached.append(target)
    by_rank = plane.exchange({"reached": reached})
    shared = [(source, target) for source, target in wanted if target in by_rank[source]["reached"]]
    for source, listener in listeners.items():
        if (source, own) in shared:
            if (end := listener.accept(plane.patience_s)) is None:
                raise PeerLostError(f"{plane.name(source)} has not connected within {plane.patience_s:g} s")
            plane.resources.callback(end.close)
            sockets[source, own] = end
        listener.close()
    return sockets, shared


def _open_nccl_channels(plane: ControlPlane, options: EdgeOptions, nccl: NcclOptions) -> dict[Ranks, NcclChannel]:
    opened = {}
    for edge in forward_edges(plane.mesh):
        group = plane.new_group(edge, options.peer_timeout_s, nccl.backend)
        if group is not None:
            opened[edge] = _open_nccl_channel(plane, edge, group, nccl, options.clock)
    return opened


def _open_nccl_channel(plane: ControlPlane, edge: Ranks, group: Group, nccl: NcclOptions, clock: Clock) -> NcclChannel:
    """Open the channel of one edge.

    Every rank opens its edges one by one in the same order, so that no two ranks wait for each other.
    """
    sending = edge[0] == plane.env.rank
    peer = edge[1] if sending else edge[0]
    channel = NcclChannel(group, edge.index(peer), nccl.new_stream())
    end_s = clock.now() + plane.patience_s
    # NCCL reads the environment at the first transfer.
    with plane.others_may_leave(peer), plane.surrounded(nccl.backend):
        opened = channel.connect(nccl.device, sending=sending)
        while opened.at_s() is None:
            if clock.now() > end_s:
                raise PeerLostError(
                    f"no connection between the devices of this rank and {plane.name(peer)} within "
                    f"{plane.patience_s:g} s (--join-timeout); set NCCL_DEBUG=INFO for details"
                )
            clock.sleep(_POLL_S)
    return channel
