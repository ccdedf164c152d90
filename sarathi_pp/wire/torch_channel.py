"""Edges between ranks by the sends and receives of torch.distributed, with one process group per directed edge.

Facts about gloo, found by tests. A message may be shorter than the buffer of the receive, and leaves the end of the
buffer unchanged. A longer message aborts the process. If the other rank is dead, `wait` raises at once. If it is
silent, `wait` raises at the group's timeout. A short `wait`, used to look whether a message is there, destroys the
connection. So receives of the largest legal size are posted (started) in advance, the sender checks that size, and no
code uses short waits. A quiet sender sends a heartbeat every second. So only a rank that is really silent reaches the
timeout.

Each end has a thread of its own. The computing thread starts a send and does not wait for it. If nothing blocks the
send, the message is in the kernel at once, without waking the other thread. A send buffer is in use until its send is
complete.

Activations follow their frame in the same message. On a GPU, they pass through pinned host buffers, or an NCCL channel
carries them instead. Texts are copied out of their buffers when they arrive. The number of requests limits the number
of these copies.
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
        group: the communicator of this edge alone. Its timeout is the time for which the other end may be silent.
        peer: rank of the other end in this group.
        peer_name: name of the other end in messages to the user.
        frame_bytes: size of the largest legal frame, without its payload.
        payloads: form of the payloads.
        nccl: carries the payloads; None if each follows its frame in the same message.
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
        """Allocate a buffer for one message. On a CPU, only the parts that messages use will take memory.

        Raises:
            CapacityError: there is no memory for the buffer.
        """
        try:
            return torch.empty(self.message_bytes, dtype=torch.uint8, pin_memory=self.payloads.device.type == "cuda")
        except RuntimeError as error:
            raise CapacityError(
                f"no memory for a message buffer of {self.message_bytes} bytes; try a smaller --chunk-size"
            ) from error

    def take_device(self) -> None:
        """Set the GPU of the calling thread, which is new.

        Otherwise the thread would use the first GPU of the machine. Its first use takes hundreds of megabytes there.
        """
        if self.payloads.device.type == "cuda":
            torch.cuda.set_device(self.payloads.device)

    def rows(self) -> torch.Tensor | None:
        """Allocate memory on the GPU for one payload that NCCL carries; None if payloads are in the messages.

        Raises:
            CapacityError: there is no memory for it.
        """
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
        bytes: a view of `message`.
        rows: memory of the payload, if it comes by an NCCL channel.
    """

    message: torch.Tensor
    bytes: memoryview
    rows: torch.Tensor | None


class TorchSender:
    """The sending end of an edge over torch.distributed. See the interface Sender."""

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
                return  # a frame was queued meanwhile and also shows that this rank is alive
            head = codec.encode(self._progress.heartbeat(), self._number)
            self._number += 1
            self._outbox.put((self._begin(torch.frombuffer(bytearray(head), dtype=torch.uint8)), None))


class TorchReceiver:
    """The receiving end of an edge over torch.distributed. See the interface Receiver.

    It keeps a receive posted for every free buffer, so that the sender's data never waits for this rank.
    """

    def __init__(self, edge: Edge, num_buffers: int, options: EdgeOptions) -> None:
        self._edge = edge
        self._clock = options.clock
        self._peer_timeout_s = options.peer_timeout_s
        self._losses = options.losses
        # Not a SimpleQueue: its `get` waits forever if a signal handler runs beyond the timeout (CPython 3.11).
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
        """Wait until the thread has ended, which it does after the goodbye of the other end.

        Receives that are still posted end with the process group.
        """
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
        """Put one message into the queue for `receive`. Return True if it was the goodbye, the last message."""
        envelope, behind = read(buffer.bytes)
        self._numbers.check(envelope.number)
        frame = envelope.frame
        if isinstance(frame, Heartbeat):
            self._watch(frame)
            self._free.put(buffer)
            return False
        self._stalled_since = None
        if isinstance(frame, Fragment):
            # The reader of texts may be slow, for example if it prints to a pipe that nothing reads. Without a free
            # buffer no heartbeat would arrive either, and the other end would seem silent. So copy the text.
            self._inbox.put(Message(frame, copied(behind), self._clock.now(), lambda: None))
            self._free.put(buffer)
            return False
        payload, landed = self._payload(frame, behind, buffer.rows)
        self._inbox.put(Message(frame, payload, self._clock.now(), lambda: self._free.put(buffer), landed))
        return isinstance(frame, Goodbye)

    def _payload(
        self, frame: Frame, behind: memoryview, rows: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, Landing | None]:
        """Return the activations; None if the frame has none.

        If they come by an NCCL channel, return also the point in the GPU's work at which they are complete.
        """
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
        """Raise StalledError if the other end stays in one layer for longer than --peer-timeout: alive, but hanging.

        Args:
            beat: its latest heartbeat.
        """
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
    internal = SarathiError(f"a connection between ranks failed: {type(error).__name__}: {error}")
    internal.__cause__ = error
    return internal


def peer_lost(name: str, error: RuntimeError) -> PeerLostError:
    """Convert an error of gloo or NCCL into an error about the rank at the other end."""
    text = str(error).lower()
    silent = "timed out" in text or "timeout" in text
    what = "has been silent for longer than --peer-timeout" if silent else "closed its connection: it died or left"
    return PeerLostError(f"{name} {what}")
