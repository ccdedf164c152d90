"""The control plane, over which all ranks of a run talk while the run is set up and while it ends.

    join -> exchange facts, in phases -> open edges -> start ... the run ... -> send numbers and files -> leave

One gloo group of all ranks carries the facts, numbers and files. During the run only edges carry messages. An edge is a
directed connection between two ranks, see edges.py. The gloo groups of the edges are made here, because all ranks must
make all groups in the same order.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from sarathi_pp.distributed.environment import INTERFACE_VARIABLE, RankEnvironment, variable
from sarathi_pp.distributed.network_interface import Interface, choose_interface
from sarathi_pp.distributed.presence import Presence
from sarathi_pp.distributed.rendezvous import rendezvous
from sarathi_pp.distributed.store import open_store
from sarathi_pp.distributed.transport import surrounded
from sarathi_pp.errors import PeerLostError, ProtocolError
from sarathi_pp.process.activity import Activity
from sarathi_pp.process.host import host_id
from sarathi_pp.process.timeout import call_with_timeout
from sarathi_pp.trace.clock import Clock, SystemClock
from sarathi_pp.wire.group import Group
from sarathi_pp.wire.mesh import Mesh

# Most seconds for the store to list the ranks that have come to an exchange. The store of a lost host never answers.
_STORE_ANSWER_S = 2.0
# Most bytes of a file that are sent at once.
_PIECE_BYTES = 4 << 20
# Seconds between two checks whether all ranks have come to an exchange.
_POLL_S = 0.001
# Seconds from the start of an exchange to the first check of the missing ranks' heartbeats.
_FIRST_CHECK_S = 0.5


@dataclass(frozen=True, slots=True)
class Connection:
    """The connection of this rank to all others.

    Attributes:
        store: the part of the key-value store that only this start of the run uses.
        interface: the network interface on which this rank talks.
        group: the gloo group of all ranks.
        presence: the heartbeats of all ranks.
    """

    store: Store
    interface: Interface
    group: Group
    presence: Presence


class ControlPlane:
    """This rank's end of the control plane. Made by `join`.

    Args:
        mesh: the replica, stage and shard of each rank.
        patience_s: seconds that this rank waits for a rank that is silent.
        connection: None if there is only one rank.
        activity: this rank's current activity. Other ranks read it while they wait.

    Attributes:
        mesh: after joining, ranks of one host are neighbours in it.
        hosts: host name of each rank.
        resources: the groups and sockets that `leave` closes, the latest first.
    """

    def __init__(
        self,
        env: RankEnvironment,
        mesh: Mesh,
        patience_s: float,
        clock: Clock,
        connection: Connection | None = None,
        activity: Activity | None = None,
    ) -> None:
        assert mesh.size == env.world_size, f"{env.world_size} ranks for {mesh}"
        self.env = env
        self.mesh = mesh
        self.patience_s = patience_s
        self.hosts = [socket.gethostname()]
        self.resources = ExitStack()
        self._activity = activity or Activity()
        self._clock = clock
        self._connection = connection
        if connection is not None:
            self.resources.callback(connection.group.close)
        self._presence = connection.presence if connection is not None else None
        self._names = _titles(mesh)
        self._num_exchanges = 0
        self._num_groups = 0

    @classmethod
    def join(
        cls,
        env: RankEnvironment,
        join_timeout_s: float,
        peer_timeout_s: float,
        mesh: Mesh | None = None,
        activity: Activity | None = None,
    ) -> ControlPlane:
        """Join the other ranks, and return when all have joined.

        Afterwards, a rank waits for a silent rank up to the longer of the two timeouts.

        Args:
            mesh: the shape of the run. None: one pipeline of all ranks.
            activity: this rank's current activity, which includes the wait for the other ranks.

        Raises:
            ConfigError: not all ranks have joined within join_timeout_s.
            PeerLostError: a rank left meanwhile.
        """
        mesh, clock, activity = mesh or Mesh(stages=env.world_size), SystemClock(), activity or Activity()
        patience_s = max(join_timeout_s, peer_timeout_s)
        if env.world_size == 1:
            return cls(env, mesh, patience_s, clock, activity=activity)
        connection = _connect(env, mesh, join_timeout_s, patience_s, clock, activity)
        plane = cls(env, mesh, patience_s, clock, connection, activity)
        try:
            plane._introduce()
        except BaseException:
            plane.leave()
            raise
        return plane

    def _introduce(self) -> None:
        """Exchange host names and process ids, for messages, and make ranks of one host neighbours in the mesh."""
        peers = self.exchange({"host": socket.gethostname(), "host_id": host_id(), "pid": os.getpid()})
        self.hosts = [peer["host"] for peer in peers]
        self.mesh = self.mesh.over([peer["host_id"] for peer in peers])
        titles = (title.removesuffix(")") for title in _titles(self.mesh))
        self._names = [
            f"{title}, {peer['host']}, pid {peer['pid']})" for title, peer in zip(titles, peers, strict=True)
        ]

    def name(self, rank: int) -> str:
        """Return the name of a rank for messages, with its host and pid."""
        return self._names[rank]

    @contextmanager
    def phase(self, name: str, detail: object = "") -> Iterator[None]:
        """Report a phase of this rank to its user, and to the ranks that wait for it. See Activity.phase."""
        with self._activity.phase(name, detail):
            if self._presence is not None:
                self._presence.announce()
            yield

    def end_set_up(self) -> None:
        """End the set-up on all ranks. From then on, the open edges have their own heartbeats."""
        self.exchange({})
        if self._presence is not None:
            self._presence.close()
            self._presence = None

    def leave(self) -> None:
        """Close everything that was opened over the control plane, and the control plane itself."""
        if self._presence is not None:
            self._presence.close()
        self.resources.close()

    def new_group(self, ranks: Sequence[int], timeout_s: float, backend: str) -> Group | None:
        """Connect these ranks and return their group, or None on other ranks.

        All ranks must make all groups in the same order, because ranks find each other by the number of the group.

        Args:
            ranks: the ranks of the new group, in the group's order.
            timeout_s: most seconds for which an operation of the group waits for another rank.
            backend: "gloo" or "nccl".
        """
        self._num_groups += 1
        if self.env.rank not in ranks:
            return None
        store = PrefixStore(f"group/{self._num_groups}", self._connected.store)
        # gloo looks up the interface for each new group.
        with self.others_may_leave(), self.surrounded(backend):
            group = Group(store, ranks.index(self.env.rank), len(ranks), timeout_s, backend)
        self.resources.callback(group.close)
        return group

    def surrounded(self, backend: str) -> AbstractContextManager[None]:
        """Set environment variables inside the block, so that a new communicator listens only on this interface."""
        return surrounded(backend, self._connected.interface.name, self.env.nccl_interface)

    def exchange(self, facts: Mapping[str, Any], *, with_timeout: bool = False) -> list[dict[str, Any]]:
        """Send this rank's facts to all ranks, and return the facts of every rank, rank 0's first.

        The call returns when all ranks have made it. Facts are plain JSON, never pickled, because unpickling can run
        code.

        Args:
            with_timeout: wait at most patience_s. Without it, a rank in set-up waits as long as the others make
                progress.
        """
        own = json.dumps(facts).encode()
        if self.env.world_size == 1:
            return [json.loads(own)]
        self._num_exchanges += 1
        connected = self._connected
        with self.others_may_leave():
            connected.store.set(f"came/{self._num_exchanges}/{self.env.rank}", "")
            size = torch.tensor([len(own)], dtype=torch.int64)
            if self._presence is not None and not with_timeout:
                sizes = self._gather_watching(size, self._presence)
            else:
                sizes = connected.group.all_gather(size)
            most = max(int(size) for size in sizes)
            texts = connected.group.all_gather(torch.frombuffer(bytearray(own.ljust(most)), dtype=torch.uint8))
        return [json.loads(bytes(text.numpy())[: int(size)]) for text, size in zip(texts, sizes, strict=True)]

    def _gather_watching(self, tensor: torch.Tensor, presence: Presence) -> list[torch.Tensor]:
        """Gather a tensor from all ranks, and regularly check that missing ranks are alive."""
        clock = self._clock
        presence.forget()
        check_s = clock.now() + _FIRST_CHECK_S
        with self._connected.group.gathering(tensor) as gathering:
            try:
                while not gathering.is_complete():
                    clock.sleep(_POLL_S)
                    if clock.now() >= check_s:
                        missing = self._missing()
                        presence.check(missing or self._others)
                        self._activity.awaited = presence.awaited(missing) if missing else ""
                        check_s = clock.now() + presence.every_s
            finally:
                self._activity.awaited = ""
        return gathering.result()

    def send_numbers(self, numbers: list[float], rank: int) -> None:
        """Send a few float64 numbers to one rank, which must know their count."""
        self._send(torch.tensor(numbers, dtype=torch.float64), rank)

    def receive_numbers(self, count: int, rank: int) -> list[float]:
        """Wait for numbers that a rank sends with `send_numbers`, and return them."""
        numbers = self._receive(torch.empty(count, dtype=torch.float64), rank)
        return [float(number) for number in numbers]

    def send_file(self, path: str | os.PathLike[str], rank: int) -> None:
        """Send a file to one rank in parts of at most _PIECE_BYTES, each after its size. Size 0 ends the file."""
        with open(path, "rb") as file:
            while piece := file.read(_PIECE_BYTES):
                self.send_numbers([float(len(piece))], rank)
                self._send(torch.frombuffer(bytearray(piece), dtype=torch.uint8), rank)
        self.send_numbers([0.0], rank)

    def receive_file(self, path: str | os.PathLike[str], rank: int) -> None:
        """Receive a file that a rank sends with `send_file`, and write it to the path."""
        with open(path, "wb") as file:
            while size := int(self.receive_numbers(1, rank)[0]):
                if not 0 < size <= _PIECE_BYTES:
                    raise ProtocolError(
                        f"rank {rank} sends a file and announced a part of {size} bytes; the limit is {_PIECE_BYTES}"
                    )
                file.write(self._receive(torch.empty(size, dtype=torch.uint8), rank).numpy().tobytes())

    def _send(self, tensor: torch.Tensor, rank: int) -> None:
        with self.others_may_leave(rank):
            self._connected.group.send(tensor, rank).wait()

    def _receive(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        with self.others_may_leave(rank):
            self._connected.group.receive(tensor, rank).wait()
        return tensor

    @contextmanager
    def others_may_leave(self, rank: int | None = None) -> Iterator[None]:
        """Raise PeerLostError instead of the error of torch, if another rank dies or is silent inside the block.

        Args:
            rank: the other rank of a transfer. None if all ranks take part.
        """
        try:
            yield
        except RuntimeError as error:
            # The library's text is about sockets, not about ranks.
            if "timed out" not in str(error).lower():
                # That rank, or its launcher, has already reported why it left.
                raise PeerLostError(
                    "another rank left while the run was being set up or closed; the message of that rank, or of its "
                    "launcher, gives the cause"
                ) from error
            if rank is None:
                who = " and ".join(self._names[rank] for rank in self._missing()) or "another rank"
            else:
                # Rank 0 talks to one rank after the other. The others talk only to rank 0.
                who = self._names[rank] + ("" if self.env.rank == 0 else " or a rank that it waits for")
            raise PeerLostError(
                f"received nothing from {who} within {self.patience_s:g} s while the run was being set up or closed. "
                f"That rank hangs or needs more time; --join-timeout sets how long ranks wait for each other"
            ) from error

    def _missing(self) -> list[int]:
        """Return the ranks that have not come to this exchange; an empty list if the store does not answer in time.

        It does not answer if the silent rank is the one whose process holds the store.
        """
        store = self._connected.store

        def ask() -> list[int]:
            return [rank for rank in self._others if not store.check([f"came/{self._num_exchanges}/{rank}"])]

        with suppress(RuntimeError):
            return call_with_timeout(ask, _STORE_ANSWER_S, late=[])
        return []

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.env.world_size) if rank != self.env.rank]

    @property
    def _connected(self) -> Connection:
        assert self._connection is not None, "a rank alone talks to no other"
        return self._connection


def _connect(
    env: RankEnvironment, mesh: Mesh, join_timeout_s: float, patience_s: float, clock: Clock, activity: Activity
) -> Connection:
    """Wait until all ranks have come, and connect them.

    Raises:
        ConfigError: ranks are missing after join_timeout_s, or do not fit together.
        PeerLostError: a rank left meanwhile.
    """
    end_s = clock.now() + join_timeout_s
    try:
        address = f"{env.master[0]}:{env.master[1]}" if env.store is None and env.master is not None else ""
        where = f" at {address}" if address else ""
        with activity.phase(f"waiting for rank 0{where}" if env.rank else "opening the store"):
            store = open_store(env, timedelta(seconds=join_timeout_s))
        interface = choose_interface(env)
        with activity.phase(f"waiting for the other ranks{where}"):
            store = rendezvous(
                store, env.rank, env.world_size, end_s, clock, interface, activity=activity, address=address
            )
        with variable(INTERFACE_VARIABLE, interface.name):
            group = Group(PrefixStore("control", store), env.rank, env.world_size, patience_s)
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {env.rank} of {env.world_size} could not join the others: {_first_line(error)}"
        ) from error
    return Connection(store, interface, group, Presence(store, env.rank, _titles(mesh), patience_s, clock, activity))


def _titles(mesh: Mesh) -> list[str]:
    return [mesh.title(rank) for rank in range(mesh.size)]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
