"""The interfaces of a stage, with which a rank computes, and of the maker that gives a rank its stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sarathi_pp.config import ResolvedRun
from sarathi_pp.core.plan import MicroBatch, SampledToken


@dataclass(frozen=True, slots=True)
class StageOutput:
    """The output of a stage for one microbatch.

    Attributes:
        hidden: (T, hidden_size) for the next stage; None on the last one, which draws tokens instead.
        tokens: drawn tokens.
        rows: (n, hidden_size) of the drawn tokens, from a last stage that leaves the LM head to the first.
        bad: sequences whose output is not finite everywhere. It is only checked if that was requested.
    """

    hidden: Tensor | None = None
    tokens: tuple[SampledToken, ...] = ()
    rows: Tensor | None = None
    bad: tuple[int, ...] = ()


class Compute(Protocol):
    """Embedding, layers, LM head and sampling of one microbatch."""

    def __call__(self, hidden: Tensor | None) -> StageOutput:
        """Compute the microbatch.

        If it found no memory, it may be called again with the same input. The output shares no memory with the input. A
        device may still be computing when this returns.

        Args:
            hidden: (T, hidden_size) from the stage before; None on the first stage, which embeds token ids.
        """
        ...


class Stage(Protocol):
    """A part of the model that runs microbatches in the order in which they were issued.

    Attributes:
        counts_cpu: the computing thread's CPU time has a meaning for a compute span.
        bytes_read: bytes of weights read at loading.
        steps: layers computed so far, which also increases inside of a microbatch. On a device, layers count once they
            are launched.
        graphed: microbatches that a CUDA graph ran, and those that fit none; None without graphs.
    """

    @property
    def counts_cpu(self) -> bool: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def graphed(self) -> tuple[int, int] | None: ...

    def prepare(self, microbatch: MicroBatch) -> Compute:
        """Do the host's own part: page tables, indices, token ids. Return the remaining work, which is timed."""
        ...

    def prepare_head(self, microbatch: MicroBatch) -> Compute:
        """Prepare the LM head on a first stage that has it too.

        It makes tokens from the rows that the last stage leaves to it.
        """
        ...

    def warm_up(self, num_tokens: int, num_keys: int) -> None:
        """Pay the costs of first calls before the run, for microbatches of up to num_tokens after num_keys."""
        ...


class StageMaker(Protocol):
    """The maker of a rank's stage. First it loads what does not depend on the run, then it makes the stage.

    Attributes:
        page_size: tokens per KV page.
        attention: name of the attention backend.
        device_name: type of the device, for the reports.
        has_head: True on the first stage if it has loaded the LM head too, and on the other stages if the run wants
            it there. Known after `load`.
        reading: shows how much of the weights `load` has read, if it is formatted.
    """

    @property
    def page_size(self) -> int: ...
    @property
    def attention(self) -> str: ...
    @property
    def device_name(self) -> str: ...
    @property
    def has_head(self) -> bool: ...
    @property
    def reading(self) -> object: ...

    def weight_bytes(self, layers: tuple[int, int]) -> int:
        """Return the bytes that `load` takes for the layers [first, end), from the checkpoint's headers alone."""
        ...

    def load(self, layers: tuple[int, int], room_bytes: int) -> None:
        """Load everything that belongs to the layers [first, end).

        Args:
            room_bytes: memory of the device that this rank may take.
        """
        ...

    def count_pages(self, layers: tuple[int, int], sharers: Mapping[str, int]) -> int:
        """Return how many KV pages fit next to what was loaded.

        Call it when every rank has loaded, since some may share the memory.

        Args:
            sharers: number of ranks that draw on each pool of memory, by the pool's id.
        """
        ...

    def shard_bytes(self, run: ResolvedRun, layers: tuple[int, int]) -> int:
        """Return the bytes of KV pages whose memory is taken only when a page is written; 0 if `make` takes it at once.

        In the first case, `make` cannot notice that there is too little memory, so it must be checked before.
        """
        ...

    def make(self, run: ResolvedRun, layers: tuple[int, int], dtype: torch.dtype) -> Stage:
        """Return the stage, for the page count that all ranks agreed on."""
        ...
