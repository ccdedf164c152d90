"""The transport of activations from stage to stage, chosen once from the devices of all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sarathi_pp.distributed.devices import DeviceInfo
from sarathi_pp.distributed.environment import INTERFACE_VARIABLE, NCCL_INTERFACE_VARIABLE, variable
from sarathi_pp.stages.cuda_timer import CudaMark, CudaTimer
from sarathi_pp.trace.clock import Clock
from sarathi_pp.wire.channel import Landing
from sarathi_pp.wire.group import Group
from sarathi_pp.wire.nccl_channel import SideStream

# The gloo group of an edge reports the loss of the other rank. With torch's defaults, a thread of torch would abort the
# process before that. Another thread of torch would abort a process whose device is slow.
_NCCL_WATCHED_ELSEWHERE = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
# NCCL would register the buffers of the sums in a CUDA graph while it captures them. For this, the ranks wait for each
# other on the host. If the capture fails on one rank, the others would wait forever.
_NCCL_CAPTURES_ALONE = {"NCCL_GRAPH_REGISTER": "0"}
# Timeout in seconds of a communicator of one rank, which waits for no other rank.
_ALONE_S = 600.0


@dataclass(frozen=True, slots=True)
class Transport:
    """The transport of activations, and the reason for the choice.

    Attributes:
        name: "nccl" or "gloo".
        reason: the reason why it is this transport and not the other one, for messages.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class NcclOptions:
    """The options from which NCCL channels are made."""

    backend: str  # name of the backend of torch.distributed, "nccl"
    device: torch.device
    new_stream: Callable[[], SideStream]  # makes a stream on which a channel's transfers run


def choose_transport(devices: Sequence[DeviceInfo], wish: str = "auto") -> Transport:
    """Return NCCL if every rank has its own GPU, as NCCL requires; otherwise gloo, through the host's memory.

    Args:
        devices: the device of each rank, by rank.
        wish: "gloo" if the user wants gloo; "auto" otherwise.
    """
    if len(devices) == 1:
        return Transport("gloo", "one stage sends nothing")
    if wish == "gloo":
        return Transport("gloo", "--transport gloo")
    seen: dict[tuple[str, str], int] = {}
    for rank, device in enumerate(devices):
        if device.gpu is None:
            return Transport("gloo", f"rank {rank} computes on CPU")
        if not device.nccl:
            return Transport("gloo", f"the torch of rank {rank} has no NCCL")
        other = seen.setdefault((device.host, device.gpu), rank)
        if other != rank:
            return Transport("gloo", f"ranks {other} and {rank} share a GPU")
    return Transport("nccl", "every rank has a GPU to itself")


def has_gloo() -> bool:
    return dist.is_gloo_available()


def has_nccl() -> bool:
    return dist.is_nccl_available()


def nccl_options(device: torch.device, clock: Clock) -> NcclOptions:
    return NcclOptions("nccl", device, lambda: CudaSideStream(device, clock))


def start_nccl_alone(device: torch.device, interface: str) -> float:
    """Test NCCL with a communicator of this process alone, because one GPU allows no more.

    Returns:
        The sum over the one process of the number 1, which is 1 if NCCL works.
    """
    with surrounded("nccl", interface, None):
        store = dist.HashStore()  # type: ignore[attr-defined]
        group = Group(store, 0, 1, _ALONE_S, "nccl")
        try:
            one = torch.ones(1, device=device)
            group.all_reduce(one)
            return float(one)
        finally:
            group.close()


def surroundings(backend: str, interface: str, nccl_interface: str | None) -> Mapping[str, str]:
    """Return the environment variables with which a new communicator listens only on this interface.

    Args:
        nccl_interface: the user's value of NCCL_SOCKET_IFNAME, in NCCL's syntax; None if it is not set.
    """
    if backend != "nccl":
        return {INTERFACE_VARIABLE: interface}
    # "=" means exactly this name, and not all names that begin with it.
    addresses = {NCCL_INTERFACE_VARIABLE: nccl_interface or f"={interface}"}
    return {**addresses, **_NCCL_WATCHED_ELSEWHERE, **_NCCL_CAPTURES_ALONE}


@contextmanager
def surrounded(backend: str, interface: str, nccl_interface: str | None) -> Iterator[None]:
    """Set the variables of `surroundings` inside the block."""
    with ExitStack() as stack:
        for name, value in surroundings(backend, interface, nccl_interface).items():
            stack.enter_context(variable(name, value))
        yield


class CudaSideStream:
    """A CUDA stream for transfers, separate from the stream on which the caller computes. See SideStream."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with self.entered():
            self._timer = CudaTimer(clock)

    def entered(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def after_computing(self) -> None:
        """Let later work on this stream wait for computing, which is on the device's default stream.

        Inside `entered`, the current stream is this one.
        """
        self._stream.wait_stream(torch.cuda.default_stream(self._device))

    def mark(self) -> Landing:
        return self._timer.mark()

    def before_computing(self, mark: Landing) -> None:
        assert isinstance(mark, CudaMark), "a mark of this stream's own"
        mark.hold(torch.cuda.default_stream(self._device))
