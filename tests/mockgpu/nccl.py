"""NCCL between processes with made-up GPUs: what goes over gloo here goes on a stream of the communicator's own.

As torch has it: a transfer begins when the caller's stream has come to it, and `wait` holds up that stream and not the
caller. One that the other end never matches is waited for by whoever waits for its stream, here already by the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mockgpu import machine
from tests.mockgpu.machine import TIMELINE, Stream, forbid_in_capture
from tests.mockgpu.tensor import MockTensor
from tests.mockgpu.timeline import MockGpuError

# Communicators with the stream that each has from its first transfer on.
_streams: dict[dist.ProcessGroup, Stream | None] = {}
# gloo stops what nobody holds any more.
_leaving: list[tuple[dist.Work, torch.Tensor]] = []


class Transfer:
    """dist.Work. kept: what must not be used again before it is done."""

    def __init__(self, stream: Stream, *kept: object) -> None:
        self._stream = stream
        self._kept = kept

    def wait(self, timeout: object = None) -> bool:
        machine.current_stream(self._stream.device).wait_stream(self._stream)
        return True


def install() -> None:
    new_group, isend, irecv, all_reduce = dist.new_group, dist.isend, dist.irecv, dist.all_reduce

    def group_of(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        made = new_group(*args, backend="gloo" if backend == "nccl" else backend, **kwargs)
        if backend == "nccl" and made is not dist.GroupMember.NON_GROUP_MEMBER:
            _streams[made] = None
        return made

    def send(tensor: torch.Tensor, dst: int | None = None, group: Any = None, **kwargs: Any) -> Any:
        stream = _stream(tensor, group)
        if stream is None:
            return isend(tensor, dst, group=group, **kwargs)
        assert isinstance(tensor, MockTensor)
        stream.wait_stream(machine.current_stream(tensor.device))
        TIMELINE.launch(stream.number, "a send of NCCL's", [tensor.host], ())
        leaving = tensor.host.clone()
        _leaving[:] = [one for one in _leaving if not one[0].is_completed()]
        _leaving.append((isend(leaving, dst, group=group, **kwargs), leaving))
        return Transfer(stream, tensor)

    def receive(tensor: torch.Tensor, src: int | None = None, group: Any = None, **kwargs: Any) -> Any:
        stream = _stream(tensor, group)
        if stream is None:
            return irecv(tensor, src, group=group, **kwargs)
        assert isinstance(tensor, MockTensor)
        stream.wait_stream(machine.current_stream(tensor.device))
        came = torch.empty_like(tensor.host)
        irecv(came, src, group=group, **kwargs).wait()
        TIMELINE.launch(stream.number, "a receive of NCCL's", (), [tensor.host])
        tensor.host.copy_(came)
        return Transfer(stream, tensor)

    def sum_up(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        if not isinstance(tensor, MockTensor):
            return all_reduce(tensor, *args, group=group, **kwargs)
        # gloo's own way with CUDA tensors: the host copies, and waits.
        stream = _stream(tensor, group) if group in _streams else machine.current_stream(tensor.device)
        assert stream is not None
        stream.wait_stream(machine.current_stream(tensor.device))
        forbid_in_capture("a sum among processes")
        total = tensor.host.clone()
        all_reduce(total, *args, group=group, **kwargs)
        TIMELINE.launch(stream.number, "a sum among processes", [tensor.host], [tensor.host])
        tensor.host.copy_(total)
        Transfer(stream).wait()

    patched: dict[str, Callable[..., Any]] = {
        "new_group": group_of,
        "isend": send,
        "irecv": receive,
        "all_reduce": sum_up,
        "is_nccl_available": lambda: True,
    }
    for name, made_up in patched.items():
        setattr(dist, name, made_up)


def _stream(tensor: torch.Tensor, group: Any) -> Stream | None:
    """The communicator's; None of gloo's."""
    ours = isinstance(tensor, MockTensor)
    if group not in _streams:
        if ours:
            raise MockGpuError("gloo is given a CUDA tensor")
        return None
    if not ours or not tensor.is_contiguous():
        raise MockGpuError("NCCL takes contiguous CUDA tensors")
    found = _streams[group] = _streams[group] or Stream(tensor.device)
    if found.device != tensor.device:
        raise MockGpuError(f"a communicator of {found.device} is given a tensor on {tensor.device}")
    return found
