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
_theirs: dict[str, Callable[..., Any]] = {}
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
    patched: dict[str, Callable[..., Any]] = {
        "init_process_group": _init_process_group,
        "new_group": _new_group,
        "isend": _isend,
        "irecv": _irecv,
        "all_reduce": _all_reduce,
        "is_nccl_available": lambda: True,
    }
    _theirs.update({name: getattr(dist, name) for name in patched})
    for name, made_up in patched.items():
        setattr(dist, name, made_up)


def _init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    _theirs["init_process_group"]("gloo" if backend == "nccl" else backend, *args, **kwargs)
    if backend == "nccl":
        _streams[dist.group.WORLD] = None


def _new_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
    made = _theirs["new_group"](*args, backend="gloo" if backend == "nccl" else backend, **kwargs)
    if backend == "nccl" and made is not dist.GroupMember.NON_GROUP_MEMBER:
        _streams[made] = None
    return made


def _isend(tensor: torch.Tensor, dst: int | None = None, group: Any = None, **kwargs: Any) -> Any:
    stream = _stream(tensor, group)
    if stream is None:
        return _theirs["isend"](tensor, dst, group=group, **kwargs)
    assert isinstance(tensor, MockTensor)
    stream.wait_stream(machine.current_stream(tensor.device))
    TIMELINE.launch(stream.number, "a send of NCCL's", [tensor.host], ())
    leaving = tensor.host.clone()
    _leaving[:] = [one for one in _leaving if not one[0].is_completed()]
    _leaving.append((_theirs["isend"](leaving, dst, group=group, **kwargs), leaving))
    return Transfer(stream, tensor)


def _irecv(tensor: torch.Tensor, src: int | None = None, group: Any = None, **kwargs: Any) -> Any:
    stream = _stream(tensor, group)
    if stream is None:
        return _theirs["irecv"](tensor, src, group=group, **kwargs)
    assert isinstance(tensor, MockTensor)
    stream.wait_stream(machine.current_stream(tensor.device))
    came = torch.empty_like(tensor.host)
    _theirs["irecv"](came, src, group=group, **kwargs).wait()
    TIMELINE.launch(stream.number, "a receive of NCCL's", (), [tensor.host])
    tensor.host.copy_(came)
    return Transfer(stream, tensor)


def _all_reduce(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
    """Of gloo too, which takes CUDA tensors here: then the host copies."""
    if not isinstance(tensor, MockTensor):
        return _theirs["all_reduce"](tensor, *args, group=group, **kwargs)
    forbid_in_capture("a sum among processes")
    group = dist.group.WORLD if group is None else group
    computing = machine.current_stream(tensor.device)
    stream = (_stream(tensor, group) if group in _streams else None) or computing
    stream.wait_stream(computing)
    total = tensor.host.clone()
    _theirs["all_reduce"](total, *args, group=group, **kwargs)
    TIMELINE.launch(stream.number, "a sum among processes", [tensor.host], [tensor.host])
    tensor.host.copy_(total)
    Transfer(stream).wait()


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
