"""Stage edges over torch.distributed point-to-point, one process group per directed edge.

Facts about gloo, found by tests: a message may be shorter than the posted receive, and leaves the tail unchanged. A
longer message aborts the process. A dead peer raises at once. A silent one raises when `wait` reaches the group's
timeout. A short wait that is used as a poll destroys the pair. So receives of the largest legal size are posted in
advance, the sender asserts that size, and nothing polls. A heartbeat per second keeps anything but a real silence from
reaching the timeout.

Each end runs its own thread. The computing thread starts a send and does not wait for it. If nothing blocks it, the
message is in the kernel at once, without waking the other thread. A send buffer is held until its send is complete.

Activations follow their frame in the same message, on devices through pinned host buffers. Or they go by an NCCL
channel. Texts are copied out of their buffers as they come. The number of requests limits their number.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import dataclass

import torch

from sarathi_pp.errors import CapacityError, PeerLostError, ProtocolError, SarathiError, StalledError
from sarathi_pp.wire import codec
from sarathi_pp.wire.channel import COMMUNICATING, Landing, Message, NumberCheck
from sarathi_pp.wire.codec import Fragment, Frame, Goodbye, Heartbeat
from sarathi_pp.wire.edge_options import EdgeOptions
from sarathi_pp.wire.group import Group, Transfer
from sarathi_pp.wire.message import Payloads, announced_rows, bytes_of, copied, read, write
from sarathi_pp.wire.nccl_channel import NcclChannel

GOODBYE_S = 10.0


@dataclass(frozen=True, slots=True)
class Edge:
    """One directed edge, as one of its two ends sees it.

    Attributes:
        group: its own communicator, whose timeout is how long the peer may be silent.
        peer: rank of the other end in the edge's group.
        peer_name: name of the other end in messages to the user.
        frame_bytes: the largest legal frame.
        nccl: carries the payloads; None if they are in the frames' own messages.
    """

    group: Group
    peer: int
    peer_name: str
    frame_bytes: int
    payloads: Payloads
    nccl: NcclChannel | None = None

    @property
    def message_bytes(self) -> int:
        """Size of the largest legal message: a frame, and the payload if it follows the frame."""
        if self.nccl is not None:
            return self.frame_bytes
        return self.payloads.max_bytes(self.frame_bytes)

    def buffer(self) -> torch.Tensor:
        """Allocate the bytes of one message. On CPU they are untouched until used, so a large size costs no memory.

        Raises:
            CapacityError: there is no memory for them.
        """
        try:
            return torch.empty(self.message_bytes, dtype=torch.uint8, pin_memory=self.payloads.device.type == "cuda")
        except RuntimeError as error:
            raise CapacityError(
                f"no memory for messages of up to {self.message_bytes} bytes; try a smaller --chunk-size"
            ) from error

    def take_device(self) -> None:
        """Set the device of a new thread.

        Otherwise it is the first device of the machine, and the first use of that one takes hundreds of megabytes of
        it.
        """
        if self.payloads.device.type == "cuda":
            torch.cuda.set_device(self.payloads.device)

    def rows(self) -> torch.Tensor | None:
        """Allocate one payload's memory on the device, if it is not in the message. Raises CapacityError."""
        if self.nccl is None:
            return None
        max_tokens, device = self.payloads.max_tokens, self.payloads.device
        try:
            return self.nccl.buffer((max_tokens, *self.payloads.row_shape), self.payloads.dtype, device)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"no memory on {device} for activations of {max_tokens} tokens; try a smaller --chunk-size"
            ) from error


@dataclass(frozen=True, slots=True)
class _Buffer:
    """The memory for one received message.

    Attributes:
        bytes: the bytes of `message`.
        rows: memory of the payload, if it comes by an NCCL channel.
    """

    message: torch.Tensor
    bytes: memoryview
    rows: torch.Tensor | None


