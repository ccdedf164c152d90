"""A stage that holds consecutive layers of a model, their KV pages, and for each sequence a table of its pages.

The coordinator assigns pages. Microbatches bring the ids of new pages, which the stage appends to the tables. If layers
keep states, the first chunk of a sequence brings the id of its state slot, which the stage keeps next to the table:

MicroBatch -> page tables, slots -> StageInputs -> layers (through paged attention) -> hidden states or token ids
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sarathi_pp.checkpoint.facts.support import ModelFacts
from sarathi_pp.checkpoint.tensor_file import ReadCount
from sarathi_pp.config import ResolvedRun, RunConfig
from sarathi_pp.core.plan import MicroBatch
from sarathi_pp.core.policy import Limits, parse_policy
from sarathi_pp.core.sequence import EXPECTED
from sarathi_pp.drawing.drawer import Drawer
from sarathi_pp.drawing.grammar import GrammarThread
from sarathi_pp.drawing.latest_draw import LatestDraw
from sarathi_pp.drawing.sampling import sample
from sarathi_pp.errors import CapacityError, ConfigError, ProtocolError
from sarathi_pp.model.attention import CapturableBackend, Needs, choose_backend
from sarathi_pp.model.batch_invariant import has_equal_decodes
from sarathi_pp.model.fuse.compiled_layers import choose_team
from sarathi_pp.model.fuse.packed_linear import product_name, warm_linears
from sarathi_pp.model.graphs import CaptureError, CudaGraph, StageGraphs, graph_shapes
from sarathi_pp.model.inputs import Span, build_inputs, on_device
from sarathi_pp.model.kv import KVShard, page_dtype
from sarathi_pp.model.loader import load_lm_head, load_stage, stage_bytes
from sarathi_pp.model.memory import give_back, in_gib, is_out_of_memory
from sarathi_pp.model.stage_model import LMHead, StageModel
from sarathi_pp.model.state.choice import state_backend
from sarathi_pp.model.tensor_parallel import TensorShard
from sarathi_pp.model.triton_available import has_kernels, why_no_kernels
from sarathi_pp.model.weights import HeldTypes
from sarathi_pp.stages.capacity import (
    DeviceMemory,
    count_pages,
    kv_budget_bytes,
    make_shard,
    resolve_limits,
    shard_bytes,
)
from sarathi_pp.stages.prompt_scoring import PromptScoring
from sarathi_pp.stages.stage import Compute, StageOutput
from sarathi_pp.stages.token_draw import TokenDraw, WaitCount, remember
from sarathi_pp.stages.tokenizer_files import TokenizerFiles
from sarathi_pp.stages.working_memory import (
    DRAWN,
    GREEDY,
    LargestMicrobatch,
    edge_bytes,
    measure_working_bytes,
    smaller_options,
)
from sarathi_pp.trace.clock import SystemClock

_log = logging.getLogger(__name__)


class ModelStages:
    """A maker of stages that compute consecutive layers of a model. See the interface StageMaker.

    Args:
        facts: facts of the whole model, also with tensor parallelism.
        shard: this rank's part of every layer with tensor parallelism; None without it. The ranks of a stage load and
            make their stages at the same time.
        moves_head: see ResolvedRun.
        by_nccl: NCCL carries the activations, so they are received into memory of the GPU.
        dequantised: type to which quantised weights are dequantised; None for dtype.
        coded: weights in FP8 and MXFP4 stay as they are stored.

    Raises:
        ConfigError: the device cannot expand coded weights, or has no such attention backend.
    """

    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        facts: ModelFacts,
        dtype: torch.dtype,
        device: torch.device,
        shard: TensorShard | None = None,
        *,
        moves_head: bool = False,
        by_nccl: bool = False,
        dequantised: torch.dtype | None = None,
        coded: bool = False,
    ) -> None:
        if coded and (why := why_no_kernels(device)) is not None:
            raise ConfigError(f"--weights stored: Triton expands the weights, and triton {why}; leave out --weights")
        float8_pages = config.kv_cache_dtype == "fp8"
        needs = Needs(dtype, facts.head_dim, facts.softcap, facts.sinks, facts.latent, float8_pages)
        backend = choose_backend(config.attention, device, config.page_size, needs)
        self.page_size = config.page_size or backend.default_page_size
        self.attention = backend.name
        self.products = product_name(dtype, device)
        self.state_backend = state_backend(facts.caches, dtype, device)
        self.equal_decodes = has_equal_decodes(dtype, self.attention, self.products)
        self.device_name = device.type
        self.draws_ahead = device.type == "cuda" and has_kernels(device)
        self._config = config
        self._backend = backend
        self._model_dir = model_dir
        self._shard = shard
        self._facts = facts if shard is None else facts.sharded(shard.size)
        self._dtype = dtype
        self._dequantised = dequantised
        self._coded = coded
        self._device = device
        self.has_head = moves_head
        self.reading = ReadCount()
        self._by_nccl = by_nccl
        self._loaded: StageModel | None = None
        self._head: LMHead | None = None
        self._working = 0
        self.captures = self._can_capture()

    def weight_bytes(self, layers: tuple[int, int]) -> int:
        held = HeldTypes.on(self._device.type, self._dtype, self._dequantised, coded=self._coded)
        return stage_bytes(self._model_dir, layers, held, self._shard)

    def load(self, layers: tuple[int, int], room_bytes: int) -> None:
        facts, dtype, device = self._facts, self._dtype, self._device
        self._loaded = load_stage(
            self._model_dir,
            layers,
            facts.num_layers,
            dtype,
            device,
            self._backend,
            room_bytes,
            self._shard,
            self.reading,
            self._dequantised,
            self._coded,
        )
        if self.has_head and layers[0] == 0:
            self._load_head(room_bytes)
        if device.type == "cuda" and self._config.kv_cache_memory_bytes is None:
            # Measure before any rank counts pages. Otherwise, memory that one rank uses only during its measurement
            # could be missing in the count of another rank on the same GPU.
            self._working = self._working_bytes(layers)

    def _load_head(self, room_bytes: int) -> None:
        """Load the LM head on the first stage too, into the memory that its layers leave free.

        If it does not fit, the last stage computes the LM head for all microbatches.

        Args:
            room_bytes: memory that this rank may take, for layers and LM head together.
        """
        assert self._loaded is not None, "layers come first"
        left = room_bytes - self._loaded.num_bytes
        try:
            self._head = load_lm_head(self._model_dir, self._dtype, self._device, left, self._dequantised)
        except CapacityError as error:
            _log.warning("the LM head stays on the last stage: %s", str(error).splitlines()[0])
            self.has_head = False

    def count_pages(self, layers: tuple[int, int], sharers: Mapping[str, int]) -> int:
        budget = kv_budget_bytes(self._config, DeviceMemory.of(self._device), sharers, self._working)
        if budget == 0 and self._working:
            raise self._no_working_memory(
                layers, f"it takes {in_gib(self._working)}, which leaves no room for KV pages"
            )
        return count_pages(budget, self._facts, layers, self._limits(), self._dtype, self._config.kv_cache_dtype)

    def shard_bytes(self, run: ResolvedRun, layers: tuple[int, int]) -> int:
        """Return the bytes of the stage's KV shard on a CPU, where memory is taken only when a page is written.

        Return 0 on a GPU, where `make` takes the memory at once.
        """
        return shard_bytes(run, self._facts, layers, self._dtype) if self._device.type == "cpu" else 0

    def make(self, run: ResolvedRun, layers: tuple[int, int], dtype: torch.dtype) -> ModelStage:
        facts = self._facts
        assert self._loaded is not None, "load comes first"
        warm_linears(self._loaded.module, run.max_microbatch_tokens, SystemClock().now)
        if self._head is not None:
            warm_linears(self._head.module, run.max_num_seqs, SystemClock().now)
        kv = make_shard(run, facts, layers, dtype, self._device, spare=self.captures)
        graphs = self._capture(run, kv) if self.captures else None
        debug_nan = self._config.debug_nan
        sizes = facts.hidden_size, dtype, self._device
        return ModelStage(
            self._loaded,
            kv,
            *sizes,
            self._head,
            graphs=graphs,
            debug_nan=debug_nan,
            grammars=GrammarThread(TokenizerFiles(self._model_dir)),
            ahead=run.issues_ahead,
        )

    def _can_capture(self) -> bool:
        if self._device.type != "cuda" or self._config.enforce_eager:
            return False
        if self._facts.has_states:
            _log.info("no CUDA graphs: layers that keep states are not captured")
            return False
        if self._shard is not None and self._shard.size > 1 and not self._shard.capturable:
            _log.info("no CUDA graphs: gloo adds up the results of tensor shards on the host")
            return False
        if not isinstance(self._backend, CapturableBackend):
            _log.info("no CUDA graphs: attention %s cannot be captured", self._backend.name)
            return False
        return True

    def _capture(self, run: ResolvedRun, kv: KVShard) -> StageGraphs | None:
        """Capture the stage's work as CUDA graphs, one for each of some sizes of microbatches.

        Return None if capturing fails, for example because the host must read the number of tokens of an expert.

        Raises:
            RuntimeError: with tensor parallelism, a microbatch cannot be computed. The other ranks of the stage wait
                for its sums.
        """
        facts, pool = self._facts, torch.cuda.graph_pool_handle()
        shapes = graph_shapes(run.max_microbatch_tokens, run.max_num_seqs)
        assert self._loaded is not None, "load comes first"
        try:
            graphs = StageGraphs(
                self._loaded,
                kv,
                shapes,
                facts.hidden_size,
                facts.num_heads,
                self._device,
                [CudaGraph(pool) for _ in shapes],  # no local name: it would keep the memory after a failure
            )
            _log.info("%d graphs of up to %d tokens", len(shapes), shapes[0].num_tokens)
            return graphs
        except RuntimeError as error:
            if self._shard is not None and not isinstance(error, CaptureError):
                raise
            _log.warning("no CUDA graphs, each microbatch is launched without one: %s", str(error).splitlines()[0])
        # Not inside the except block: there, the traceback still holds the captured graphs.
        give_back()
        return None

    def _working_bytes(self, layers: tuple[int, int]) -> int:
        """Measure the bytes that the stage needs besides weights and KV pages. See working_memory.py.

        With tensor parallelism, all ranks of a stage must compute the same microbatch at the same time. So its size
        does not depend on the free memory of one rank.

        Raises:
            CapacityError: the GPU has less memory.
        """
        facts, device = self._facts, self._device
        limits = self._limits()
        largest = LargestMicrobatch.of(parse_policy(self._config.policy), limits)
        assert self._loaded is not None, "load comes first"
        try:
            pages = page_dtype(self._config.kv_cache_dtype, self._dtype)
            kv = KVShard(
                layers, 1, self.page_size, facts.caches, self._dtype, device, pages=pages, num_slots=1, spare=True
            )
            computing = measure_working_bytes(
                self._loaded, kv, largest, facts.hidden_size, facts.num_heads, graphed=self.captures
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._no_working_memory(layers, str(error).splitlines()[0]) from error
        del kv
        give_back()
        if not self._by_nccl:
            return computing
        edges = (layers[0] > 0) + (layers[1] < facts.num_layers)
        item_bytes = self._dtype.itemsize
        return computing + edge_bytes(edges, largest.num_tokens, facts.hidden_size, item_bytes, limits.inflight)

    def _limits(self) -> Limits:
        """Return the limits of the run before pages are counted: with pages for all sequences that may run at once."""
        return resolve_limits(self._config, self._facts, self._config.stages, (), self.page_size)

    def _no_working_memory(self, layers: tuple[int, int], why: str) -> CapacityError:
        policy, limits = parse_policy(self._config.policy), self._limits()
        largest = LargestMicrobatch.of(policy, limits)
        return CapacityError(
            f"layers [{layers[0]}, {layers[1]}) have no memory for the largest microbatch of --policy {policy}, of "
            f"{largest.num_tokens} tokens, of which {largest.num_rows} have logits: {why}\n  try  a smaller "
            f"{smaller_options(policy, limits)}, more --stages, or --kv-cache-memory if no microbatch gets that large"
        )


class ModelStage:
    """A stage that computes consecutive layers of a model. See the interface Stage.

    All that it knows about sequences comes with the microbatches.

    Args:
        kv: KV pages of these layers.
        head: LM head of a first stage that computes it for some microbatches; None on any other stage.
        graphs: CUDA graphs of the stage's work; None without graphs.
        debug_nan: check every output and report the sequences with NaN or infinity.
        grammars: computes the masks of requests with a grammar.
        ahead: see ResolvedRun.issues_ahead.
    """

    def __init__(
        self,
        model: StageModel,
        kv: KVShard,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        head: LMHead | None = None,
        *,
        graphs: StageGraphs | None = None,
        debug_nan: bool = False,
        grammars: GrammarThread | None = None,
        ahead: bool = False,
    ) -> None:
        self.model = model
        self.kv = kv
        self.device = device
        self._head = head
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._graphs = graphs
        self._debug_nan = debug_nan
        self.threads: tuple[int, int] | None = None
        self._tables: dict[int, array[int]] = {}
        self._slots: dict[int, int] = {}  # by sequence; empty in a model without states
        self._waits = WaitCount()
        self._grammars = grammars
        self._drawer = Drawer(grammars)
        self._latest = LatestDraw() if ahead else None
        self._token_draws: dict[int, TokenDraw] = {}  # of the microbatches in flight whose LM head is computed here

    @property
    def _draws(self) -> bool:
        return self.model.has_lm_head or self._head is not None

    @property
    def counts_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def bytes_read(self) -> int:
        return self.model.bytes_read + (self._head.bytes_read if self._head is not None else 0)

    @property
    def steps(self) -> int:
        return int(self.model.steps[0]) + self._waits.num_waits

    @property
    def graphed(self) -> tuple[int, int] | None:
        return None if self._graphs is None else (self._graphs.hits, self._graphs.misses)

    def drop_graphs(self) -> None:
        self._graphs = None

    def prepare(self, microbatch: MicroBatch) -> Compute:
        spans, ids = self._spans(microbatch)
        # Both ends take the tokens of every microbatch, and only one of them draws.
        draws = self._draws and microbatch.head_on_first == (self._head is not None)
        edits = self._drawer.prepare(microbatch, draws=draws) if self._draws else {}
        draw = TokenDraw(microbatch, edits, self._waits, self._grammars)
        if self._head is not None and draws:
            self._token_draws[microbatch.index] = draw
        if self.model.has_lm_head and microbatch.scores:
            return self._prepare_scores(PromptScoring(microbatch, draw), spans, ids)
        forward = self._forward(microbatch, spans, ids, draw.rows() if self.model.has_lm_head else ())

        def compute(hidden: Tensor | None) -> StageOutput:
            draw.begin()
            y = forward(hidden)
            if self.model.has_lm_head:
                if microbatch.head_on_first:
                    return StageOutput(rows=y)
                return draw.output(y) if self._latest is None else draw.launch(y, self._latest)
            return StageOutput(hidden=y, bad=_not_finite(y, microbatch) if self._debug_nan else ())

        return compute

    def _prepare_scores(self, scoring: PromptScoring, spans: list[Span], ids: array[int]) -> Compute:
        """Prepare a microbatch with scored tokens on the last stage. CUDA graphs have too few rows of logits."""
        inputs = build_inputs(spans, scoring.rows, self.kv.page_size, self.device)
        token_ids = self._token_ids(ids)

        def compute(hidden: Tensor | None) -> StageOutput:
            x = token_ids() if hidden is None else hidden
            scoring.begin()
            output = scoring.output(self.model.rows_head(), self.model.forward_rows(x, inputs, self.kv))
            return output if self._latest is None else remember(output, self._latest, self.device)

        return compute

    def prepare_head(self, microbatch: MicroBatch) -> Compute:
        head = self._head
        assert head is not None, f"{microbatch}: its head is not here"
        draw = self._token_draws.pop(microbatch.index)

        def compute(hidden: Tensor | None) -> StageOutput:
            assert hidden is not None, "a head gets rows"
            return draw.output(head.forward(hidden))

        return compute

    def _forward(
        self, microbatch: MicroBatch, spans: list[Span], ids: array[int], logit_rows: Sequence[int]
    ) -> Callable[[Tensor | None], Tensor]:
        """Return a function that computes the model on a microbatch. It uses a CUDA graph if one fits.

        Args:
            ids: token ids of all chunks.
            logit_rows: rows of the microbatch for which the LM head is computed.
        """
        if self._graphs is not None:
            graph = self._graphs.prepare(spans, logit_rows, ids, self._fill(ids))
            if graph is not None:
                return graph
        inputs = build_inputs(spans, logit_rows, self.kv.page_size, self.device)
        token_ids = self._token_ids(ids)

        def forward(hidden: Tensor | None) -> Tensor:
            x = token_ids() if hidden is None else hidden
            if self.model.has_lm_head and microbatch.head_on_first:
                return self.model.forward_rows(x, inputs, self.kv)
            return self.model.forward(x, inputs, self.kv)

        return forward

    def _token_ids(self, ids: array[int]) -> Callable[[], Tensor]:
        """Return a function that returns the token ids on the device, with the tokens that were drawn last."""
        fill = self._fill(ids)
        token_ids = on_device(torch.frombuffer(ids, dtype=torch.int64), self.device) if self.model.embed else None

        def ids_on_device() -> Tensor:
            assert token_ids is not None, "a stage that does not embed gets activations"
            return token_ids if fill is None else fill(token_ids)

        return ids_on_device

    def _fill(self, ids: array[int]) -> Callable[[Tensor], Tensor] | None:
        """Return the function that replaces the codes of expected tokens; None if there are none."""
        return self._latest.fill if self._latest is not None and min(ids) < 0 else None

    def warm_up(self, num_tokens: int, num_keys: int) -> None:
        """Compute microbatches of synthetic tokens, and draw a token greedily and at random.

        So the costs of first calls (compilation, kernels, allocator) come before the run. On a CPU, the number of
        threads is chosen too. See Stage.
        """
        room = self.kv.num_pages * self.kv.page_size
        on_device = self.device.type != "cpu"
        for microbatch in warming(min(num_tokens, room), min(num_keys, room), on_device=on_device):
            y = self._warm(microbatch)
        if not on_device:
            compute = partial(self._warm_rows, min(num_tokens, room))
            self.threads = choose_team(self.model.module, compute, SystemClock().now)
        if self._head is not None:
            y = self._head.forward(torch.zeros(1, self._head.size, dtype=self._dtype, device=self.device))
        if self.model.has_lm_head or self._head is not None:
            for row in (GREEDY, DRAWN):
                sample(y, [row])

    def _warm(self, microbatch: Sequence[tuple[int, int, bool]]) -> Tensor:
        """Compute a microbatch of synthetic tokens. See `warming` for its form."""
        spans, rows = [], 0
        for end, count, prompt in microbatch:
            # All sequences use the same pages and state slot, because the written values are not needed.
            spans.append(Span(end - count, count, range(-(-end // self.kv.page_size)), prompt, slot=0))
            rows += count
        inputs = build_inputs(spans, (rows - 1,), self.kv.page_size, self.device)
        return self.model.forward(self._synthetic_ids(rows), inputs, self.kv)

    def _warm_rows(self, most: int, rows: int) -> None:
        rows = min(rows, most)
        self._warm([(rows, rows, True)])

    def prepare_grammars(self) -> None:
        if self._draws and self._grammars is not None:
            self._grammars.warm_up()

    def _synthetic_ids(self, num_tokens: int) -> Tensor:
        if self.model.embed:
            return torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        return torch.zeros(num_tokens, self._hidden_size, dtype=self._dtype, device=self.device)

    def _spans(self, microbatch: MicroBatch) -> tuple[list[Span], array[int]]:
        """Update the page tables and the slots. Return a Span for each chunk, and all token ids.

        Raises:
            ProtocolError: the microbatch has the id of a page or a state slot that this stage does not have, or a
                sequence has no state slot.
        """
        tables, num_pages = self._tables, self.kv.num_pages
        for sequence in microbatch.freed:
            tables.pop(sequence, None)
        slots = self._update_slots(microbatch) if self.kv.num_slots else {}
        spans, ids = [], array("q")
        for sequence, _, start, num_tokens, decode, token_ids, new_pages, _, long_factors, *_ in microbatch.chunks:
            table = tables.get(sequence)
            if table is None:
                table = tables[sequence] = array("q")
            if new_pages:
                if min(new_pages) < 0 or max(new_pages) >= num_pages:
                    raise ProtocolError(
                        f"{microbatch} brings the KV pages {new_pages}; this stage has the pages 0 to {num_pages - 1}"
                    )
                table.extend(new_pages)
            spans.append(Span(start, num_tokens, table, not decode, long_factors, slots.get(sequence, -1)))
            if self._latest is not None and token_ids[0] == EXPECTED:
                token_ids = (self._latest.code(sequence),)
            ids.extend(token_ids)
        return spans, ids

    def _update_slots(self, microbatch: MicroBatch) -> dict[int, int]:
        """Update the state slots of the sequences, and return them."""
        slots, num_slots = self._slots, self.kv.num_slots
        for sequence in microbatch.freed:
            slots.pop(sequence, None)
        for chunk in microbatch.chunks:
            if chunk.slot >= 0:
                slots[chunk.sequence] = chunk.slot
            if not 0 <= slots.get(chunk.sequence, -1) < num_slots:
                raise ProtocolError(
                    f"{microbatch}: {chunk} has the state slot {slots.get(chunk.sequence)}; this stage has the slots "
                    f"0 to {num_slots - 1}"
                )
        return slots


def warming(num_tokens: int, num_keys: int, *, on_device: bool) -> list[list[tuple[int, int, bool]]]:
    """Return the microbatches for the warm-up, each as a list of sequences.

    A sequence is a tuple: the position after its last token, the number of its tokens in the microbatch, and True for a
    prompt's tokens or False for a decode. The first two microbatches are a chunk, and a decode after it. On a GPU three
    more follow: a chunk after a long context, a decode after one, and a chunk together with such a decode. The reason
    is that kernels on GPUs split long contexts, and the split variants are compiled separately for chunks and decodes.

    Args:
        num_tokens: tokens of the chunk.
        num_keys: length of the long context, in tokens.
        on_device: the stage is on a GPU.
    """
    chunk, decode = (num_tokens, num_tokens, True), (num_tokens, 1, False)
    if not on_device:
        return [[chunk], [decode]]
    end = max(num_keys, num_tokens)
    late = (end, 1, False)
    return [[chunk], [decode], [(end, num_tokens, True)], [late], [chunk, late]]


def _not_finite(hidden: Tensor, microbatch: MicroBatch) -> tuple[int, ...]:
    finite: list[bool] = hidden.isfinite().all(dim=1).tolist()
    bad, row = [], 0
    for chunk in microbatch.chunks:
        if not all(finite[row : row + chunk.num_tokens]):
            bad.append(chunk.sequence)
        row += chunk.num_tokens
    return tuple(bad)
