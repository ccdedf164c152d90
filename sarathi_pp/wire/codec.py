"""The binary form of frames, the messages between ranks: a head of fixed size, a body of numbers, then the payload.

    head   magic 4s | version u16 | kind u16 | number u64 | body u32 | payload u64 | crc32 u32
    body   u32 integers | u32 reals | int64 ... | float64 ...
    gap    zeros to the next multiple of 64
    payload   activations, raw, in the model's dtype, or a fragment of a text; after it a trailer u64

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

from sarathi_pp.core.draw_rules import MOST_MICROBATCH_BYTES, Failure
from sarathi_pp.core.pages import MOST_SHARED_PAGES
from sarathi_pp.core.plan import (
    Chunk,
    ChunkLogprobs,
    MicroBatch,
    SampledToken,
    SamplingRow,
    Scored,
    StageTime,
    StepResult,
    TokenLogprobs,
)
from sarathi_pp.errors import ProtocolError
from sarathi_pp.sampling_params import MOST_LOGPROBS

MAGIC = b"SPPW"
VERSION = 13
ALIGNMENT = 64

_HEAD = struct.Struct("<4sHHQIQ")
_CRC = struct.Struct("<I")
_COUNTS = struct.Struct("<II")
# The legal flags of a chunk. Bit 0: it is a decode. Bit 1: a token is drawn after it. Bit 2: its rotary embeddings use
# the long factors. Bit 3: it brings rules. Bit 4: it has scored tokens. Bit 5: it brings a state slot.
_FLAGS = frozenset(range(64))
_WORD_BYTES = 8
_FAILURES = {int(failure): failure for failure in Failure}  # calling the class takes longer
_TRAILER = struct.Struct("<Q")
TRAILER_BYTES = _TRAILER.size
# Untouched memory holds 0. With this mark, no trailer of a frame is 0.
_TRAILER_MARK = 0x5350505754524C52
HEAD_BYTES = _HEAD.size + _CRC.size


@dataclass(frozen=True, slots=True)
class MicroBatchFrame:
    """A microbatch on its way through the stages.

    Attributes:
        stage_times: compute times, one per stage so far. Each stage appends its own. See StepResult.
        bad: for each sequence whose activations have NaN or infinity: its index, and that of the first stage that
            noticed it.
        short: see StepResult.
    """

    microbatch: MicroBatch
    stage_times: tuple[StageTime, ...] = ()
    bad: tuple[tuple[int, int], ...] = ()
    short: bool = False


@dataclass(frozen=True, slots=True)
class HeadFrame:
    """A microbatch that has passed the last stage, and whose LM head the first stage computes.

    The payload is the input of the LM head, one row per token that is drawn. The other fields are as in
    MicroBatchFrame.

    Attributes:
        index: index of the microbatch.
        num_rows: number of rows of the payload.
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
    """The message that its sender is alive.

    Attributes:
        progress: number of microbatches that the sender has finished.
        busy: the sender computes a microbatch now.
        steps: number of layers that the sender has computed so far. It grows inside a microbatch too.
    """

    progress: int
    busy: bool
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Fragment:
    """A fragment of a long text. The payload of the frame holds it. See byte_stream.py."""

    last: bool  # the text ends with this fragment


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The last frame of an edge: the run has ended in order, and the sender sends nothing more."""


Frame = MicroBatchFrame | HeadFrame | StepResult | Heartbeat | Fragment | Goodbye
Number = TypeVar("Number", int, float)
Numbers = tuple[Sequence[int], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Envelope:
    """A decoded frame, and the position of its payload in the message.

    Attributes:
        number: number of the frame on its edge, from 0.
        payload_start: index of the payload's first byte in the message.
    """

    frame: Frame
    number: int
    payload_start: int
    payload_bytes: int


def payload_start(body_bytes: int) -> int:
    return -(-(HEAD_BYTES + body_bytes) // ALIGNMENT) * ALIGNMENT


def encode(frame: Frame, number: int, payload_bytes: int = 0) -> bytes:
    """Return the bytes of a message before its payload: head, body and padding.

    Args:
        number: number of the frame on its edge, from 0.
        payload_bytes: size of the payload that follows.
    """
    kind, (integers, reals) = _flatten(frame)
    body = _COUNTS.pack(len(integers), len(reals)) + struct.pack(f"<{len(integers)}q{len(reals)}d", *integers, *reals)
    head = _HEAD.pack(MAGIC, VERSION, kind, number, len(body), payload_bytes)
    message = head + _CRC.pack(zlib.crc32(body, zlib.crc32(head))) + body
    return message.ljust(payload_start(len(body)), b"\0")


def trailer(number: int) -> bytes:
    """Return the bytes that follow the payload of a frame. They depend on the frame's number.

    A receiver does not know the length of a message, and its buffer still holds bytes of an earlier one. The trailer
    shows that the message came to its end.
    """
    return _TRAILER.pack(number ^ _TRAILER_MARK)


def decode(message: memoryview | bytes) -> Envelope:
    """Return the frame at the start of a message. Raises ProtocolError, which names the part that is wrong."""
    view = memoryview(message)
    if len(view) < HEAD_BYTES:
        raise ProtocolError(f"a message of {len(view)} bytes is shorter than a head of {HEAD_BYTES}")
    magic, version, kind, number, body_bytes, payload_bytes = _HEAD.unpack_from(view)
    if magic != MAGIC:
        raise ProtocolError(f"a message starts with {bytes(magic)!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise ProtocolError(
            f"the peer speaks wire version {version}, this rank {VERSION}: install one version of sarathi-pp on both"
        )
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
    except (struct.error, IndexError, KeyError, ValueError, OverflowError) as error:
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
        case StepResult():
            return 2, _flatten_result(frame)
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
            return _restore_result(integers, reals)
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


def _flatten_result(result: StepResult) -> Numbers:
    """Return all numbers of a result. Log probabilities follow for the tokens whose requests want them.

    integers   index | short | tokens | sequence ... | epoch ... | token id ... | failure ... | first bad ... |
               number of top tokens, or -1 ... | ids of all top tokens | scores
    reals      of each token with log probabilities: its own, then those of its top tokens | scores | stage times
    scores     integers: for each scored chunk, sequence, epoch, first, number of positions, number of top tokens, ids
               reals: for each scored chunk, log probabilities, then those of the top tokens
    """
    tokens = result.tokens
    integers: list[int] = [result.index, int(result.short), len(tokens)]
    reals: list[float] = []
    if tokens:
        sequences, epochs, token_ids, failures, first_bad, logprobs = zip(*tokens, strict=True)
        integers += (*sequences, *epochs, *token_ids, *map(int, failures), *first_bad)
        integers += [-1 if one is None else len(one.top) for one in logprobs]
        for one in logprobs:
            if one is not None:
                integers += [token_id for token_id, _ in one.top]
                reals += (one.logprob, *(logprob for _, logprob in one.top))
    for sequence, epoch, position, num_top, own, top_ids, tops in result.prompt_logprobs:
        integers += (sequence, epoch, position, len(own), num_top, *top_ids)
        reals += (*own, *tops)
    return integers, [*reals, *chain.from_iterable(result.stage_times)]


def _restore_result(integers: Sequence[int], reals: Sequence[float]) -> StepResult:
    """Return the result whose numbers `_flatten_result` made. Raise ValueError for other numbers."""
    index, short, count = integers[:3]
    if count < 0 or len(integers) < 3 + 6 * count:
        raise ValueError(f"{count} tokens in {len(integers)} integers")
    sequences, epochs, token_ids, failures, first_bad, num_tops = _columns(integers, 3, 6, count)
    if min(num_tops, default=0) < -1:
        raise ValueError("a token has a negative number of top tokens")
    at, first = 3 + 6 * count, 0
    logprobs: list[TokenLogprobs | None] = []
    for num_top in num_tops:
        if num_top < 0:
            logprobs.append(None)
            continue
        own, *others = reals[first : first + 1 + num_top]
        logprobs.append(TokenLogprobs(own, tuple(zip(integers[at : at + num_top], others, strict=True))))
        at, first = at + num_top, first + 1 + num_top
    scores, first = _cut_scores(integers, at, reals, first)
    fields = zip(sequences, epochs, token_ids, map(_FAILURES.__getitem__, failures), first_bad, logprobs, strict=True)
    times = _stage_times(reals[first:])
    return StepResult(index, tuple(map(SampledToken._make, fields)), times, _flag(short), scores)


def _cut_scores(
    integers: Sequence[int], at: int, reals: Sequence[float], first: int
) -> tuple[tuple[ChunkLogprobs, ...], int]:
    """Return the log probabilities of prompt tokens, and the index after their last real. They end the integers.

    Args:
        at: index of their first integer.
        first: index of their first real.
    """
    scores = []
    while at < len(integers):
        sequence, epoch, position, count, num_top = integers[at : at + 5]
        at, num_tops = at + 5, count * num_top
        if min(count, num_top) < 0 or at + num_tops > len(integers) or first + count + num_tops > len(reals):
            raise ValueError(f"{count} scored tokens, with {num_top} top tokens for one, do not fit into the message")
        own, tops = reals[first : first + count], reals[first + count : first + count + num_tops]
        ids = integers[at : at + num_tops]
        scores.append(ChunkLogprobs(sequence, epoch, position, num_top, tuple(own), tuple(ids), tuple(tops)))
        at, first = at + num_tops, first + count + num_tops
    return tuple(scores), first


def _flatten_microbatch(frame: MicroBatchFrame) -> Numbers:
    """Return all numbers of a frame: counts, then a column of numbers for each field of its chunks.

    Columns take a third of the time that writing one chunk after another takes:

    integers   index | short | head on first | chunks | freed | bad | sequence, stage of each bad one | sequence ... |
               epoch ... | start ... | num_tokens ... | flags ... | number of token ids ... | number of new pages ... |
               freed ids | all token ids | all new pages | position ... | top_k ... | seed ... | scored | slots |
               rules
    scored     of the chunks with scored tokens: first ... | stop ... | number of top tokens ... | following ...
    slots      state slot of each chunk that brings one
    rules      for each chunk that brings rules: number of bytes, then the bytes in words of 8
    reals      issued_s | stages | microbatch, seconds per stage | temperature ... | top_p ... | min_p ...
    """
    m = frame.microbatch
    reals = [m.issued_s, float(len(frame.stage_times)), *chain.from_iterable(frame.stage_times)]
    bad = list(chain.from_iterable(frame.bad))
    integers = [m.index, int(frame.short), int(m.head_on_first), len(m.chunks), len(m.freed), len(frame.bad), *bad]
    if not m.chunks:
        return [*integers, *m.freed], reals
    columns = zip(*m.chunks, strict=True)
    sequences, epochs, starts, num_tokens, decodes, token_ids, new_pages, sampling, are_long, rules, scored, slots = (
        columns
    )
    flags = [decode | (row is not None) << 1 for decode, row in zip(decodes, sampling, strict=True)]
    is_rare = any(are_long) or any(rules) or any(scored) or slots.count(-1) < len(slots)
    if is_rare:  # most microbatches have only the flags above
        flags = [
            flag | is_long << 2 | (text != b"") << 3 | (wanted is not None) << 4 | (slot >= 0) << 5
            for flag, is_long, text, wanted, slot in zip(flags, are_long, rules, scored, slots, strict=True)
        ]
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
    if is_rare:
        integers += chain.from_iterable(zip(*(one for one in scored if one is not None), strict=True))
        integers += [slot for slot in slots if slot >= 0]
        for text in rules:
            if text:
                integers += (len(text), *_words(text))
    return integers, reals


def _restore_microbatch(integers: Sequence[int], reals: Sequence[float]) -> MicroBatchFrame:
    """Return the frame whose numbers `_flatten_microbatch` made. The counts give the length of each column.

    If the counts add up to the number of all numbers, each column has the right length.

    Raises:
        ValueError: the numbers do not make a frame.
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
    drawn = [flag & 2 > 0 for flag in flags]
    num_rows = sum(drawn)
    num_times = 2 * reals[1]
    scored, slots, rules, end = _cut_rare(integers, at + 3 * num_rows, flags)
    if not num_times >= 0 or len(integers) != end or len(reals) != 2 + num_times + 3 * num_rows:
        raise ValueError(
            f"{len(integers)} integers and {len(reals)} reals; expected {end} and {2 + num_times + 3 * num_rows}"
        )
    first = len(reals) - 3 * num_rows
    positions, top_ks, seeds = _columns(integers, at, 3, num_rows)
    temperatures, top_ps, min_ps = _columns(reals, first, 3, num_rows)
    row_fields = zip(positions, temperatures, top_ks, top_ps, min_ps, seeds, strict=True)
    rows = map(SamplingRow._make, row_fields)
    sampling = [next(rows) if draws else None for draws in drawn]
    decodes = [flag & 1 > 0 for flag in flags]
    are_long = [flag & 4 > 0 for flag in flags] if max(flags, default=0) > 3 else [False] * num_chunks
    schedule = sequences, epochs, starts, num_tokens, decodes
    chunk_fields = zip(*schedule, token_ids, new_pages, sampling, are_long, rules, scored, slots, strict=True)
    chunks = tuple(map(Chunk._make, chunk_fields))
    microbatch = MicroBatch(index, chunks, tuple(freed), reals[0], _flag(head_on_first))
    return MicroBatchFrame(microbatch, _stage_times(reals[2:first]), bad, _flag(short))


