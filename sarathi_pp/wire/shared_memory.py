"""Stage edges between ranks of one host, through memory that both map.

    sender                                                 receiver
      reserve, write -->  | slot | slot | slot |  --> read, release        a memfd
                      --- slot 1, filled at t --->                         a Unix socket
                      <-- slot 1 is free ---------

Whoever waits for a message waits in the kernel for its own socket: nothing but the thread that computes need wake up
for it, where over torch.distributed three threads do, one after the other. A message lies in its slot as it would
travel, see wire/message.py. Saying that a slot is full, and hearing it, are system calls, which order what either side
has written and reads: no fences are needed here.

Sockets find each other by abstract names, which are of one network namespace: who can reach the other shares its
memory, and ranks that cannot, on whatever host, have the other edge. Neither names nor memory outlive the processes.
Beside it stays an edge of torch_channel. It carries heartbeats and a goodbye, and tells who is lost or hangs.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

from sarathi_pp.errors import CapacityError, PeerLostError, ProtocolError, SarathiError
from sarathi_pp.wire.channel import Clock, Message, NumberCheck
from sarathi_pp.wire.codec import Frame, Goodbye
from sarathi_pp.wire.message import Payloads, bytes_of, read, write

# What is said over the socket, each a datagram: which slot is filled, since when on the host's clock; which is free.
_FILLED = struct.Struct("<Id")
_FREED = struct.Struct("<I")
_SHAPE = struct.Struct("<IQ")
# SO_PEERCRED: pid, uid, gid.
_CREDENTIALS = struct.Struct("iII")
_KNOCK_S = 5.0
# More than this many slots, and the socket might not hold what is said of all of them: kernels take at least 256.
MAX_SLOTS = 128

OnFailure = Callable[[SarathiError], None]


class Beside(Protocol):
    """An end of the other edge between the same two ranks."""

    def close(self) -> None: ...


MakeBeside = Callable[[OnFailure], Beside]


class Door:
    """Where the rank that will receive waits for the one that will send. name: how that one finds it.

    Raises OSError where there are no such sockets.
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

    def admit(self, timeout_s: float) -> socket.socket | None:
        """The first of this user's processes that has knocked; None where there is none within that time each."""
        self._listener.settimeout(timeout_s)
        try:
            while True:
                found, _ = self._listener.accept()
                if _is_ours(found):
                    return found
                found.close()
        except OSError:
            return None

    def close(self) -> None:
        self._listener.close()


def knock(name: str) -> socket.socket | None:
    """A way to the door of that name, None where none of this user's is to be found from here."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Names are anybody's to see, and where too many have knocked one waits.
    found.settimeout(_KNOCK_S)
    try:
        found.connect(f"\0{name}")
    except OSError:
        found.close()
        return None
    if _is_ours(found):
        return found
    found.close()
    return None


def can_share() -> bool:
    """Whether this process could share memory with another one of this user's here."""
    try:
        door = Door()
    except OSError:
        return False
    way = knock(door.name)
    if way is not None:
        way.close()
    door.close()
    return way is not None


def _is_ours(end: socket.socket) -> bool:
    """Whether the other end is a process of this user's: anybody may use an abstract name."""
    _, uid, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.geteuid())


class _End:
    """What both have: the socket, the slots, and how the edge ended. See `SharedSender` and `SharedReceiver`.

    way: stays open, to be closed when both ends have closed: the kernel breaks what is closed with something unread.
    """

    def __init__(self, way: socket.socket, peer_name: str, beside: MakeBeside, on_failure: OnFailure) -> None:
        self._way = way
        self._peer_name = peer_name
        self._on_failure = on_failure
        self._failure: SarathiError | None = None
        self._beside = beside(self._fail)
        # Nobody asks the socket itself to wait: to tell it for how long would be a system call each time.
        way.settimeout(None)
        self._waiting = select.poll()
        self._waiting.register(way, select.POLLIN)

    def _fail(self, error: SarathiError) -> None:
        """The edge has ended so, as the one beside found out on a thread of its own: whoever waits here wakes up."""
        self._failure = error
        with suppress(OSError):
            self._way.shutdown(socket.SHUT_RDWR)
        self._on_failure(error)

    def _hear(self, timeout_s: float | None, form: struct.Struct) -> tuple[int | float, ...] | None:
        """What the other end says next; None where nothing comes in time. Raises what ended the edge."""
        try:
            said = self._receive(form.size + 1, timeout_s)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._ended() from error
        if not said:
            raise self._ended()
        if len(said) != form.size:
            raise self._broken(f"said {len(said)} bytes where {form.size} are legal")
        return form.unpack(said)

    def _receive(self, size: int, timeout_s: float | None) -> bytes:
        """Raises BlockingIOError where nothing comes in time."""
        if timeout_s:
            self._waiting.poll(math.ceil(1000 * max(0.0, timeout_s)))
        flags = 0 if timeout_s is None else socket.MSG_DONTWAIT
        try:
            return self._way.recv(size, flags)
        except ConnectionResetError:
            # Who left had not read all that was said to it, and the kernel tells so once, before what it had said.
            return self._way.recv(size, flags)

    def _say(self, what: bytes) -> None:
        """Who is no longer there to hear it has ended the edge, which whoever waits next is told."""
        with suppress(OSError):
            self._way.send(what)

    def _broken(self, what: str) -> ProtocolError:
        """The other end does what no peer of this version does: the edge ends."""
        error = ProtocolError(f"{self._peer_name} {what}")
        self._fail(error)
        return error

    def _ended(self) -> SarathiError:
        return self._failure or PeerLostError(f"{self._peer_name} closed its connection: it died or left")


