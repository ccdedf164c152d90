"""Frames on a stage edge: one fixed head, one body of flat numbers, the payload behind it.

    head   magic 4s | version u16 | kind u16 | number u64 | body u32 | payload u64 | crc32 u32
    body   u32 integers | u32 reals | int64 ... | float64 ...
    gap    zeros to the next multiple of 64
    payload   activations, raw, in the model's dtype, or a piece of a text; behind it a trailer u64

`number` counts the frames of an edge, so a repeated, lost or reordered frame is seen. The checksum covers
head and body; the payload's length is in the head, the trailer shows that it came whole, its bits are TCP's.
Little-endian throughout.
decode(encode(x)) == x, and any other bytes raise ProtocolError.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Generic, TypeVar

from sarathi_pp.core.plan import Chunk, MicroBatch, SampledToken, SamplingRow, StageTime, StepResult
from sarathi_pp.errors import ProtocolError

MAGIC = b"SPPW"
VERSION = 8
ALIGNMENT = 64

_HEAD = struct.Struct("<4sHHQIQ")
_CRC = struct.Struct("<I")
_COUNTS = struct.Struct("<II")
_TRAILER = struct.Struct("<Q")
TRAILER_BYTES = _TRAILER.size
# Of memory that nothing was written to yet the number is 0.
_TRAILER_MARK = 0x5350505754524C52
HEAD_BYTES = _HEAD.size + _CRC.size


@dataclass(frozen=True, slots=True)
class MicroBatchFrame:
    """A microbatch on its way through the stages; each adds a time that it computed. See StepResult.

    bad: sequences of it whose activations are not finite, with the stage that noticed it first. short: see StepResult.
    """

    microbatch: MicroBatch
    stage_times: tuple[StageTime, ...] = ()
    bad: tuple[tuple[int, int], ...] = ()
    short: bool = False


@dataclass(frozen=True, slots=True)
class HeadFrame:
    """A microbatch behind the last stage, without its head: its payload is what that takes, a row for each token that
    is drawn. The rest is as in MicroBatchFrame.
    """

    index: int
    num_rows: int
    stage_times: tuple[StageTime, ...] = ()
    bad: tuple[tuple[int, int], ...] = ()
    short: bool = False

    def __str__(self) -> str:
        return f"the head of m{self.index}"


@dataclass(frozen=True, slots=True)
class ResultFrame:
    result: StepResult


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The sender is alive. progress: microbatches it has finished; busy: it has one in hand."""

    progress: int
    busy: bool


