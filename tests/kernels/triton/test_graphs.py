"""Captured microbatches equal launched ones: a simulated graph repeats its work when replayed.

It reads and writes at fixed addresses, and tables and rows are padded. A misplaced value, or one left from the
microbatch before, changes the logits.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sarathi_pp_kernels.triton.attention_work import Blocks, CapturableWork, Extent, cut_work
from torch import Tensor
from transformers import AutoModelForCausalLM

from sarathi_pp.checkpoint.facts.layer_cache import plain_caches
from sarathi_pp.core.plan import Chunk, MicroBatch, SamplingRow
from sarathi_pp.model.attention.triton import TritonAttention
from sarathi_pp.model.graphs import CaptureError, Shape, StageGraphs, graph_shapes, graph_sizes
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import load_stage
from sarathi_pp.model.stage_model import LMHead, StageModel
from sarathi_pp.stages.model_stage import ModelStage
from tests import thinning
from tests.model.families import VOCAB_SIZE, with_layers, write_checkpoint

CPU = torch.device("cpu")
PAGE_SIZE, NUM_PAGES, NUM_LAYERS = 16, 12, 2


@dataclass
class Repeated:
    """A captured graph, as far as addresses matter."""

    work: Callable[[], None] | None = None
    replays: int = 0

    def capture(self, work: Callable[[], None]) -> None:
        assert self.work is None, "a graph is captured once"
        self.work = work
        work()

    def replay(self) -> None:
        assert self.work is not None
        self.replays += 1
        self.work()


@dataclass
class Stage:
    """One of two stages, with its pages, and with graphs if requested."""

    model: StageModel
    config: Any
    shapes: Sequence[Shape] = ()
    graphs: StageGraphs | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        heads = self.config.num_key_value_heads
        head_dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        self.kv = KVShard(
            self.model.layers,
            NUM_PAGES,
            PAGE_SIZE,
            plain_caches(self.model.layers[1], heads, head_dim),
            torch.float32,
            CPU,
            spare=True,
        )
        for layer in range(*self.model.layers):
            self.kv.keys(layer).fill_(torch.nan)
            self.kv.values(layer).fill_(torch.nan)
        if self.shapes:
            sizes = self.config.hidden_size, self.config.num_attention_heads
            self.graphs = StageGraphs(self.model, self.kv, self.shapes, *sizes, CPU, [Repeated() for _ in self.shapes])

    def run(self, spans: Sequence[Span], rows: Sequence[int], ids: array[int], hidden: Tensor | None) -> Tensor:
        forward = self.graphs.prepare(spans, rows, ids) if self.graphs is not None else None
        if forward is not None:
            return forward(hidden)
        inputs = build_inputs(spans, rows, PAGE_SIZE, CPU)
        x = torch.tensor(ids) if hidden is None else hidden
        return self.model.forward(x, inputs, self.kv)


@pytest.fixture(scope="module", params=["llama", pytest.param("mistral", marks=pytest.mark.full)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, directory, config=with_layers(request.param, NUM_LAYERS))
    return directory


def stages_of(directory: Path, shapes: Sequence[Shape]) -> list[Stage]:
    made = []
    for layers in ((0, 1), (1, NUM_LAYERS)):
        loaded = load_stage(directory, layers, NUM_LAYERS, torch.float32, CPU, TritonAttention())
        made.append(Stage(loaded, loaded.module.config, shapes))
    return made


def microbatches() -> list[list[tuple[int, int]]]:
    """Return (sequence, tokens) of each microbatch: prompts in chunks with decodes among them, then decodes."""
    return [
        [(0, 17)],
        [(0, 5), (1, 9)],
        [(0, 1), (1, 3), (2, 20)],
        [(0, 1), (1, 1), (2, 1)],
        [(2, 1), (0, 1)],
        [(1, 1)],
        [(1, 7), (2, 1)],
        [(0, 1), (1, 1), (2, 1)],
    ]


def logits_of(stages: Sequence[Stage], tokens: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """Return, by sequence, the logits after each of its parts."""
    tables = [(3, 7), (1, 10, 4), (0, 11)]
    done, found = [0] * 3, [[] for _ in range(3)]
    for microbatch in microbatches():
        spans, ids, rows, end = [], array("q"), [], 0
        for sequence, count in microbatch:
            start = done[sequence]
            spans.append(Span(start, count, tables[sequence]))
            ids.extend(tokens[sequence][start : start + count])
            done[sequence] += count
            end += count
            rows.append(end - 1)
        hidden = None
        for stage in stages:
            hidden = stage.run(spans, rows if stage.model.has_lm_head else (), ids, hidden)
        for (sequence, _), row in zip(microbatch, hidden, strict=True):
            found[sequence].append(row)
    return found


@torch.inference_mode()
def test_graphs_give_the_logits_of_transformers(model: Path) -> None:
    """Pipelines have other shapes: fitting ones, larger ones, and some for decodes alone."""
    random_numbers = random.Random(0)
    tokens = [[random_numbers.randrange(3, 40) for _ in range(40)] for _ in range(3)]
    whole = AutoModelForCausalLM.from_pretrained(model)
    expected = [whole(torch.tensor([row])).logits[0] for row in tokens]
    plain = logits_of(stages_of(model, ()), tokens)
    pipelines = [((Shape(24, 3, decodes=False), Shape(4, 4, decodes=True)), 8), ((Shape(14, 2, decodes=False),), 2)]
    if thinning.full:
        pipelines += [(graph_shapes(32, 4), 8), ((Shape(8, 4, decodes=True),), 4)]
    for shapes, hits in pipelines:
        stages = stages_of(model, shapes)
        found = logits_of(stages, tokens)
        for sequence in range(3):
            ends = [0]
            for microbatch in microbatches():
                ends += [ends[-1] + count for row, count in microbatch if row == sequence]
            for got, same, end in zip(found[sequence], plain[sequence], ends[1:], strict=True):
                assert torch.allclose(got, same, rtol=0, atol=1e-5)
                assert torch.allclose(got, expected[sequence][end - 1], rtol=0, atol=1e-4)
                assert int(got.argmax()) == int(expected[sequence][end - 1].argmax())
        for stage in stages:
            assert stage.graphs is not None
            assert (stage.graphs.hits, stage.graphs.misses) == (hits, 8 - hits)
            spare = stage.kv.keys(stage.model.layers[0])[NUM_PAGES]
            assert not spare.isnan().all(), "padding rows are written there"


@torch.inference_mode()
def test_what_a_graph_gave_is_the_callers(model: Path) -> None:
    """It may be in transfer to the next stage when the next microbatch is replayed."""
    stage = stages_of(model, (Shape(8, 8, decodes=True),))[0]
    first = stage.run([Span(0, 1, (2,))], (), array("q", [5]), None)
    before = first.clone()
    second = stage.run([Span(0, 1, (3,)), Span(0, 1, (4,))], (), array("q", [6, 7]), None)
    assert torch.equal(first, before) and first.shape[0] == 1 and second.shape[0] == 2


@torch.inference_mode()
def test_the_lm_head_is_computed_only_for_the_rows_that_need_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs for decodes have it in them. All others have room for more rows than need it, and mostly none does."""
    shapes = (Shape(8, 4, decodes=False), Shape(4, 4, decodes=True))
    graphed, plain = (stages_of(model, some)[1] for some in (shapes, ()))
    rows_computed: list[int] = []
    forward = LMHead.forward

    def record(self: LMHead, rows: Tensor) -> Tensor:
        rows_computed.append(len(rows))
        return forward(self, rows)

    monkeypatch.setattr(LMHead, "forward", record)
    hidden = torch.randn(6, graphed.config.hidden_size, generator=torch.Generator().manual_seed(5))
    spans = [Span(0, 4, (2,)), Span(0, 2, (3,))]
    found = []
    for wanted in ((), (5,), (3, 5)):
        found.append(graphed.run(spans, wanted, array("q"), hidden))
        expected = plain.run(spans, wanted, array("q"), hidden)
        assert torch.equal(found[-1], expected) and found[-1].shape == (len(wanted), VOCAB_SIZE)
    assert rows_computed == [0, 1, 2]
    assert torch.equal(found[1][0], found[2][1]), "a later replay does not change it"
    decodes = graphed.run([Span(4, 1, (2,)), Span(2, 1, (3,))], (0, 1), array("q"), hidden[:2])
    assert decodes.shape[0] == 2 and rows_computed == [0, 1, 2]


