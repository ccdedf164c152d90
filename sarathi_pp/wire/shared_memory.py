"""Edges between ranks of one host, through memory that both ranks map.

    sender                                                 receiver
      reserve, write -->  | slot | slot | slot |  --> read, release        a memfd
                      --- slot 1, filled at t --->                         a Unix socket
                      <-- slot 1 is free ---------

The receiver of a message waits in the kernel for its own socket. Only the computing thread wakes up for it. Over
torch.distributed, three threads wake up one after the other. A slot is a buffer for one message, in the form of
wire/message.py. Both sides send and receive "slot is full" and "slot is free" by system calls. These order the writes
and reads of both sides, so no memory fences are needed here.

Sockets find each other by abstract names, which are valid in one network namespace. Ranks that can reach each other
in this way share memory. Other ranks use an edge of torch_channel instead. Neither names nor memory outlive the
processes. Next to each edge through shared memory, an edge of torch_channel is open. It carries heartbeats and a
goodbye, and notices if the other rank is lost or hangs.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import select
import socket
import struct
from contextlib import suppress
from typing import Protocol

import torch

from sarathi_pp.errors import CapacityError, PeerLostError, ProtocolError, SarathiError
from sarathi_pp.wire.channel import Clock, Message, NumberCheck
from sarathi_pp.wire.codec import Frame, Goodbye
from sarathi_pp.wire.edge_options import LossListener
from sarathi_pp.wire.message import Payloads, bytes_of, read, write

# Datagrams on the socket: the slot that is filled and the time of that on the host's clock, the slot that is free, and
# the number and size of the slots.
_FILLED = struct.Struct("<Id")
_FREED = struct.Struct("<I")
_SHAPE = struct.Struct("<IQ")
# SO_PEERCRED: pid, uid, gid.
_CREDENTIALS = struct.Struct("iII")
_CONNECT_S = 5.0
# With more slots, the socket might not hold the datagrams of all of them: kernels take at least 256.
MAX_SLOTS = 128


class Heartbeats(Protocol):
    """This rank's end of the edge of torch_channel that carries heartbeats between the same two ranks."""

    def close(self) -> None: ...


class SlotListener:
    """A listening socket of an edge's receiving rank, to which the sending rank connects.

    Attributes:
        name: abstract name of the socket.

    Raises:
        OSError: this host has no sockets with abstract names.
    """

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.name = f"sarathi-pp-{secrets.token_hex(16)}"
        try:
            self._listener.bind(f"\0{self.name}")
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise

    def accept(self, timeout_s: float) -> socket.socket | None:
        """Return the first connection of a process of this user; None if no process connects within timeout_s."""
        self._listener.settimeout(timeout_s)
        try:
            while True:
                end, _ = self._listener.accept()
                if _is_ours(end):
                    return end
                end.close()
        except OSError:
            return None

    def close(self) -> None:
        self._listener.close()


