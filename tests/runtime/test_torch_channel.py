"""The sending end of a stage edge, whose peer takes what it is sent when the test says so."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
import torch

from sarathi_pp.wire import codec, torch_channel
from sarathi_pp.wire.codec import Frame, Goodbye, Heartbeat
from sarathi_pp.wire.torch_channel import Edge, TorchSender

BLOCKED_S = 10.0


class Peer:
    """What arrives, each message only once it is let through."""

    def __init__(self) -> None:
        self.offered: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self.numbers: list[int] = []
        self._through = threading.Semaphore(0)

    def send(self, message: torch.Tensor, peer: int, group: object) -> None:
        envelope = codec.decode(memoryview(message.numpy()))
        self.numbers.append(envelope.number)
        self.offered.put(envelope.frame)
        self._through.acquire()

    def let(self, count: int) -> None:
        self._through.release(count)


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    peer = Peer()
    monkeypatch.setattr(torch_channel.dist, "send", peer.send)
    monkeypatch.setattr(torch_channel, "HEARTBEAT_S", 0.05)
    yield peer
    peer.let(1000)


def test_whoever_sends_does_not_wait_with_a_heartbeat_that_a_stopped_peer_does_not_take(peer):
    edge = Edge(None, 1, "stage 1", 4096, (1,), torch.float32, torch.device("cpu"))
    sender = TorchSender(edge, num_buffers=2, progress=lambda: (7, True), on_failure=lambda error: None)
    assert peer.offered.get(timeout=BLOCKED_S) == Heartbeat(7, True)
    sent = threading.Event()

    def send() -> None:
        sender.reserve()
        sender.send(Goodbye())
        sent.set()

    threading.Thread(target=send, daemon=True).start()
    assert sent.wait(BLOCKED_S), "it waits for the peer"
    peer.let(1)
    assert peer.offered.get(timeout=BLOCKED_S) == Goodbye()
    assert peer.numbers == [0, 1]
