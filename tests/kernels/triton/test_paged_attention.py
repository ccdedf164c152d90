"""The attention kernel in Triton's interpreter against its float64 reference, and compiled for GPUs that are absent.

In bfloat16 the interpreter's products are wrong, so that dtype is compiled alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sarathi_pp_kernels.triton.attention_work import (
    AttentionWork,
    Blocks,
    CapturableWork,
    Extent,
    cut_work,
    equal_share,
)
from sarathi_pp_kernels.triton.paged_attention import paged_attention, reference_paged_attention
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from sarathi_pp.checkpoint.facts.layer_cache import plain_caches
from sarathi_pp.model.attention.sdpa import SdpaAttention
from sarathi_pp.model.attention.spec import AttentionSpec
from sarathi_pp.model.attention.triton import TritonAttention
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from tests.kernels.triton.bounds import checked_addresses
from tests.kernels.triton.compiler import run_compiler
from tests.thinning import examples

CPU = torch.device("cpu")
EVERYTHING = 1 << 30  # keys per piece: nothing is split


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def checked() -> Iterator[None]:
    with checked_addresses():
        yield


@dataclass
class Case:
    """Sequences (start, num_tokens) whose last tokens are one microbatch; unwritten places of the pages hold NaN."""

    extents: list[tuple[int, int]]
    page_size: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random).to(self.dtype)

        counts = [-(-(start + tokens) // self.page_size) for start, tokens in self.extents]
        ids = torch.randperm(sum(counts) + 3, generator=random).tolist()
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        pool = (sum(counts) + 3, self.page_size, self.num_kv_heads, self.head_dim)
        self.kv = KVShard((0, 1), pool[0], self.page_size, plain_caches(1, *pool[2:]), self.dtype, CPU)
        for pages in (self.kv.keys(0), self.kv.values(0)):
            pages.fill_(torch.nan)
        for (start, tokens), table in zip(self.extents, self.tables, strict=True):
            end = start + tokens
            key, value = (normal(end, self.num_kv_heads, self.head_dim) for _ in range(2))
            self.kv.write(0, key, value, build_inputs([Span(0, end, table)], [], self.page_size, CPU))
        self.choose(range(len(self.extents)))
        self.query = normal(self.inputs.num_tokens, self.num_heads, self.head_dim)
        self.sinks = normal(self.num_heads) * 2

    def choose(self, chosen: range) -> None:
        """Make a microbatch of these sequences."""
        spans = [Span(*self.extents[index], self.tables[index]) for index in chosen]
        self.inputs = build_inputs(spans, [], self.page_size, CPU)
        self.pages = torch.cat([span.pages for span in self.inputs.spans])
        self.parts, first_page = [], 0
        for span in self.inputs.spans:
            self.parts.append(Extent(span.first_row, span.num_tokens, span.start, first_page))
            first_page += len(span.pages)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def small_blocks(self) -> Blocks:
        """Make blocks so small that short contexts cross every edge."""
        return Blocks(self.group, 16, 32, 16)

    def cut(self, window: int | None, keys_per_piece: int, blocks: Blocks | None = None) -> AttentionWork:
        chosen = blocks or self.small_blocks()
        return cut_work(self.parts, chosen, window, self.num_kv_heads, 1, CPU, keys_per_piece=keys_per_piece)

    def run(self, work: AttentionWork, *, softcap: float | None = None, sinks: bool = False) -> Tensor:
        return paged_attention(
            self.query,
            self.kv.keys(0),
            self.kv.values(0),
            self.pages,
            work,
            scaling=self.head_dim**-0.5,
            softcap=softcap,
            sinks=self.sinks if sinks else None,
        )

    def expected(self, window: int | None = None, *, softcap: float | None = None, sinks: bool = False) -> Tensor:
        return reference_paged_attention(
            self.query,
            self.kv.keys(0),
            self.kv.values(0),
            self.pages,
            self.parts,
            scaling=self.head_dim**-0.5,
            window=window,
            softcap=softcap,
            sinks=self.sinks if sinks else None,
        )


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


def test_the_reference_is_the_attention_of_torch() -> None:
    case = Case([(21, 12)], head_dim=32)
    key, value = (
        pool[case.pages].transpose(0, 1).reshape(1, 2, -1, 32)[:, :, :33].double()
        for pool in (case.kv.keys(0), case.kv.values(0))
    )
    query = case.query.transpose(0, 1)[None].double()
    mask = causal_lower_right(12, 33)
    theirs = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(case.expected(), theirs[0].transpose(0, 1), atol=1e-12, rtol=0)


@settings(max_examples=examples(45))
@given(
    extents=st.lists(st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(2, 30))), min_size=1, max_size=3),
    page_size=st.sampled_from([16, 32, 48, 64]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (7, 1)]),
    head_dim=st.sampled_from([16, 48]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    window=st.one_of(st.none(), st.integers(1, 90)),
    softcap=st.one_of(st.none(), st.just(1.5)),
    sinks=st.booleans(),
    keys_per_piece=st.sampled_from([EVERYTHING, 16, 40]),
    ahead=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_microbatch_is_exact(
    extents: list[tuple[int, int]],
    page_size: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    keys_per_piece: int,
    ahead: bool,
    seed: int,
) -> None:
    """In float16 weights and outputs are rounded to 11 bits, each by at most 2^-12 of the largest value."""
    case = Case(extents, page_size, *heads, head_dim, dtype, seed)
    work = case.cut(window, keys_per_piece, replace(case.small_blocks(), ahead=ahead))
    found = case.run(work, softcap=softcap, sinks=sinks)
    assert found.dtype == dtype
    largest = float(case.kv.values(0).nan_to_num().abs().max())
    tolerance = 2e-6 if dtype == torch.float32 else 2.2 * 2**-12 * largest
    close(found, case.expected(window, softcap=softcap, sinks=sinks), tolerance)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "dtype"),
    [
        (4, 1, 64, torch.float32),
        (7, 1, 80, torch.float16),
        (2, 2, 96, torch.float32),
        (8, 2, 128, torch.float16),
        (2, 1, 256, torch.float16),
    ],
)
def test_blocks_of_the_real_size_are_exact(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = Case([(150, 20), (200, 1)], 32, num_heads, num_kv_heads, head_dim, dtype)
    work = case.cut(120, 96, Blocks.of(case.group, head_dim, dtype.itemsize))
    assert work.merges.shape[0] and work.has_many == (20 * case.group > work.blocks.few_rows)
    close(case.run(work, sinks=True), case.expected(120, sinks=True), 3e-6 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize(("window", "most_keys"), [(None, 200), (88, 111)])
def test_the_number_of_pieces_changes_only_roundings(window: int | None, most_keys: int) -> None:
    """most_keys: whole blocks of 16 before the end of a tile."""
    case = Case([(199, 1), (150, 9)])
    whole = case.run(case.cut(window, EVERYTHING), softcap=3.0, sinks=True)
    for num_pieces in (2, 3, 4):
        work = case.cut(window, -(-most_keys // num_pieces))
        assert int(work.merges[:, 3].max()) == num_pieces
        close(case.run(work, softcap=3.0, sinks=True), whole.double())


def test_more_pieces_are_merged_than_are_read_at_once() -> None:
    case = Case([(303, 1)], 32)
    work = case.cut(None, 16)
    assert int(work.merges[0, 3]) > 16
    close(case.run(work, sinks=True), case.expected(sinks=True))


@pytest.mark.parametrize("keys_per_piece", [EVERYTHING, 48])
def test_batch_mates_change_no_bit(keys_per_piece: int) -> None:
    case = Case([(140, 1), (30, 40), (33, 1), (5, 3)])
    query = case.query
    together = case.run(case.cut(100, keys_per_piece), sinks=True)
    spans = case.inputs.spans
    for index, span in enumerate(spans):
        rows = slice(span.first_row, span.first_row + span.num_tokens)
        case.choose(range(index, index + 1))
        case.query = query[rows]
        assert torch.equal(case.run(case.cut(100, keys_per_piece), sinks=True), together[rows])


def test_keys_of_a_tile_change_bits_and_its_rows_and_products_ahead_do_not() -> None:
    """A row adds up the same blocks of keys in the same order. Blocks in which it sees no key change nothing."""
    case = Case([(30, 40), (140, 1), (5, 90)])
    small, tall, ahead, narrow = (
        case.run(case.cut(None, EVERYTHING, blocks), sinks=True)
        for blocks in (
            Blocks(2, 16, 32, 32),
            Blocks(2, 16, 64, 32),
            Blocks(2, 16, 64, 32, ahead=True),
            Blocks(2, 16, 64, 16),
        )
    )
    assert torch.equal(small, tall) and torch.equal(small, ahead) and not torch.equal(small, narrow)


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_is_the_attention_of_the_plain_backend(window: int | None, dtype: torch.dtype) -> None:
    case = Case([(140, 1), (30, 40), (5, 1)], 16, 6, 2, 48, dtype)
    spec = AttentionSpec(0.2, window, 2.0, case.sinks)
    found, expected = (
        backend(case.query, case.kv, 0, case.inputs, spec) for backend in (TritonAttention(), SdpaAttention())
    )
    close(found, expected.double(), 3e-6 if dtype == torch.float32 else 3e-3)


def test_the_work_of_a_microbatch_is_laid_out_once_for_each_window() -> None:
    """Layers alternate with and without a window.

    The next microbatch has the same number of rows but is another one.
    """
    case, backend = Case([(50, 1), (20, 4)]), TritonAttention()
    for _ in range(2):
        layouts = []
        for _ in range(2):
            for window in (None, 7):
                found = backend(case.query, case.kv, 0, case.inputs, AttentionSpec(0.25, window))
                close(found, case.expected(window))
            assert backend._microbatch is not None
            layouts.append({window: id(work) for window, work in backend._microbatch._work.items()})
        assert layouts[0] == layouts[1] and len(layouts[0]) == 2
        case.choose(range(1, -1, -1))
        case.query = case.query.flip(0)


def test_queries_may_lie_heads_first_in_memory() -> None:
    case = Case([(40, 9)])
    work = case.cut(None, EVERYTHING)
    straight = case.run(work)
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(case.run(work), straight)


def test_large_scores_do_not_overflow() -> None:
    case = Case([(40, 9), (60, 1)])
    case.query *= 1000
    close(case.run(case.cut(None, 32), sinks=True), case.expected(sinks=True), 1e-3)
    close(case.run(case.cut(None, 32), softcap=4.0), case.expected(softcap=4.0), 1e-4)


def test_keys_that_no_row_sees_are_not_read() -> None:
    """These keys are outside every row's window, in pages that are read.

    They may hold any value, like keys after the end.
    """
    case = Case([(40, 1)])
    for pool in (case.kv.keys(0), case.kv.values(0)):
        pool[case.pages[:2]] = torch.nan
        pool[case.pages[2], :, :4] = torch.nan  # keys 32 to 35; the row at 40 sees 36 to 40
    case.pages[:2] = 10**12  # such a page id does not exist
    found = case.run(case.cut(5, EVERYTHING, Blocks(2, 16, 32, 32)))
    assert bool(found.isfinite().all())


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("pool", ["keys", "values"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_broken_sequence_is_seen_and_stays_alone(pool: str, poison: float) -> None:
    case = Case([(39, 3), (32, 1), (7, 1), (9, 20)])
    work = case.cut(None, 32)
    clean = case.run(work, sinks=True)
    for broken_span in (0, 1):
        getattr(case.kv, pool)(0)[case.inputs.spans[broken_span].pages[0]] = poison
    broken = case.run(work, sinks=True)
    assert not bool(broken[:4].isfinite().any())
    assert torch.equal(broken[4:], clean[4:])


extents_of_a_microbatch = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 700)), min_size=1, max_size=6)


@given(
    extents=extents_of_a_microbatch,
    group=st.sampled_from([1, 3, 4, 16, 71]),
    window=st.one_of(st.none(), st.integers(1, 6000)),
    num_processors=st.sampled_from([1, 16, 132]),
    head_dim=st.sampled_from([64, 256]),
)
def test_every_row_is_in_one_tile_whose_pieces_hold_all_its_keys(
    extents: list[tuple[int, int]], group: int, window: int | None, num_processors: int, head_dim: int
) -> None:
    parts, first_row = [], 0
    for start, num_tokens in extents:
        parts.append(Extent(first_row, num_tokens, start, 1000 * len(parts)))
        first_row += num_tokens
    blocks = Blocks.of(group, head_dim, 2)
    work = cut_work(parts, blocks, window, 8, num_processors, CPU)
    tiles: dict[tuple[int, ...], list[list[int]]] = {}
    for piece in work.pieces.tolist():
        tiles.setdefault(tuple(piece[:4]), []).append(piece[4:])
    merges = {(first, tokens): (partial, count) for first, tokens, partial, count, _ in work.merges.tolist()}
    assert work.merges[:, 4].tolist() == [0, *work.merges[:, 1].cumsum(0).tolist()][: len(work.merges)]
    merged_heads = int(work.merges[:, 1].sum()) * 8 * group
    assert work.merge_programs == min(merged_heads, 8 * num_processors)
    positions = [
        (start + token, 1000 * index) for index, (start, tokens) in enumerate(extents) for token in range(tokens)
    ]
    partial_rows: list[int] = []
    seen: list[int] = []
    lengths = [pieces[-1][1] - pieces[0][0] for pieces in tiles.values()]
    assert lengths == sorted(lengths, reverse=True)
    for (first, tokens, start, first_page), pieces in tiles.items():
        seen += range(first, first + tokens)
        assert positions[first : first + tokens] == [(start + token, first_page) for token in range(tokens)]
        assert tokens * group <= (blocks.many_rows if work.has_many else blocks.few_rows)
        bounds = [begin for begin, *_ in pieces] + [pieces[-1][1]]
        assert bounds == sorted({*bounds}) and bounds[1:] == [end for _, end, *_ in pieces]
        assert not any(bound % blocks.keys for bound in bounds[:-1]) and bounds[-1] == start + tokens
        oldest = 0 if window is None else max(start - window + 1, 0)
        assert bounds[0] <= oldest < bounds[0] + blocks.keys
        assert [takes_sinks for *_, takes_sinks in pieces] == [1] + [0] * (len(pieces) - 1)
        if len(pieces) == 1:
            assert pieces[0][2] == -1
        else:
            slots = [slot for _, _, slot, _ in pieces]
            assert merges.pop((first, tokens)) == (slots[0], len(pieces))
            assert slots == [slots[0] + tokens * group * index for index in range(len(pieces))]
            partial_rows += range(slots[0], slots[-1] + tokens * group)
    assert sorted(seen) == list(range(first_row)) and not merges
    assert sorted(partial_rows) == list(range(work.partial_rows))


def test_contexts_are_split_only_where_that_fills_the_device() -> None:
    def pieces_of(extents: list[tuple[int, int]]) -> list[int]:
        parts = [Extent(row, tokens, start, 0) for row, (start, tokens) in enumerate(extents)]
        pieces = cut_work(parts, Blocks.of(4, 128, 2), None, 8, 132, CPU).pieces
        return [int((pieces[:, 0] == part.first_row).sum()) for part in parts]

    assert pieces_of([(32767, 1)]) == [32]
    assert pieces_of([(99, 1)]) == [1]
    assert pieces_of([(2047, 1)] * 64) == [1] * 64
    assert pieces_of([(2047, 1)] * 4) == [8] * 4
    # With a chunk there are enough programs for all processors, and one decode would still read when they end.
    parts = [Extent(0, 512, 0, 0), Extent(512, 1, 30000, 0)]
    pieces = cut_work(parts, Blocks.of(4, 128, 2), None, 8, 132, CPU).pieces
    assert int((pieces[:, 0] < 512).sum()) == 16 and int((pieces[:, 0] == 512).sum()) > 10


def test_a_chunk_is_split_only_where_that_is_worth_its_partial_results() -> None:
    """They are written and read again for each row. For short pieces they have more bytes than keys and values."""

    def counts_of(num_tokens: int, start: int, programs: int = 1) -> list[int]:
        blocks = replace(Blocks.of(4, 128, 2), many_programs=programs)
        pieces = cut_work([Extent(0, num_tokens, start, 0)], blocks, None, 8, 132, CPU).pieces
        return [int((pieces[:, 0] == row).sum()) for row in range(0, num_tokens, 32)]

    assert counts_of(512, 0) == [1] * 16
    # A processor holds one program of this number of rows: 128 of them are all that 132 processors hold.
    assert counts_of(512, 4096) == [1] * 16
    assert counts_of(512, 4096, programs=2) == [2] * 16
    assert counts_of(512, 0, programs=2) == [1] * 16
    assert counts_of(128, 8000) == [4] * 4
    assert counts_of(32, 1000) == [1]


def test_merging_programs_share_the_rows_in_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is computed once and alike, by one program or by more programs than there are rows.

    The table has more entries than are read at once, and unused ones at the end.
    """
    monkeypatch.setattr("sarathi_pp_kernels.triton.paged_attention._BLOCK_MERGES", 4)
    case = Case([(40 + row, 1) for row in range(7)] + [(60, 9)])
    work = case.cut(None, 16)
    assert len(work.merges) == 8
    padded = torch.cat([work.merges, torch.zeros(6, work.merges.shape[1], dtype=torch.int32)])
    found = [
        case.run(replace(work, merges=merges, merge_programs=programs))
        for merges, programs in ((work.merges, 8), (padded, 1), (padded, 100))
    ]
    assert all(torch.equal(one, found[0]) for one in found)
    close(found[0], case.expected())


