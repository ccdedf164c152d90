"""Write a message of an edge into a buffer of bytes, and read it back: a frame, then its activations.

Both ends of the edge know the size of the buffer, and not the length of a message:

| frame, padded | activations | trailer |     see wire/codec.py
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch

from sarathi_pp.errors import ProtocolError
from sarathi_pp.wire import codec
from sarathi_pp.wire.codec import Envelope, Fragment, Frame, HeadFrame, MicroBatchFrame


@dataclass(frozen=True, slots=True)
class Payloads:
    """The form of the activations that an edge carries, which are the payload of its messages.

    Attributes:
        max_tokens: most rows of a message; a row belongs to one token. On an edge that carries texts (byte_stream.py),
            the size of the largest fragment in bytes. On an edge that carries only frames, 0.
        row_shape: shape of a row.
        device: device of this rank, on which the activations are.
    """

    max_tokens: int
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def none(cls) -> Payloads:
        return cls(0, (0,), torch.uint8, torch.device("cpu"))

    def num_bytes(self, num_tokens: int) -> int:
        return num_tokens * math.prod(self.row_shape) * self.dtype.itemsize

    def max_bytes(self, frame_bytes: int) -> int:
        """Return the size of the largest legal message. `frame_bytes` is the size of its frame."""
        return frame_bytes + self.num_bytes(self.max_tokens) + codec.TRAILER_BYTES

    def rows(self, frame: Frame, behind: memoryview) -> torch.Tensor | None:
        """Return the activations as (rows, *row_shape), or None if there are none.

        Args:
            behind: the bytes after the frame. On a CPU the result is a view of them, on a GPU a copy.

        Raises:
            ProtocolError: the size of `behind` does not match the number of rows that the frame announces.
        """
        announced = announced_rows(frame)
        expected = self.num_bytes(announced)
        if len(behind) != expected:
            raise ProtocolError(f"{_title(frame)} came with {len(behind)} bytes of activations, not {expected}")
        if not expected:
            return None
        rows = torch.frombuffer(behind, dtype=self.dtype).view(announced, *self.row_shape)
        return rows if self.device.type == "cpu" else rows.to(self.device, non_blocking=True)


def announced_rows(frame: Frame) -> int:
    """Return the number of rows of activations that belong to a frame."""
    if isinstance(frame, MicroBatchFrame):
        return frame.microbatch.num_tokens
    return frame.num_rows if isinstance(frame, HeadFrame) else 0


def write(buffer: torch.Tensor, frame: Frame, number: int, payload: torch.Tensor | None) -> int:
    """Write a message into a buffer of bytes, and return its size in bytes.

    Args:
        number: number of the frame on its edge, from 0.
        payload: activations, or a part of a text; None without a payload.

    Raises:
        ProtocolError: the message does not fit into the buffer.
    """
    payload_bytes = 0 if payload is None else payload.numel() * payload.element_size()
    head = codec.encode(frame, number, payload_bytes)
    end = len(head) + payload_bytes
    size = end + (codec.TRAILER_BYTES if payload_bytes else 0)
    if size > buffer.numel():
        raise ProtocolError(f"a message has {size} bytes; at most {buffer.numel()} are legal on its edge")
    to = buffer.data_ptr()
    ctypes.memmove(to, head, len(head))
    if payload is not None and payload_bytes:
        if payload.is_cpu and payload.is_contiguous():
            ctypes.memmove(to + len(head), payload.data_ptr(), payload_bytes)
        else:
            buffer[len(head) : end].view(payload.dtype).view(payload.shape).copy_(payload)
        ctypes.memmove(to + end, codec.trailer(number), codec.TRAILER_BYTES)
    return size


def bytes_of(buffer: torch.Tensor) -> memoryview:
    """Return a view of a buffer's memory, as `read` takes it. Make it once per buffer, since making it takes time."""
    return memoryview(buffer.numpy())  # type: ignore[arg-type]


def copied(behind: memoryview) -> torch.Tensor:
    """Copy bytes into a new tensor of uint8."""
    return torch.frombuffer(bytearray(behind), dtype=torch.uint8) if behind else torch.empty(0, dtype=torch.uint8)


def read(buffer: memoryview) -> tuple[Envelope, memoryview]:
    """Return the frame at the start of a buffer, and the bytes of its payload.

    Raises:
        ProtocolError: the buffer does not start with a legal message.
    """
    envelope = codec.decode(buffer)
    behind = buffer[envelope.payload_start : envelope.payload_start + envelope.payload_bytes]
    if behind and not isinstance(envelope.frame, (MicroBatchFrame, HeadFrame, Fragment)):
        raise ProtocolError(f"a {type(envelope.frame).__name__} has {len(behind)} bytes of payload, not 0")
    return envelope, behind


def _title(frame: Frame) -> str:
    return str(frame.microbatch if isinstance(frame, MicroBatchFrame) else frame)
