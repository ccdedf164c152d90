"""What one microbatch computes, as a frozen value that prints, parses and compares.

Text form, used by golden schedules, logs and traces (KV length after the colon):

    m7[s3:256+128 | d s1:300 s2:17]
      |  |  |   |     |  `- position of the decode: it reads 300 earlier tokens and writes one
      |  |  |   |     `- decodes
      |  |  |   `- tokens in the chunk
      |  |  `- position of the chunk's first token
      |  `- sequence; `s3.1` is sequence 3 after one preemption (epoch 1)
      `- index of the microbatch

Chunk, SamplingRow and SampledToken are tuples: one of each is made for every token that is drawn, and a tuple takes a
third of the time of a frozen dataclass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

# Why no microbatch is issued. full: enough are in flight. held: the policy waits. no_kv: no pages are free.
# tokens_in_flight: every sequence waits for its next token.
IdleReason = Literal["full", "held", "no_arrivals", "no_kv", "tokens_in_flight"]


class SamplingRow(NamedTuple):
    """What the last stage needs to draw the token that follows a chunk; stateless, so it travels each time.

    position: index of the drawn token in prompt + output. The draw depends on (seed, position) alone.
    """

    position: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


class Chunk(NamedTuple):
    """Consecutive tokens [start, start + num_tokens) of one sequence.

    They follow those of its last chunk, or begin among these: tokens that are computed again (Grant.overlap) get the
    keys and values, in the same places, that they have already, and count as tokens like the others.

    The first four fields are the schedule. The rest is payload for the stages: `token_ids` (num_tokens of
    them), `new_pages` (appended to the sequence's page table before the chunk runs), and `sampling`, None
    where the chunk does not reach the end of the known tokens and so has no next token to draw.
    """

    sequence: int
    epoch: int
    start: int
    num_tokens: int
    decode: bool = False
    token_ids: tuple[int, ...] = ()
    new_pages: tuple[int, ...] = ()
    sampling: SamplingRow | None = None

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def attention(self) -> float:
        """x*L + x*x/2: the score entries that attention computes for x tokens behind L."""
        return self.num_tokens * self.start + self.num_tokens**2 / 2

    def __str__(self) -> str:
        name = f"s{self.sequence}.{self.epoch}" if self.epoch else f"s{self.sequence}"
        return f"{name}:{self.start}" if self.decode else f"{name}:{self.start}+{self.num_tokens}"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What every stage runs at once: prefill chunks first, then decodes.

    freed: sequences whose page tables the stages drop before running this microbatch.
    issued_s: the coordinator's clock at issue. head_on_first: the last stage hands the rows that draw a token to the
    first one, which computes the head for them; not part of the text form.
    """

    index: int
    chunks: tuple[Chunk, ...]
    freed: tuple[int, ...] = ()
    issued_s: float = 0.0
    head_on_first: bool = False

    @property
    def num_tokens(self) -> int:
        return sum([chunk.num_tokens for chunk in self.chunks])

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks if not chunk.decode)

    @property
    def num_decodes(self) -> int:
        return sum(chunk.decode for chunk in self.chunks)

    @property
    def num_drawn(self) -> int:
        """Chunks that end with the known tokens of their sequence, so that the next one is drawn."""
        return sum([chunk.sampling is not None for chunk in self.chunks])

    def __str__(self) -> str:
        prefills = " ".join(str(chunk) for chunk in self.chunks if not chunk.decode)
        decodes = " ".join(str(chunk) for chunk in self.chunks if chunk.decode)
        body = " | ".join(part for part in (prefills, f"d {decodes}" if decodes else "") if part)
        return f"m{self.index}[{body}]"

    @classmethod
    def parse(cls, text: str) -> MicroBatch:
        """The inverse of `str`, up to `schedule()`. Raises ValueError on any other text."""
        match = re.fullmatch(r"m(\d+)\[(.*)\]", text.strip())
        if match is None:
            raise ValueError(f"not a microbatch: {text!r}; expected a form like m7[s3:256+128 | d s1:300]")
        prefills, _, decodes = match[2].partition("d ") if match[2].startswith("d ") else match[2].partition(" | d ")
        chunks = [*_parse_chunks(prefills, decode=False), *_parse_chunks(decodes, decode=True)]
        return cls(int(match[1]), tuple(chunks))


_CHUNK = re.compile(r"s(\d+)(?:\.(\d+))?:(\d+)(?:\+(\d+))?")


def _parse_chunks(text: str, *, decode: bool) -> Iterable[Chunk]:
    for word in text.split():
        match = _CHUNK.fullmatch(word)
        if match is None or (match[4] is None) != decode:
            raise ValueError(f"not a {'decode' if decode else 'prefill chunk'}: {word!r}")
        num_tokens = 1 if decode else int(match[4])
        yield Chunk(int(match[1]), int(match[2] or 0), int(match[3]), num_tokens, decode)


class SampledToken(NamedTuple):
    """One drawn token. `failed` marks logits that were not finite: there is no token, the request fails.

    first_bad: the first stage whose output was not finite; -1 where nobody looked.
    """

    sequence: int
    epoch: int
    token_id: int
    failed: bool = False
    first_bad: int = -1


class StageTime(NamedTuple):
    """Seconds that a stage computed a microbatch; 0 where that is not known yet."""

    microbatch: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """What comes back for one microbatch, in issue order.

    stage_times: one of each stage, first stage first; of this microbatch, or of one that was in flight with it where a
    device tells its times later. short: a stage had no memory for it, and computed it at a second attempt.
    """

    index: int
    tokens: tuple[SampledToken, ...] = ()
    stage_times: tuple[StageTime, ...] = ()
    short: bool = False
