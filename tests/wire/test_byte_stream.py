"""Texts of any length over an edge with a limit on message size."""

from __future__ import annotations

import threading

import pytest
import torch

from sarathi_pp.errors import ProtocolError
from sarathi_pp.trace.clock import ManualClock
from sarathi_pp.wire.byte_stream import PAYLOADS, ByteStreamReceiver, ByteStreamSender
from sarathi_pp.wire.channel import QueueChannel
from sarathi_pp.wire.codec import Heartbeat

LARGEST = PAYLOADS.max_tokens


def byte_stream(num_buffers: int = 4) -> tuple[ByteStreamSender, ByteStreamReceiver, QueueChannel[torch.Tensor]]:
    channel: QueueChannel[torch.Tensor] = QueueChannel(ManualClock(), num_buffers)
    return ByteStreamSender(channel), ByteStreamReceiver(channel), channel


@pytest.mark.parametrize("size", [1, LARGEST - 1, LARGEST, LARGEST + 1, 3 * LARGEST])
def test_a_text_comes_whole(size):
    sender, receiver, _ = byte_stream()
    text = bytes(number % 251 for number in range(size))
    sender.write(text)
    assert receiver.read(0) == text and receiver.read(0) is None and not receiver.ended


def test_no_fragment_is_larger_than_the_edge_takes():
    sender, _, channel = byte_stream()
    sender.write(bytes(2 * LARGEST + 5))
    assert [channel.receive(0).payload.numel() for _ in range(3)] == [LARGEST, LARGEST, 5]


def test_texts_of_many_threads_are_not_mixed():
    sender, receiver, _ = byte_stream(num_buffers=2)
    texts = [bytes([number]) * (2 * LARGEST + number) for number in range(6)]
    threads = [threading.Thread(target=sender.write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    assert sorted(receiver.read(10) for _ in texts) == sorted(texts)


def test_after_the_goodbye_there_is_nothing_more():
    sender, receiver, _ = byte_stream()
    sender.write(b"last")
    sender.close()
    assert receiver.read(None) == b"last"
    assert receiver.read(None) is None and receiver.ended and receiver.read(None) is None


def test_anything_but_a_fragment_is_refused():
    _, receiver, channel = byte_stream()
    channel.reserve()
    channel.send(Heartbeat(0, False))
    with pytest.raises(ProtocolError, match="a Heartbeat came on an edge for texts"):
        receiver.read(0)
