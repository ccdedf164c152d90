"""The interfaces of a stage, with which a rank computes, and of the maker that gives a rank its stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sarathi_pp.config import ResolvedRun
from sarathi_pp.core.plan import ChunkLogprobs, MicroBatch, SampledToken


@dataclass(frozen=True, slots=True)
class StageOutput:
    """The output of a stage for one microbatch.

    Attributes:
        hidden: activations for the next stage, (T, hidden_size) for T tokens. None on the last stage.
        tokens: tokens that the last stage drew, or the first stage if it computes the LM head.
        prompt_logprobs: those of the microbatch's scored tokens.
        later: returns `tokens`. Call it after the device has computed the microbatch. It is set instead of `tokens` if
            the host may launch the next microbatch before.
        mask_s: seconds in which drawing waited for masks of grammars; None if no row has a grammar.
        rows: inputs of the LM head, (n, hidden_size) for n tokens to draw. Set if the last stage leaves the LM head to
            the first stage.
        bad: indices of the sequences whose `hidden` has NaN or infinity. It is only checked with --debug-nan.
    """

    hidden: Tensor | None = None
    tokens: tuple[SampledToken, ...] = ()
    rows: Tensor | None = None
    bad: tuple[int, ...] = ()
    prompt_logprobs: tuple[ChunkLogprobs, ...] = ()
    mask_s: float | None = None
    later: Callable[[], tuple[SampledToken, ...]] | None = None


class Compute(Protocol):
    """A function that computes one microbatch: those of embedding, layers, LM head and sampling that the stage has."""

    def __call__(self, hidden: Tensor | None) -> StageOutput:
        """Compute the microbatch.

        If memory ran out, it may be called again with the same input. The output shares no memory with the input. A GPU
        may still be computing when this returns.

        Args:
            hidden: activations from the stage before, (T, hidden_size) for T tokens. None on the first stage, which
                embeds token ids.
        """
        ...


class Stage(Protocol):
    """A part of the model that runs microbatches in the order in which they were issued.

    Attributes:
        counts_cpu: True if the computing thread's CPU time is a measure of the stage's work. It is not on a GPU, nor
            if the stage is emulated.
        bytes_read: bytes of weights read at loading.
        steps: number of layers computed so far. It also grows inside a microbatch, and in a wait for masks. On a GPU, a
            layer counts once it is launched.
        graphed: number of microbatches that a CUDA graph ran, and number that fit no graph; None without graphs.
        threads: number of threads that compute the layers, for few rows and for more; None if `warm_up` chose none.
    """

    @property
    def threads(self) -> tuple[int, int] | None: ...
    @property
    def counts_cpu(self) -> bool: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def graphed(self) -> tuple[int, int] | None: ...

    def drop_graphs(self) -> None:
        """Drop the CUDA graphs, if there are any, and free their memory. Later microbatches run without graphs."""
        ...

    def prepare(self, microbatch: MicroBatch) -> Compute:
        """Prepare a microbatch on the host: page tables, indices, token ids.

        Return a function that does the remaining work. The trace times only that function.
        """
        ...

    def prepare_head(self, microbatch: MicroBatch) -> Compute:
        """Return a function that computes the LM head of a microbatch and draws its tokens.

        It is for a first stage that has the LM head too. The function gets the rows that the last stage sent.
        """
        ...

    def warm_up(self, num_tokens: int, num_keys: int) -> None:
        """Compute synthetic microbatches before the run, so that it does not pay for compiling and first allocations.

        Args:
            num_tokens: most tokens of such a microbatch.
            num_keys: longest context of its tokens, in tokens.
        """
        ...

    def prepare_grammars(self) -> None:
        """Make a stage that draws ready for requests with a grammar. Without this call, the first one waits longer."""
        ...


class StageMaker(Protocol):
    """The maker of a rank's stage. It loads the weights first, and makes the stage when the page count is known.

    Attributes:
        page_size: tokens per KV page.
        attention: name of the attention backend.
        products: name of what computes linear layers, such as numba.
        state_backend: name of what computes layers with a state: numba or torch. It says nothing about a model that has
            no such layers.
        device_name: type of the device, for the reports.
        equal_decodes: a decode writes the same keys and values as a prompt chunk would, to the last bit.
        draws_ahead: the stage can compute a decode of a token that it drew in the microbatch before, when the host does
            not know the token yet.
        captures: stages of this maker try to capture CUDA graphs. Set it to False before `load` if another rank of a
            tensor-parallel stage cannot capture, because all ranks must compute the same microbatches.
        has_head: True if the run wants the first stage to have the LM head too. On the first stage, `load` sets it to
            False if there is no room.
        reading: an object whose text shows how much of the weights `load` has read.
    """

    captures: bool

    @property
    def page_size(self) -> int: ...
    @property
    def attention(self) -> str: ...
    @property
    def products(self) -> str: ...
    @property
    def state_backend(self) -> str | None: ...
    @property
    def device_name(self) -> str: ...
    @property
    def equal_decodes(self) -> bool: ...
    @property
    def draws_ahead(self) -> bool: ...
    @property
    def has_head(self) -> bool: ...
    @property
    def reading(self) -> object: ...

    def weight_bytes(self, layers: tuple[int, int]) -> int:
        """Return the bytes of memory that `load` takes for the layers [first, end). Only file headers are read."""
        ...

    def load(self, layers: tuple[int, int], room_bytes: int) -> None:
        """Load everything that belongs to the layers [first, end).

        Args:
            room_bytes: memory of the device that this rank may take.
        """
        ...

    def count_pages(self, layers: tuple[int, int], sharers: Mapping[str, int]) -> int:
        """Return the number of KV pages that fit into memory next to the loaded weights.

        Call it after every rank has loaded its weights, since several ranks may share the memory.

        Args:
            sharers: number of ranks that draw on each pool of memory, by the pool's id.
        """
        ...

    def shard_bytes(self, run: ResolvedRun, layers: tuple[int, int]) -> int:
        """Return the bytes of KV pages whose memory is taken only when a page is written; 0 if `make` takes it at once.

        In the first case, `make` cannot notice that there is too little memory. So the caller checks this before.
        """
        ...

    def make(self, run: ResolvedRun, layers: tuple[int, int], dtype: torch.dtype) -> Stage:
        """Return the stage, with the number of KV pages on which all ranks have agreed."""
        ...