class SharedSender(_End):
    """The sending end; a Sender. One thread uses it.

    way: to the receiving end. num_slots, slot_bytes: of the memory, as the other end makes it.
    beside, on_failure: makes this end of the edge beside, whose end `on_failure` is told. timeout_s: how long the
    receiving end may take to come. Raises PeerLostError, ProtocolError.
    """

    def __init__(
        self,
        way: socket.socket,
        peer_name: str,
        beside: MakeBeside,
        on_failure: OnFailure,
        *,
        num_slots: int,
        slot_bytes: int,
        clock: Clock,
        timeout_s: float,
    ) -> None:
        super().__init__(way, peer_name, beside, on_failure)
        self._clock = clock
        slots = self._take_slots(num_slots, _whole_pages(slot_bytes), timeout_s)
        self._slots = [slot[:slot_bytes] for slot in slots]
        # The last one that became free is the first to be filled: it is the likeliest to be in a cache.
        self._free = list(range(num_slots))
        self._number = 0

    def _take_slots(self, num_slots: int, slot_bytes: int, timeout_s: float) -> torch.Tensor:
        self._way.settimeout(timeout_s)
        try:
            said, descriptors, _, _ = socket.recv_fds(self._way, _SHAPE.size + 1, 1, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError as error:
            raise PeerLostError(f"{self._peer_name} shares no memory within {timeout_s:g} s") from error
        except OSError as error:
            raise self._ended() from error
        if not said:
            raise self._ended()
        try:
            if len(said) != _SHAPE.size or len(descriptors) != 1:
                raise self._broken(f"shares {len(descriptors)} memories in {len(said)} bytes")
            if (found := _SHAPE.unpack(said)) != (num_slots, slot_bytes):
                raise self._broken(f"shares {found} slots and bytes of each, not {num_slots, slot_bytes}")
            return _map(descriptors[0], num_slots, slot_bytes)
        except OSError as error:
            raise _no_room(num_slots, slot_bytes) from error
        finally:
            self._way.settimeout(None)
            for descriptor in descriptors:
                os.close(descriptor)

    def reserve(self) -> None:
        while (freed := self._hear(0 if self._free else None, _FREED)) is not None:
            slot = int(freed[0])
            if slot >= len(self._slots) or slot in self._free:
                raise self._broken(f"freed slot {slot}, which it does not hold")
            self._free.append(slot)

    def send(self, frame: Frame, payload: torch.Tensor | None = None) -> None:
        slot = self._free.pop()
        write(self._slots[slot], frame, self._number, payload)
        self._number += 1
        self._say(_FILLED.pack(slot, self._clock.now()))

    def close(self) -> None:
        if self._failure is None:
            self.reserve()
            self.send(Goodbye())
        self._beside.close()


class SharedReceiver(_End):
    """The receiving end; a Receiver, whose messages' memory it makes. One thread uses it.

    payloads, frame_bytes: of the largest legal message. The rest is as in SharedSender. Raises CapacityError where
    there is no room.
    """

    def __init__(
        self,
        way: socket.socket,
        peer_name: str,
        beside: MakeBeside,
        on_failure: OnFailure,
        *,
        num_slots: int,
        frame_bytes: int,
        payloads: Payloads,
        clock: Clock,
    ) -> None:
        super().__init__(way, peer_name, beside, on_failure)
        self._payloads = payloads
        self._clock = clock
        self._numbers = NumberCheck()
        self._slots = self._share_slots(num_slots, _whole_pages(payloads.max_bytes(frame_bytes)))
        self._bytes = [bytes_of(slot) for slot in self._slots]

    def _share_slots(self, num_slots: int, slot_bytes: int) -> torch.Tensor:
        """Untouched until used, so that a large bound costs no memory by itself."""
        memory = os.memfd_create("sarathi-pp edge")
        try:
            os.ftruncate(memory, num_slots * slot_bytes)
            slots = _map(memory, num_slots, slot_bytes)
            with suppress(OSError):  # who has left meanwhile is missed at the first wait
                socket.send_fds(self._way, [_SHAPE.pack(num_slots, slot_bytes)], [memory])
            return slots
        except OSError as error:
            raise _no_room(num_slots, slot_bytes) from error
        finally:
            os.close(memory)

    def receive(self, timeout_s: float | None = None) -> Message[torch.Tensor] | None:
        said = self._hear(0, _FILLED)
        waited = said is None and timeout_s != 0
        if waited:
            said = self._hear(timeout_s, _FILLED)
        if said is None:
            return None
        slot, filled_s = int(said[0]), said[1]
        if slot >= len(self._slots):
            raise self._broken(f"filled slot {slot} of {len(self._slots)}")
        # What was there before it was asked for was so from the moment on in which it was filled.
        arrived_s = self._clock.now() if waited else filled_s
        try:
            return self._message(slot, arrived_s)
        except ProtocolError as error:
            self._fail(error)
            raise

    def _message(self, slot: int, arrived_s: float) -> Message[torch.Tensor]:
        envelope, behind = read(self._bytes[slot])
        self._numbers.check(envelope.number)
        rows = self._payloads.rows(envelope.frame, behind)
        return Message(envelope.frame, rows, arrived_s, lambda: self._say(_FREED.pack(slot)))

    def close(self) -> None:
        self._beside.close()


def _no_room(num_slots: int, slot_bytes: int) -> CapacityError:
    return CapacityError(f"no memory for {num_slots} messages of up to {slot_bytes} bytes; try a smaller --chunk-size")


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _map(memory: int, num_slots: int, slot_bytes: int) -> torch.Tensor:
    """(num_slots, slot_bytes) uint8."""
    mapped = mmap.mmap(memory, num_slots * slot_bytes)
    return torch.frombuffer(mapped, dtype=torch.uint8).view(num_slots, slot_bytes)