@torch.inference_mode()
def test_sequences_that_share_pages_may_have_more_page_ids_than_there_are_pages(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the room that a graph has for them, it does not fit."""
    monkeypatch.setattr("sarathi_pp.model.inputs._PAGE_IDS_PER_PAGE", 2)
    shared, own = (0, 1, 2), range(3, 3 + 8)
    for num_shared, hits in ((2, 1), (3, 0)):
        begin = num_shared * PAGE_SIZE
        spans = [Span(begin, 1, (*shared[:num_shared], page)) for page in own]
        assert NUM_PAGES < len(spans) * (num_shared + 1), "more than without sharing"
        found = []
        for shapes in ((), (Shape(8, 8, decodes=True),)):
            stage = stages_of(model, shapes)[0]
            stage.run([Span(0, begin, shared)], (), array("q", range(5, 5 + begin)), None)
            found.append(stage.run(spans, (), array("q", range(5, 13)), None))
        assert torch.allclose(found[0], found[1], rtol=0, atol=1e-5)
        assert stage.graphs is not None
        assert stage.graphs.hits == hits


@torch.inference_mode()
def test_every_shape_is_launched_before_the_first_capture(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed capture on one rank of a tensor-parallel stage, no other rank may wait for a sum."""
    loaded = load_stage(model, (0, 1), NUM_LAYERS, torch.float32, CPU, TritonAttention())
    config, events = loaded.module.config, list[str]()
    kv = KVShard((0, 1), 4, PAGE_SIZE, plain_caches(1, config.num_key_value_heads, 16), torch.float32, CPU, spare=True)
    forward = StageModel.forward

    def launch(*given: Any) -> Tensor:
        events.append("launch")
        return forward(*given)

    monkeypatch.setattr(StageModel, "forward", launch)

    class Failing:
        def capture(self, work: Callable[[], None]) -> None:
            events.append("capture")
            raise CaptureError("operation not permitted when stream is capturing")

        def replay(self) -> None: ...

    shapes = (Shape(3, 2, decodes=False), Shape(2, 2, decodes=True))
    with pytest.raises(CaptureError, match="not permitted"):
        StageGraphs(loaded, kv, shapes, config.hidden_size, config.num_attention_heads, CPU, [Failing(), Failing()])
    assert events == ["launch", "launch", "capture"]


@pytest.mark.parametrize("most", [1, 2, 5, 8, 64, 100, 512, 1000])
def test_sizes_waste_at_most_an_eighth(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes[0] == 1 and sizes[-1] == most and list(sizes) == sorted(set(sizes))
    for tokens in range(64, most + 1):
        fitting = min(size for size in sizes if size >= tokens)
        assert fitting - tokens <= tokens / 8
    assert len(sizes) < 45


def test_shapes_of_a_run() -> None:
    shapes = graph_shapes(2048, 96)
    assert [shape.num_tokens for shape in shapes] == sorted((shape.num_tokens for shape in shapes), reverse=True)
    decodes = [shape.num_tokens for shape in shapes if shape.decodes]
    mixed = [shape.num_tokens for shape in shapes if not shape.decodes]
    assert (max(decodes), min(decodes), max(mixed), min(mixed)) == (96, 1, 2048, 2)
    assert all(shape.num_seqs == min(shape.num_tokens, 96) for shape in shapes)
    assert {shape.num_tokens for shape in graph_shapes(100, 8) if not shape.decodes} >= {100}


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5000)), min_size=1, max_size=40),
    st.sampled_from([1, 4, 8, 24]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([None, 1, 100, 4096]),
    st.sampled_from([1, 20, 132]),
)
def test_capturable_tables_have_room_for_any_microbatch(
    sequences: list[tuple[int, int]], group: int, num_kv_heads: int, window: int | None, num_processors: int
) -> None:
    """This covers any microbatch with its tokens and sequences; `load` asserts it.

    Remains of a longer one before are erased.
    """
    extents, first_row = [], 0
    for num_tokens, start in sequences:
        extents.append(Extent(first_row, num_tokens, start, 0))
        first_row += num_tokens
    blocks = Blocks.of(group, 128, 2)
    longest = max(num_tokens for num_tokens, _ in sequences)
    capturable = CapturableWork(first_row, len(sequences), longest, blocks, window, num_kv_heads, num_processors, CPU)
    capturable.load(extents)
    expected = cut_work(extents, blocks, window, num_kv_heads, num_processors, CPU)
    for table, cut in ((capturable.work.pieces, expected.pieces), (capturable.work.merges, expected.merges)):
        assert torch.equal(table[: len(cut)], cut) and not table[len(cut) :].any()
    capturable.load(extents[:1])
    used = capturable.work.pieces[capturable.work.pieces[:, 1] > 0]
    assert int(used[:, 0].max()) < sequences[0][0] and int(capturable.work.merges[:, 1].max()) <= sequences[0][0]


