"""Frames on a stage edge: one fixed head, one body of flat numbers, then the payload.

    head   magic 4s | version u16 | kind u16 | number u64 | body u32 | payload u64 | crc32 u32
    body   u32 integers | u32 reals | int64 ... | float64 ...
    gap    zeros to the next multiple of 64
    payload   activations, raw, in the model's dtype, or a piece of a text; after it a trailer u64

`number` counts the frames of an edge, so a repeated, lost or reordered frame is noticed. The checksum covers head and
body. The payload's length is in the head, and the trailer shows that all of it came. TCP protects the payload's bits.
All numbers are little-endian. decode(encode(x)) == x, and any other bytes raise ProtocolError.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from sarathi_pp.core.plan import Chunk, MicroBatch, SampledToken, SamplingRow, StageTime, StepResult
from sarathi_pp.errors import ProtocolError

MAGIC = b"SPPW"
VERSION = 10
ALIGNMENT = 64

_HEAD = struct.Struct("<4sHHQIQ")
_CRC = struct.Struct("<I")
_COUNTS = struct.Struct("<II")
# The bits of a chunk's flags: it is a decode, and a token is drawn after it.
_FLAGS = frozenset(range(4))
_TRAILER = struct.Struct("<Q")
TRAILER_BYTES = _TRAILER.size
# Untouched memory holds 0. With this mark, no trailer of a frame is 0.
_TRAILER_MARK = 0x5350505754524C52
HEAD_BYTES = _HEAD.size + _CRC.size


@dataclass(frozen=True, slots=True)
class MicroBatchFrame:
    """A microbatch on its way through the stages. Each stage adds a time that it computed. See StepResult.

    Attributes:
        bad: sequences whose activations are not finite, each with the first stage that noticed it.
        short: see StepResult.
    """

    microbatch: MicroBatch
    stage_times: tuple[StageTime, ...] = ()
    bad: tuple[tuple[int, int], ...] = ()
    short: bool = False


@dataclass(frozen=True, slots=True)
class HeadFrame:
    """A microbatch after the last stage, without its LM head.

    The payload is the input of the LM head, one row per token that is drawn. The other fields are as in
    MicroBatchFrame.
    """

    index: int
    num_rows: int
    stage_times: tuple[StageTime, ...] = ()
    bad: tuple[tuple[int, int], ...] = ()
    short: bool = False

    def __str__(self) -> str:
        return f"the head of m{self.index}"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The message that the sender is alive.

    Attributes:
        progress: microbatches that it has finished.
        busy: it computes one now.
        steps: layers that it has computed so far. This number grows inside a microbatch too.
    """

    progress: int
    busy: bool
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Fragment:
    """A piece of a text, which is the frame's payload."""

    last: bool  # the text ends with it


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The last frame of an edge: the run is over in good order."""


Frame = MicroBatchFrame | HeadFrame | StepResult | Heartbeat | Fragment | Goodbye
Number = TypeVar("Number", int, float)
Numbers = tuple[Sequence[int], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Envelope:
    """A decoded frame, and the position of its payload in the message."""

    frame: Frame
    number: int
    payload_start: int
    payload_bytes: int


def payload_start(body_bytes: int) -> int:
    return -(-(HEAD_BYTES + body_bytes) // ALIGNMENT) * ALIGNMENT


def encode(frame: Frame, number: int, payload_bytes: int = 0) -> bytes:
    """Return everything of the message before the payload, padded to the payload's start."""
    kind, (integers, reals) = _flatten(frame)
    body = _COUNTS.pack(len(integers), len(reals)) + struct.pack(f"<{len(integers)}q{len(reals)}d", *integers, *reals)
    head = _HEAD.pack(MAGIC, VERSION, kind, number, len(body), payload_bytes)
    message = head + _CRC.pack(zlib.crc32(body, zlib.crc32(head))) + body
    return message.ljust(payload_start(len(body)), b"\0")


def trailer(number: int) -> bytes:
    """Return the bytes that follow the payload of a frame.

    A receiver does not know the length of a message, and its buffer still holds bytes of an earlier one. The trailer
    shows that the message came to its end.
    """
    return _TRAILER.pack(number ^ _TRAILER_MARK)