def test_a_graph_launches_merging_programs_only_for_the_device() -> None:
    """For Llama-3-8B, one program for each entry, token of a tile and head were 33,792 programs, nearly all empty."""
    blocks = Blocks.of(4, 128, 2)
    for num_tokens, longest in ((512, 512), (33, 1)):
        work = CapturableWork(num_tokens, 33, longest, blocks, None, 8, 132, CPU).work
        tile = min(longest, work.most_rows // blocks.group)
        assert len(work.merges) * tile * 32 == (33_792 if longest > 1 else 1056)
        assert work.merge_programs == 1056, "8 for each processor"
    assert CapturableWork(1, 1, 1, blocks, None, 8, 132, CPU).work.merge_programs == 32


def test_an_equal_share_of_the_keys_is_a_piece() -> None:
    assert equal_share(32768, 8, 264) == 993
    assert equal_share(4096 * 100, 8, 2) > 4096


_COMPILE = """
import json, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sarathi_pp_kernels.triton import paged_attention as module
from sarathi_pp_kernels.triton.attention_stages import NUM_STAGES, shared_bytes
from sarathi_pp_kernels.triton.attention_work import MERGE_COLUMNS, PIECE_COLUMNS, Blocks, power_of_two

cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

def compile(kernel, signature, constants, warps, stages):
    names = kernel.arg_names
    types = {name: signature.get(name, "constexpr") for name in names}
    even = [name for name in names if types[name][0] == "*" and name != "pages" or "stride" in name]
    source = ASTSource(kernel, types, constants, {(names.index(name),): [["tt.divisibility", 16]] for name in even})
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    spilled = int(usage.split("STACK:")[1].split()[0])
    assert "tf32" not in made.asm["ptx"]
    return {"cubin": len(made.asm["cubin"]), "shared": made.metadata.shared, "spilled": spilled}

dtype, shapes = sys.argv[1], json.loads(sys.argv[2])
partial = {"maxima": "*fp32", "sums": "*fp32", "weighted": "*fp32"}
found = {}
for arch, has_many, head_dim, group in shapes:
    blocks = Blocks.of(group, head_dim, 4 if dtype == "fp32" else 2)
    has_many = has_many and blocks.many_rows > blocks.few_rows
    block_dim = max(power_of_two(head_dim), 16)
    tensors = dict.fromkeys(("query", "keys", "values", "sinks", "out"), "*" + dtype)
    numbers = dict.fromkeys(("token_stride", "head_stride", "num_kv_heads", "window"), "i32")
    factors = dict.fromkeys(("score_factor", "cap_factor"), "fp32")
    shape = {"GROUP": group, "HEAD_DIM": head_dim, "BLOCK_DIM": block_dim}
    rows = {"FEW_ROWS": blocks.few_rows, "MANY_ROWS": blocks.many_rows if has_many else 0, "BLOCK_KEYS": blocks.keys}
    rule = {"HAS_SOFTCAP": True, "HAS_WINDOW": True, "HAS_SPLITS": True, "PAGE_SIZE": 16, "COLUMNS": PIECE_COLUMNS}
    rule["AHEAD"] = False
    # The least of each generation's devices, as sm_86 in the name of sm_80's code.
    room = {80: 99 << 10, 90: 227 << 10}[arch]
    how = {"has_many": has_many, "generation": arch // 10}
    size = 4 if dtype == "fp32" else 2
    fits = shared_bytes(blocks, head_dim, size, stages=NUM_STAGES, **how) <= room
    stages = NUM_STAGES - (not fits)
    most = shared_bytes(blocks, head_dim, size, stages=stages, **how)
    found[f"attend {arch} {head_dim} {group} {has_many}"] = compile(
        module._attend,
        {**tensors, **partial, **numbers, **factors, "pages": "*i64", "pieces": "*i32"},
        {**shape, **rows, **rule},
        8 if max(rows["FEW_ROWS"], rows["MANY_ROWS"]) >= 128 else 4,
        stages,
    )
    found[f"attend {arch} {head_dim} {group} {has_many}"] |= {"most": most, "room": room}
    found[f"merge {arch} {head_dim} {group} {has_many}"] = compile(
        module._merge,
        {"merges": "*i32", "num_merges": "i32", "num_kv_heads": "i32", **partial, "out": "*" + dtype},
        {
            **shape,
            "BLOCK_DIM": power_of_two(head_dim),
            "BLOCK_PIECES": module._BLOCK_PIECES,
            "BLOCK_MERGES": module._BLOCK_MERGES,
            "COLUMNS": MERGE_COLUMNS,
        },
        4,
        3,
    )
print(json.dumps(found))
"""


# Compute capability, whether there are chunks, channels of a head, heads that share a KV head.
_USUAL = [(80, False, 64, 4), (80, False, 128, 4), (80, True, 128, 4), (90, True, 64, 4), (90, True, 128, 4)]
_UNUSUAL = [(80, True, 256, 2), (90, True, 256, 2), (80, True, 96, 1), (80, True, 8, 1), (90, True, 128, 24)]
_UNUSUAL += [(80, False, 256, 2), (80, False, 128, 40), (90, True, 512, 2)]


@pytest.mark.parametrize(
    ("dtype", "shapes"),
    [
        pytest.param("bf16", _USUAL, id="bf16-usual"),
        pytest.param("fp32", _USUAL[2:3], id="fp32-one"),
        # It has the registers and the memory of bfloat16.
        pytest.param("fp16", _USUAL[-1:], marks=pytest.mark.full, id="fp16-one"),
        pytest.param("fp32", _USUAL, marks=pytest.mark.full, id="fp32-usual"),
        pytest.param("fp16", _USUAL, marks=pytest.mark.full, id="fp16-usual"),
        *(
            pytest.param(dtype, _UNUSUAL, marks=pytest.mark.full, id=f"{dtype}-unusual")
            for dtype in ("bf16", "fp16", "fp32")
        ),
    ],
)
def test_it_compiles_for_gpus_and_fits(dtype: str, shapes: list[tuple[int, bool, int, int]], tmp_path: Path) -> None:
    """It must fit into the shared memory of the smallest device of a generation, and into registers without spills.

    This needs a process in which kernels are not defined for the interpreter.
    """
    found = json.loads(run_compiler(tmp_path, _COMPILE, dtype, json.dumps(shapes)))
    assert len(found) == 2 * len(shapes), "kernels for chunks and decodes, and those that merge"
    for kernel, made in found.items():
        # Wide heads may spill a few registers; heads of 512 only need to run.
        spilled = {128: 64, 256: 128}.get(max(128, int(kernel.split()[2])), 1 << 12)
        assert made["cubin"] > 1000 and made["spilled"] <= spilled, (kernel, made)
        assert made["shared"] <= made.get("most", 99 << 10) <= made.get("room", 99 << 10), (kernel, made)