def connect(name: str) -> socket.socket | None:
    """Connect to the listener of that name. Return None if this process can reach no listener of this user."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Any process may see the name and connect. If too many wait to be accepted, connecting blocks.
    end.settimeout(_CONNECT_S)
    try:
        end.connect(f"\0{name}")
    except OSError:
        end.close()
        return None
    if _is_ours(end):
        return end
    end.close()
    return None


def can_share() -> bool:
    """Return whether this process could share memory with another process of this user on this host."""
    try:
        listener = SlotListener()
    except OSError:
        return False
    end = connect(listener.name)
    if end is not None:
        end.close()
    listener.close()
    return end is not None


def _is_ours(end: socket.socket) -> bool:
    """Return whether the other end is a process of this user, since any process may use an abstract name."""
    _, uid, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.geteuid())


class SlotConnection:
    """The socket between both ends of an edge, and the error that ended the edge.

    It is also the LossListener of the edge that carries heartbeats between the same two ranks. So an error there ends
    this edge too.

    Args:
        end: socket that is connected to the other end. Close it only after both ends have closed the edge. If a socket
            is closed with unread data, the kernel resets the connection, which is an error at the other end.
        losses: gets the error that ended the edge.
    """

    def __init__(self, end: socket.socket, peer_name: str, losses: LossListener) -> None:
        self._socket = end
        self.peer_name = peer_name
        self.failure: SarathiError | None = None
        self._losses = losses
        # The socket has no timeout of its own: setting one would be a system call per wait.
        end.settimeout(None)
        self._readable = select.poll()
        self._readable.register(end, select.POLLIN)

    def report_loss(self, error: SarathiError) -> None:
        """End the edge with an error. A thread that waits for the socket wakes up.

        The thread of the edge that carries heartbeats calls this too.
        """
        self.failure = error
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._losses.report_loss(error)

    def share_slots(self, num_slots: int, slot_bytes: int) -> torch.Tensor:
        """Make the memory for messages and share it with the other end. Return it as `take_slots` does there.

        Only the parts that messages use will take memory.

        Args:
            num_slots: number of messages that the memory holds.
            slot_bytes: size of the largest message. It is rounded up to whole memory pages.

        Raises:
            CapacityError: there is no memory.
        """
        slot_bytes = _whole_pages(slot_bytes)
        memory = os.memfd_create("sarathi-pp edge")
        try:
            os.ftruncate(memory, num_slots * slot_bytes)
            slots = _map(memory, num_slots, slot_bytes)
            with suppress(OSError):  # if the other end has left, the first wait notices
                socket.send_fds(self._socket, [_SHAPE.pack(num_slots, slot_bytes)], [memory])
            return slots
        except OSError as error:
            raise _no_room(num_slots, slot_bytes) from error
        finally:
            os.close(memory)

    def take_slots(self, num_slots: int, slot_bytes: int, timeout_s: float) -> torch.Tensor:
        """Map the memory that the other end shares: (num_slots, slot_bytes) uint8. Each slot has whole memory pages.

        Raises:
            PeerLostError: the other end shares no memory within timeout_s, or has left.
            ProtocolError: the other end shares memory of another shape.
            CapacityError: there is no memory.
        """
        slot_bytes = _whole_pages(slot_bytes)
        self._socket.settimeout(timeout_s)
        try:
            said, descriptors, _, _ = socket.recv_fds(self._socket, _SHAPE.size + 1, 1, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError as error:
            raise PeerLostError(f"{self.peer_name} shares no memory within {timeout_s:g} s") from error
        except OSError as error:
            raise self.ended() from error
        if not said:
            raise self.ended()
        try:
            if len(said) != _SHAPE.size or len(descriptors) != 1:
                shape = f"{len(descriptors)} file descriptors in a datagram of {len(said)} bytes"
                raise self.broken(f"shares {shape}, not 1 in {_SHAPE.size}")
            if (found := _SHAPE.unpack(said)) != (num_slots, slot_bytes):
                raise self.broken(f"shares memory of (slots, bytes per slot) {found}, not {num_slots, slot_bytes}")
            return _map(descriptors[0], num_slots, slot_bytes)
        except OSError as error:
            raise _no_room(num_slots, slot_bytes) from error
        finally:
            self._socket.settimeout(None)
            for descriptor in descriptors:
                os.close(descriptor)

    def receive(self, timeout_s: float | None, form: struct.Struct) -> tuple[int | float, ...] | None:
        """Return the fields of the next datagram; None if no datagram comes within timeout_s.

        Raises the error that ended the edge.

        Args:
            timeout_s: seconds; None waits without limit.
            form: the layout of the datagram.
        """
        try:
            datagram = self._receive(form.size + 1, timeout_s)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self.ended() from error
        if not datagram:
            raise self.ended()
        if len(datagram) != form.size:
            raise self.broken(f"sent a datagram of {len(datagram)} bytes, not {form.size}")
        return form.unpack(datagram)

    def _receive(self, size: int, timeout_s: float | None) -> bytes:
        """Receive one datagram. Raises BlockingIOError if none comes in time."""
        if timeout_s:
            self._readable.poll(math.ceil(1000 * max(0.0, timeout_s)))
        flags = 0 if timeout_s is None else socket.MSG_DONTWAIT
        try:
            return self._socket.recv(size, flags)
        except ConnectionResetError:
            # The other end has left without reading everything. The kernel reports this once, and only then gives the
            # data that the other end had sent.
            return self._socket.recv(size, flags)

    def send(self, datagram: bytes) -> None:
        """Send a datagram. If the other end has left, do nothing: the next receive raises."""
        with suppress(OSError):
            self._socket.send(datagram)

    def broken(self, what: str) -> ProtocolError:
        """End the edge, because the other end does something that this version never does. Return the error to raise.

        Args:
            what: the end of the message, after the name of the other end.
        """
        error = ProtocolError(f"{self.peer_name} {what}")
        self.report_loss(error)
        return error

    def ended(self) -> SarathiError:
        """Return the error that ended the edge."""
        return self.failure or PeerLostError(f"{self.peer_name} closed its connection: it died or left")


class SharedSender:
    """The sending end of an edge through shared memory. See the interface Sender. Only one thread may use it.

    Args:
        connection: connection to the receiving end, which makes the memory.
        heartbeats: this rank's end of the edge that carries heartbeats. `close` closes it too.
        num_slots, slot_bytes: shape of the memory. See `SlotConnection.share_slots`.
        timeout_s: most seconds until the receiving end has shared the memory.
    """

    def __init__(
        self,
        connection: SlotConnection,
        heartbeats: Heartbeats,
        clock: Clock,
        *,
        num_slots: int,
        slot_bytes: int,
        timeout_s: float,
    ) -> None:
        self._connection = connection
        self._heartbeats = heartbeats
        self._clock = clock
        slots = connection.take_slots(num_slots, slot_bytes, timeout_s)
        self._slots = [slot[:slot_bytes] for slot in slots]
        # The slot that became free last is filled first: it is most likely in a cache.
        self._free = list(range(num_slots))
        self._number = 0

    def reserve(self) -> None:
        while (freed := self._connection.receive(0 if self._free else None, _FREED)) is not None:
            slot = int(freed[0])
            if slot >= len(self._slots) or slot in self._free:
                raise self._connection.broken(f"freed slot {slot}, which it does not hold")
            self._free.append(slot)

    def send(self, frame: Frame, payload: torch.Tensor | None = None) -> None:
        slot = self._free.pop()
        write(self._slots[slot], frame, self._number, payload)
        self._number += 1
        self._connection.send(_FILLED.pack(slot, self._clock.now()))

    def close(self) -> None:
        if self._connection.failure is None:
            self.reserve()
            self.send(Goodbye())
        self._heartbeats.close()


class SharedReceiver:
    """The receiving end of an edge through shared memory. See the interface Receiver. Only one thread may use it.

    It makes the memory for messages.

    Args:
        connection: connection to the sending end.
        heartbeats: this rank's end of the edge that carries heartbeats. `close` closes it too.
        num_slots: number of messages that the memory holds.
        frame_bytes: size of the largest legal frame, without its payload.
        payloads: form of the payloads.
    """

    def __init__(
        self,
        connection: SlotConnection,
        heartbeats: Heartbeats,
        clock: Clock,
        *,
        num_slots: int,
        frame_bytes: int,
        payloads: Payloads,
    ) -> None:
        self._connection = connection
        self._heartbeats = heartbeats
        self._clock = clock
        self._payloads = payloads
        self._numbers = NumberCheck()
        self._slots = connection.share_slots(num_slots, payloads.max_bytes(frame_bytes))
        self._bytes = [bytes_of(slot) for slot in self._slots]

    def receive(self, timeout_s: float | None = None) -> Message[torch.Tensor] | None:
        said = self._connection.receive(0, _FILLED)
        waited = said is None and timeout_s != 0
        if waited:
            said = self._connection.receive(timeout_s, _FILLED)
        if said is None:
            return None
        slot, filled_s = int(said[0]), said[1]
        if slot >= len(self._slots):
            raise self._connection.broken(f"filled slot {slot} of {len(self._slots)}")
        # If a message was there before this call, it arrived when its slot was filled.
        arrived_s = self._clock.now() if waited else filled_s
        try:
            return self._message(slot, arrived_s)
        except ProtocolError as error:
            self._connection.report_loss(error)
            raise

    def _message(self, slot: int, arrived_s: float) -> Message[torch.Tensor]:
        envelope, behind = read(self._bytes[slot])
        self._numbers.check(envelope.number)
        rows = self._payloads.rows(envelope.frame, behind)
        return Message(envelope.frame, rows, arrived_s, lambda: self._connection.send(_FREED.pack(slot)))

    def close(self) -> None:
        self._heartbeats.close()


def _no_room(num_slots: int, slot_bytes: int) -> CapacityError:
    return CapacityError(f"no memory for {num_slots} messages of up to {slot_bytes} bytes; try a smaller --chunk-size")


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _map(memory: int, num_slots: int, slot_bytes: int) -> torch.Tensor:
    """Map the memory as (num_slots, slot_bytes) uint8."""
    mapped = mmap.mmap(memory, num_slots * slot_bytes)
    return torch.frombuffer(mapped, dtype=torch.uint8).view(num_slots, slot_bytes)
