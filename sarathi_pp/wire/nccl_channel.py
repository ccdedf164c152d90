"""The activations of one edge, from one device straight to the next, beside the frames that announce them.

    sending rank     computing    [ microbatch 0 ][ microbatch 1 ]
                     lane                         [ send 0 ]     [ send 1 ]
                     edge, host   [ frame 0 ][ frame 1 ]
    receiving rank   lane                         [ receive 0 ]  [ receive 1 ]
                     computing                                [ microbatch 0 ][ microbatch 1 ]

The program gives transfers to a stream of their own, whose work waits for what it needs, and goes on: frames run ahead
of the devices, so that a stage has launched a microbatch before its input is there. Both ends give their streams the
transfers in the order of the frames, which alone matches a send with its receive. NCCL heeds no tags, and its kernel
keeps its stream until the other end takes part; so there is one communicator an edge, and a receive is begun when its
frame has come.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from sarathi_pp.wire.channel import Landing
from sarathi_pp.wire.group import Group


class SideStream(Protocol):
    """A device's second line of work, beside the one on which the caller's thread computes."""

    def entered(self) -> AbstractContextManager[object]:
        """What is given to the device inside goes to this stream."""
        ...

    def after_computing(self) -> None:
        """What comes next on this stream waits for all that computing was given so far."""
        ...

    def mark(self) -> Landing:
        """The point behind all that was given to this stream so far."""
        ...

    def before_computing(self, mark: Landing) -> None:
        """What computing is given next waits for a point on this stream."""
        ...


class Lane:
    """One end of it. group: a communicator of this edge alone. peer: rank of the other end in the group.

    A sending end is used by the computing thread alone. A receiving end begins its receives on one thread and is
    asked for them on the computing one.
    """

    def __init__(self, group: Group, peer: int, stream: SideStream) -> None:
        self._group = group
        self._peer = peer
        self._stream = stream
        # With their rows, whose memory must not be used again before they have left.
        self._leaving: deque[tuple[Landing, torch.Tensor]] = deque()

    def connect(self, device: torch.device, *, sending: bool) -> Landing:
        """Begin the first transfer, with which NCCL opens the connection; returns the point at which it is over."""
        token = self.buffer((1,), torch.float32, device)
        if not sending:
            return self.receive(token)
        self.send(token)
        return self._leaving[-1][0]

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory to receive into. Work of computing that had it before may still be under way."""
        rows = torch.empty(shape, dtype=dtype, device=device)
        with self._stream.entered():
            self._stream.after_computing()
        return rows

    def wait_for_room(self, most: int) -> None:
        """Until fewer than `most` sends are under way."""
        while self._leaving and (len(self._leaving) >= most or self._leaving[0][0].at_s() is not None):
            self._leaving.popleft()[0].wait()

    def send(self, rows: torch.Tensor) -> None:
        """Behind what computing was given so far. The frame must need nothing more of this thread."""
        with self._stream.entered():
            self._stream.after_computing()
            self._group.send(rows, self._peer).wait()  # on NCCL the stream waits, not the program
            self._leaving.append((self._stream.mark(), rows))

    def receive(self, rows: torch.Tensor) -> Landing:
        """Fill `rows` with what the next frame announced; returns the point at which they are filled."""
        with self._stream.entered():
            self._group.receive(rows, self._peer).wait()
            return self._stream.mark()

    def admit(self, landed: Landing) -> None:
        """Let computing read what has landed by then."""
        self._stream.before_computing(landed)
