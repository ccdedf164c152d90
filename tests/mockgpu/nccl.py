"""NCCL between processes with simulated GPUs: transfers use gloo here, on a stream of the communicator.

As in torch, a transfer starts when the caller's stream reaches it. `wait` holds up that stream and not the caller. If
the other end never matches it, waiting for its stream blocks. Here the call already blocks.
"""

from __future__ import annotations

import os
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.mockgpu import machine
from tests.mockgpu.machine import TIMELINE, Stream, forbid_in_capture
from tests.mockgpu.tensor import MockTensor
from tests.mockgpu.timeline import MockGpuError

_Gloo = dist.ProcessGroupGloo
# gloo stops work to which no reference is left.
_leaving: list[tuple[Any, torch.Tensor]] = []


class Transfer:
    """dist.Work. kept: memory that must not be reused before the end."""

    def __init__(self, stream: Stream, *kept: object) -> None:
        self._stream = stream
        self._kept = kept

    def wait(self, timeout: object = None) -> bool:
        machine.current_stream(self._stream.device).wait_stream(self._stream)
        return True


def install() -> None:
    dist.ProcessGroupGloo = Gloo  # type: ignore[misc]
    dist.ProcessGroupNCCL = Nccl  # type: ignore[misc]
    dist.is_nccl_available = lambda: True


class Gloo:
    """Gloo as in torch. It accepts CUDA tensors only for sums: then the host copies."""

    def __init__(self, *args: Any) -> None:
        self._gloo: Any = _Gloo(*args)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        _forbid_on_device(tensors)
        return self._gloo.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        _forbid_on_device(tensors)
        return self._gloo.recv(tensors, rank, tag)

    def allgather(self, parts: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any) -> Any:
        _forbid_on_device(tensors)
        return self._gloo.allgather(parts, tensors, options)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        (tensor,) = tensors
        if not isinstance(tensor, MockTensor):
            return self._gloo.allreduce(tensors, options)
        return _sum(self._gloo, tensor, machine.current_stream(tensor.device), options)

    def shutdown(self) -> None:
        self._gloo.shutdown()


class _Captured:
    """A captured sum, which is kept by its graph alone."""


class Nccl:
    """NCCL, which has a stream of its own from the first transfer on."""

    class Options:
        _timeout = timedelta(minutes=10)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._gloo: Any = _Gloo(store, rank, size, options._timeout)
        self._stream: Stream | None = None
        self._captured: list[weakref.ref[_Captured]] = []

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Transfer:
        (tensor,) = tensors
        stream = self._enter(tensor)
        TIMELINE.launch(stream.number, "a send of NCCL's", [tensor.host], ())
        leaving = tensor.host.clone()
        _leaving[:] = [one for one in _leaving if not one[0].is_completed()]
        _leaving.append((self._gloo.send([leaving], rank, tag), leaving))
        return Transfer(stream, tensor)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Transfer:
        (tensor,) = tensors
        stream = self._enter(tensor)
        came = torch.empty_like(tensor.host)
        self._gloo.recv([came], rank, tag).wait()
        TIMELINE.launch(stream.number, "a receive of NCCL's", (), [tensor.host])
        tensor.host.copy_(came)
        return Transfer(stream, tensor)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Transfer:
        (tensor,) = tensors
        if machine.recording() is not None:
            return self._capture_sum(tensor, options)
        return _sum(self._gloo, tensor, self._enter(tensor), options)

    def shutdown(self) -> None:
        if any(captured() is not None for captured in self._captured):
            TIMELINE.report("a communicator is closed before the graphs that contain its sums: it waits forever")
        self._gloo.shutdown()

    def _capture_sum(self, tensor: Any, options: Any) -> Transfer:
        """Record a sum. The ranks wait for each other only if buffers are registered."""
        recording = machine.recording()
        assert recording is not None
        if self._stream is None:
            forbid_in_capture("connecting")
        if os.environ.get("MOCK_CAPTURE_FAILS_ON", "none") == os.environ.get("LOCAL_RANK"):
            forbid_in_capture("a sum on this rank")
        if os.environ.get("MOCK_SUM_REFUSED_ON", "none") == os.environ.get("LOCAL_RANK"):
            raise MockGpuError("NCCL Error 5: invalid usage")  # the capture stays valid
        if os.environ.get("NCCL_GRAPH_REGISTER") != "0":
            self._gloo.allreduce([torch.zeros(1)], options).wait()
        place, captured = recording.hold(tensor.host), _Captured()
        self._captured.append(weakref.ref(captured))

        def redo() -> None:
            host = machine.released(place)
            total = host.clone()
            self._gloo.allreduce([total], options).wait()
            host.copy_(total)
            assert captured is not None, "the graph keeps it"

        recording.work.append(redo)
        recording.reads.append(place)
        recording.writes.append(place)
        return Transfer(machine.current_stream(tensor.device))

    def _enter(self, tensor: Any) -> Stream:
        """Return the communicator's stream, after the work that the caller's stream has."""
        if not isinstance(tensor, MockTensor) or not tensor.is_contiguous():
            raise MockGpuError("NCCL takes contiguous CUDA tensors")
        stream = self._stream = self._stream or Stream(tensor.device)
        if stream.device != tensor.device:
            raise MockGpuError(f"a communicator of {stream.device} is given a tensor on {tensor.device}")
        stream.wait_stream(machine.current_stream(tensor.device))
        return stream


def _sum(gloo: Any, tensor: Any, stream: Stream, options: Any) -> Transfer:
    forbid_in_capture("a sum among processes")
    total = tensor.host.clone()
    gloo.allreduce([total], options).wait()
    TIMELINE.launch(stream.number, "a sum among processes", [tensor.host], [tensor.host])
    tensor.host.copy_(total)
    return Transfer(stream)


def _forbid_on_device(tensors: list[torch.Tensor]) -> None:
    if any(isinstance(tensor, MockTensor) for tensor in tensors):
        raise MockGpuError("gloo is given a CUDA tensor")
