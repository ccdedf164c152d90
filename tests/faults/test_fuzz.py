"""Hundreds of thousands of damaged byte strings: each is refused with the right error or read as it is written."""

from __future__ import annotations

import io
import json
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, get_args

import pytest

from sarathi_pp.core.draw_rules import Failure
from sarathi_pp.core.plan import (
    Chunk,
    ChunkLogprobs,
    MicroBatch,
    SampledToken,
    SamplingRow,
    Scored,
    StageTime,
    StepResult,
)
from sarathi_pp.errors import InputError, ProtocolError, RowError
from sarathi_pp.inputs.generation_config import GenerationDefaults
from sarathi_pp.inputs.input_format import choose_format
from sarathi_pp.inputs.lines import read_lines
from sarathi_pp.inputs.parse import parse_line
from sarathi_pp.inputs.prompt_limits import PromptLimits
from sarathi_pp.inputs.request_maker import RequestMaker
from sarathi_pp.outputs.output_line import encode_line
from sarathi_pp.text.tokenizer import Tokenizer
from sarathi_pp.wire import codec
from tests import thinning

pytestmark = pytest.mark.timeout(600)

# Messages of each kind, thinned.
CASES = 1_000_000 if thinning.full else 20_000
LIMIT = 4096
ADDER = Path(__file__).parents[2] / "examples" / "tiny-adder"
VOCAB_SIZE = json.loads((ADDER / "config.json").read_text())["vocab_size"]

EXTREMES = (0, 1, 255, 2**15, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)