@dataclass(frozen=True, slots=True)
class Parcel:
    """A piece of a text, which is its payload. last: the text ends with it."""

    last: bool


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The last frame of an edge: the run is over in good order."""


Frame = MicroBatchFrame | HeadFrame | ResultFrame | Heartbeat | Parcel | Goodbye
Number = TypeVar("Number", int, float)
Numbers = tuple[list[int], list[float]]


@dataclass(frozen=True, slots=True)
class Envelope:
    """A decoded frame and where its payload lies in the message."""

    frame: Frame
    number: int
    payload_start: int
    payload_bytes: int


def payload_start(body_bytes: int) -> int:
    return -(-(HEAD_BYTES + body_bytes) // ALIGNMENT) * ALIGNMENT


def encode(frame: Frame, number: int, payload_bytes: int = 0) -> bytes:
    """Everything of the message before the payload, padded to where the payload starts."""
    kind, (integers, reals) = _flatten(frame)
    body = _COUNTS.pack(len(integers), len(reals)) + struct.pack(f"<{len(integers)}q{len(reals)}d", *integers, *reals)
    head = _HEAD.pack(MAGIC, VERSION, kind, number, len(body), payload_bytes)
    message = head + _CRC.pack(zlib.crc32(body, zlib.crc32(head))) + body
    return message.ljust(payload_start(len(body)), b"\0")


def trailer(number: int) -> bytes:
    """What follows the payload of a frame, where it has one.

    A receiver is not told where a message ends: behind one that was cut stands what an earlier one has left.
    """
    return _TRAILER.pack(number ^ _TRAILER_MARK)


def decode(message: memoryview | bytes) -> Envelope:
    """The frame at the start of a message. Raises ProtocolError saying what does not fit."""
    view = memoryview(message)
    if len(view) < HEAD_BYTES:
        raise ProtocolError(f"a message of {len(view)} bytes is shorter than a head of {HEAD_BYTES}")
    magic, version, kind, number, body_bytes, payload_bytes = _HEAD.unpack_from(view)
    if magic != MAGIC:
        raise ProtocolError(f"a message starts with {bytes(magic)!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise ProtocolError(f"the peer speaks wire version {version}, this rank {VERSION}: install one version on all")
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
    return list(integers), list(reals)


def _flatten(frame: Frame) -> tuple[int, Numbers]:
    match frame:
        case MicroBatchFrame():
            return 1, _flatten_microbatch(frame)
        case ResultFrame(result):
            tokens = [v for t in result.tokens for v in (t.sequence, t.epoch, t.token_id, int(t.failed), t.first_bad)]
            integers = [result.index, int(result.short), len(result.tokens), *tokens]
            return 2, (integers, [v for time in result.stage_times for v in time])
        case Heartbeat(progress, busy):
            return 3, ([progress, int(busy)], [])
        case Goodbye():
            return 4, ([], [])
        case Parcel(last):
            return 5, ([int(last)], [])
        case HeadFrame(index, num_rows, stage_times, bad, short):
            integers = [index, num_rows, int(short), *chain.from_iterable(bad)]
            return 6, (integers, list(chain.from_iterable(stage_times)))


def _restore(kind: int, integers: list[int], reals: list[float]) -> Frame:
    match kind:
        case 1:
            return _restore_microbatch(integers, reals)
        case 2:
            index, short, count, *rest = integers
            _expect(len(rest) == 5 * count, f"{count} tokens in {len(rest)} integers")
            rows = [rest[i : i + 5] for i in range(0, len(rest), 5)]
            tokens = tuple(SampledToken(s, e, token, _flag(failed), bad) for s, e, token, failed, bad in rows)
            return ResultFrame(StepResult(index, tokens, _stage_times(reals), _flag(short)))
        case 3:
            progress, busy = integers
            _expect(not reals, "reals in a heartbeat")
            return Heartbeat(progress, _flag(busy))
        case 4:
            _expect(not integers and not reals, "numbers in a goodbye")
            return Goodbye()
        case 5:
            (last,) = integers
            _expect(not reals, "reals in a parcel")
            return Parcel(_flag(last))
        case 6:
            index, num_rows, short, *rest = integers
            _expect(num_rows >= 0, f"{num_rows} rows")
            bad = tuple(zip(rest[::2], rest[1::2], strict=True))
            return HeadFrame(index, num_rows, _stage_times(reals), bad, _flag(short))
    raise ValueError("unknown kind")


def _flatten_microbatch(frame: MicroBatchFrame) -> Numbers:
    """Counts, then the chunks by column, which takes a third of the time that chunk by chunk does:

    integers   index | short | head on first | chunks | freed | bad | sequence, stage of each bad one | sequence ... |
               epoch ... | start ... | num_tokens ... | flags ... | token ids of each ... | new pages of each ... |
               freed ids | all token ids | all new pages | position ... | top_k ... | seed ...
    reals      issued_s | stages | microbatch, seconds of each | temperature ... | top_p ... | min_p ...
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


