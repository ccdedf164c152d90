"""NCCL channels on CUDA streams: the waits between them, and the race that a missing wait causes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sarathi_pp.distributed.transport import CudaSideStream
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.wire.nccl_channel import NcclChannel
from tests.mockgpu.machine import TIMELINE, Stream
from tests.mockgpu.nccl import Transfer
from tests.mockgpu.timeline import MockGpuError

GPU = torch.device("cuda", 0)


class Careless(CudaSideStream):
    """A channel that forgets a wait."""

    def __init__(self, forgets: str) -> None:
        super().__init__(GPU, SystemClock())
        setattr(self, forgets, lambda *given: None)


class Communicator:
    """Transfers that end when the device reaches them."""

    def __init__(self) -> None:
        self._stream = Stream(GPU)

    def send(self, rows: Any, rank: int) -> Transfer:
        self._stream.wait_stream(torch.cuda.current_stream())
        TIMELINE.launch(self._stream.number, "send", [rows.host], [])
        return Transfer(self._stream, rows)

    def receive(self, rows: Any, rank: int) -> Transfer:
        self._stream.wait_stream(torch.cuda.current_stream())
        TIMELINE.launch(self._stream.number, "receive", [], [rows.host])
        return Transfer(self._stream, rows)


def sent(side: CudaSideStream) -> None:
    channel = NcclChannel(Communicator(), 1, side)  # type: ignore[arg-type]
    channel.send(torch.ones(3, device=GPU))
    torch.ones(3, device=GPU)
    channel.wait_for_room(1)


def received(side: CudaSideStream) -> None:
    channel = NcclChannel(Communicator(), 1, side)  # type: ignore[arg-type]
    torch.ones(8, device=GPU)
    rows = channel.buffer((3,), torch.float32, GPU)
    landed = channel.receive(rows)
    channel.admit(landed)
    rows.sum()


@pytest.mark.parametrize("transfer", [sent, received])
def test_nothing_races(transfer):
    transfer(CudaSideStream(GPU, SystemClock()))


@pytest.mark.parametrize(
    ("transfer", "forgets"),
    [(sent, "after_computing"), (received, "after_computing"), (received, "before_computing")],
)
def test_a_wait_that_is_forgotten_is_a_race(transfer, forgets, monkeypatch):
    monkeypatch.delenv("MOCK_GPU_HAZARDS")  # this hazard is no fault
    with pytest.raises(MockGpuError, match="for which it has not waited"):
        transfer(Careless(forgets))