def _columns(numbers: Sequence[Number], start: int, count: int, length: int) -> list[Sequence[Number]]:
    return [numbers[start + i * length : start + (i + 1) * length] for i in range(count)]


def _cut(numbers: Sequence[int], start: int, counts: Sequence[int]) -> tuple[list[tuple[int, ...]], int]:
    """Cut `numbers`, from the index `start`, into consecutive tuples. Return them and the index after the last one.

    Args:
        counts: length of each tuple.
    """
    pieces = []
    for count in counts:
        pieces.append(tuple(numbers[start : start + count]) if count else ())
        start += count
    return pieces, start


def _words(text: bytes) -> tuple[int, ...]:
    """Return bytes as integers of 64 bits, with zeros at the end."""
    count = -(-len(text) // _WORD_BYTES)
    return struct.unpack(f"<{count}q", text.ljust(count * _WORD_BYTES, b"\0"))


def _cut_rare(
    integers: Sequence[int], start: int, flags: Sequence[int]
) -> tuple[list[Scored | None], list[int], list[bytes], int]:
    """Return the scored tokens, the state slot and the rules of each chunk, and the index after the last ones.

    Args:
        start: index of the first of these integers.
        flags: flags of each chunk.
    """
    if max(flags, default=0) < 8:  # most microbatches have none of them
        return [None] * len(flags), [-1] * len(flags), [b""] * len(flags), start
    scored, slots_at = _cut_scored(integers, start, flags)
    slots, rules_at = _cut_slots(integers, slots_at, flags)
    return scored, slots, *_cut_rules(integers, rules_at, flags)


def _cut_scored(integers: Sequence[int], start: int, flags: Sequence[int]) -> tuple[list[Scored | None], int]:
    """Return each chunk's scored tokens, which begin at the index `start`, and the index after the last ones.

    Args:
        flags: flags of each chunk.
    """
    count = sum([flag & 16 > 0 for flag in flags])
    found = map(Scored._make, zip(*_columns(integers, start, 4, count), strict=True))
    try:
        return [next(found) if flag & 16 else None for flag in flags], start + 4 * count
    except StopIteration:
        raise ValueError(f"{count} scored chunks in {len(integers) - start} integers") from None


def _cut_slots(integers: Sequence[int], start: int, flags: Sequence[int]) -> tuple[list[int], int]:
    """Return the state slot of each chunk, -1 for none, from the index `start`, and the index after the last one.

    Args:
        flags: flags of each chunk.
    """
    bring = [flag & 32 > 0 for flag in flags]
    found = integers[start : start + sum(bring)]
    if len(found) < sum(bring) or min(found, default=0) < 0:
        raise ValueError(f"state slots {tuple(found)} for {sum(bring)} chunks")
    each = iter(found)
    return [next(each) if brings else -1 for brings in bring], start + len(found)


def _cut_rules(integers: Sequence[int], start: int, flags: Sequence[int]) -> tuple[list[bytes], int]:
    """Return the rules of each chunk, which begin at the index `start`, and the index after the last one.

    Args:
        flags: flags of each chunk.
    """
    found = []
    for flag in flags:
        if not flag & 8:
            found.append(b"")
            continue
        length = integers[start]
        words = integers[start + 1 : start + 1 - (-length // _WORD_BYTES)]
        if not 0 < length <= MOST_MICROBATCH_BYTES or len(words) != -(-length // _WORD_BYTES):
            raise ValueError(f"rules of {length} bytes in {len(words)} integers")
        start += 1 + len(words)
        found.append(struct.pack(f"<{len(words)}q", *words)[:length])
    return found, start


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


def max_frame_bytes(*, max_tokens: int, max_seqs: int, page_size: int, num_stages: int, shares_pages: bool) -> int:
    """Return the bytes of the largest legal message of a run, without its payload.

    Receivers prepare buffers of this size in advance. Senders check that no message is larger.

    Args:
        max_tokens: most tokens of one microbatch.
        max_seqs: most running sequences of the pipeline.
        page_size: tokens per KV page.
        shares_pages: sequences may start with pages that are not empty.
    """
    chunks = min(max_tokens, max_seqs)
    pages = -(-max_tokens // page_size) + chunks + MOST_SHARED_PAGES * shares_pages
    # A sequence is freed at most twice between two microbatches: once preempted, once finished.
    rules = 2 * chunks + MOST_MICROBATCH_BYTES // _WORD_BYTES
    integers = 6 + 2 * chunks + 7 * chunks + 2 * max_seqs + max_tokens + pages + 8 * chunks + rules
    reals = 2 + 2 * num_stages + 3 * chunks
    # Log probabilities are of one token per chunk, and of the prompt's tokens.
    result_integers = 3 + 6 * chunks + 5 * chunks + MOST_LOGPROBS * (chunks + max_tokens)
    result_reals = (1 + MOST_LOGPROBS) * (chunks + max_tokens) + 2 * num_stages
    return payload_start(_COUNTS.size + 8 * max(integers + reals, result_integers + result_reals))
