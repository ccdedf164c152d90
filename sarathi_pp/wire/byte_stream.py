"""Send texts of any length over an edge, cut into fragments of bounded size.

    write(text) -> | fragment | fragment | last fragment | -> read()

A text may be longer than any message, since the buffers of an edge have a fixed size.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from sarathi_pp.errors import ProtocolError
from sarathi_pp.wire import codec
from sarathi_pp.wire.channel import Receiver, Sender
from sarathi_pp.wire.codec import Fragment, Goodbye
from sarathi_pp.wire.message import Payloads

_FRAGMENT_BYTES = 64 << 10

FRAME_BYTES = codec.SMALL_FRAME_BYTES
PAYLOADS = Payloads(_FRAGMENT_BYTES, (), torch.uint8, torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Remote:
    """Another rank with a byte stream in both directions."""

    name: str  # for messages to the user
    outgoing: ByteStreamSender
    incoming: ByteStreamReceiver


class ByteStreamSender:
    """The sending end of a byte stream. Any thread may write."""

    def __init__(self, sender: Sender[Tensor]) -> None:
        self._sender = sender
        self._lock = threading.Lock()  # held for a whole text

    def write(self, text: bytes) -> None:
        """Send a text of at least one byte. This may wait for a slow reader. Raises the error that ended the edge."""
        pieces = [text[start : start + _FRAGMENT_BYTES] for start in range(0, len(text), _FRAGMENT_BYTES)]
        with self._lock:
            for number, piece in enumerate(pieces, start=1):
                payload = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
                self._sender.reserve()
                self._sender.send(Fragment(last=number == len(pieces)), payload)

    def close(self) -> None:
        """Say that nothing more will be written. Raises the error that ended the edge."""
        with self._lock:
            self._sender.close()


class ByteStreamReceiver:
    """The receiving end of a byte stream. Only one thread may read.

    Attributes:
        ended: the other end has closed the stream.
    """

    def __init__(self, receiver: Receiver[Tensor]) -> None:
        self._receiver = receiver
        self._fragments: list[bytes] = []  # of a text that is not complete
        self.ended = False

    def read(self, timeout_s: float | None = None) -> bytes | None:
        """Return the next text; None if the other end has closed the stream, or if a fragment takes too long.

        Raises the error that ended the edge.

        Args:
            timeout_s: seconds to wait for each fragment of the text; None waits without limit.
        """
        while not self.ended and (message := self._receiver.receive(timeout_s)) is not None:
            frame, payload = message.frame, message.payload
            if isinstance(frame, Goodbye):
                self.ended = True
                break
            if not isinstance(frame, Fragment) or payload is None:
                raise ProtocolError(f"a {type(frame).__name__} came on an edge for texts")
            self._fragments.append(payload.numpy().tobytes())
            message.release()
            if frame.last:
                text, self._fragments = b"".join(self._fragments), []
                return text
        return None

    def close(self) -> None:
        self._receiver.close()
