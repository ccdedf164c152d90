"""The two ends of a stage edge, with a peer whose actions the test decides."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from sarathi_pp.core.plan import Chunk, MicroBatch, StepResult
from sarathi_pp.errors import PeerLostError, ProtocolError, SarathiError
from sarathi_pp.trace.clock import ManualClock
from sarathi_pp.wire import codec
from sarathi_pp.wire.channel import COMMUNICATING
from sarathi_pp.wire.codec import Fragment, Frame, Goodbye, Heartbeat, MicroBatchFrame
from sarathi_pp.wire.edge_options import EdgeOptions
from sarathi_pp.wire.stage_progress import StageProgress
from sarathi_pp.wire.torch_channel import Edge, Payloads, TorchReceiver, TorchSender

BLOCKED_S = 10.0
PAYLOADS = Payloads(512, (1,), torch.float32, torch.device("cpu"))


def edge(group: object) -> Edge:
    return Edge(group, 1, "stage 1", 2048, PAYLOADS)  # type: ignore[arg-type]


@dataclass
class Layers:
    """A stage that has computed that number of layers."""

    steps: int = 0


@dataclass
class Losses:
    """The errors that ended edges."""

    errors: queue.SimpleQueue[SarathiError] = field(default_factory=queue.SimpleQueue)

    def report_loss(self, error: SarathiError) -> None:
        self.errors.put(error)


def edge_options(
    losses: Losses | None = None, *, peer_timeout_s: float = 60.0, now_s: float = 0.0, beat: Heartbeat | None = None
) -> EdgeOptions:
    progress = StageProgress(Layers(beat.steps if beat is not None else 0))
    if beat is not None:
        progress.num_done, progress.busy = beat.progress, beat.busy
    return EdgeOptions(ManualClock(now_s), progress, losses or Losses(), peer_timeout_s)


def a_sender(peer: Peer, num_buffers: int, beat: Heartbeat, losses: Losses | None = None) -> TorchSender:
    return TorchSender(edge(peer), num_buffers, edge_options(losses, peer_timeout_s=0.15, beat=beat))


class Peer:
    """Messages offered to the peer, each taken only after the test lets it through. gone: it takes no more messages."""

    def __init__(self) -> None:
        self.offered: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self.numbers: list[int] = []
        self.messages: list[torch.Tensor] = []
        self.gone = False
        self._through = threading.Semaphore(0)

    def send(self, message: torch.Tensor, rank: int) -> Transfer:
        if self.gone:
            raise RuntimeError("Connection closed by peer")
        envelope = codec.decode(memoryview(message.numpy()))
        self.numbers.append(envelope.number)
        self.messages.append(message)
        self.offered.put(envelope.frame)
        return Transfer(self._through)

    def let(self, count: int) -> None:
        self._through.release(count)


@dataclass
class Transfer:
    through: threading.Semaphore

    def wait(self) -> None:
        self.through.acquire()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer, before = Peer(), threading.enumerate()
    yield peer
    # Senders look up their functions by name: a leftover thread would talk to the next test's peer.
    peer.gone = True
    peer.let(1000)
    for thread in threading.enumerate():
        if thread not in before and thread.name.startswith(COMMUNICATING):
            thread.join(BLOCKED_S)


def test_whoever_sends_does_not_wait_with_a_heartbeat_that_a_stopped_peer_does_not_take(peer):
    sender = a_sender(peer, 2, Heartbeat(7, True))
    assert peer.offered.get(timeout=BLOCKED_S) == Heartbeat(7, True)
    sent = threading.Event()

    def send() -> None:
        sender.reserve()
        sender.send(Goodbye())
        sent.set()

    threading.Thread(target=send, daemon=True).start()
    assert sent.wait(BLOCKED_S), "it waits for the peer"
    assert peer.offered.get(timeout=BLOCKED_S) == Goodbye()
    assert peer.numbers == [0, 1]


def in_turn(peer, losses: Losses | None = None) -> TorchSender:
    sender = a_sender(peer, 2, Heartbeat(7, True), losses)
    assert peer.offered.get(timeout=BLOCKED_S) == Heartbeat(7, True)
    return sender


def test_a_buffer_is_held_until_its_message_has_left(peer):
    """A third message waits for one of two buffers; each buffer keeps its content meanwhile."""
    sender = in_turn(peer)
    frames = [StepResult(index, (), ()) for index in range(3)]
    for frame in frames[:2]:
        sender.reserve()
        sender.send(frame)
    third = threading.Event()

    def send() -> None:
        sender.reserve()
        sender.send(frames[2])
        third.set()

    threading.Thread(target=send, daemon=True).start()
    assert not third.wait(0.3)
    assert [codec.decode(memoryview(one.numpy())).frame for one in peer.messages[1:]] == frames[:2]
    peer.let(2)  # the heartbeat, and the first message
    assert third.wait(BLOCKED_S)
    assert [peer.offered.get(timeout=BLOCKED_S) for _ in range(3)] == frames


def test_whoever_sends_to_a_lost_peer_is_told_at_the_next_reservation(peer):
    losses = Losses()
    sender = in_turn(peer, losses)
    sender.reserve()
    peer.gone = True
    sender.send(StepResult(0, (), ()))
    assert "closed its connection" in str(losses.errors.get(timeout=BLOCKED_S))
    for _ in range(5):
        with pytest.raises(PeerLostError, match="stage 1 closed its connection"):
            sender.reserve()
    peer.let(1000)
    sender.close()


class Posted:
    """A receive, matched with the next message that was sent, or with silence if none comes."""

    def __init__(self, messages: queue.SimpleQueue[bytes], buffer: torch.Tensor) -> None:
        self._messages = messages
        self._buffer = buffer

    def wait(self) -> None:
        message = self._messages.get()
        self._buffer[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)


class Sent(queue.SimpleQueue[bytes]):
    """Messages that arrive at a receiving end, one at a time."""

    def receive(self, buffer: torch.Tensor, rank: int) -> Posted:
        return Posted(self, buffer)


@pytest.fixture
def sent() -> Sent:
    return Sent()


def microbatch(number: int, payload: bytes) -> bytes:
    """Make a microbatch of three tokens."""
    chunks = (Chunk(0, 0, 0, 3, False, (1, 2, 3), (), None),)
    head = codec.encode(MicroBatchFrame(MicroBatch(0, chunks, (), 0.0)), number, len(payload))
    return head + payload + codec.trailer(number)


BEAT = codec.encode(Heartbeat(0, False), 0)
ROWS = bytes(3 * 4)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([BEAT, BEAT], "frame 0 came instead of 1"),
        ([BEAT, codec.encode(Goodbye(), 2)], "frame 2 came instead of 1"),
        ([BEAT, microbatch(1, ROWS)[:40]], "checksum mismatch"),
        ([BEAT, microbatch(1, bytes(3 * 2))], "6 bytes of activations, not 12"),
        ([BEAT, microbatch(1, bytes(4 * 4))], "16 bytes of activations, not 12"),
        ([BEAT, microbatch(1, ROWS), microbatch(2, ROWS)[:-12]], "frame 2: its payload of 12 bytes was cut"),
        ([BEAT, codec.encode(Goodbye(), 1, 8) + bytes(8) + codec.trailer(1)], "a Goodbye has 8 bytes of payload"),
        (
            [BEAT, codec.encode(Heartbeat(0, False), 1, 8) + bytes(8) + codec.trailer(1)],
            "a Heartbeat has 8 bytes of payload",
        ),
        ([BEAT, codec.encode(Goodbye(), 1, 5000)], "in a buffer of 4104"),
        ([BEAT, bytes(64)], "a message starts with"),
    ],
    ids=[
        *("replayed", "one lost", "cut", "of another dtype", "too long", "cut behind the frame"),
        *("goodbye", "heartbeat", "beyond", "zeros"),
    ],
)
def test_what_is_not_the_next_whole_message_ends_the_edge(messages, says, sent):
    losses = Losses()
    receiver = TorchReceiver(edge(sent), 2, edge_options(losses))
    for message in messages:
        sent.put(message)
    with pytest.raises(ProtocolError, match=says):
        while (whole := receiver.receive(BLOCKED_S)) is not None:
            whole.release()
    assert isinstance(losses.errors.get(timeout=BLOCKED_S), ProtocolError)
    with pytest.raises(ProtocolError, match=says):  # a second request gets the same error
        receiver.receive(BLOCKED_S)


def test_what_is_whole_comes_through(sent):
    receiver = TorchReceiver(edge(sent), 2, edge_options(now_s=5.0))
    for message in (BEAT, microbatch(1, torch.arange(3.0).numpy().tobytes()), codec.encode(Goodbye(), 2)):
        sent.put(message)
    first, last = receiver.receive(BLOCKED_S), receiver.receive(BLOCKED_S)
    assert first is not None and last is not None
    assert (first.payload.tolist(), first.arrived_s, last.frame) == ([[0.0], [1.0], [2.0]], 5.0, Goodbye())


def test_a_wait_that_a_signal_interrupts_ends_in_time(sent):
    """This holds even if the handler takes longer than the time left."""
    receiver = TorchReceiver(edge(sent), 2, edge_options())
    before = signal.signal(signal.SIGUSR1, lambda number, frame: time.sleep(0.2))
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        began_s = time.monotonic()
        assert receiver.receive(0.2) is None
        assert time.monotonic() - began_s < BLOCKED_S / 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_texts_are_taken_in_though_nobody_reads_them(sent):
    """Otherwise a peer that reports progress would find no posted receive and take this end for dead."""
    receiver = TorchReceiver(edge(sent), 2, edge_options())
    for number in range(20):
        body = bytes([number]) * (1 + number)
        sent.put(codec.encode(Fragment(True), number, len(body)) + body + codec.trailer(number))
    deadline_s = time.monotonic() + BLOCKED_S
    while not sent.empty():
        assert time.monotonic() < deadline_s, f"{sent.qsize()} texts are not taken"
        time.sleep(0.01)
    for number in range(20):
        message = receiver.receive(BLOCKED_S)
        assert message is not None and message.payload.tolist() == [number] * (1 + number)


def test_a_message_that_the_peer_would_not_take_is_not_sent(peer):
    """gloo would abort the process that has posted too short a receive."""
    sender = a_sender(peer, 1, Heartbeat(0, False))
    sender.reserve()
    with pytest.raises(ProtocolError, match="at most 4104 are legal"):
        sender.send(Goodbye(), torch.zeros(4096))
