"""Send the activations of one edge from GPU to GPU with NCCL. Their frames travel over the host.

    sending rank     computing    [ microbatch 0 ][ microbatch 1 ]
                     channel                      [ send 0 ]     [ send 1 ]
                     edge, host   [ frame 0 ][ frame 1 ]
    receiving rank   channel                      [ receive 0 ]  [ receive 1 ]
                     computing                                [ microbatch 0 ][ microbatch 1 ]

Transfers are launched on a CUDA stream of their own. That stream waits for the work on which they depend, and the
program does not. So frames arrive before the activations, and a stage launches a microbatch before its input is there.

NCCL has no tags: only the order matches a send with its receive. So both ends launch transfers in the order of the
frames. An NCCL kernel holds its stream until the other end takes part. So each edge has its own communicator, and a
receive is launched only when its frame has come.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from sarathi_pp.wire.channel import Landing
from sarathi_pp.wire.group import Group


class SideStream(Protocol):
    """A second stream of the device, next to the one on which the calling thread computes."""

    def entered(self) -> AbstractContextManager[object]:
        """Launch on this stream inside the context."""
        ...

    def after_computing(self) -> None:
        """Let later work on this stream wait for everything launched on the computing stream so far."""
        ...

    def mark(self) -> Landing:
        """Return the point after everything launched on this stream so far."""
        ...

    def before_computing(self, mark: Landing) -> None:
        """Let later work on the computing stream wait for a point on this one."""
        ...


class NcclChannel:
    """One end of an edge's transfers between GPUs.

    Only the computing thread uses a sending end. For a receiving end, the thread of the edge launches the receives. The
    computing thread then calls `admit` before it uses what they bring.

    Args:
        group: a communicator of this edge alone.
        peer: rank of the other end in the group.
        stream: the stream on which the transfers are launched.
    """

    def __init__(self, group: Group, peer: int, stream: SideStream) -> None:
        self._group = group
        self._peer = peer
        self._stream = stream
        # Sends under way: the point after each, and its rows, whose memory must not be reused before that point.
        self._leaving: deque[tuple[Landing, torch.Tensor]] = deque()

    def connect(self, device: torch.device, *, sending: bool) -> Landing:
        """Start a first transfer of one number, with which NCCL opens the connection. Return the point after it."""
        token = self.buffer((1,), torch.float32, device)
        if not sending:
            return self.receive(token)
        self.send(token)
        return self._leaving[-1][0]

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory to receive into.

        Launched work may still use this memory, which was freed before. So later transfers wait for that work.
        """
        rows = torch.empty(shape, dtype=dtype, device=device)
        with self._stream.entered():
            self._stream.after_computing()
        return rows

    def wait_for_room(self, most: int) -> None:
        """Wait until fewer than `most` sends are under way, and forget those that are complete."""
        while self._leaving and (len(self._leaving) >= most or self._leaving[0][0].at_s() is not None):
            self._leaving.popleft()[0].wait()

    def send(self, rows: torch.Tensor) -> None:
        """Send `rows` when everything launched on the computing stream so far is done. Send their frame before this."""
        with self._stream.entered():
            self._stream.after_computing()
            self._group.send(rows, self._peer).wait()  # on NCCL the stream waits, not the program
            self._leaving.append((self._stream.mark(), rows))

    def receive(self, rows: torch.Tensor) -> Landing:
        """Receive the activations of the latest frame into `rows`. Return the point at which they are complete."""
        with self._stream.entered():
            self._group.receive(rows, self._peer).wait()
            return self._stream.mark()

    def admit(self, landed: Landing) -> None:
        """Let later work on the computing stream wait for a receive.

        Args:
            landed: the point that `receive` returned.
        """
        self._stream.before_computing(landed)
