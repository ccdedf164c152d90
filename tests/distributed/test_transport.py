"""The transport of activations, and the environment and order in which communicators are made."""

from __future__ import annotations

import os

import pytest
import torch

from sarathi_pp.distributed import control_plane, edges
from sarathi_pp.distributed.control_plane import Connection, ControlPlane
from sarathi_pp.distributed.devices import DeviceInfo, describe_device
from sarathi_pp.distributed.edges import Edges
from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.distributed.network_interface import Interface
from sarathi_pp.distributed.transport import NcclOptions, Transport, choose_transport, surroundings
from sarathi_pp.errors import PeerLostError
from sarathi_pp.trace.clock import ManualClock
from sarathi_pp.wire.edge_options import EdgeOptions, IgnoreLosses
from sarathi_pp.wire.mesh import Mesh
from sarathi_pp.wire.stage_progress import StageProgress
from tests.wire.test_torch_channel import Layers

ALONE = [DeviceInfo("a", "GPU-0", True), DeviceInfo("a", "GPU-1", True), DeviceInfo("b", "GPU-0", True)]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (ALONE, Transport("nccl", "every rank has a GPU to itself")),
        (ALONE[:1], Transport("gloo", "one stage sends nothing")),
        ([*ALONE, ALONE[1]], Transport("gloo", "ranks 1 and 3 share a GPU")),
        ([*ALONE, DeviceInfo("b", None, False)], Transport("gloo", "rank 3 computes on CPU")),
        ([*ALONE, DeviceInfo("b", "GPU-1", False)], Transport("gloo", "the torch of rank 3 has no NCCL")),
    ],
    ids=["one each", "one stage", "shared", "a CPU among them", "no NCCL"],
)
def test_the_choice_and_its_reason(devices, expected):
    assert choose_transport(devices) == expected


def test_who_asks_for_gloo_gets_it():
    assert choose_transport(ALONE, "gloo") == Transport("gloo", "--transport gloo")


def test_a_rank_on_cpu_has_no_gpu_whatever_its_torch_can():
    found = describe_device(torch.device("cpu"), "here", nccl=True)
    assert found == DeviceInfo("here", None, nccl=False, arithmetic=found.arithmetic)


def test_ranks_with_other_threads_do_not_compute_alike() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, again = (describe_device(torch.device("cpu"), "here", nccl=True).arithmetic for _ in range(2))
        torch.set_num_threads(2)
        two = describe_device(torch.device("cpu"), "here", nccl=True).arithmetic
    finally:
        torch.set_num_threads(before)
    assert one == again != two


def test_nccl_listens_where_gloo_does_unless_the_user_says_otherwise():
    assert surroundings("gloo", "lo", None) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert surroundings("nccl", "lo", None)["NCCL_SOCKET_IFNAME"] == "=lo"
    assert surroundings("nccl", "eth0", "ib0,ib1")["NCCL_SOCKET_IFNAME"] == "ib0,ib1"
    assert surroundings("nccl", "lo", None)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert surroundings("nccl", "lo", None)["NCCL_GRAPH_REGISTER"] == "0"


class Calls:
    """Communicators and NCCL channels that one rank makes, in its order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, answered: bool = True) -> None:
        self.made: list[object] = []
        self._answered = answered
        monkeypatch.setattr(control_plane, "PrefixStore", lambda name, store: name)
        monkeypatch.setattr(control_plane, "Group", self.group)
        monkeypatch.setattr(edges, "NcclChannel", self.channel)

    def group(self, store: str, rank: int, size: int, timeout_s: float, backend: str) -> Calls:
        assert size == 2
        self.made.append((backend, store, rank))
        return self

    def channel(self, group: Calls, peer: int, stream: object) -> Calls:
        self.made.append(("channel", peer))
        return self

    def close(self) -> None: ...

    def connect(self, device: torch.device, *, sending: bool) -> Calls:
        self.made.append(("connect", sending, os.environ["NCCL_SOCKET_IFNAME"]))
        return self

    def at_s(self) -> float | None:
        return 0.0 if self._answered else None


def connect(calls: Calls, rank: int, world_size: int, nccl: NcclOptions | None = None) -> None:
    connection = Connection(None, Interface("lo", "127.0.0.1"), calls, None)  # type: ignore[arg-type]
    env, clock = RankEnvironment(rank, world_size, rank, world_size), ManualClock()
    plane = ControlPlane(env, Mesh(stages=world_size), 5.0, clock, connection)
    Edges.connect(plane, EdgeOptions(clock, StageProgress(Layers()), IgnoreLosses(), 60.0), nccl)


NCCL = NcclOptions("nccl", torch.device("cpu"), object)  # type: ignore[arg-type]


def test_every_rank_makes_its_own_communicators_in_one_order_and_opens_its_own_nccl_channels(monkeypatch):
    """Stage 1 of 3 has both ends. Each directed edge has one communicator, whose rank 0 is the sender.

    The return edge carries no activations and has no channel.
    """
    calls = Calls(monkeypatch)
    connect(calls, 1, 3, NCCL)
    assert calls.made == [
        ("gloo", "group/1", 1),
        ("gloo", "group/2", 0),
        ("nccl", "group/4", 1),
        ("channel", 0),
        ("connect", False, "=lo"),
        ("nccl", "group/5", 0),
        ("channel", 1),
        ("connect", True, "=lo"),
    ]
    ends = []
    for rank in (0, 2):
        calls = Calls(monkeypatch)
        connect(calls, rank, 3, NCCL)
        ends.append([made for made in calls.made if made[0] in ("gloo", "nccl")])
    first, last = ends
    assert first == [("gloo", "group/1", 0), ("gloo", "group/3", 1), ("nccl", "group/4", 0)]
    assert last == [("gloo", "group/2", 1), ("gloo", "group/3", 0), ("nccl", "group/5", 1)]
    assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_without_nccl_options_nothing_of_nccl_is_asked_for(monkeypatch):
    calls = Calls(monkeypatch)
    connect(calls, 1, 3)
    assert calls.made == [("gloo", "group/1", 1), ("gloo", "group/2", 0)]


def test_a_nccl_channel_that_does_not_open_is_given_up_with_the_peers_name(monkeypatch):
    calls = Calls(monkeypatch, answered=False)
    with pytest.raises(PeerLostError, match=r"of this rank and stage 0 \(rank 0\) within 5 s \(--join-timeout\)"):
        connect(calls, 1, 2, NCCL)
