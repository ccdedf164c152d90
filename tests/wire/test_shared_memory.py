"""The two ends of an edge through shared memory: in one process, and in two processes of which one is killed.

The other edge, and the fault tests, detect stopped processes.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_pp.core.plan import Chunk, MicroBatch, StageTime, StepResult
from sarathi_pp.errors import PeerLostError, ProtocolError, SarathiError
from sarathi_pp.trace.clock import Clock, ManualClock, SystemClock
from sarathi_pp.wire import shared_memory
from sarathi_pp.wire.codec import Frame, Goodbye, HeadFrame, MicroBatchFrame
from sarathi_pp.wire.message import Payloads
from sarathi_pp.wire.shared_memory import SharedReceiver, SharedSender, SlotConnection, SlotListener, connect

BLOCKED_S = 10.0
PAYLOADS = Payloads(64, (8,), torch.bfloat16, torch.device("cpu"))
FRAME_BYTES = 4096
SLOTS = 3
SYSTEM_CLOCK = SystemClock()


@dataclass
class Heartbeats:
    """The edge of heartbeats, which receives nothing on its own."""

    closed: bool = False

    def close(self) -> None:
        self.closed = True


@dataclass
class Losses:
    errors: list[SarathiError] = field(default_factory=list)

    def report_loss(self, error: SarathiError) -> None:
        self.errors.append(error)


@dataclass
class Pair:
    sender: SharedSender
    receiver: SharedReceiver
    ways: tuple[socket.socket, socket.socket]
    connections: tuple[SlotConnection, SlotConnection]
    heartbeats: tuple[Heartbeats, Heartbeats]
    losses: Losses


def connected() -> tuple[socket.socket, socket.socket]:
    listener = SlotListener()
    to = connect(listener.name)
    came = listener.accept(BLOCKED_S)
    listener.close()
    assert to is not None and came is not None
    return to, came


@contextmanager
def opened(clock: Clock = SYSTEM_CLOCK) -> Iterator[Pair]:
    to, came = connected()
    heartbeats, losses = (Heartbeats(), Heartbeats()), Losses()
    incoming, outgoing = SlotConnection(came, "stage 0", losses), SlotConnection(to, "stage 1", losses)
    receiver = SharedReceiver(
        incoming, heartbeats[1], clock, num_slots=SLOTS, frame_bytes=FRAME_BYTES, payloads=PAYLOADS
    )
    slot_bytes = PAYLOADS.max_bytes(FRAME_BYTES)
    sender = SharedSender(outgoing, heartbeats[0], clock, num_slots=SLOTS, slot_bytes=slot_bytes, timeout_s=BLOCKED_S)
    with to, came:
        yield Pair(sender, receiver, (to, came), (outgoing, incoming), heartbeats, losses)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with opened() as pair:
        yield pair


def frame_of(index: int, num_tokens: int) -> MicroBatchFrame:
    chunk = Chunk(0, 0, 0, num_tokens, False, tuple(range(num_tokens)), (), None)
    return MicroBatchFrame(MicroBatch(index, (chunk,), (), 0.5), (StageTime(index, 0.25),))


def result_of(index: int) -> StepResult:
    return StepResult(index, (), ())


def rows_of(num_rows: int, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def send(pair: Pair, frame: Frame, payload: torch.Tensor | None = None) -> None:
    pair.sender.reserve()
    pair.sender.send(frame, payload)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 64), st.booleans()), min_size=1, max_size=40),
)
@settings(max_examples=40, deadline=None)
def test_what_is_sent_arrives_whole_and_in_order_whatever_is_held_meanwhile(steps):
    """held: messages whose memory is still read; no later message overwrites them."""
    with opened() as pair:
        run_through(pair, steps)


def run_through(pair: Pair, steps: list[tuple[int, int, bool]]) -> None:
    held: list[tuple[torch.Tensor, torch.Tensor, Callable[[], None]]] = []
    for index, (kind, size, keep) in enumerate(steps):
        rows = rows_of(size, index)
        frame: Frame = (frame_of(index, size), HeadFrame(index, size), result_of(index))[kind]
        send(pair, frame, rows if kind < 2 else None)
        message = pair.receiver.receive(0)
        assert message is not None and message.frame == frame
        if kind == 2:
            assert message.payload is None
            message.release()
            continue
        assert message.payload is not None and torch.equal(message.payload, rows)
        held.append((message.payload, rows, message.release))
        if not keep or len(held) == SLOTS:
            held.pop(0)[2]()
        assert all(torch.equal(lying, was) for lying, was, _ in held)
    assert pair.receiver.receive(0) is None


def test_a_sender_waits_for_memory_until_a_message_is_released(pair):
    for index in range(SLOTS):
        send(pair, frame_of(index, 4), rows_of(4, index))
    waited = threading.Event()

    def reserve() -> None:
        pair.sender.reserve()
        waited.set()

    threading.Thread(target=reserve, daemon=True).start()
    message = pair.receiver.receive(BLOCKED_S)
    assert message is not None and not waited.wait(0.2)
    message.release()
    assert waited.wait(BLOCKED_S)


def test_memory_that_was_freed_last_is_filled_first(pair):
    """A hop then writes and reads memory that a cache holds."""
    places = set()
    for index in range(10):
        send(pair, frame_of(index, 4), rows_of(4, index))
        message = pair.receiver.receive(BLOCKED_S)
        assert message is not None and message.payload is not None
        places.add(message.payload.data_ptr())
        message.release()
    assert len(places) == 1


def test_a_message_arrives_when_it_was_there_or_when_it_woke_who_waited():
    clock = ManualClock(1.0)
    with opened(clock) as pair:
        send(pair, result_of(0))
        clock.sleep(4.0)
        before = pair.receiver.receive(0)
        assert before is not None and before.arrived_s == 1.0
        threading.Timer(0.1, lambda: send(pair, result_of(1))).start()
        after = pair.receiver.receive(BLOCKED_S)
        assert after is not None and after.arrived_s == 5.0


def test_waits_end_in_time_and_after_a_signal(pair):
    began_s = time.monotonic()
    assert pair.receiver.receive(0.1) is None
    before = signal.signal(signal.SIGUSR1, lambda number, frame: time.sleep(0.2))
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        assert pair.receiver.receive(0.2) is None
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - began_s < BLOCKED_S / 2


def test_a_goodbye_comes_behind_everything_else(pair):
    send(pair, result_of(0))
    pair.sender.close()
    frames = []
    for _ in range(2):
        message = pair.receiver.receive(BLOCKED_S)
        assert message is not None
        frames.append(message.frame)
        message.release()
    pair.receiver.close()
    assert frames == [result_of(0), Goodbye()]
    assert all(edge.closed for edge in pair.heartbeats) and not pair.losses.errors


@pytest.mark.parametrize("receives", [True, False], ids=["receiver", "sender"])
def test_who_waits_hears_of_what_ended_the_edge_beside_and_first_of_what_had_come(receives, pair):
    silent = PeerLostError("stage 9 has been silent for longer than --peer-timeout")
    for index in range(SLOTS):
        send(pair, result_of(index))
    ending = threading.Timer(0.1, pair.connections[receives].report_loss, (silent,))
    ending.start()
    if receives:
        for index in range(SLOTS):
            message = pair.receiver.receive(BLOCKED_S)
            assert message is not None and message.frame == result_of(index)
    for _ in range(2):  # a second request gets the same error
        with pytest.raises(PeerLostError, match="stage 9 has been silent"):
            pair.receiver.receive(BLOCKED_S) if receives else pair.sender.reserve()
    if not receives:
        pair.sender.close()
    ending.join()
    assert pair.losses.errors == [silent]


def test_who_sends_to_a_lost_peer_is_told_at_the_next_reservation(pair):
    pair.sender.reserve()
    pair.ways[1].close()
    pair.sender.send(result_of(0))
    with pytest.raises(PeerLostError, match="stage 1 closed its connection"):
        pair.sender.reserve()


def test_releasing_to_a_sender_that_has_left_is_no_error(pair):
    send(pair, result_of(0))
    message = pair.receiver.receive(BLOCKED_S)
    pair.ways[0].close()
    assert message is not None
    message.release()
    with pytest.raises(PeerLostError, match="stage 0 closed its connection"):
        pair.receiver.receive(BLOCKED_S)


@contextmanager
def tampered(pair: Pair) -> Iterator[torch.Tensor]:
    """Return the bytes in memory of a message that has arrived and was not received."""
    send(pair, frame_of(0, 4), rows_of(4, 0))
    message = pair.ways[1].recv(64, socket.MSG_PEEK)
    slot, _ = struct.unpack("<Id", message)
    yield pair.receiver._slots[slot]


def flip_frame(memory: torch.Tensor) -> None:
    memory[40] ^= 1


def cut_behind(memory: torch.Tensor) -> None:
    memory[256:] = 0


@pytest.mark.parametrize(
    ("tamper", "says"), [(flip_frame, "checksum mismatch"), (cut_behind, "payload of 64 bytes was cut")]
)
def test_what_is_not_the_message_that_was_written_ends_the_edge(tamper, says, pair):
    with tampered(pair) as memory:
        tamper(memory)
    for _ in range(2):
        with pytest.raises(ProtocolError, match=says):
            pair.receiver.receive(BLOCKED_S)
    assert [type(one) for one in pair.losses.errors] == [ProtocolError]


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (struct.pack("<Id", SLOTS, 0.0), f"filled slot {SLOTS} of {SLOTS}"),
        (b"x", "sent a datagram of 1 bytes, not 12"),
        (bytes(13), "sent a datagram of 13 bytes, not 12"),
        (struct.pack("<Id", 1, 0.0), "a message starts with"),
    ],
    ids=["no such slot", "short", "long", "nothing in it"],
)
def test_what_no_sender_says_ends_the_edge(said, says, pair):
    pair.ways[0].send(said)
    for _ in range(2):  # a second request gets the same error
        with pytest.raises(ProtocolError, match=says):
            pair.receiver.receive(BLOCKED_S)
    assert [type(one) for one in pair.losses.errors] == [ProtocolError]


@pytest.mark.parametrize(
    ("freed", "says"),
    [
        ([struct.pack("<I", SLOTS)], f"freed slot {SLOTS}, which it does not hold"),
        ([struct.pack("<I", 1)], "freed slot 1, which it does not hold"),
        ([struct.pack("<I", SLOTS - 1)] * 2, f"freed slot {SLOTS - 1}, which it does not hold"),
        ([b"12345"], "sent a datagram of 5 bytes, not 4"),
    ],
    ids=["no such slot", "never filled", "twice", "long"],
)
def test_what_no_receiver_says_ends_the_edge(freed, says, pair):
    """Otherwise two messages would share the same memory."""
    send(pair, result_of(0))
    for said in freed:
        pair.ways[1].send(said)
    for _ in range(2):
        with pytest.raises(ProtocolError, match=says):
            pair.sender.reserve()


def test_who_leaves_with_something_unread_is_lost_behind_its_last_message(pair):
    """The kernel reports this to the other end before the data that was sent."""
    for index in range(SLOTS):
        send(pair, result_of(index))
    first = pair.receiver.receive(BLOCKED_S)
    assert first is not None
    first.release()
    pair.ways[0].close()
    for index in range(1, SLOTS):
        message = pair.receiver.receive(BLOCKED_S)
        assert message is not None and message.frame == result_of(index)
    with pytest.raises(PeerLostError, match="stage 0 closed its connection"):
        pair.receiver.receive(BLOCKED_S)


def test_memory_of_more_than_4_gib_a_slot_costs_nothing_until_it_is_used():
    to, came = connected()
    rows = Payloads(1 << 20, (4096,), torch.bfloat16, torch.device("cpu"))
    with to, came:
        opened_receiver(came, payloads=rows)
        sender = opened_sender(to, slot_bytes=rows.max_bytes(FRAME_BYTES), timeout_s=BLOCKED_S)
        sender.reserve()
        sender.send(result_of(0))
    assert rows.max_bytes(FRAME_BYTES) > 2**33


def test_a_receiver_that_leaves_at_once_is_lost():
    to, came = connected()
    came.close()
    with to, pytest.raises(PeerLostError, match="stage 1 closed its connection"):
        opened_sender(to)


def test_a_frame_of_other_rows_than_it_brings_ends_the_edge(pair):
    send(pair, frame_of(0, 4), rows_of(3, 0))
    with pytest.raises(ProtocolError, match="m0.* came with 48 bytes of activations, not 64"):
        pair.receiver.receive(BLOCKED_S)


def test_a_message_that_has_no_room_is_not_written(pair):
    pair.sender.reserve()
    with pytest.raises(ProtocolError, match="are legal"):
        pair.sender.send(frame_of(0, 65), torch.zeros(2000, 8, dtype=torch.bfloat16))


def test_a_name_that_nobody_has_opens_nothing():
    listener = SlotListener()
    name = listener.name
    listener.close()
    assert connect(name) is None


def test_another_users_processes_are_not_let_in(monkeypatch):
    """Abstract names are open to every user."""
    listener = SlotListener()
    ours = connect(listener.name)
    assert ours is not None
    monkeypatch.setattr(shared_memory.os, "geteuid", lambda: 12345)
    assert connect(listener.name) is None
    assert listener.accept(0.1) is None
    ours.close()
    listener.close()


def opened_sender(
    way: socket.socket, *, num_slots: int = SLOTS, slot_bytes: int = 1, timeout_s: float = 0.1
) -> SharedSender:
    connection = SlotConnection(way, "stage 1", Losses())
    return SharedSender(
        connection, Heartbeats(), SYSTEM_CLOCK, num_slots=num_slots, slot_bytes=slot_bytes, timeout_s=timeout_s
    )


def opened_receiver(way: socket.socket, name: str = "stage 0", payloads: Payloads = PAYLOADS) -> SharedReceiver:
    connection = SlotConnection(way, name, Losses())
    return SharedReceiver(
        connection, Heartbeats(), SYSTEM_CLOCK, num_slots=SLOTS, frame_bytes=FRAME_BYTES, payloads=payloads
    )


def test_who_shares_other_memory_than_agreed_is_refused():
    to, came = connected()
    with to, came:
        opened_receiver(came)
        with pytest.raises(ProtocolError, match="shares"):
            opened_sender(to, slot_bytes=1)


def test_a_receiver_that_never_comes_is_lost():
    to, came = connected()
    with to, came, pytest.raises(PeerLostError, match="stage 1 shares no memory within 0.1 s"):
        opened_sender(to)


CHILD = """
import sys, time
from tests.wire.test_shared_memory import *
sender = opened_sender(connect(sys.argv[1]), slot_bytes=PAYLOADS.max_bytes(FRAME_BYTES), timeout_s=BLOCKED_S)
for index in range(2):
    sender.reserve()
    sender.send(frame_of(index, 64), rows_of(64, index))
print("sent", flush=True)
time.sleep(600)
"""


def test_a_killed_sender_is_lost_behind_its_last_message():
    listener = SlotListener()
    child = subprocess.Popen([sys.executable, "-c", CHILD, listener.name], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        came = listener.accept(60.0)
        assert came is not None
        with came, child.stdout as said:
            receiver = opened_receiver(came, "child")
            assert said.readline() == b"sent\n"
            child.kill()
            child.wait()
            for index in range(2):
                message = receiver.receive(BLOCKED_S)
                assert message is not None and message.payload is not None
                assert message.frame == frame_of(index, 64) and torch.equal(message.payload, rows_of(64, index))
            with pytest.raises(PeerLostError, match="child closed its connection"):
                receiver.receive(BLOCKED_S)
    finally:
        listener.close()
        child.kill()
        child.wait()
