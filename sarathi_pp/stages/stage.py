"""What a rank computes with: a stage, and the maker that gives a rank its own."""

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
    """hidden: (T, hidden_size) for the next stage, None on the last one, which draws tokens instead. rows: (n,
    hidden_size) of what is drawn, from a last stage that leaves the head to the first.

    bad: sequences of which not all of the output is finite; only looked for where that was asked for.
    """

    hidden: Tensor | None = None
    tokens: tuple[SampledToken, ...] = ()
    rows: Tensor | None = None
    bad: tuple[int, ...] = ()


class Compute(Protocol):
    """Embedding, layers, head and sampling of one microbatch."""

    def __call__(self, hidden: Tensor | None) -> StageOutput:
        """hidden: (T, hidden_size) from the stage before; None on the first stage, which embeds token ids.

        May be called again with the same where it found no memory. The output shares no memory with the input. A device
        may still be computing when this returns.
        """
        ...


class Stage(Protocol):
    """Runs microbatches in the order in which they were issued.

    counts_cpu: whether the computing thread's CPU time says something about a compute span. bytes_read: of the
    weights, at loading. steps: layers computed so far, which moves inside of a microbatch too; on a device, once they
    are launched. graphed: microbatches that a CUDA graph ran, and those that none fits; None without graphs.
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
        """The program's own part: page tables, indices, token ids. Returns the rest, which is timed."""
        ...

    def prepare_head(self, microbatch: MicroBatch) -> Compute:
        """Of a first stage that has the head too: from the rows that the last stage has left to it to tokens."""
        ...

    def warm_up(self, num_tokens: int, num_keys: int) -> None:
        """Bear the costs of first calls, before the run, for microbatches of up to num_tokens behind num_keys."""
        ...


class StageMaker(Protocol):
    """Where a rank's stage comes from: first what can be loaded without knowing the run, then the rest.

    Attributes:
        page_size: tokens per KV page.
        attention: name of the attention backend.
        device_name: type of the device, for the reports.
        has_head: on the first stage, it could load the LM head too; on other stages, the first stage was asked to.
            Known after `load`.
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
        """Return what `load` takes for the layers [first, end), which it tells from the checkpoint's headers alone."""
        ...

    def load(self, layers: tuple[int, int], room_bytes: int) -> None:
        """Load what belongs to the layers [first, end). room_bytes: what this rank may take of the device's memory."""
        ...

    def count_pages(self, layers: tuple[int, int], sharers: Mapping[str, int]) -> int:
        """Return how many KV pages fit beside what was loaded: when every rank has, since some may share the memory.

        sharers: ranks that draw on each pool of memory, by the pool's id.
        """
        ...

    def shard_bytes(self, run: ResolvedRun, layers: tuple[int, int]) -> int:
        """Return what `make` takes for KV pages before it can find out that they are not there; 0 if it can."""
        ...

    def make(self, run: ResolvedRun, layers: tuple[int, int], dtype: torch.dtype) -> Stage:
        """The stage, for the page count that all ranks agreed on."""
        ...