def decode(message: memoryview | bytes) -> Envelope:
    """Return the frame at the start of a message. Raises ProtocolError with the part that does not fit."""
    view = memoryview(message)
    if len(view) < HEAD_BYTES:
        raise ProtocolError(f"a message of {len(view)} bytes is shorter than a head of {HEAD_BYTES}")
    magic, version, kind, number, body_bytes, payload_bytes = _HEAD.unpack_from(view)
    if magic != MAGIC:
        raise ProtocolError(f"a message starts with {bytes(magic)!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise ProtocolError(f"the peer speaks wire version {version}, this rank {VERSION}: install one version on both")
    start = payload_start(body_bytes)
    end = start + payload_bytes
    if end + _TRAILER.size * (payload_bytes > 0) > len(view):
        raise ProtocolError(f"the head announces {end} bytes and a trailer in a buffer of {len(view)}")
    body = view[HEAD_BYTES : HEAD_BYTES + body_bytes]
    (crc,) = _CRC.unpack_from(view, _HEAD.size)
    if crc != zlib.crc32(body, zlib.crc32(view[: _HEAD.size])):
        raise ProtocolError(f"frame {number}: checksum mismatch")
    if payload_bytes and view[end : end + _TRAILER.size] != trailer(number):
        raise ProtocolError(f"frame {number}: its payload of {payload_bytes} bytes was cut")
    try:
        frame = _restore(kind, *_read_numbers(body))
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise ProtocolError(f"frame {number} of kind {kind} has a malformed body: {error}") from error
    return Envelope(frame, number, start, payload_bytes)


def _read_numbers(body: memoryview) -> Numbers:
    num_integers, num_reals = _COUNTS.unpack_from(body)
    if len(body) != _COUNTS.size + 8 * (num_integers + num_reals):
        raise ValueError(f"{num_integers} integers and {num_reals} reals do not make {len(body)} bytes")
    integers = struct.unpack_from(f"<{num_integers}q", body, _COUNTS.size)
    reals = struct.unpack_from(f"<{num_reals}d", body, _COUNTS.size + 8 * num_integers)
    return integers, reals


def _flatten(frame: Frame) -> tuple[int, Numbers]:
    match frame:
        case MicroBatchFrame():
            return 1, _flatten_microbatch(frame)
        case StepResult(index, tokens, stage_times, short):
            columns = chain.from_iterable(zip(*tokens, strict=True))
            integers = [index, int(short), len(tokens), *map(int, columns)]
            return 2, (integers, [v for time in stage_times for v in time])
        case Heartbeat(progress, busy, steps):
            return 3, ([progress, int(busy), steps], [])
        case Goodbye():
            return 4, ([], [])
        case Fragment(last):
            return 5, ([int(last)], [])
        case HeadFrame(index, num_rows, stage_times, bad, short):
            integers = [index, num_rows, int(short), *chain.from_iterable(bad)]
            return 6, (integers, list(chain.from_iterable(stage_times)))


def _restore(kind: int, integers: Sequence[int], reals: Sequence[float]) -> Frame:
    match kind:
        case 1:
            return _restore_microbatch(integers, reals)
        case 2:
            index, short, count, *rest = integers
            if count < 0 or len(rest) != 5 * count:
                raise ValueError(f"{count} tokens in {len(rest)} integers")
            sequences, epochs, token_ids, failed, first_bad = _columns(rest, 0, 5, count)
            fields = zip(sequences, epochs, token_ids, map(_flag, failed), first_bad, strict=True)
            tokens = tuple(map(SampledToken._make, fields))
            return StepResult(index, tokens, _stage_times(reals), _flag(short))
        case 3:
            progress, busy, steps = integers
            _expect(not reals, "reals in a heartbeat")
            return Heartbeat(progress, _flag(busy), steps)
        case 4:
            _expect(not integers and not reals, "numbers in a goodbye")
            return Goodbye()
        case 5:
            (last,) = integers
            _expect(not reals, "reals in a fragment")
            return Fragment(_flag(last))
        case 6:
            index, num_rows, short, *rest = integers
            _expect(num_rows >= 0, f"{num_rows} rows")
            return HeadFrame(index, num_rows, _stage_times(reals), _pairs(rest), _flag(short))
    raise ValueError("unknown kind")


def _flatten_microbatch(frame: MicroBatchFrame) -> Numbers:
    """Return counts, then the chunks by column. That takes a third of the time that chunk by chunk takes:

    integers   index | short | head on first | chunks | freed | bad | sequence, stage of each bad one | sequence ... |
               epoch ... | start ... | num_tokens ... | flags ... | number of token ids ... | number of new pages ... |
               freed ids | all token ids | all new pages | position ... | top_k ... | seed ...
    reals      issued_s | stages | microbatch, seconds per stage | temperature ... | top_p ... | min_p ...
    """
    m = frame.microbatch
    reals = [m.issued_s, float(len(frame.stage_times)), *chain.from_iterable(frame.stage_times)]
    bad = list(chain.from_iterable(frame.bad))
    integers = [m.index, int(frame.short), int(m.head_on_first), len(m.chunks), len(m.freed), len(frame.bad), *bad]
    if not m.chunks:
        return [*integers, *m.freed], reals
    sequences, epochs, starts, num_tokens, decodes, token_ids, new_pages, sampling = zip(*m.chunks, strict=True)
    flags = [decode | (row is not None) << 1 for decode, row in zip(decodes, sampling, strict=True)]
    integers += (*sequences, *epochs, *starts, *num_tokens, *flags)
    integers += map(len, token_ids)
    integers += map(len, new_pages)
    integers += m.freed
    integers += chain.from_iterable(token_ids)
    integers += chain.from_iterable(new_pages)
    rows = [row for row in sampling if row is not None]
    if rows:
        positions, temperatures, top_ks, top_ps, min_ps, seeds = zip(*rows, strict=True)
        integers += (*positions, *top_ks, *seeds)
        reals += (*temperatures, *top_ps, *min_ps)
    return integers, reals


def _restore_microbatch(integers: Sequence[int], reals: Sequence[float]) -> MicroBatchFrame:
    """Restore a frame by cutting the numbers with the counts.

    If the counts add up to all the numbers, each column has the right length.
    """
    index, short, head_on_first, num_chunks, num_freed, num_bad = integers[:6]
    if min(num_chunks, num_freed, num_bad) < 0:
        raise ValueError(f"{num_chunks} chunks, {num_freed} freed and {num_bad} bad sequences")
    at = 6 + 2 * num_bad
    bad = _pairs(integers[6:at])
    sequences, epochs, starts, num_tokens, flags, num_ids, num_pages = _columns(integers, at, 7, num_chunks)
    at += 7 * num_chunks
    if min(num_ids, default=0) < 0 or min(num_pages, default=0) < 0:
        raise ValueError("a chunk has a negative number of tokens or pages")
    if not _FLAGS.issuperset(flags):
        raise ValueError("a chunk has unknown flags")
    freed = integers[at : at + num_freed]
    at += num_freed
    token_ids, at = _cut(integers, at, num_ids)
    new_pages, at = _cut(integers, at, num_pages)
    drawn = [flag > 1 for flag in flags]
    num_rows = sum(drawn)
    num_times = 2 * reals[1]
    if not num_times >= 0 or len(integers) != at + 3 * num_rows or len(reals) != 2 + num_times + 3 * num_rows:
        raise ValueError(
            f"{len(integers)} integers and {len(reals)} reals; expected {at + 3 * num_rows} and "
            f"{2 + num_times + 3 * num_rows}"
        )
    first = len(reals) - 3 * num_rows
    positions, top_ks, seeds = _columns(integers, at, 3, num_rows)
    temperatures, top_ps, min_ps = _columns(reals, first, 3, num_rows)
    row_fields = zip(positions, temperatures, top_ks, top_ps, min_ps, seeds, strict=True)
    rows = map(SamplingRow._make, row_fields)
    sampling = [next(rows) if draws else None for draws in drawn]
    decodes = [flag % 2 == 1 for flag in flags]
    chunk_fields = zip(sequences, epochs, starts, num_tokens, decodes, token_ids, new_pages, sampling, strict=True)
    chunks = tuple(map(Chunk._make, chunk_fields))
    microbatch = MicroBatch(index, chunks, tuple(freed), reals[0], _flag(head_on_first))
    return MicroBatchFrame(microbatch, _stage_times(reals[2:first]), bad, _flag(short))


def _columns(numbers: Sequence[Number], start: int, count: int, length: int) -> list[Sequence[Number]]:
    return [numbers[start + i * length : start + (i + 1) * length] for i in range(count)]


def _cut(numbers: Sequence[int], start: int, counts: Sequence[int]) -> tuple[list[tuple[int, ...]], int]:
    """Cut consecutive pieces with the lengths in `counts`. Return them and the position after the last."""
    pieces = []
    for count in counts:
        pieces.append(tuple(numbers[start : start + count]) if count else ())
        start += count
    return pieces, start


def _pairs(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def _stage_times(reals: Sequence[float]) -> tuple[StageTime, ...]:
    pairs = zip(reals[::2], reals[1::2], strict=True)
    if not all(microbatch.is_integer() for microbatch in reals[::2]):
        raise ValueError("a stage time whose microbatch is not an integer")
    return tuple(StageTime(int(microbatch), seconds) for microbatch, seconds in pairs)


def _flag(value: int) -> bool:
    if value not in (0, 1):
        raise ValueError(f"a flag of {value}")
    return bool(value)


def _expect(legal: bool, what: str) -> None:
    if not legal:
        raise ValueError(what)


# Size of a frame with few numbers: a fragment, a heartbeat, a goodbye.
SMALL_FRAME_BYTES = payload_start(_COUNTS.size + 8 * 3)


def max_frame_bytes(*, max_tokens: int, max_seqs: int, page_size: int, num_stages: int) -> int:
    """Return the size of the largest legal message of a run, without its payload.

    Receivers post buffers for it in advance, and senders assert it.

    Args:
        max_tokens: of one microbatch.
        max_seqs: over the pipeline.
    """
    chunks = min(max_tokens, max_seqs)
    pages = -(-max_tokens // page_size) + chunks
    # A sequence is freed at most twice between two microbatches: once preempted, once finished.
    integers = 6 + 2 * chunks + 7 * chunks + 2 * max_seqs + max_tokens + pages + 3 * chunks
    reals = 2 + 2 * num_stages + 3 * chunks
    return payload_start(_COUNTS.size + 8 * (integers + reals))
