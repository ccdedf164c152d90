"""The view that a policy gets, and the grants that it returns.

A policy only chooses: it allocates nothing and sees no page ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.errors import PolicyError, StoppedError


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
    @property
    def decoding(self) -> bool: ...
    @property
    def paragraph_ends(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """The fixed numbers of a run that scheduling depends on.

    Attributes:
        chunk_size: token budget C of a microbatch.
        max_num_seqs: running sequences over the whole pipeline.
        max_model_len: most tokens of prompt and output together.
        inflight: most microbatches at once.
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
        """SARATHI's B: decodes per microbatch if the running sequences are divided among P microbatches."""
        return -(-self.max_num_seqs // self.num_stages)


class View(NamedTuple):
    """One moment of the run.

    Attributes:
        prefills: started sequences with known tokens that are not issued yet, oldest first.
        waiting: sequences that may start now, oldest first. A grant admits the sequence.
        decodes: sequences that are ready for their next token, longest ready first.
        running: all started sequences by index, those whose next token is in flight included.
        slot: index of the next microbatch modulo P.
        free_tokens: KV positions in free pages.
        waiting_tokens: known tokens of all waiting sequences, those that cannot start yet included.
        num_past_prompt: number of running sequences whose whole prompt is issued.
        tokens_past_prompt: known tokens of these sequences.
        finished: prompt and output tokens of the latest requests that finished, oldest first.
        cost: None if nothing is known about the stages, or if the policy does not ask for it (`Policy.wants_cost`).
    """

    prefills: Sequence[SequenceView]
    waiting: Sequence[SequenceView]
    decodes: Sequence[SequenceView]
    running: Mapping[int, SequenceView]
    limits: Limits
    num_inflight: int
    slot: int
    free_tokens: int
    waiting_tokens: int = 0
    num_past_prompt: int = 0
    tokens_past_prompt: int = 0
    finished: Sequence[tuple[int, int]] = ()
    cost: CostModel | None = None


class Grant(NamedTuple):
    """The order to compute the next num_tokens known tokens of a sequence, and the `overlap` before them once more."""

    sequence: SequenceView
    num_tokens: int
    overlap: int = 0


class Policy(ABC):
    """A rule that chooses the next microbatch.

    The class attributes declare what a policy needs from the runtime. A policy sets only those that differ from these.
    Its parameters are its int and float fields, if it is a dataclass.
    """

    __slots__ = ()

    # The policy uses the chunk size. If False, a --chunk-size causes a warning.
    uses_chunk_size: ClassVar[bool] = True
    # The chunk size is a ceiling: the policy chooses its sizes below it.
    chooses_chunk_size: ClassVar[bool] = False
    # Tokens, unless the user or a profile sets another number.
    default_chunk_size: ClassVar[int] = 256
    # Microbatches in flight beyond one per stage, unless the user or a profile sets a number. None if there is one
    # stage.
    spare_microbatches: ClassVar[int] = 0
    # View.cost is set. Each microbatch then takes time to learn its cost.
    wants_cost: ClassVar[bool] = False
    # SequenceView.paragraph_ends is set. Each prompt then takes time to find its paragraphs.
    wants_paragraphs: ClassVar[bool] = False

    @abstractmethod
    def pick(self, view: View) -> list[Grant]:
        """Return the next microbatch, or an empty one to wait for a result. A result must then be in flight."""

    @abstractmethod
    def max_tokens(self, limits: Limits) -> int:
        """Return the most tokens that one microbatch can hold under these limits. They size the wire's buffers."""


def class_name(kind: type[Policy]) -> str:
    """Return module:Class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def max_tokens_of(policy: Policy, limits: Limits) -> int:
    """Return the policy's `max_tokens`. Raises PolicyError if the call fails or returns no integer of at least 1."""
    try:
        most = policy.max_tokens(limits)
    except StoppedError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise PolicyError(f"the policy {class_name(type(policy))} failed in max_tokens with {what}") from error
    if type(most) is not int or most < 1:
        raise PolicyError(
            f"the policy {class_name(type(policy))} has a max_tokens of {most!r}; it must be an integer of at least 1"
        )
    return most