class TorchSender:
    """The sending end."""

    def __init__(self, edge: Edge, num_buffers: int, options: EdgeOptions) -> None:
        self._edge = edge
        self._num_buffers = num_buffers
        self._progress = options.progress
        self._heartbeat_s = options.heartbeat_s
        self._losses = options.losses
        self._free = threading.Semaphore(num_buffers)
        self._spare = deque(edge.buffer() for _ in range(num_buffers))
        # Transfers under way, each with its buffer. A heartbeat has none.
        self._outbox: queue.Queue[tuple[Transfer, torch.Tensor | None] | None] = queue.Queue()
        self._failure: SarathiError | None = None
        self._number = 0
        # Messages leave in the order of their numbers. The lock is never held during a wait for a message, because a
        # stopped peer can delay that for a minute. The compute thread would wait too, and could not react to a stop
        # signal.
        self._order = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"{COMMUNICATING}to {edge.peer_name}", daemon=True)
        self._thread.start()

    def reserve(self) -> None:
        self._free.acquire()
        if self._failure is not None:
            self._free.release()
            raise self._failure
        if self._edge.nccl is not None:
            self._edge.nccl.wait_for_room(self._num_buffers)

    def send(self, frame: Frame, payload: torch.Tensor | None = None) -> None:
        """Copy frame and payload into the reserved buffer and start the send. The sender thread waits for the send.

        If an error ends the edge meanwhile, the next `reserve` raises it.
        """
        channel = self._edge.nccl
        behind = payload if channel is None else None
        if behind is not None and behind.device.type == "cuda":
            # The copy to the host waits for the device in any case. Wait here, so that heartbeats need not wait too.
            torch.cuda.current_stream(behind.device).synchronize()
        with self._order:
            buffer = self._spare.popleft()
            size = write(buffer, frame, self._number, behind)  # a larger message would make gloo abort the peer
            self._number += 1
            try:
                self._outbox.put((self._begin(buffer[:size]), buffer))
            except SarathiError as error:
                self._fail(error)
                return
        if payload is not None and channel is not None:
            channel.send(payload)

    def close(self) -> None:
        if self._failure is None and self._thread.is_alive():
            self.reserve()
            self.send(Goodbye())
        self._outbox.put(None)
        self._thread.join(GOODBYE_S)

    def _run(self) -> None:
        try:
            self._edge.take_device()
            while True:
                try:
                    item = self._outbox.get(timeout=self._heartbeat_s)
                except queue.Empty:
                    self._queue_heartbeat()
                    continue
                if item is None:
                    return
                work, buffer = item
                _wait(work, self._edge)
                if buffer is not None:
                    self._spare.append(buffer)
                    self._free.release()
        except BaseException as error:  # after any error, the compute thread must not wait forever for this one
            self._fail(_as_sarathi_error(error))

    def _fail(self, error: SarathiError) -> None:
        self._failure = error
        self._free.release(self._num_buffers)
        self._losses.report_loss(error)

    def _begin(self, message: torch.Tensor) -> Transfer:
        try:
            return self._edge.group.send(message, self._edge.peer)
        except RuntimeError as error:
            raise peer_lost(self._edge.peer_name, error) from error

    def _queue_heartbeat(self) -> None:
        with self._order:
            if not self._outbox.empty():
                return  # a frame was queued meanwhile and shows the same
            head = codec.encode(self._progress.heartbeat(), self._number)
            self._number += 1
            self._outbox.put((self._begin(torch.frombuffer(bytearray(head), dtype=torch.uint8)), None))