@pytest.mark.parametrize(("group", "itemsize"), [(4, 2), (71, 2), (24, 4)])
def test_capturable_tables_are_for_the_kernel_that_the_microbatch_has_anyhow(group: int, itemsize: int) -> None:
    """If blocks of few rows have the full size, there is one kind of block, compiled once."""
    blocks = Blocks.of(group, 128, itemsize)
    capturable = CapturableWork(64, 4, 64, blocks, None, 1, 132, CPU)
    extents = [Extent(0, 64, 100, 0)]
    capturable.load(extents)
    assert capturable.work.has_many == cut_work(extents, blocks, None, 1, 132, CPU).has_many


@torch.inference_mode()
def test_a_stage_runs_what_fits_a_graph_by_it_and_the_rest_as_ever(model: Path) -> None:
    drawn = SamplingRow(position=0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    issued = [
        MicroBatch(0, (Chunk(0, 0, 0, 9, False, tuple(range(3, 12)), (4,), drawn),), (), 0.0),
        MicroBatch(
            1, (Chunk(0, 0, 9, 1, True, (5,), (), drawn), Chunk(1, 0, 0, 3, False, (6, 7, 8), (2,), drawn)), (), 0.0
        ),
        MicroBatch(2, (Chunk(0, 0, 10, 1, True, (9,), (), drawn), Chunk(1, 0, 3, 1, True, (3,), (), drawn)), (), 0.0),
    ]
    tokens = []
    for shapes, graphed in (((), None), ((Shape(4, 4, decodes=False), Shape(2, 2, decodes=True)), (2, 1))):
        loaded = load_stage(model, (0, NUM_LAYERS), NUM_LAYERS, torch.float32, CPU, TritonAttention())
        made = Stage(loaded, loaded.module.config, shapes)
        stage = ModelStage(loaded, made.kv, made.config.hidden_size, torch.float32, CPU, graphs=made.graphs)
        tokens.append([stage.prepare(microbatch)(None).tokens for microbatch in issued])
        assert stage.graphed == graphed
    assert tokens[0] == tokens[1] and all(tokens[0])
