"""Texts of any length over an edge, cut into parcels of bounded size.

    write(text) -> | parcel | parcel | last parcel | -> read()

An edge's buffers are as large as its largest message, and nobody knows how long a text will be.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from sarathi_pp.errors import ProtocolError
from sarathi_pp.wire import codec
from sarathi_pp.wire.channel import Receiver, Sender
from sarathi_pp.wire.codec import Goodbye, Parcel
from sarathi_pp.wire.message import Payloads

_PARCEL_BYTES = 64 << 10

FRAME_BYTES = codec.SMALL_FRAME_BYTES
PAYLOADS = Payloads(_PARCEL_BYTES, (), torch.uint8, torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Remote:
    """Whom one can write to and hear from. name: of the rank, for messages."""

    name: str
    outgoing: PostSender
    incoming: PostReceiver


class PostSender:
    """Any thread may write."""

    def __init__(self, sender: Sender[Tensor]) -> None:
        self._sender = sender
        self._whole = threading.Lock()

    def write(self, text: bytes) -> None:
        """Waits while the other end is slow to read. Raises what ended the edge."""
        pieces = [text[start : start + _PARCEL_BYTES] for start in range(0, len(text), _PARCEL_BYTES)]
        with self._whole:
            for number, piece in enumerate(pieces, start=1):
                self._sender.reserve()
                self._sender.send(Parcel(number == len(pieces)), torch.frombuffer(bytearray(piece), dtype=torch.uint8))

    def close(self) -> None:
        """Nothing more will be written. Raises what ended the edge."""
        with self._whole:
            self._sender.close()


class PostReceiver:
    """One thread reads. ended: the other end has closed."""

    def __init__(self, receiver: Receiver[Tensor]) -> None:
        self._receiver = receiver
        self._begun: list[bytes] = []
        self.ended = False

    def read(self, timeout_s: float | None = None) -> bytes | None:
        """The next text; None where its end has not come within timeout_s, or none will. Raises what ended the edge."""
        while not self.ended and (message := self._receiver.receive(timeout_s)) is not None:
            frame, payload = message.frame, message.payload
            if isinstance(frame, Goodbye):
                self.ended = True
                break
            if not isinstance(frame, Parcel) or payload is None:
                raise ProtocolError(f"a {type(frame).__name__} where texts travel")
            self._begun.append(payload.numpy().tobytes())
            message.release()
            if frame.last:
                text, self._begun = b"".join(self._begun), []
                return text
        return None

    def close(self) -> None:
        self._receiver.close()
