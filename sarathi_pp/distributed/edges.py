"""The edges of one rank: its directed connections to other ranks, such as from its stage to the next stage.

wire/order.py defines the edges of a run and their order. Each edge has its own gloo group of two ranks. Two ranks that
can share memory send their messages through it, and gloo then carries only heartbeats and a goodbye. GPUs send
activations through an NCCL communicator.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sarathi_pp.config import ResolvedRun
from sarathi_pp.distributed.control_plane import ControlPlane
from sarathi_pp.distributed.transport import NcclOptions
from sarathi_pp.errors import PeerLostError
from sarathi_pp.stages.cuda_timer import CudaTimer
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.wire import byte_stream, codec
from sarathi_pp.wire.byte_stream import ByteStreamReceiver, ByteStreamSender, Remote
from sarathi_pp.wire.channel import Clock, Landing, NoSender, QueueChannel, Receiver, Sender, edge_buffers
from sarathi_pp.wire.edge_options import EdgeOptions
from sarathi_pp.wire.group import Group
from sarathi_pp.wire.message import Payloads
from sarathi_pp.wire.nccl_channel import NcclChannel
from sarathi_pp.wire.order import downstream, edges, forward_edges, stage_edges, upstream
from sarathi_pp.wire.shard_group import ShardGroup
from sarathi_pp.wire.shared_memory import SharedReceiver, SharedSender, SlotConnection, SlotListener, connect
from sarathi_pp.wire.torch_channel import Edge, TorchReceiver, TorchSender

# Buffers of an edge of requests and answers between rank 0 and the leader of another replica. Each holds a fragment.
_FRAGMENT_BUFFERS = 8
# Receive buffers of an edge that carries only heartbeats: one for a heartbeat and one for a goodbye.
_HEARTBEAT_BUFFERS = 2
# Seconds between two checks whether an NCCL connection is open.
_POLL_S = 0.001

# An edge, as its sending rank and its receiving rank.
Ranks = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Wires:
    """This rank's ends of the edges that its stage uses.

    Attributes:
        way_in: receives microbatches from the stage before. On a leader, it receives results from the last stage.
        way_out: sends microbatches to the next stage. On the last stage, it sends results to the leader.
        shards: on a leader, senders to the other ranks of its stage, which get only the headers of microbatches.
    """

    way_in: Receiver[Tensor]
    way_out: Sender[Tensor]
    shards: tuple[Sender[Tensor], ...]


class Edges:
    """The connections of this rank's edges. `connect` makes them, and `ControlPlane.leave` closes them.

    Args:
        groups: the gloo group of each edge of this rank.
        sockets: the Unix socket of each edge of this rank that uses shared memory.
        nccl: the NCCL channel of each edge of this rank that carries activations between GPUs.

    Attributes:
        shared: all edges of the run that use shared memory, also those of other ranks.
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
            PeerLostError: another rank does not connect its end of an edge.
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
        """Open this rank's ends of the edges that its stage uses.

        In a pipeline of one stage, the leader sends its results to itself, through a queue.

        Args:
            activations: size and type of the largest microbatch's activations.
            head_size: number of values in a row (the vector of a token) that the LM head takes.
        """
        mesh, rank = self._plane.mesh, self._plane.env.rank
        coordinate, buffers = mesh.coordinate(rank), edge_buffers(run.most_inflight)
        returning = mesh.rank(coordinate.replica, mesh.stages - 1), mesh.leader(coordinate.replica)
        frame_bytes = codec.max_frame_bytes(
            max_tokens=run.max_microbatch_tokens,
            max_seqs=run.max_num_seqs,
            page_size=run.page_size,
            num_stages=run.num_stages,
            shares_pages=run.prefix_cache != "off",
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
        """Open both edges between rank 0 and the leader of another replica, for requests and for answers.

        Args:
            rank: the rank at the other end: on rank 0 that leader, on the leader rank 0.
        """
        outgoing = self._sender(rank, byte_stream.FRAME_BYTES, byte_stream.PAYLOADS, _FRAGMENT_BUFFERS)
        incoming = self._receiver(rank, byte_stream.FRAME_BYTES, byte_stream.PAYLOADS, _FRAGMENT_BUFFERS)
        return Remote(self._plane.name(rank), ByteStreamSender(outgoing), ByteStreamReceiver(incoming))

    def _sender(self, target: int, frame_bytes: int, payloads: Payloads, num_buffers: int) -> Sender[Tensor]:
        """Return this rank's end of the edge to rank `target`, through shared memory if the edge has a socket."""
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
        """Return this rank's end of the edge from rank `source`, through shared memory if the edge has a socket."""
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
        """Return an edge over gloo. `peer` is the rank at its other end."""
        group, name, channel = self._groups[edge], self._plane.name(peer), self._nccl_channels.get(edge)
        return Edge(group, edge.index(peer), name, frame_bytes, payloads, channel)

    def _heartbeat_edge(self, edge: Ranks, peer: int) -> Edge:
        """Return the gloo edge that carries the heartbeats of an edge in shared memory. See `_gloo_edge`."""
        return self._gloo_edge(edge, peer, codec.SMALL_FRAME_BYTES, Payloads.none())


def open_shard_group(
    plane: ControlPlane, peer_timeout_s: float, backend: str, device: torch.device
) -> ShardGroup | None:
    """Connect the ranks that hold one stage together (tensor parallelism). Every rank of the run calls it.

    Args:
        backend: "gloo" or "nccl".
        device: device of this rank.

    Returns:
        The group of this rank's stage; None if the rank holds its stage alone.

    Raises:
        PeerLostError: another rank of the stage does not connect its device.
    """
    mesh, own = plane.mesh, plane.mesh.coordinate(plane.env.rank)
    shards: ShardGroup | None = None
    others: tuple[str, ...] = ()
    for replica in range(mesh.replicas) if mesh.shards > 1 else ():
        for stage in range(mesh.stages):
            ranks = mesh.shard_ranks(replica, stage)
            group = plane.new_group(ranks, peer_timeout_s, backend)
            if group is not None:
                others = tuple(plane.name(rank) for rank in ranks if rank != plane.env.rank)
                shards = ShardGroup(own.shard, mesh.shards, others, group, SystemClock())
    if shards is not None and backend == "nccl":
        _connect_shards(plane, shards, others, device)
    return shards


def _connect_shards(plane: ControlPlane, shards: ShardGroup, others: Sequence[str], device: torch.device) -> None:
    """Start a first sum, in which NCCL connects the ranks of a stage, and wait for the result.

    Args:
        others: names of the other ranks of the stage.
    """
    clock, token = SystemClock(), torch.zeros(1, device=device)
    # NCCL reads the environment in the first sum. No CUDA graph can contain that.
    with plane.phase("connecting its device to the other ranks of its stage"), plane.surrounded("nccl"):
        timer = CudaTimer(clock)
        shards.all_reduce(token)
        _await_connection(plane, timer.mark(), " or ".join(others), clock)


def _connect_sockets(plane: ControlPlane) -> tuple[dict[Ranks, socket.socket], list[Ranks]]:
    """Connect a Unix socket for each edge between stages, if its two ranks can reach each other by such a socket.

    Two ranks with a socket pass each other shared memory through it.

    Returns:
        The sockets of this rank's edges, and all edges of the run that have a socket.
    """
    own, wanted = plane.env.rank, stage_edges(plane.mesh)
    sockets: dict[Ranks, socket.socket] = {}
    listeners: dict[int, SlotListener] = {}
    for source, target in wanted:
        with suppress(OSError):  # this host has no such sockets, so its edges use gloo
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
                raise PeerLostError(
                    f"{plane.name(source)} has not connected its socket for shared memory to this rank within "
                    f"{plane.patience_s:g} s (--join-timeout)"
                )
            plane.resources.callback(end.close)
            sockets[source, own] = end
        listener.close()
    return sockets, shared


def _open_nccl_channels(plane: ControlPlane, options: EdgeOptions, nccl: NcclOptions) -> dict[Ranks, NcclChannel]:
    """Open an NCCL channel for each edge of this rank that carries activations. Return them by edge."""
    opened = {}
    for edge in forward_edges(plane.mesh):
        group = plane.new_group(edge, options.peer_timeout_s, nccl.backend)
        if group is not None:
            opened[edge] = _open_nccl_channel(plane, edge, group, nccl, options.clock)
    return opened


def _open_nccl_channel(plane: ControlPlane, edge: Ranks, group: Group, nccl: NcclOptions, clock: Clock) -> NcclChannel:
    """Open the NCCL channel of one edge, and wait until it is connected.

    Every rank opens its channels one by one in the order of the run's edges. In different orders, two ranks could wait
    for each other.
    """
    sending = edge[0] == plane.env.rank
    peer = edge[1] if sending else edge[0]
    channel = NcclChannel(group, edge.index(peer), nccl.new_stream())
    # NCCL reads the environment at the first transfer.
    with plane.others_may_leave(peer), plane.surrounded(nccl.backend):
        _await_connection(plane, channel.connect(nccl.device, sending=sending), plane.name(peer), clock)
    return channel


def _await_connection(plane: ControlPlane, opened: Landing, peer_name: str, clock: Clock) -> None:
    """Wait until the device has finished the first transfer or sum of an NCCL communicator.

    Args:
        opened: the point after it.

    Raises:
        PeerLostError: the other ranks do not take part in time.
    """
    end_s = clock.now() + plane.patience_s
    while opened.at_s() is None:
        if clock.now() > end_s:
            raise PeerLostError(
                f"no connection between the devices of this rank and {peer_name} within {plane.patience_s:g} s "
                f"(--join-timeout); set NCCL_DEBUG=INFO for details"
            )
        clock.sleep(_POLL_S)
