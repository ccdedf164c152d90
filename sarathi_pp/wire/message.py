"""A message as edges carry it: a frame, and behind it its activations, in the bytes of a buffer that both ends know.

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
    """Activations as an edge carries them: up to max_tokens rows of row_shape, on this rank's device.

    Of an edge of texts, the largest fragment. Where nothing but frames travels rows are empty.
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
        """Of the largest legal message; frame_bytes: of its frame."""
        return frame_bytes + self.num_bytes(self.max_tokens) + codec.TRAILER_BYTES

    def rows(self, frame: Frame, behind: memoryview) -> torch.Tensor | None:
        """The activations as (rows, *row_shape): of the bytes behind the frame a view on CPU and a copy on devices.

        None where there are none. Raises ProtocolError where the frame announces others.
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
    """Rows of activations that belong to a frame."""
    if isinstance(frame, MicroBatchFrame):
        return frame.microbatch.num_tokens
    return frame.num_rows if isinstance(frame, HeadFrame) else 0


def write(buffer: torch.Tensor, frame: Frame, number: int, payload: torch.Tensor | None) -> int:
    """Fill a buffer of bytes; how many of them the message has. Raises ProtocolError where it does not fit."""
    payload_bytes = 0 if payload is None else payload.numel() * payload.element_size()
    head = codec.encode(frame, number, payload_bytes)
    end = len(head) + payload_bytes
    size = end + (codec.TRAILER_BYTES if payload_bytes else 0)
    if size > buffer.numel():
        raise ProtocolError(f"a message of {size} bytes, where {buffer.numel()} are legal")
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
    """The same memory, for `read`: made once for each buffer."""
    return memoryview(buffer.numpy())  # type: ignore[arg-type]


def copied(behind: memoryview) -> torch.Tensor:
    """Bytes as a tensor of their own."""
    return torch.frombuffer(bytearray(behind), dtype=torch.uint8) if behind else torch.empty(0, dtype=torch.uint8)


def read(buffer: memoryview) -> tuple[Envelope, memoryview]:
    """What lies in a buffer: the frame, and the bytes behind it. Raises ProtocolError for what is none."""
    envelope = codec.decode(buffer)
    behind = buffer[envelope.payload_start : envelope.payload_start + envelope.payload_bytes]
    if behind and not isinstance(envelope.frame, (MicroBatchFrame, HeadFrame, Fragment)):
        raise ProtocolError(f"a {type(envelope.frame).__name__} with {len(behind)} bytes of payload")
    return envelope, behind


def _title(frame: Frame) -> str:
    return str(frame.microbatch if isinstance(frame, MicroBatchFrame) else frame)
