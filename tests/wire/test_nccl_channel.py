"""Activations by NCCL channels: dependencies on a device's streams, and whole runs on CPU."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from sarathi_pp.core.plan import Chunk, MicroBatch
from sarathi_pp.errors import ProtocolError
from sarathi_pp.wire import codec
from sarathi_pp.wire.codec import MicroBatchFrame
from sarathi_pp.wire.nccl_channel import NcclChannel
from sarathi_pp.wire.torch_channel import Edge, Payloads, TorchReceiver, TorchSender
from tests.commands.processes import run, torchrun
from tests.exact.references import NEW_TOKENS
from tests.wire.test_torch_channel import edge_options

WORKER = Path(__file__).with_name("nccl_channel_worker.py")
BLOCKED_S = 10.0
PAYLOADS = Payloads(32, (1,), torch.float32, torch.device("cpu"))


@dataclass
class Device:
    """Two streams of work, each done in order, and the other work that each piece waits for."""

    streams: dict[str, list[str]] = field(default_factory=lambda: {"computing": [], "side": []})
    waits: dict[str, set[str]] = field(default_factory=dict)  # piece of work -> work that it waits for
    pending: dict[str, set[str]] = field(default_factory=lambda: {"computing": set(), "side": set()})
    current: str = "computing"
    done: set[str] = field(default_factory=set)

    def do(self, work: str) -> None:
        stream = self.streams[self.current]
        self.waits[work] = {*stream[-1:], *self.pending[self.current]}
        self.pending[self.current] = set()
        stream.append(work)

    def waits_for(self, work: str, other: str) -> bool:
        return any(before == other or self.waits_for(before, other) for before in self.waits[work])

    def send(self, rows: torch.Tensor, rank: int) -> Transfer:
        return self._transfer(f"send {len(rows)}")

    def receive(self, rows: torch.Tensor, rank: int) -> Transfer:
        rows.fill_(7.0)
        return self._transfer(f"receive {len(rows)}")

    def _transfer(self, what: str) -> Transfer:
        assert self.current == "side", "a transfer on the stream that computes keeps it waiting for the peer"
        self.do(what)
        return Transfer()


class Transfer:
    def wait(self) -> None: ...


@dataclass
class Landed:
    device: Device
    work: str

    def at_s(self) -> float | None:
        return 1.0 if self.work in self.device.done else None

    def wait(self) -> None:
        self.device.done.add(self.work)


@dataclass
class Side:
    device: Device

    @contextmanager
    def entered(self) -> Iterator[None]:
        before, self.device.current = self.device.current, "side"
        yield
        self.device.current = before

    def after_computing(self) -> None:
        self.device.pending["side"].update(self.device.streams["computing"][-1:])

    def mark(self) -> Landed:
        return Landed(self.device, self.device.streams["side"][-1])

    def before_computing(self, mark: Landed) -> None:
        self.device.pending["computing"].add(mark.work)


@pytest.fixture
def device() -> Device:
    return Device()


def channel_of(device: Device) -> NcclChannel:
    return NcclChannel(device, 1, Side(device))  # type: ignore[arg-type]


def test_a_send_waits_for_what_was_computed_and_nothing_computed_waits_for_a_send(device):
    sending = channel_of(device)
    device.do("microbatch 0")
    sending.send(torch.zeros(3))
    device.do("microbatch 1")
    sending.send(torch.zeros(4))
    assert device.waits_for("send 3", "microbatch 0") and not device.waits_for("send 3", "microbatch 1")
    assert device.waits_for("send 4", "microbatch 1") and device.waits_for("send 4", "send 3")
    assert not device.waits_for("microbatch 1", "send 3")


def test_what_is_computed_waits_for_what_was_admitted_and_for_nothing_later(device):
    receiving = channel_of(device)
    first, second = receiving.receive(torch.zeros(3)), receiving.receive(torch.zeros(4))
    receiving.admit(first)
    device.do("microbatch 0")
    receiving.admit(second)
    device.do("microbatch 1")
    assert device.waits_for("microbatch 0", "receive 3") and not device.waits_for("microbatch 0", "receive 4")
    assert device.waits_for("microbatch 1", "receive 4")
    assert not device.waits_for("receive 4", "microbatch 0"), "double buffers: the next one comes meanwhile"


def test_a_buffer_is_not_filled_while_what_had_its_memory_before_is_at_work(device):
    receiving = channel_of(device)
    device.do("warm-up")
    rows = receiving.buffer((3,), torch.float32, torch.device("cpu"))
    device.do("microbatch 0")
    receiving.receive(rows)
    assert device.waits_for("receive 3", "warm-up") and not device.waits_for("receive 3", "microbatch 0")


def test_rows_are_kept_until_they_have_left_and_no_more_than_that_many_wait(device):
    sending = channel_of(device)
    for size in (1, 2, 3):
        sending.wait_for_room(3)
        device.do(f"microbatch {size}")
        sending.send(torch.zeros(size))
    assert device.done == set() and len(sending._leaving) == 3
    sending.wait_for_room(3)
    assert device.done == {"send 1"}, "the oldest was waited for, and no other"
    device.done.add("send 2")
    sending.wait_for_room(3)
    assert [len(rows) for _, rows in sending._leaving] == [3], "the memory of what has left is given back"


def frame_of(num_tokens: int) -> MicroBatchFrame:
    chunks = (Chunk(0, 0, 0, num_tokens, False, (1,) * num_tokens, (), None),)
    return MicroBatchFrame(MicroBatch(0, chunks, (), 0.0))


class Said:
    """A frame that has left."""

    def wait(self) -> None: ...


@dataclass
class Frames:
    """The group of an edge that also has a channel: keeps the bytes that were sent."""

    said: queue.SimpleQueue[bytes] = field(default_factory=queue.SimpleQueue)

    def send(self, message: torch.Tensor, rank: int) -> Said:
        self.said.put(bytes(message.numpy()))
        return Said()


def test_a_frame_leaves_before_its_rows_and_without_them(device):
    """If it did not, the device of the other end could not start to receive the rows."""
    frames = Frames()
    sender = TorchSender(
        Edge(frames, 1, "stage 1", 2048, PAYLOADS, channel_of(device)),  # type: ignore[arg-type]
        2,
        edge_options(),
    )
    device.do("microbatch 0")
    sender.reserve()
    sender.send(frame_of(3), torch.zeros(3, 1))
    envelope = codec.decode(frames.said.get(timeout=BLOCKED_S))
    assert (envelope.frame, envelope.payload_bytes) == (frame_of(3), 0)
    assert device.streams["side"] == ["send 3"]
    sender.close()


class Posted:
    """A receive of a message, matched with the next one, or with silence if none comes."""

    def __init__(self, messages: queue.SimpleQueue[bytes], buffer: torch.Tensor) -> None:
        self._messages = messages
        self._buffer = buffer

    def wait(self) -> None:
        message = self._messages.get()
        self._buffer[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)


class Arriving(queue.SimpleQueue[bytes]):
    """The group of an edge that also has a channel: messages that arrive."""

    def receive(self, buffer: torch.Tensor, rank: int) -> Posted:
        return Posted(self, buffer)


def receiver_of(device: Device, message: bytes) -> TorchReceiver:
    messages = Arriving()
    messages.put(message)
    return TorchReceiver(
        Edge(messages, 1, "stage 0", 2048, PAYLOADS, channel_of(device)),  # type: ignore[arg-type]
        2,
        edge_options(now_s=5.0),
    )


def test_a_message_is_handed_out_before_its_rows_have_landed(device):
    receiver = receiver_of(device, codec.encode(frame_of(3), 0))
    message = receiver.receive(BLOCKED_S)
    assert message is not None and message.payload is not None and message.landed is not None
    assert message.payload.shape == (3, 1) and message.landed.at_s() is None
    device.do("microbatch 0")
    assert device.waits_for("microbatch 0", "receive 3")


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (codec.encode(frame_of(3), 0, 12) + bytes(12) + codec.trailer(0), "12 bytes of activations, not 0"),
        (codec.encode(frame_of(33), 0), "has 33 rows; at most 32 are legal"),
    ],
    ids=["behind the frame", "too many"],
)
def test_what_no_nccl_channel_can_carry_ends_the_edge(message, says, device):
    with pytest.raises(ProtocolError, match=says):
        receiver_of(device, message).receive(BLOCKED_S)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.full), 3])
def test_whole_runs_with_nccl_channels_give_the_same_tokens(stages, reference, tmp_path):
    """Two models in turn, over new channels each."""
    known = [reference(family) for family in ("llama", "qwen3")]
    plan, answers = tmp_path / "plan.json", tmp_path / "answers.json"
    cases = [
        {
            "model": str(each.directory),
            "run_dir": str(tmp_path / each.family),
            "prompts": each.prompts,
            "new_tokens": NEW_TOKENS,
        }
        for each in known
    ]
    plan.write_text(json.dumps(cases))
    done = run((*torchrun(stages, WORKER), str(plan), str(answers)), tmp_path, timeout_s=150)
    for each, output in zip(known, json.loads(answers.read_text()), strict=True):
        assert [tuple(tokens) for tokens in output] == list(each.outputs), each.family
    tokens = sum(len(prompt) + NEW_TOKENS - 1 for each in known for prompt in each.prompts) + len(known)
    assert done.stderr.count(f" {tokens} sent") == done.stderr.count(f" {tokens} received") == stages - 1, done.stderr
