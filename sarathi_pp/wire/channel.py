"""The interfaces with which stages send and receive messages, and a channel inside one process that has both.

A sender has a limited number of send buffers. `reserve` waits for one (the recorded state `send_wait`), and `send` then
never blocks. A receiver hands out messages in order. `release` gives a message's buffer back.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from sarathi_pp.errors import ProtocolError
from sarathi_pp.wire import codec
from sarathi_pp.wire.codec import Frame, Goodbye

# Prefix of the names of threads that may be inside a send or receive.
COMMUNICATING = "transfer "

Payload = TypeVar("Payload")
Sent = TypeVar("Sent", contravariant=True)


def edge_buffers(inflight: int) -> int:
    """Return the number of messages for which an edge has room: all microbatches in flight, and a goodbye."""
    return inflight + 1


class Clock(Protocol):
    """Seconds on this host's clock. See trace/clock.py, which the wire does not import."""

    def now(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class Landing(Protocol):
    """A point in a device's work. See Mark in trace/timer.py, which the wire does not import."""

    def at_s(self) -> float | None: ...
    def wait(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Message(Generic[Payload]):
    """One frame and its payload.

    Attributes:
        arrived_s: time when the message was complete here, on this rank's clock.
        release: call it once, when the payload is no longer read.
        landed: the point in a device's work at which the payload is complete. It is set if the payload comes by an NCCL
            channel, later than the frame.
    """

    frame: Frame
    payload: Payload | None
    arrived_s: float
    release: Callable[[], None]
    landed: Landing | None = None


class Sender(Protocol[Sent]):
    def reserve(self) -> None:
        """Wait until a send buffer is free. Raises the error that ended the edge, if it has ended."""

    def send(self, frame: Frame, payload: Sent | None = None) -> None:
        """Send one frame, with a buffer that was reserved before."""

    def close(self) -> None:
        """Say goodbye, and wait until everything is sent."""


class Receiver(Protocol[Payload]):
    def receive(self, timeout_s: float | None = None) -> Message[Payload] | None:
        """Return the next message, or None if none comes within timeout_s. Raises the error that ended the edge."""

    def close(self) -> None: ...


class NoSender(Generic[Payload]):
    """A sender that does nothing, for a rank whose output another rank of the same stage sends."""

    def reserve(self) -> None: ...

    def send(self, frame: Frame, payload: Payload | None = None) -> None: ...

    def close(self) -> None: ...


class NumberCheck:
    """A check that the frames of an edge arrive in order, each once."""

    def __init__(self) -> None:
        self._next = 0

    def check(self, number: int) -> None:
        if number != self._next:
            raise ProtocolError(
                f"frame {number} came instead of {self._next}: a frame is repeated, lost or out of order"
            )
        self._next += 1


class QueueChannel(Generic[Payload]):
    """Both ends of an edge inside one process. Frames pass through the codec, payloads pass by reference."""

    def __init__(self, clock: Clock, num_buffers: int) -> None:
        self._clock = clock
        self._messages: queue.Queue[Message[Payload]] = queue.Queue()
        self._buffers = threading.Semaphore(num_buffers)
        self._sent = 0
        self._numbers = NumberCheck()

    def reserve(self) -> None:
        self._buffers.acquire()

    def send(self, frame: Frame, payload: Payload | None = None) -> None:
        envelope = codec.decode(codec.encode(frame, self._sent))
        self._sent += 1
        self._numbers.check(envelope.number)
        self._messages.put(Message(envelope.frame, payload, self._clock.now(), self._buffers.release))

    def receive(self, timeout_s: float | None = None) -> Message[Payload] | None:
        try:
            return self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        self.reserve()
        self.send(Goodbye())
