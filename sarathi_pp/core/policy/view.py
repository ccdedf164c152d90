"""What a policy sees and what it answers. A policy only chooses: it allocates nothing and sees no page ids."""

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


class View(NamedTuple):
    """One moment of the run.

    prefills: started, with known tokens not yet issued, oldest first. waiting: those that may start now,
    oldest first; granting one admits it. decodes: ready for their next token, longest ready first.
    running: all that have started, by index, those whose next token is in flight included. waiting_tokens: known
    tokens of all that wait, those that cannot start yet included. slot: index of the next microbatch modulo P.
    free_tokens: KV positions in free pages. num_past_prompt, tokens_past_prompt: how many of the running ones have all
    of their prompt issued, and their known tokens. finished: prompt and output tokens of the latest requests that
    finished, oldest first. cost: None where nothing is known about the stages, or the policy does not ask for it
    (`Policy.wants_cost`).
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
    """Compute the next num_tokens known tokens of this sequence, and the `overlap` before them once more."""

    sequence: SequenceView
    num_tokens: int
    overlap: int = 0


class Policy(ABC):
    """A rule that chooses the next microbatch.

    The class attributes say what a policy needs from the runtime. A policy sets those that differ from here. Its
    parameters are its int and float fields, if it is a dataclass.
    """

    __slots__ = ()

    # The chunk size makes a difference. If False, a --chunk-size is answered with a warning.
    uses_chunk_size: ClassVar[bool] = True
    # The chunk size is a ceiling: the policy chooses its sizes below it.
    chooses_chunk_size: ClassVar[bool] = False
    # Tokens, unless the user or a profile says.
    default_chunk_size: ClassVar[int] = 256
    # Microbatches in flight beyond one per stage, unless the user or a profile says. None if there is one stage.
    spare_microbatches: ClassVar[int] = 0
    # View.cost is set. Learning what microbatches cost takes time with each of them.
    wants_cost: ClassVar[bool] = False
    # SequenceView.paragraph_ends is set. Finding paragraphs takes time with each prompt.
    wants_paragraphs: ClassVar[bool] = False

    @abstractmethod
    def pick(self, view: View) -> list[Grant]:
        """Return the next microbatch; an empty one to wait for a result, of which one must be in flight."""

    @abstractmethod
    def max_tokens(self, limits: Limits) -> int:
        """Return the most tokens that one microbatch can hold under these limits; sizes the wire's buffers."""


def class_name(kind: type[Policy]) -> str:
    """Return module:Class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def max_tokens_of(policy: Policy, limits: Limits) -> int:
    """Return the policy's `max_tokens`. Raises PolicyError if it gives none, or no integer of at least 1."""
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
