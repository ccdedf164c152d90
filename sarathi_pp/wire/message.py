"""A message on an edge: a frame, then its activations, in the bytes of a buffer that both ends know.

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
    """The activations that an edge carries: up to max_tokens rows of row_shape, on this rank's device.

    On an edge that carries texts (byte_stream.py), max_tokens is the size of the largest fragment, in bytes. On an edge
    that carries only frames, it is 0.
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
            behind: the bytes after the frame. On CPU the result is a view of them, on devices a copy.

        Raises:
            ProtocolError: the frame announces another number of rows.
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
    """Write a message into a buffer of bytes. Return its size. Raises ProtocolError if it does not fit."""
    payload_bytes = 0 if payload is None else payload.numel() * payload.element_size()
    head = codec.encode(frame, number, payload_bytes)
    end = len(head) + payload_bytes
    size = end + (codec.TRAILER_BYTES if payload_bytes else 0)
    if size > buffer.numel():
        raise ProtocolError(f"a message of {size} bytes; at most {buffer.numel()} are legal")
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
    """Return the same memory as bytes for `read`. Call it once per buffer."""
    return memoryview(buffer.numpy())  # type: ignore[arg-type]


def copied(behind: memoryview) -> torch.Tensor:
    """Copy bytes into a new tensor."""
    return torch.frombuffer(bytearray(behind), dtype=torch.uint8) if behind else torch.empty(0, dtype=torch.uint8)


def read(buffer: memoryview) -> tuple[Envelope, memoryview]:
    """Return the frame in a buffer and the bytes after it. Raises ProtocolError if there is no frame."""
    envelope = codec.decode(buffer)
    behind = buffer[envelope.payload_start : envelope.payload_start + envelope.payload_bytes]
    if behind and not isinstance(envelope.frame, (MicroBatchFrame, HeadFrame, Fragment)):
        raise ProtocolError(f"a {type(envelope.frame).__name__} has {len(behind)} bytes of payload, not 0")
    return envelope, behind


def _title(frame: Frame) -> str:
    return str(frame.microbatch if isinstance(frame, MicroBatchFrame) else frame)
