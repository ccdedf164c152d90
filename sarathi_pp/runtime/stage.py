"""One stage: its slice of the model, its KV shard, and the page tables that the coordinator's microbatches build.

MicroBatch -> page tables -> StageInputs -> layers (through paged attention) -> hidden states or token ids
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from sarathi_pp.core.plan import Chunk, MicroBatch, SampledToken
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.sampling import sample
from sarathi_pp.model.slice import StageModel


@dataclass(frozen=True, slots=True)
class StageOutput:
    """hidden: (T, hidden_size) for the next stage, None on the last one, which draws tokens instead."""

    hidden: Tensor | None = None
    tokens: tuple[SampledToken, ...] = ()


class Stage:
    """Runs microbatches in the order in which they were issued; holds nothing that a header did not tell it."""

    def __init__(
        self, model: StageModel, kv: KVShard, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.model = model
        self.kv = kv
        self.device = device
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._tables: dict[int, array[int]] = {}

    def compute(self, microbatch: MicroBatch, hidden: Tensor | None) -> StageOutput:
        """hidden: (T, hidden_size) from the stage before; None on the first stage, which embeds token ids."""
        self._update_tables(microbatch)
        drawn = [chunk for chunk in microbatch.chunks if chunk.sampling is not None] if self.model.head else []
        inputs = build_inputs(
            [Span(chunk.start, chunk.num_tokens, self._tables[chunk.sequence]) for chunk in microbatch.chunks],
            _last_rows(microbatch) if drawn else (),
            self.kv.page_size,
            self.device,
        )
        x = self._embedding_input(microbatch) if hidden is None else hidden
        y = self.model.forward(x, inputs, self.kv)
        output = StageOutput(tokens=_draw(y, drawn)) if self.model.head else StageOutput(hidden=y)
        if self.device.type == "cuda":
            # Kernels run behind the caller's back; whoever times this call must see them end.
            torch.cuda.synchronize(self.device)
        return output

    def warm_up(self, num_tokens: int) -> None:
        """A chunk of made-up tokens, then a decode behind it, so that first-call costs (compilation, kernel
        choice, allocator) fall before the run."""
        num_tokens = min(num_tokens, self.kv.num_pages * self.kv.page_size)
        pages = range(-(-num_tokens // self.kv.page_size))
        for span in (Span(0, num_tokens, pages), Span(num_tokens - 1, 1, pages)):
            inputs = build_inputs([span], (span.num_tokens - 1,), self.kv.page_size, self.device)
            if self.model.embed:
                x = torch.zeros(span.num_tokens, dtype=torch.int64, device=self.device)
            else:
                x = torch.zeros(span.num_tokens, self._hidden_size, dtype=self._dtype, device=self.device)
            self.model.forward(x, inputs, self.kv)

    def _update_tables(self, microbatch: MicroBatch) -> None:
        for sequence in microbatch.freed:
            self._tables.pop(sequence, None)
        for chunk in microbatch.chunks:
            self._tables.setdefault(chunk.sequence, array("q")).extend(chunk.new_pages)

    def _embedding_input(self, microbatch: MicroBatch) -> Tensor:
        ids = array("q", (token for chunk in microbatch.chunks for token in chunk.token_ids))
        return torch.frombuffer(ids, dtype=torch.int64).to(self.device)


def _last_rows(microbatch: MicroBatch) -> list[int]:
    """Row of the last token of every chunk that reaches the end of its sequence's known tokens."""
    rows, end = [], 0
    for chunk in microbatch.chunks:
        end += chunk.num_tokens
        if chunk.sampling is not None:
            rows.append(end - 1)
    return rows


def _draw(logits: Tensor, chunks: list[Chunk]) -> tuple[SampledToken, ...]:
    rows = [chunk.sampling for chunk in chunks if chunk.sampling is not None]
    if not rows:
        return ()
    token_ids, failed = sample(logits, rows)
    return tuple(
        SampledToken(chunk.sequence, chunk.epoch, token_id, failed=bad)
        for chunk, token_id, bad in zip(chunks, token_ids, failed, strict=True)
    )
