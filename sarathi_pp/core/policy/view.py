"""What a policy sees and what it answers. A policy only chooses: it allocates nothing and sees no page ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class SequenceView(Protocol):
    """The readable side of a sequence: what a real run knows of it, and never its output length in advance."""

    @property
    def index(self) -> int: ...
    @property
    def done(self) -> int: ...
    @property
    def issued(self) -> int: ...
    @property
    def known(self) -> int: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def remaining(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """The fixed numbers of a run that scheduling depends on.

    chunk_size: token budget C of a microbatch. max_num_seqs: running sequences over the whole pipeline.
    max_model_len: most tokens of prompt and output together. inflight: most microbatches at once.
    """

    num_stages: int
    chunk_size: int
    max_num_seqs: int
    max_model_len: int
    page_size: int
    num_pages: int
    inflight: int

    @property
    def max_decodes(self) -> int:
        """SARATHI's B: decodes a microbatch, when the running sequences are shared out over P microbatches."""
        return -(-self.max_num_seqs // self.num_stages)


@dataclass(frozen=True, slots=True)
class View:
    """One moment of the run.

    prefills: started, with known tokens not yet issued, oldest first. waiting: those that may start now,
    oldest first; granting one admits it. decodes: ready for their next token, longest ready first.
    slot: index of the next microbatch modulo P.
    """

    prefills: Sequence[SequenceView]
    waiting: Sequence[SequenceView]
    decodes: Sequence[SequenceView]
    limits: Limits
    num_inflight: int
    slot: int
    free_tokens: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Compute the next num_tokens known tokens of this sequence."""

    sequence: SequenceView
    num_tokens: int


class Policy(Protocol):
    def pick(self, view: View) -> list[Grant]:
        """The next microbatch; empty where this policy would rather wait for a result."""
        ...

    def max_tokens(self, limits: Limits) -> int:
        """The most tokens one microbatch can hold under these limits; sizes the wire's buffers."""
        ...
