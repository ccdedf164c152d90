"""The connection of a stage's devices: other ranks see this phase, and a rank that does not take part is named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sarathi_pp.distributed import edges
from sarathi_pp.distributed.control_plane import Connection, ControlPlane
from sarathi_pp.distributed.edges import open_shard_group
from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.distributed.network_interface import Interface
from sarathi_pp.errors import PeerLostError
from sarathi_pp.process.activity import Activity
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.wire.mesh import Mesh


def test_a_device_that_does_not_connect_to_its_stage_is_named(monkeypatch):
    activity, phases = Activity(), []
    group = SimpleNamespace(all_reduce=lambda x: phases.append(activity.own), close=lambda: None)
    never = SimpleNamespace(mark=lambda: SimpleNamespace(at_s=lambda: None))
    connection = Connection(None, Interface("lo", "127.0.0.1"), group, None)
    plane = ControlPlane(RankEnvironment(0, 2, 0, 2), Mesh(shards=2), 0.05, SystemClock(), connection, activity)
    monkeypatch.setattr(plane, "new_group", lambda *args: group)
    monkeypatch.setattr(edges, "CudaTimer", lambda clock: never)
    with pytest.raises(PeerLostError, match=r"devices of this rank and shard 1 of stage 0 \(rank 1\) within 0.05 s"):
        open_shard_group(plane, 5.0, "nccl", torch.device("cpu"))
    assert phases == ["connecting its device to the other ranks of its stage"]