def _restore_microbatch(integers: list[int], reals: list[float]) -> MicroBatchFrame:
    ints, floats = _Cursor(integers), _Cursor(reals)
    index, short, head_on_first, num_chunks, num_freed, num_bad = ints.take(6)
    bad = tuple(zip(*[iter(ints.take(2 * num_bad))] * 2, strict=True))
    sequences, epochs, starts, num_tokens, flags, num_ids, num_pages = (ints.take(num_chunks) for _ in range(7))
    freed = tuple(ints.take(num_freed))
    (issued_s,) = floats.take(1)
    (num_stages,) = floats.take(1)
    stage_times = _stage_times(floats.take(2 * int(num_stages)))
    _expect(all(flag in range(4) for flag in flags), f"flags {flags}")
    token_ids, new_pages = ints.take_each(num_ids), ints.take_each(num_pages)
    rows = iter(_restore_sampling(sum(flag > 1 for flag in flags), ints, floats))
    sampling = [next(rows) if flag > 1 else None for flag in flags]
    decodes = [flag % 2 == 1 for flag in flags]
    _expect(ints.at_end and floats.at_end, "numbers left over")
    fields = zip(sequences, epochs, starts, num_tokens, decodes, token_ids, new_pages, sampling, strict=True)
    chunks = tuple(map(Chunk._make, fields))
    microbatch = MicroBatch(index, chunks, freed, issued_s, _flag(head_on_first))
    return MicroBatchFrame(microbatch, stage_times, bad, _flag(short))


def _stage_times(reals: list[float]) -> tuple[StageTime, ...]:
    pairs = zip(reals[::2], reals[1::2], strict=True)
    _expect(all(microbatch.is_integer() for microbatch in reals[::2]), "a time of no microbatch")
    return tuple(StageTime(int(microbatch), seconds) for microbatch, seconds in pairs)


def _restore_sampling(count: int, ints: _Cursor[int], floats: _Cursor[float]) -> list[SamplingRow]:
    positions, top_ks, seeds = (ints.take(count) for _ in range(3))
    temperatures, top_ps, min_ps = (floats.take(count) for _ in range(3))
    fields = zip(positions, temperatures, top_ks, top_ps, min_ps, seeds, strict=True)
    return list(map(SamplingRow._make, fields))


class _Cursor(Generic[Number]):
    """Reads a list from front to back; taking more than is left, or fewer than none, is an error."""

    def __init__(self, numbers: list[Number]) -> None:
        self._numbers: list[Number] = numbers
        self._position = 0

    def take(self, count: int) -> list[Number]:
        end = self._position + _count(count, len(self._numbers) - self._position)
        taken = self._numbers[self._position : end]
        self._position = end
        return taken

    def take_each(self, counts: list[int]) -> list[tuple[Number, ...]]:
        """As many after one another as each count says."""
        _expect(min(counts, default=0) >= 0, f"counts {counts}")
        taken = self.take(sum(counts))
        ends = list(accumulate(counts))
        return [tuple(taken[end - count : end]) for count, end in zip(counts, ends, strict=True)]

    @property
    def at_end(self) -> bool:
        return self._position == len(self._numbers)


def _count(count: int, most: int) -> int:
    _expect(0 <= count <= most, f"a count of {count} where at most {most} can be")
    return count


def _flag(value: int) -> bool:
    _expect(value in (0, 1), f"a flag of {value}")
    return bool(value)


def _expect(legal: bool, what: str) -> None:
    if not legal:
        raise ValueError(what)


# Of a frame with next to no numbers: a parcel, a heartbeat, a goodbye.
SMALL_FRAME_BYTES = payload_start(_COUNTS.size + 8 * 2)


def max_frame_bytes(*, max_tokens: int, max_seqs: int, page_size: int, num_stages: int) -> int:
    """The largest legal message of a run, but for its payload: what receivers post ahead and senders assert.

    max_tokens, max_seqs: of one microbatch and over the pipeline.
    """
    chunks = min(max_tokens, max_seqs)
    pages = -(-max_tokens // page_size) + chunks
    # A sequence is freed at most twice between two microbatches: once preempted, once finished.
    integers = 6 + 2 * chunks + 7 * chunks + 2 * max_seqs + max_tokens + pages + 3 * chunks
    reals = 2 + 2 * num_stages + 3 * chunks
    return payload_start(_COUNTS.size + 8 * (integers + reals))