class TorchReceiver:
    """The receiving end. It keeps every free buffer posted, so that data never waits for this rank."""

    def __init__(self, edge: Edge, num_buffers: int, options: EdgeOptions) -> None:
        self._edge = edge
        self._clock = options.clock
        self._peer_timeout_s = options.peer_timeout_s
        self._losses = options.losses
        # No SimpleQueue: if a signal handler runs beyond its timeout, it waits forever (CPython 3.11).
        self._inbox: queue.Queue[Message[torch.Tensor] | SarathiError] = queue.Queue()
        self._free: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        for _ in range(num_buffers):
            message = edge.buffer()
            self._free.put(_Buffer(message, bytes_of(message), edge.rows()))
        self._numbers = NumberCheck()
        self._stalled_since: tuple[Heartbeat, float] | None = None
        self._thread = threading.Thread(target=self._run, name=f"{COMMUNICATING}from {edge.peer_name}", daemon=True)
        self._thread.start()

    def receive(self, timeout_s: float | None = None) -> Message[torch.Tensor] | None:
        try:
            item = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, SarathiError):
            self._inbox.put(item)  # for the next call
            raise item
        if self._edge.nccl is not None and item.landed is not None:
            self._edge.nccl.admit(item.landed)
        return item

    def close(self) -> None:
        """Wait until the thread has ended after the goodbye. Posted receives end with the process group."""
        self._thread.join(GOODBYE_S)

    def _run(self) -> None:
        posted: deque[tuple[Transfer, _Buffer]] = deque()
        try:
            self._edge.take_device()
            while True:
                while not posted or not self._free.empty():
                    buffer = self._free.get()
                    posted.append((self._post(buffer.message), buffer))
                work, buffer = posted.popleft()
                _wait(work, self._edge)
                if self._deliver(buffer):
                    return
        except BaseException as error:  # after any error, the compute thread must not wait forever for this one
            self._fail(_as_sarathi_error(error))

    def _post(self, buffer: torch.Tensor) -> Transfer:
        try:
            return self._edge.group.receive(buffer, self._edge.peer)
        except RuntimeError as error:
            raise peer_lost(self._edge.peer_name, error) from error

    def _deliver(self, buffer: _Buffer) -> bool:
        """Pass one message on. Return True if it was the last."""
        envelope, behind = read(buffer.bytes)
        self._numbers.check(envelope.number)
        frame = envelope.frame
        if isinstance(frame, Heartbeat):
            self._watch(frame)
            self._free.put(buffer)
            return False
        self._stalled_since = None
        if isinstance(frame, Fragment):
            # The reader of texts may be slow, if no other process reads its output. Its peer must not seem silent.
            self._inbox.put(Message(frame, copied(behind), self._clock.now(), lambda: None))
            self._free.put(buffer)
            return False
        payload, landed = self._payload(frame, behind, buffer.rows)
        self._inbox.put(Message(frame, payload, self._clock.now(), lambda: self._free.put(buffer), landed))
        return isinstance(frame, Goodbye)

    def _payload(
        self, frame: Frame, behind: memoryview, rows: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, Landing | None]:
        """Return the activations. If they come by an NCCL channel, return also the point at which they are complete."""
        channel = self._edge.nccl
        if channel is None or rows is None:
            return self._edge.payloads.rows(frame, behind), None
        num_rows = announced_rows(frame)
        if behind:
            raise ProtocolError(f"{frame} came with {len(behind)} bytes of activations, not 0")
        if num_rows > len(rows):
            raise ProtocolError(f"{frame} has {num_rows} rows; at most {len(rows)} are legal")
        if not num_rows:
            return None, None
        filled = rows[:num_rows]
        return filled, channel.receive(filled)

    def _watch(self, beat: Heartbeat) -> None:
        """Raise StalledError if a peer stays in one layer for the whole timeout: it is alive, yet hangs."""
        now = self._clock.now()
        if not beat.busy:
            self._stalled_since = None
        elif self._stalled_since is None or self._stalled_since[0] != beat:
            self._stalled_since = (beat, now)
        elif now - self._stalled_since[1] > self._peer_timeout_s:
            raise StalledError(
                f"{self._edge.peer_name} has been in one layer of its microbatch {beat.progress} for more than "
                f"{self._peer_timeout_s:g} s: it hangs, or one layer takes longer than --peer-timeout. Try a larger "
                f"--peer-timeout, or a smaller --chunk-size",
                at_start=beat.progress == 0,
            )

    def _fail(self, error: SarathiError) -> None:
        self._inbox.put(error)
        self._losses.report_loss(error)


def _wait(work: Transfer, edge: Edge) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise peer_lost(edge.peer_name, error) from error


def _as_sarathi_error(error: BaseException) -> SarathiError:
    if isinstance(error, SarathiError):
        return error
    internal = SarathiError(f"the wire failed: {type(error).__name__}: {error}")
    internal.__cause__ = error
    return internal


def peer_lost(name: str, error: RuntimeError) -> PeerLostError:
    """Convert an error of gloo or NCCL into an error about the rank at the other end."""
    text = str(error).lower()
    silent = "timed out" in text or "timeout" in text
    what = "has been silent for longer than --peer-timeout" if silent else "closed its connection: it died or left"
    return PeerLostError(f"{name} {what}")