def mutated(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Return one of the seeds, changed in one to four positions."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 4)):
        MUTATIONS[rng.randrange(len(MUTATIONS))](rng, data, seeds)
    return bytes(data)


def flip(rng: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def set_number(rng: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    width = rng.choice((1, 2, 4, 8))
    if len(data) >= width:
        at = rng.randrange(len(data) - width + 1)
        data[at : at + width] = (rng.choice(EXTREMES) % 256**width).to_bytes(width, "little")


def cut(rng: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data:
        begin = rng.randrange(len(data))
        del data[begin : begin + rng.choice((1, 8, len(data)))]


def insert(rng: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.choice((1, 3, 8, 64)))


def splice(rng: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    other = rng.choice(seeds)
    begin = rng.randrange(len(other) + 1)
    at = rng.randrange(len(data) + 1)
    data[at:] = other[begin:]


def repeat(rng: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data and len(data) < LIMIT:
        begin = rng.randrange(len(data))
        piece = data[begin : begin + rng.randint(1, 40)]
        data[begin:begin] = piece * rng.choice((1, 2, 9))


MUTATIONS: tuple[Callable[[random.Random, bytearray, Sequence[bytes]], None], ...] = (
    flip, set_number, cut, insert, splice, repeat,
)  # fmt: skip

ROW = SamplingRow(130, 0.7, 5, 0.9, 0.0, 7)
CHUNKS = (
    Chunk(3, 0, 128, 2, False, (5, 6), (9, 10), None, scored=Scored(129, 131, 1, 7)),
    Chunk(1, 2, 129, 1, True, (4,), (), ROW),
    Chunk(2, 0, 0, 3, False, (1, 2, 3), (0,), ROW, slot=4),
)
FRAMES = (
    codec.MicroBatchFrame(MicroBatch(7, CHUNKS, (4, 5), 1.5), (StageTime(7, 0.25),), ((3, 0),)),
    codec.MicroBatchFrame(MicroBatch(0, (), (2,), 0.0)),
    StepResult(7, (SampledToken(1, 2, 99), SampledToken(2, 0, 0, Failure.NOT_FINITE, 1)), (StageTime(6, 0.5),)),
    StepResult(8, (), (StageTime(6, 0.5),), False, (ChunkLogprobs(3, 0, 129, 1, (-1.0, -2.0), (5, 6), (-0.5, -0.7)),)),
    codec.HeadFrame(7, 3, (StageTime(7, 0.25),), ((3, 0),)),
    codec.Heartbeat(12, True),
    codec.Fragment(True),
    codec.Goodbye(),
)
PAYLOAD = bytes(range(48))


def signed(message: bytes) -> bytes:
    """Add the right checksum, so that the code after the check is reached."""
    head, data = struct.Struct("<4sHHQIQ"), bytearray(message)
    if len(data) < codec.HEAD_BYTES:
        return message
    body = int.from_bytes(data[16:20], "little")
    end = min(len(data), codec.HEAD_BYTES + body)
    checksum = zlib.crc32(data[codec.HEAD_BYTES : end], zlib.crc32(data[: head.size]))
    data[head.size : codec.HEAD_BYTES] = checksum.to_bytes(4, "little")
    return bytes(data)


def test_the_frame_decoder_survives_any_bytes() -> None:
    rng = random.Random("frames")
    seeds = [codec.encode(frame, number) for number, frame in enumerate(FRAMES)]
    carriers = [
        frame for frame in FRAMES if isinstance(frame, codec.MicroBatchFrame | codec.HeadFrame | codec.Fragment)
    ]
    for number, frame in enumerate(carriers, 2**40):
        seeds.append(codec.encode(frame, number, len(PAYLOAD)) + PAYLOAD + codec.trailer(number))
    read, kinds = 0, set[tuple[type, bool]]()
    for case in range(CASES):
        message = mutated(rng, seeds)
        try:
            envelope = codec.decode(signed(message) if case % 4 else message)
        except ProtocolError:
            continue
        read += 1
        kinds.add((type(envelope.frame), envelope.payload_bytes > 0))
        # The whole payload is present.
        end = envelope.payload_start + envelope.payload_bytes
        assert not envelope.payload_bytes or message[end:].startswith(codec.trailer(envelope.number))
        # Writing the value again gives the same bytes, so they have no second meaning.
        again = codec.decode(codec.encode(envelope.frame, envelope.number))
        assert repr(again.frame) == repr(envelope.frame)
    # The fuzzer also gets past the checksum.
    assert CASES // 1000 < read < CASES
    assert kinds >= {*((kind, False) for kind in get_args(codec.Frame)), *((type(frame), True) for frame in carriers)}


LINES = (
    {"id": "a", "prompt": "1+1=", "max_new_tokens": 5, "temperature": 0.5, "stop": ["\n", "x"]},
    {"prompt_token_ids": [1, 2, 3, 250], "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 7, "ignore_eos": True},
    {"id": 12, "messages": [{"role": "user", "content": [{"type": "text", "text": "h\u00e9"}]}]},
    {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions",
     "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 3, "n": 1}},
    {"custom_id": "r-2", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p", "logprobs": None}},
    {"id": "rules", "prompt": "1+1=", "logit_bias": {"5": -1.5}, "bad_words": ["1", "2 3"], "min_tokens": 2,
     "allowed_token_ids": [4, 5, 6, 7], "bad_words_ids": [[5], [6, 7]], "suppress_tokens": [9], "presence_penalty": 1},
    {"prompt": "2+2=", "sequence_bias": [[[5], 1.5]], "stop_token_ids": [7], "min_length": 9, "repetition_penalty": 1.1,
     "temperature": 1, "typical_p": 0.5, "no_repeat_ngram_size": 3, "include_stop_str_in_output": True},
    {"id": "pair", "prompt": "1\N{GRINNING FACE}", "stop": ["\N{GRINNING FACE}", "<bos>"]},
)  # fmt: skip


def no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def test_a_row_is_made_of_any_bytes_or_refused() -> None:
    """A row is read up to its request for the engine. Each line that is no row has a valid error line."""
    rng = random.Random("lines")
    texts = [json.dumps(line, ensure_ascii=escaped).encode() + b"\n" for line in LINES for escaped in (True, False)]
    seeds = [*texts, b"".join(texts), b"\xef\xbb\xbf" + texts[0], b'{"prompt": ' + b"[" * 300 + b"\r\n", b"1e999\n"]
    seeds.append(b'{"id": 1e999, "prompt": "\xff"}\n')
    tokenizer = Tokenizer.load(ADDER, vocab_size=VOCAB_SIZE)
    maker = RequestMaker(
        tokenizer, GenerationDefaults({"temperature": 0.0}), PromptLimits(99, 99, 16, VOCAB_SIZE), seed=0
    )
    asked = failed = lines = 0
    while lines < CASES:
        data = mutated(rng, seeds)
        plain_text = rng.random() < 0.1
        found = list(read_lines(io.BytesIO(data), LIMIT))
        with suppress(InputError):
            choose_format("-", data, stream=True)
        for number, line in found:
            lines += 1
            assert len(line) <= LIMIT + 2
            parsed = parse_line(number, line, plain_text=plain_text, max_line_bytes=LIMIT)
            try:
                if parsed.error is not None:
                    raise parsed.error
                request = maker.make(parsed, number, 0.0)
                tokenizer.stop_checker(request)
                asked += 1
            except RowError as error:
                failed += 1
                written = encode_line({"id": parsed.id, "error": {"code": error.code, "message": error.message}})
                assert written.count(b"\n") == 1
                assert json.loads(written, parse_constant=no_constant)["error"]["code"] == error.code
        lines += not found
    assert min(asked, failed) > CASES // 100
