"""The processes of a run: the control plane over which they agree before they run, and the edges between them.

The only file, beside the wire itself, that touches torch.distributed.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from sarathi_pp.distributed.environment import INTERFACE_VARIABLE, Place, variable
from sarathi_pp.distributed.network_interface import choose_interface
from sarathi_pp.distributed.presence import Presence
from sarathi_pp.distributed.rendezvous import meet
from sarathi_pp.distributed.store import open_store
from sarathi_pp.distributed.transport import Lanes, surrounded
from sarathi_pp.errors import PeerLostError, ProtocolError
from sarathi_pp.process.host import host_id
from sarathi_pp.process.timeout import within
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.wire.channel import Receiver, Sender
from sarathi_pp.wire.codec import SMALL_FRAME_BYTES
from sarathi_pp.wire.edge_options import EdgeOptions
from sarathi_pp.wire.group import Group
from sarathi_pp.wire.mesh import Mesh
from sarathi_pp.wire.message import Payloads
from sarathi_pp.wire.nccl_channel import Lane
from sarathi_pp.wire.order import edges, forward_edges, stage_edges
from sarathi_pp.wire.shard_group import ShardGroup
from sarathi_pp.wire.shared_memory import Door, SharedReceiver, SharedSender, SlotConnection, knock
from sarathi_pp.wire.torch_channel import Edge, TorchReceiver, TorchSender

# How long a store may take to tell who has come: that of a host which is gone would take for ever.
_TOLD_S = 2.0
_PIECE_BYTES = 4 << 20
_LOOK_EVERY_S = 0.001
# Ranks that wait for each other as a rule need no look.
_FIRST_LOOK_S = 0.5
# For heartbeats and a goodbye.
_BESIDE_BUFFERS = 2


class Topology:
    """The run's processes: one control group for set-up and the end, one group per directed edge in between.

    mesh: who sits where, on what was joined. hosts: of the ranks, by rank. shared_edges: those through shared memory.
    """

    def __init__(self, place: Place, join_timeout_s: float, peer_timeout_s: float, mesh: Mesh | None = None) -> None:
        """Join the others; returns when all are there. Raises ConfigError when they are not within join_timeout_s.

        mesh: the run's shape, a pipeline of as many stages as there are ranks where none is given.
        While they load, and when they bring their traces together, the others wait for the longer of both times.
        """
        self.place = place
        self.mesh = mesh or Mesh(stages=place.world_size)
        assert self.mesh.size == place.world_size, f"{place.world_size} ranks for {self.mesh}"
        self._patience_s = max(join_timeout_s, peer_timeout_s)
        self._exchanges = 0
        self._names = [self.mesh.title(rank) for rank in range(place.world_size)]
        self.hosts = [socket.gethostname()]
        self._num_groups = 0
        self._groups: list[Group] = []
        self._edge_groups: dict[tuple[int, int], Group] = {}
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._ways: dict[tuple[int, int], socket.socket] = {}
        self.shared_edges: list[tuple[int, int]] = []
        self._presence: Presence | None = None
        if place.world_size == 1:
            return
        clock = SystemClock()
        end_s = clock.now() + join_timeout_s
        try:
            store = open_store(place, timedelta(seconds=join_timeout_s))
            interface = choose_interface(place)
            store = meet(store, place.rank, place.world_size, end_s, clock, interface)
            with variable(INTERFACE_VARIABLE, interface.name):
                control = PrefixStore("control", store)
                self._control = Group(control, place.rank, place.world_size, self._patience_s)
            self._groups.append(self._control)
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {place.rank} of {place.world_size} could not join the others: {_first_line(error)}"
            ) from error
        self._interface, self._store = interface, store
        self._presence = Presence(store, place.rank, self._names, self._patience_s, clock)
        peers = self.exchange({"host": socket.gethostname(), "host_id": host_id(), "pid": os.getpid()})
        self.hosts = [peer["host"] for peer in peers]
        self.mesh = self.mesh.over([peer["host_id"] for peer in peers])
        self._names = [
            f"{self.mesh.title(rank).removesuffix(')')}, {p['host']}, pid {p['pid']})" for rank, p in enumerate(peers)
        ]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say what this rank does while the others wait for it: a continuation of "while it was ..."."""
        with self._presence.phase(name) if self._presence is not None else nullcontext():
            yield

    def start(self) -> None:
        """End the set-up: edges are open, and have heartbeats of their own."""
        self.exchange({})
        if self._presence is not None:
            self._presence.close()
            self._presence = None

    def name(self, rank: int) -> str:
        """With its host and pid, for messages."""
        return self._names[rank]

    def open_edges(self, peer_timeout_s: float, lanes: Lanes | None = None, *, share: bool = False) -> None:
        """Fresh communicators for every edge, on which a peer may be silent for peer_timeout_s.

        lanes: of activations, beside the edges that carry any. share: memory, where ranks have it in common. Raises
        PeerLostError where one does not open.
        """
        for edge in edges(self.mesh):
            group = self._new_group(edge, peer_timeout_s, "gloo")
            if group is not None:
                self._edge_groups[edge] = group
        if share:
            self._open_ways()
        if lanes is None:
            return
        for edge in forward_edges(self.mesh):
            group = self._new_group(edge, peer_timeout_s, lanes.backend)
            if group is not None:
                self._lanes[edge] = self._open_lane(edge, group, lanes)

    def _open_ways(self) -> None:
        """Between ranks that reach each other's sockets. Afterwards all know which do."""
        self._close_ways()
        mine, wanted = self.place.rank, stage_edges(self.mesh)
        doors: dict[int, Door] = {}
        for source, target in wanted:
            with suppress(OSError):  # where there are no such sockets nobody finds this rank
                if target == mine:
                    doors[source] = Door()
        told = self.exchange({"doors": {source: door.name for source, door in doors.items()}})
        reached = []
        for source, target in wanted:
            name = told[target]["doors"].get(str(mine)) if source == mine else None
            if name is not None and (way := knock(name)) is not None:
                self._ways[source, target] = way
                reached.append(target)
        by_rank = self.exchange({"reached": reached})
        self.shared_edges = [(source, target) for source, target in wanted if target in by_rank[source]["reached"]]
        for source, door in doors.items():
            if (source, mine) in self.shared_edges:
                if (came := door.admit(self._patience_s)) is None:
                    raise PeerLostError(f"{self._names[source]} has not come within {self._patience_s:g} s")
                self._ways[source, mine] = came
            door.close()

    def open_shards(self, peer_timeout_s: float, backend: str) -> ShardGroup | None:
        """This rank's part in its stage; None where it holds one alone. Every rank calls it."""
        mesh, mine = self.mesh, self.mesh.seat(self.place.rank)
        found: ShardGroup | None = None
        for replica in range(mesh.replicas) if mesh.shards > 1 else ():
            for stage in range(mesh.stages):
                ranks = mesh.shard_ranks(replica, stage)
                group = self._new_group(ranks, peer_timeout_s, backend)
                if group is not None:
                    others = tuple(self._names[rank] for rank in ranks if rank != self.place.rank)
                    found = ShardGroup(mine.shard, mesh.shards, others, group, SystemClock())
        return found

    def _new_group(self, ranks: Sequence[int], timeout_s: float, backend: str) -> Group | None:
        """Connect these ranks; None on any other. All ranks make all groups in one order, which numbers them."""
        self._num_groups += 1
        if self.place.rank not in ranks:
            return None
        store = PrefixStore(f"group/{self._num_groups}", self._store)
        # gloo looks where it may listen at each new group.
        with self._others_may_leave(), self._surrounded(backend):
            group = Group(store, ranks.index(self.place.rank), len(ranks), timeout_s, backend)
        self._groups.append(group)
        return group

    def _open_lane(self, edge: tuple[int, int], group: Group, lanes: Lanes) -> Lane:
        """One edge after the other, on every rank in the same order, so that none waits for one that waits for it."""
        sending = edge[0] == self.place.rank
        peer = edge[1] if sending else edge[0]
        lane = Lane(group, edge.index(peer), lanes.new_stream())
        clock = SystemClock()
        end_s = clock.now() + self._patience_s
        # NCCL looks at the first transfer.
        with self._others_may_leave(peer), self._surrounded(lanes.backend):
            opened = lane.connect(lanes.device, sending=sending)
            while opened.at_s() is None:
                if clock.now() > end_s:
                    raise PeerLostError(
                        f"no connection between the devices of this rank and {self._names[peer]} within "
                        f"{self._patience_s:g} s (--join-timeout); NCCL_DEBUG=INFO tells more"
                    )
                clock.sleep(_LOOK_EVERY_S)
        return lane

    def _surrounded(self, backend: str) -> AbstractContextManager[None]:
        return surrounded(backend, self._interface.name, self.place.nccl_interface)

    def exchange(self, facts: Mapping[str, Any], *, bounded: bool = False) -> list[dict[str, Any]]:
        """Every rank's facts, rank 0's first; a barrier too. Plain JSON, never pickle.

        In set-up a rank waits as long as the others get on. bounded: it does not.
        """
        mine = json.dumps(facts).encode()
        if self.place.world_size == 1:
            return [json.loads(mine)]
        self._exchanges += 1
        with self._others_may_leave():
            self._store.set(f"came/{self._exchanges}/{self.place.rank}", "")
            size = torch.tensor([len(mine)], dtype=torch.int64)
            watches = self._presence is not None and not bounded
            sizes = self._gather_watching(size) if watches else self._control.all_gather(size)
            most = max(int(size) for size in sizes)
            texts = self._control.all_gather(torch.frombuffer(bytearray(mine.ljust(most)), dtype=torch.uint8))
        return [json.loads(bytes(text.numpy())[: int(size)]) for text, size in zip(texts, sizes, strict=True)]

    def sender(
        self, target: int, frame_bytes: int, payloads: Payloads, num_buffers: int, options: EdgeOptions
    ) -> Sender[torch.Tensor]:
        """Open this rank's end of the edge to that one."""
        way = self._ways.get((self.place.rank, target))
        if way is None:
            edge = self._edge(self.place.rank, target, target, frame_bytes, payloads)
            return TorchSender(edge, num_buffers, options)
        connection = SlotConnection(way, self._names[target], options.losses)
        beside = self._edge(self.place.rank, target, target, SMALL_FRAME_BYTES, Payloads.none())
        return SharedSender(
            connection,
            TorchSender(beside, 1, replace(options, losses=connection)),
            options.clock,
            num_slots=num_buffers,
            slot_bytes=payloads.max_bytes(frame_bytes),
            timeout_s=self._patience_s,
        )

    def receiver(
        self, source: int, frame_bytes: int, payloads: Payloads, num_buffers: int, options: EdgeOptions
    ) -> Receiver[torch.Tensor]:
        """Open this rank's end of the edge from that one."""
        way = self._ways.get((source, self.place.rank))
        if way is None:
            edge = self._edge(source, self.place.rank, source, frame_bytes, payloads)
            return TorchReceiver(edge, num_buffers, options)
        connection = SlotConnection(way, self._names[source], options.losses)
        beside = self._edge(source, self.place.rank, source, SMALL_FRAME_BYTES, Payloads.none())
        return SharedReceiver(
            connection,
            TorchReceiver(beside, _BESIDE_BUFFERS, replace(options, losses=connection)),
            options.clock,
            num_slots=num_buffers,
            frame_bytes=frame_bytes,
            payloads=payloads,
        )

    def _edge(self, source: int, target: int, peer: int, frame_bytes: int, payloads: Payloads) -> Edge:
        group, lane = self._edge_groups[source, target], self._lanes.get((source, target))
        return Edge(group, (source, target).index(peer), self._names[peer], frame_bytes, payloads, lane)

    def send_numbers(self, numbers: list[float], rank: int) -> None:
        """A few float64 to one rank over the control group; the receiver knows how many."""
        with self._others_may_leave(rank):
            self._control.send(torch.tensor(numbers, dtype=torch.float64), rank).wait()

    def receive_numbers(self, count: int, rank: int) -> list[float]:
        numbers = torch.empty(count, dtype=torch.float64)
        with self._others_may_leave(rank):
            self._control.receive(numbers, rank).wait()
        return [float(number) for number in numbers]

    def send_file(self, path: str | os.PathLike[str], rank: int) -> None:
        """A file's bytes in bounded pieces, each behind its length; a piece of length 0 ends it."""
        with open(path, "rb") as file:
            while piece := file.read(_PIECE_BYTES):
                self.send_numbers([float(len(piece))], rank)
                with self._others_may_leave(rank):
                    self._control.send(torch.frombuffer(bytearray(piece), dtype=torch.uint8), rank).wait()
        self.send_numbers([0.0], rank)

    def receive_file(self, path: str | os.PathLike[str], rank: int) -> None:
        with open(path, "wb") as file:
            while size := int(self.receive_numbers(1, rank)[0]):
                if not 0 < size <= _PIECE_BYTES:
                    raise ProtocolError(
                        f"rank {rank} announced a piece of {size} bytes; at most {_PIECE_BYTES} are legal"
                    )
                piece = torch.empty(size, dtype=torch.uint8)
                with self._others_may_leave(rank):
                    self._control.receive(piece, rank).wait()
                file.write(piece.numpy().tobytes())

    def _close_ways(self) -> None:
        for way in self._ways.values():
            way.close()
        self._ways.clear()

    def leave(self) -> None:
        if self._presence is not None:
            self._presence.close()
        self._close_ways()
        for group in reversed(self._groups):
            group.close()
        self._groups.clear()
        self._edge_groups.clear()
        self._lanes.clear()

    @contextmanager
    def _others_may_leave(self, rank: int | None = None) -> Iterator[None]:
        """What the control group raises when a rank dies or is silent, as the error that it is.

        rank: the other end; None where all take part.
        """
        try:
            yield
        except RuntimeError as error:
            # The library's text tells of sockets, not of ranks.
            if "timed out" not in str(error).lower():
                # Who left has said why, or its launcher has.
                raise PeerLostError("another rank left while the run was being set up or closed") from error
            if rank is None:
                who = " and ".join(self._names[rank] for rank in self._missing()) or "another rank"
            else:
                # Rank 0 talks with one after the other, the others with rank 0 alone.
                who = self._names[rank] + ("" if self.place.rank == 0 else " or a rank that it waits for")
            raise PeerLostError(
                f"no word from {who} within {self._patience_s:g} s while the run was being set up or closed: a rank "
                f"that hangs, or takes longer (--join-timeout is how long ranks wait for each other)"
            ) from error

    def _gather_watching(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Gather, and check regularly that the ranks that are missing are alive."""
        assert self._presence is not None
        presence, clock = self._presence, SystemClock()
        presence.wait_anew()
        check_s = clock.now() + _FIRST_LOOK_S
        with self._control.gathering(tensor) as gathering:
            while not gathering.is_complete():
                clock.sleep(_LOOK_EVERY_S)
                if clock.now() >= check_s:
                    presence.check(self._missing() or self._others)
                    check_s = clock.now() + presence.every_s
        return gathering.result()

    def _missing(self) -> list[int]:
        """Return the ranks that have not come to this rank's exchange, as far as the store answers in time.

        A rank that is silent may be the one that holds it.
        """

        def ask() -> list[int]:
            return [rank for rank in self._others if not self._store.check([f"came/{self._exchanges}/{rank}"])]

        with suppress(RuntimeError):
            return within(_TOLD_S, ask, late=[])
        return []

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.place.world_size) if rank != self.place.rank]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
