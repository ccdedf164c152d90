"""A microbatch as a frozen value that prints, parses and compares.

Text form, used in traces, logs and the expected schedules of tests:

    m7[s3:256+128 | d s1:300 s2:17]
      |  |  |   |     |  `- position of the decode: it reads 300 earlier tokens and writes one
      |  |  |   |     `- decodes
      |  |  |   `- tokens in the chunk
      |  |  `- position of the chunk's first token
      |  `- sequence; `s3.1` is sequence 3 when it is computed a second time (epoch 1), and `s3/2` is the third
      |     choice of the same input line
      `- index of the microbatch

Chunk, SamplingRow and SampledToken are tuples. One of each is made for every token that is drawn, and making a tuple
takes a third of the time of making a frozen dataclass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sarathi_pp.core.draw_rules import Failure
from sarathi_pp.core.request_index import SEQUENCE_PATTERN, index_name, index_of

# The reason why the coordinator issues no microbatch:
#     full               the most microbatches are in flight
#     held               at least one microbatch per stage is in flight, and the policy wants no more
#     no_arrivals        there is no unfinished request
#     no_kv              requests wait, and too few KV pages are free to start one
#     tokens_in_flight   the running sequences wait for their next tokens
IdleReason = Literal["full", "held", "no_arrivals", "no_kv", "tokens_in_flight"]


class SamplingRow(NamedTuple):
    """The parameters with which the token after a chunk is drawn.

    A stage keeps no state for drawing, so these parameters come with each chunk.

    Attributes:
        position: index of the drawn token in prompt + output, from 0. Its random numbers depend only on seed and
            position.
    """

    position: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


class Scored(NamedTuple):
    """The prompt tokens whose log probabilities a chunk gives: those at the positions [first, stop).

    The row of the token before gives the log probability of a token. So the last one may be after the chunk's end.

    Attributes:
        num_top: number of the likeliest tokens whose log probabilities are wanted too.
        following: id of the token at the chunk's end; -1 if its log probability is not wanted.
    """

    first: int
    stop: int
    num_top: int
    following: int


class Chunk(NamedTuple):
    """Consecutive tokens [start, start + num_tokens) of one sequence.

    A chunk starts at the end of the sequence's earlier chunks, and the first one after the pages that were found. It
    starts before that end if tokens are computed again (Grant.overlap). Such tokens get the same keys and values in the
    same places, and count like other tokens.

    The fields up to `decode` are the schedule, which the text form shows. The others are data for the stages.

    Attributes:
        sequence: index of the sequence's request.
        epoch: number of times that the sequence had lost its pages when this chunk was issued.
        start: position of the first token, from 0.
        token_ids: ids of the chunk's tokens. That of a decode may be EXPECTED, see core/sequence.py.
        new_pages: ids of KV pages. The stages append them to the sequence's pages before they compute the chunk.
        sampling: None if the chunk does not reach the end of the known tokens, so that no next token is drawn.
        long_factors: the rotary embeddings use the long factors (longrope). See Limits.longrope_after.
        rules: DrawRules as bytes. They come with the first chunk of each epoch; empty if the request has none.
        scored: prompt tokens whose log probabilities are wanted; None if there are none.
        slot: id of the sequence's state slot. It comes with the first chunk of each epoch; -1 with later chunks, and in
            a model without states.
    """

    sequence: int
    epoch: int
    start: int
    num_tokens: int
    decode: bool = False
    token_ids: tuple[int, ...] = ()
    new_pages: tuple[int, ...] = ()
    sampling: SamplingRow | None = None
    long_factors: bool = False
    rules: bytes = b""
    scored: Scored | None = None
    slot: int = -1

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def attention(self) -> float:
        """Return the query-key scores that attention computes: x*L + x*x/2 for x tokens after L earlier ones."""
        return self.num_tokens * self.start + self.num_tokens**2 / 2

    def __str__(self) -> str:
        name = f"s{index_name(self.sequence)}.{self.epoch}" if self.epoch else f"s{index_name(self.sequence)}"
        return f"{name}:{self.start}" if self.decode else f"{name}:{self.start}+{self.num_tokens}"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The work that every stage runs at once: prefill chunks first, then decodes.

    Attributes:
        freed: indexes of sequences that ended or lost their pages. Before they run this microbatch, the stages drop the
            lists of KV pages and the state slots of these sequences.
        issued_s: time of issue in seconds, on the coordinator's clock.
        head_on_first: the first stage computes the LM head. The last stage sends it the rows (vectors of tokens) after
            which a token is drawn. The text form does not show this.
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
        """Number of chunks that reach the last known token of their sequence, so that the next token is drawn."""
        return sum([chunk.sampling is not None for chunk in self.chunks])

    @property
    def scores(self) -> bool:
        """Return whether a chunk gives log probabilities of prompt tokens."""
        return any([chunk.scored is not None for chunk in self.chunks])

    def __str__(self) -> str:
        prefills = " ".join(str(chunk) for chunk in self.chunks if not chunk.decode)
        decodes = " ".join(str(chunk) for chunk in self.chunks if chunk.decode)
        body = " | ".join(part for part in (prefills, f"d {decodes}" if decodes else "") if part)
        return f"m{self.index}[{body}]"

    @classmethod
    def parse(cls, text: str) -> MicroBatch:
        """Return the microbatch of a text that `str` printed. Fields that `str` does not print keep their defaults.

        Raises:
            ValueError: the text has another form.
        """
        match = re.fullmatch(r"m(\d+)\[(.*)\]", text.strip())
        if match is None:
            raise ValueError(f"not a microbatch: {text!r}; expected a form like m7[s3:256+128 | d s1:300]")
        prefills, _, decodes = match[2].partition("d ") if match[2].startswith("d ") else match[2].partition(" | d ")
        chunks = [*_parse_chunks(prefills, decode=False), *_parse_chunks(decodes, decode=True)]
        return cls(int(match[1]), tuple(chunks))


_CHUNK = re.compile(SEQUENCE_PATTERN + r"(?:\.(\d+))?:(\d+)(?:\+(\d+))?")


def _parse_chunks(text: str, *, decode: bool) -> Iterable[Chunk]:
    for word in text.split():
        match = _CHUNK.fullmatch(word)
        if match is None or (match[5] is None) != decode:
            raise ValueError(f"not a {'decode like s1:300' if decode else 'prefill chunk like s3:256+128'}: {word!r}")
        num_tokens = 1 if decode else int(match[5])
        yield Chunk(index_of(match[1], match[2]), int(match[3] or 0), int(match[4]), num_tokens, decode)


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities, from the model's own logits.

    Attributes:
        logprob: that of the drawn token.
        top: ids and logarithms of the likeliest tokens, likeliest first; empty if none were requested.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class ChunkLogprobs(NamedTuple):
    """The log probabilities of prompt tokens that a chunk gave.

    Attributes:
        sequence: index of the sequence's request.
        epoch: epoch of the chunk.
        first: position of the first of these tokens.
        num_top: number of likeliest tokens at each position.
        logprobs: that of each token.
        top_ids, top_logprobs: ids and log probabilities of the likeliest tokens of the first position, likeliest first,
            then those of the next one.
    """

    sequence: int
    epoch: int
    first: int
    num_top: int
    logprobs: tuple[float, ...]
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class SampledToken(NamedTuple):
    """The next token of a sequence, which was drawn from its logits.

    Attributes:
        sequence: index of the sequence's request.
        epoch: epoch of the chunk after which the token was drawn.
        failure: the reason why there is no token.
        first_bad: index of the first stage whose output had NaN or infinity; -1 if none had, or if no stage checked.
        logprobs: None unless the request wants them.
    """

    sequence: int
    epoch: int
    token_id: int
    failure: Failure = Failure.NONE
    first_bad: int = -1
    logprobs: TokenLogprobs | None = None


class StageTime(NamedTuple):
    """The seconds in which a stage computed the microbatch with this index; 0 if they are not known yet."""

    microbatch: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one microbatch. Results come in the order of issue.

    Attributes:
        index: index of the microbatch.
        stage_times: one per stage, first stage first. Usually they are times of this microbatch. If a device reports
            its times later, they are of an earlier microbatch that was in flight at the same time.
        short: a stage ran out of memory for the microbatch, and computed it at a second attempt.
        prompt_logprobs: those of the scored chunks.
    """

    index: int
    tokens: tuple[SampledToken, ...] = ()
    stage_times: tuple[StageTime, ...] = ()
    short: bool = False
    prompt_logprobs: tuple[ChunkLogprobs, ...] = ()
