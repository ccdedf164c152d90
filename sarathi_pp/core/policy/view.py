"""The interface of policies: the view of the run that a policy gets, and the grants (orders) that it returns.

A policy only chooses: it allocates nothing and sees no page ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from sarathi_pp.config import PrefixCacheMode
from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.errors import PolicyError, StoppedError


class SequenceView(Protocol):
    """The part of a sequence that policies may read. The properties are those of core.sequence.Sequence.

    Nothing shows in advance how long the output will be, since a real run does not know that.
    """

    @property
    def index(self) -> int: ...
    @property
    def order(self) -> int: ...
    @property
    def done(self) -> int: ...
    @property
    def issued(self) -> int: ...
    @property
    def known(self) -> int: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def num_found(self) -> int: ...
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
        num_stages: number of stages P.
        chunk_size: most tokens in a microbatch (its budget C), for policies that use it.
        max_num_seqs: most sequences that run at once, over the whole pipeline.
        max_model_len: most tokens of prompt and output together.
        page_size: tokens per page of the KV cache.
        num_pages: pages of the KV cache. Every stage has room for all of them.
        inflight: most microbatches in flight at once.
        longrope_after: most tokens for which a sequence's rotary embeddings use the short factors (longrope). A
            sequence that becomes longer waits again, and all its tokens are computed with the long factors. None: the
            embeddings do not depend on the length.
        prefix_cache: which KV pages are entered in the index, so that sequences can share them: none, those whose
            tokens all came in chunks of prompts, or all.
        most_idle_pages: most pages that are kept for sharing while no sequence holds them; None for all.
        num_slots: number of state slots, one for each sequence that can run at once, see state_slots.py. 0: the model
            keeps no states. Stages apply the tokens of a sequence to its state one after the other, so any cut of a
            prompt into chunks gives the same bits. No policy has to know about states.
        issues_ahead: one more microbatch may be in flight, so that a device never waits for the host. Policies do not
            see it. Its decodes are of tokens that the microbatch before it draws, whose ids only the stage knows. So
            there must be one stage, and `inflight` must be 1.
    """

    num_stages: int
    chunk_size: int
    max_num_seqs: int
    max_model_len: int
    page_size: int
    num_pages: int
    inflight: int
    longrope_after: int | None = None
    prefix_cache: PrefixCacheMode = "off"
    most_idle_pages: int | None = None
    num_slots: int = 0
    issues_ahead: bool = False

    def __post_init__(self) -> None:
        assert not self.num_slots or self.num_slots >= self.max_num_seqs, "a sequence could run without a state slot"
        assert not self.num_slots or self.prefix_cache == "off", "a shared page would skip tokens of a state"
        assert not self.issues_ahead or self.num_stages == self.inflight == 1, "the stage would not know the tokens"

    @property
    def most_inflight(self) -> int:
        """Return the most microbatches in flight, with the one that is issued ahead."""
        return self.inflight + self.issues_ahead

    @property
    def max_decodes(self) -> int:
        """Decodes per microbatch, if `max_num_seqs` sequences are divided among P microbatches. SARATHI calls it B."""
        return -(-self.max_num_seqs // self.num_stages)


class View(NamedTuple):
    """The state of the run when a policy chooses the next microbatch.

    Attributes:
        prefills: started sequences with known tokens that are not issued yet, oldest first.
        waiting: sequences that may start now, oldest first. A grant admits the sequence. Held ones are left out
            (Policy.holds_sequences). `issued` is the number of tokens whose pages were found.
        decodes: sequences that are ready for their next token, longest ready first.
        running: all started sequences by index, those whose next token is in flight included.
        num_inflight: number of microbatches in flight, without one that may be issued ahead.
        slot: index of the next microbatch modulo the number of stages.
        free_tokens: number of tokens for which the free KV pages have room.
        waiting_tokens: tokens to compute of all waiting sequences, those that cannot start yet included, without held
            ones. For those that cannot start yet, it assumes the share of prompt tokens that was found so far.
        num_past_prompt: number of running sequences whose whole prompt is issued.
        tokens_past_prompt: known tokens of these sequences.
        finished: (prompt tokens, output tokens) of the latest requests that finished, oldest first. Prompt tokens that
            were found are left out.
        cost: cost model of the stages. None if nothing is known about them, or if the policy does not ask for it
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
    """The order to compute the next `num_tokens` known tokens of a sequence.

    The `overlap` tokens before them are computed once more. In a model with states (Limits.num_slots) they are not,
    because a state must get each token once.
    """

    sequence: SequenceView
    num_tokens: int
    overlap: int = 0


class Policy(ABC):
    """A rule that chooses the next microbatch.

    The class attributes declare what a policy needs from the runtime. A policy sets only those that differ from these.
    If it is a dataclass, its int and float fields are parameters that the command line can set.
    """

    __slots__ = ()

    # The policy uses the chunk size. If False, a --chunk-size causes a warning.
    uses_chunk_size: ClassVar[bool] = True
    # The chunk size is only an upper limit: the policy chooses the size of each microbatch.
    chooses_chunk_size: ClassVar[bool] = False
    # Chunk size in tokens, unless the user or a profile sets another one.
    default_chunk_size: ClassVar[int] = 256
    # Microbatches in flight beyond one per stage, unless the user or a profile sets their number. With one stage, there
    # are no spare microbatches.
    spare_microbatches: ClassVar[int] = 0
    # A waiting sequence is left out of View.waiting while another one is about to compute its next KV page, which both
    # can then share. Such a wait takes a few microbatches.
    holds_sequences: ClassVar[bool] = True
    # The policy needs View.cost. The coordinator then spends time on each microbatch to learn its cost.
    wants_cost: ClassVar[bool] = False
    # The policy needs SequenceView.paragraph_ends. The tokenizer then spends time on each prompt to find them.
    wants_paragraphs: ClassVar[bool] = False

    @abstractmethod
    def pick(self, view: View) -> list[Grant]:
        """Return the grants of the next microbatch.

        An empty list means to wait for the next result. It is legal only if a microbatch is in flight.
        """

    @abstractmethod
    def max_tokens(self, limits: Limits) -> int:
        """Return the most tokens that one microbatch can hold under these limits.

        The buffers for messages between stages get this size.
        """


def class_name(kind: type[Policy]) -> str:
    """Return the name of a policy's class in the form module:Class."""
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
