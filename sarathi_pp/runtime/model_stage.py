"""A stage that holds a slice of the model, its KV shard, and the page tables that the coordinator's microbatches build.

MicroBatch -> page tables -> StageInputs -> layers (through paged attention) -> hidden states or token ids
"""

from __future__ import annotations

from array import array
from pathlib import Path

import torch
from torch import Tensor

from sarathi_pp.config import ResolvedRun, RunConfig
from sarathi_pp.core.plan import Chunk, MicroBatch, SampledToken, SamplingRow
from sarathi_pp.errors import ProtocolError
from sarathi_pp.model.attention import Needs, choose_backend
from sarathi_pp.model.inputs import Span, build_inputs, on_device
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.packed import warm_linears
from sarathi_pp.model.sampling import sample
from sarathi_pp.model.slice import StageModel, load_stage
from sarathi_pp.model.support import ModelFacts
from sarathi_pp.runtime.capacity import count_pages, kv_budget_bytes, make_shard, room_bytes
from sarathi_pp.runtime.stage import Compute, StageOutput
from sarathi_pp.trace.clock import SystemClock

# For warming up.
_GREEDY = SamplingRow(position=0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
_DRAWN = SamplingRow(position=0, temperature=1.0, top_k=1, top_p=0.9, min_p=0.0, seed=0)


class ModelStages:
    """Stages that hold a slice of a model. See StageMaker.

    sharers: ranks that draw on the same memory.
    """

    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        facts: ModelFacts,
        dtype: torch.dtype,
        device: torch.device,
        sharers: int,
    ) -> None:
        needs = Needs(dtype, facts.head_dim, facts.softcap, facts.sinks)
        backend = choose_backend(config.attention, device, config.page_size, needs)
        self.page_size = config.page_size or backend.default_page_size
        self.attention = backend.name
        self.device_name = device.type
        self._config = config
        self._backend = backend
        self._model_dir = model_dir
        self._facts = facts
        self._dtype = dtype
        self._device = device
        self._sharers = sharers
        # Now, before any of the sharers has loaded anything.
        self._room = room_bytes(device)
        self._loaded: StageModel | None = None

    def load(self, layers: tuple[int, int]) -> int:
        facts, dtype, device = self._facts, self._dtype, self._device
        self._loaded = load_stage(self._model_dir, layers, facts.num_layers, dtype, device, self._backend, self._room)
        budget = kv_budget_bytes(self._config, self._device, self._sharers)
        return count_pages(budget, facts, layers, self.page_size, dtype)

    def make(self, run: ResolvedRun, layers: tuple[int, int], dtype: torch.dtype) -> ModelStage:
        facts = self._facts
        assert self._loaded is not None, "load comes first"
        warm_linears(self._loaded.module, run.max_microbatch_tokens, SystemClock().now)
        kv = make_shard(run, facts, layers, dtype, self._device)
        debug_nan = self._config.debug_nan
        return ModelStage(self._loaded, kv, facts.hidden_size, dtype, self._device, debug_nan=debug_nan)


class ModelStage:
    """A slice of a model and its KV shard; holds nothing that a header did not tell it.

    debug_nan: look at every output, so that the first stage with values that are not finite is known.
    """

    def __init__(
        self,
        model: StageModel,
        kv: KVShard,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        debug_nan: bool = False,
    ) -> None:
        self.model = model
        self.kv = kv
        self.device = device
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._debug_nan = debug_nan
        self._tables: dict[int, array[int]] = {}

    @property
    def counts_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def bytes_read(self) -> int:
        return self.model.bytes_read

    def prepare(self, microbatch: MicroBatch) -> Compute:
        self._update_tables(microbatch)
        drawn = [chunk for chunk in microbatch.chunks if chunk.sampling is not None] if self.model.head else []
        inputs = build_inputs(
            [Span(chunk.start, chunk.num_tokens, self._tables[chunk.sequence]) for chunk in microbatch.chunks],
            _last_rows(microbatch) if drawn else (),
            self.kv.page_size,
            self.device,
        )
        token_ids = self._embedding_input(microbatch) if self.model.embed else None

        def compute(hidden: Tensor | None) -> StageOutput:
            x = token_ids if hidden is None else hidden
            assert x is not None, "a stage that does not embed gets activations"
            y = self.model.forward(x, inputs, self.kv)
            if self.model.head:
                return StageOutput(tokens=_draw(y, drawn))
            return StageOutput(hidden=y, bad=_not_finite(y, microbatch) if self._debug_nan else ())

        return compute

    def warm_up(self, num_tokens: int, num_keys: int) -> None:
        """A chunk of made-up tokens, then a decode behind it, so that first-call costs (compilation, kernel
        choice, allocator) fall before the run. On a device both again behind a long context, which kernels there share
        out, and a draw of either kind.
        """
        room = self.kv.num_pages * self.kv.page_size
        num_tokens, num_keys = min(num_tokens, room), min(num_keys, room)
        ends = (num_tokens,) if self.device.type == "cpu" else (num_tokens, max(num_keys, num_tokens))
        for end in ends:
            pages = range(-(-end // self.kv.page_size))
            for count in (num_tokens, 1):
                inputs = build_inputs([Span(end - count, count, pages)], (count - 1,), self.kv.page_size, self.device)
                y = self.model.forward(self._made_up(count), inputs, self.kv)
        if self.model.head:
            for row in (_GREEDY, _DRAWN):
                sample(y, [row])

    def _made_up(self, num_tokens: int) -> Tensor:
        if self.model.embed:
            return torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        return torch.zeros(num_tokens, self._hidden_size, dtype=self._dtype, device=self.device)

    def _update_tables(self, microbatch: MicroBatch) -> None:
        for sequence in microbatch.freed:
            self._tables.pop(sequence, None)
        num_pages = self.kv.num_pages
        for chunk in microbatch.chunks:
            if chunk.new_pages and not (min(chunk.new_pages) >= 0 and max(chunk.new_pages) < num_pages):
                raise ProtocolError(f"{microbatch} brings pages {chunk.new_pages} to a KV shard of {num_pages}")
            self._tables.setdefault(chunk.sequence, array("q")).extend(chunk.new_pages)

    def _embedding_input(self, microbatch: MicroBatch) -> Tensor:
        ids = array("q", (token for chunk in microbatch.chunks for token in chunk.token_ids))
        return on_device(torch.frombuffer(ids, dtype=torch.int64), self.device)


def _not_finite(hidden: Tensor, microbatch: MicroBatch) -> tuple[int, ...]:
    finite: list[bool] = hidden.isfinite().all(dim=1).tolist()
    bad, row = [], 0
    for chunk in microbatch.chunks:
        if not all(finite[row : row + chunk.num_tokens]):
            bad.append(chunk.sequence)
        row += chunk.num_tokens
    return tuple(bad)


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
