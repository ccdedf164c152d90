"""The backends that run on CPU against attention written out in float64 over contiguous keys."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sarathi_pp_kernels.cpu import attention_decode, attention_decode_simd, attention_prefill
from sarathi_pp_kernels.cpu.attention_prefill import BLOCK_KEYS, rows_at_once
from sarathi_pp_kernels.cpu.simd import compile as compiling
from sarathi_pp_kernels.cpu.simd.target import has_avx512_bf16
from sarathi_pp_kernels.cpu.threads import scratch_of_thread
from torch import Tensor
from torch.nn import functional
from transformers.masking_utils import sliding_window_causal_mask_function

from sarathi_pp.checkpoint.facts.layer_cache import plain_caches
from sarathi_pp.model.attention import choose_backend, sdpa
from sarathi_pp.model.attention.numba import NumbaAttention, key_bounds
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from tests import thinning
from tests.machine import patient
from tests.model.microbatches import CPU, Case, spec_for, visible
from tests.processors import environment_of, why_not
from tests.thinning import examples

# (heads, KV heads, channels of a head, tokens of a page). Each shape has a kernel of its own, and compiling it takes
# seconds. So by default every number is drawn, but not with all others, and other tests compile most of these too.
FLOAT32_SHAPES = [(1, 1, 8, 1), (6, 2, 8, 3), (4, 2, 8, 16)]
BFLOAT16_SHAPES = [(1, 1, 32, 16), (4, 2, 64, 16), (4, 2, 16, 16), (3, 3, 80, 256)]
if has_avx512_bf16():
    BFLOAT16_SHAPES += [(6, 2, 96, 64), (8, 1, 256, 16)]
if thinning.full:
    FLOAT32_SHAPES = [(*heads, 8, page) for heads in ((1, 1), (4, 2), (6, 2), (3, 3)) for page in (1, 3, 16, 64)]
    BFLOAT16_SHAPES = [
        (*heads, head_dim, page)
        for heads in ((1, 1), (4, 2), (6, 2), (3, 3), (8, 1))
        for head_dim in (16, 64, 80)
        for page in (16, 32, 256)
    ]

# Without these instructions, such a case repeats on this processor what others prove of the plain kernels.
for_avx512_bf16 = () if has_avx512_bf16() else pytest.mark.full

every_backend = pytest.mark.parametrize("backend", ["sdpa", "numba"])


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread: with tensors this small, a second thread only adds waiting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextmanager
def small_steps() -> Iterator[None]:
    """Make tiles and blocks so small that every edge between them is crossed."""
    with mock.patch.multiple(sdpa, TILE_ROWS=6, BLOCK_KEYS=8, ROW_STEP=4, KEY_STEP=4):
        yield


def test_the_reference_sees_what_transformers_sees() -> None:
    for window in (1, 4, 30):
        allowed = sliding_window_causal_mask_function(window)
        expected = [
            [bool(allowed(0, 0, torch.tensor(row), torch.tensor(key))) for key in range(12)] for row in range(7, 12)
        ]
        assert visible(7, 5, window).tolist() == expected


@every_backend
@settings(max_examples=examples(150))
@given(
    extents=st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(2, 30))), min_size=1, max_size=4),
    shape=st.sampled_from(FLOAT32_SHAPES),
    window=st.one_of(st.none(), st.integers(1, 50)),
    softcap=st.one_of(st.none(), st.just(1.5)),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_microbatch_is_exact(
    backend: str,
    extents: list[tuple[int, int]],
    shape: tuple[int, int, int, int],
    window: int | None,
    softcap: float | None,
    sinks: bool,
    seed: int,
) -> None:
    *heads, head_dim, page_size = shape
    case = Case(extents, page_size, *heads, head_dim, seed=seed, backend=backend)
    spec = spec_for(case, window=window, softcap=softcap, sinks=sinks)
    with small_steps():
        torch.testing.assert_close(case.run(spec).double(), case.expected(spec), atol=2e-6, rtol=0)


@every_backend
@pytest.mark.parametrize("window", [None, 100, 1500])
def test_a_hybrid_microbatch_at_full_size_is_exact(backend: str, window: int | None) -> None:
    case = Case([(1900, 150), (1030, 1), (0, 33), (5, 1)], 16, 4, 2, 16, backend=backend)
    spec = spec_for(case, window=window)
    torch.testing.assert_close(case.run(spec).double(), case.expected(spec), atol=3e-6, rtol=0)


def test_bfloat16_has_kernels_of_its_own_where_the_processor_can() -> None:
    """Without them, the tests below would run the other kernels twice."""
    shard = KVShard((0, 1), 1, 16, plain_caches(1, 1, 16), torch.bfloat16, CPU)
    assert NumbaAttention().fits_simd(shard) == has_avx512_bf16()


@settings(max_examples=examples(80))
@given(
    extents=st.lists(
        st.tuples(st.sampled_from([0, 1, 15, 16, 31, 200, 1020, 2100]), st.one_of(st.just(1), st.integers(1, 40))),
        min_size=1,
        max_size=3,
    ),
    shape=st.sampled_from(BFLOAT16_SHAPES),
    window=st.one_of(st.none(), st.integers(1, 1100)),
    softcap=st.one_of(st.none(), st.just(1.5)),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_microbatch_in_bfloat16_is_as_exact_as_its_roundings(
    extents: list[tuple[int, int]],
    shape: tuple[int, int, int, int],
    window: int | None,
    softcap: float | None,
    sinks: bool,
    seed: int,
) -> None:
    """Weights and outputs are rounded to 8 bits, each with an error of at most 2^-9 of the largest value."""
    *heads, head_dim, page_size = shape
    case = Case(extents, page_size, *heads, head_dim, torch.bfloat16, seed=seed, backend="numba")
    spec = spec_for(case, window=window, softcap=softcap, sinks=sinks)
    largest = max(float(value.abs().max()) for value in case.values)
    torch.testing.assert_close(case.run(spec).double(), case.expected(spec), atol=2.2 * 2**-9 * largest, rtol=0)


@pytest.mark.parametrize(
    ("group", "head_dim", "page_size"),
    [
        (1, 32, 16),
        (2, 64, 16),
        *(pytest.param(*shape, marks=for_avx512_bf16) for shape in ((3, 96, 64), (4, 64, 32), (8, 256, 16))),
    ],
)
@pytest.mark.parametrize("window", [None, 1, 2, 37])
def test_decodes_in_bfloat16_begin_and_end_anywhere_in_a_page(
    group: int, head_dim: int, page_size: int, window: int | None
) -> None:
    """Unwritten places hold NaN. So does the scratch of a kernel that has run before."""
    extents = [(length, 1) for length in (0, 1, 2, 15, 16, 30, 31, 63, 64, 65, 200)]
    case = Case(extents, page_size, 2 * group, 2, head_dim, torch.bfloat16, backend="numba")
    spec = spec_for(case, window=window, sinks=group == 3, softcap=2.0 if group == 2 else None)
    expected = case.expected(spec)
    scratch_of_thread(1 << 20).fill_(-1)
    found = case.run(spec)
    assert relative_error(found, expected) < 2 * relative_error(expected.bfloat16(), expected) + 1e-6
    backend = choose_backend("numba", CPU, page_size)
    for row, span in enumerate(case.inputs.spans):
        lone = build_inputs([Span(span.start, 1, span.pages.tolist())], [], page_size, CPU)
        assert torch.equal(backend(case.query[row : row + 1], case.kv, case.layer, lone, spec), found[row : row + 1])


_ON_A_LESSER_PROCESSOR = """
import sys
import torch
from tests.model.attention.test_attention import Case, spec_for
torch.set_num_threads(1)
for dtype in map(torch.__dict__.get, sys.argv[1:]):
    case = Case([(40, 1), (0, 1), (20, 3)], 16, 4, 2, 32, dtype, backend="numba")
    spec = spec_for(case, window=30, sinks=True)
    torch.testing.assert_close(case.run(spec).double(), case.expected(spec), atol=2e-2, rtol=0)
"""


@pytest.mark.parametrize(
    "processor", [pytest.param("avx2", marks=for_avx512_bf16), pytest.param("avx512", marks=pytest.mark.full)]
)
def test_decodes_are_compiled_for_processors_without_bfloat16(processor: str, tmp_path: Path) -> None:
    if reason := why_not(processor):
        pytest.skip(reason)
    settings = {**environment_of(processor), "NUMBA_CACHE_DIR": str(tmp_path)}
    # Other tests decode in float32 there: launch/test.sh avx2.
    dtypes = ("bfloat16", "float16", *["float32"] * thinning.full)
    command = (sys.executable, "-c", _ON_A_LESSER_PROCESSOR, *dtypes)
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=patient(110))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("group", [1, 7])
def test_a_long_chunk_in_bfloat16_passes_every_border(group: int, head_dim: int) -> None:
    """The chunk exceeds the rows that share keys and the keys of a block. Its last tile is not full."""
    case = Case([(1500, 1000), (0, 5)], 32, group, 1, head_dim, torch.bfloat16, backend="numba")
    assert rows_at_once(7) < 1000 and BLOCK_KEYS < 1500
    spec = spec_for(case, window=1200, sinks=True)
    expected = case.expected(spec)
    assert relative_error(case.run(spec), expected) < 2 * relative_error(expected.bfloat16(), expected)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(
    ("dtype", "cuts"),
    # In bfloat16 if the products are ours.
    [
        (torch.float32, (1, 2, 100, 1499, 1599)),
        pytest.param(
            torch.bfloat16,
            (1, 2, 6, 100, 1024, 1499, 1599),
            marks=pytest.mark.skipif(not has_avx512_bf16(), reason="torch's products of bfloat16 sum as it likes"),
        ),
    ],
)
def test_how_a_prompt_is_cut_changes_no_bit_of_a_row(
    window: int | None, dtype: torch.dtype, cuts: tuple[int, ...]
) -> None:
    case = Case([(0, 1600)], 16, 4, 2, 32, dtype, backend="numba")
    spec = spec_for(case, window=window, softcap=20.0, sinks=True)
    whole = case.run(spec)
    (span,) = case.inputs.spans
    backend = choose_backend("numba", CPU, 16)
    for start, num_tokens in [part for cut in cuts for part in ((0, cut), (cut, 1600 - cut))]:
        chunk = build_inputs([Span(start, num_tokens, span.pages.tolist(), prompt=True)], [], 16, CPU)
        part = backend(case.query[start : start + num_tokens], case.kv, case.layer, chunk, spec)
        assert torch.equal(part, whole[start : start + num_tokens])


def test_queries_may_lie_heads_first_in_memory() -> None:
    case = Case([(70, 30)], 16, 4, 2, 32, torch.bfloat16, backend="numba")
    spec = spec_for(case)
    straight = case.run(spec)
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(case.run(spec), straight)


@pytest.mark.parametrize("num_threads", [2, 3, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_split_a_chunk_and_change_no_bit(num_threads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    case = Case([(200, 50), (3, 20)], 16, 6, num_kv_heads, 32, dtype, backend="numba")
    spec = spec_for(case, window=60)
    alone = case.run(spec)
    torch.set_num_threads(num_threads)
    try:
        assert all(torch.equal(case.run(spec), alone) for _ in range(3))
    finally:
        torch.set_num_threads(1)


@every_backend
def test_large_scores_do_not_overflow(backend: str) -> None:
    case = Case([(20, 9), (30, 1)], 4, 4, 2, 8, backend=backend)
    spec = replace(spec_for(case, sinks=True), scaling=300.0)
    with small_steps():
        torch.testing.assert_close(case.run(spec).double(), case.expected(spec), atol=1e-3, rtol=0)


@every_backend
def test_a_key_outside_the_window_does_not_shift_the_softmax(backend: str) -> None:
    """The key is in a page that is read. Its score is so large that all others would vanish in the softmax."""
    case = Case([(20, 1)], 16, 4, 2, 8, backend=backend)
    case.keys[0][17] = 1000 * case.query[0, ::2]
    (span,) = case.inputs.spans
    everything = build_inputs([Span(0, 21, span.pages.tolist())], [], 16, CPU)
    case.kv.write(case.layer, case.keys[0], case.values[0], everything)
    spec = spec_for(case, window=2)
    torch.testing.assert_close(case.run(spec).double(), case.expected(spec), atol=2e-6, rtol=0)


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_only_the_output(backend: str, dtype: torch.dtype) -> None:
    case = Case([(200, 90), (300, 1)], 16, 4, 2, 32, dtype, backend=backend)
    spec = spec_for(case)
    output = case.run(spec)
    assert output.dtype == dtype
    expected = case.expected(spec)
    assert relative_error(output, expected) < 1.5 * relative_error(expected.to(dtype), expected)


def relative_error(output: Tensor, expected: Tensor) -> float:
    return float((output.double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())


@every_backend
@pytest.mark.parametrize(("start", "num_tokens"), [(500, 1), (128, 128)])
def test_bf16_is_about_as_good_as_the_attention_of_transformers(backend: str, start: int, num_tokens: int) -> None:
    case = Case([(start, num_tokens)], 16, 4, 2, 64, torch.bfloat16, backend=backend)
    spec = spec_for(case)
    theirs = functional.scaled_dot_product_attention(
        case.query.transpose(0, 1)[None],
        case.keys[0].transpose(0, 1)[None],
        case.values[0].transpose(0, 1)[None],
        attn_mask=visible(start, num_tokens, None),
        scale=spec.scaling,
        enable_gqa=True,
    )[0].transpose(0, 1)
    expected = case.expected(spec)
    # Rounding the output causes most of either error. The processor decides which of torch's kernels runs.
    assert relative_error(case.run(spec), expected) <= 1.1 * relative_error(theirs, expected)


@every_backend
def test_batch_mates_change_no_bit(backend: str) -> None:
    case = Case([(40, 1), (10, 20), (33, 1)], 4, 4, 2, 8, backend=backend)
    spec = spec_for(case)
    together = case.run(spec)
    other = choose_backend(backend, CPU, 4)
    for span in case.inputs.spans:
        rows = slice(span.first_row, span.first_row + span.num_tokens)
        alone = build_inputs([Span(span.start, span.num_tokens, span.pages.tolist())], [], 4, CPU)
        output = other(case.query[rows], case.kv, case.layer, alone, spec)
        assert torch.equal(output, together[rows])


def test_scratch_is_bounded_by_tile_and_block_not_by_the_context() -> None:
    with small_steps():
        held = []
        for start in (40, 400):
            backend = sdpa.SdpaAttention()
            case = Case([(start, 20)], 4, 4, 2, 8)
            case.run(spec_for(case), backend)
            held.append(sum(buffer.nbytes for buffer in backend._scratch.values()))
    assert held[0] == held[1]


@every_backend
@pytest.mark.parametrize("pool", ["keys", "values"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize(("dtype", "page_size", "head_dim"), [(torch.float32, 4, 8), (torch.bfloat16, 16, 16)])
def test_a_broken_sequence_is_seen_and_stays_alone(
    backend: str, pool: str, poison: float, dtype: torch.dtype, page_size: int, head_dim: int
) -> None:
    case = Case([(39, 3), (32, 1), (7, 1), (9, 7)], page_size, 4, 2, head_dim, dtype, backend=backend)
    spec = spec_for(case)
    clean = case.run(spec)
    for broken_span in (0, 1):
        page = case.inputs.spans[broken_span].pages[0]
        getattr(case.kv, pool)(case.layer)[page] = poison
    broken = case.run(spec)
    assert not bool(broken[:4].isfinite().any())
    assert torch.equal(broken[4:], clean[4:])


@pytest.mark.parametrize("num_threads", [2, 3, 8])
def test_threads_split_the_decodes_and_change_no_bit(num_threads: int) -> None:
    case = Case([(200, 1), (3, 1), (40, 5), (90, 1), (91, 1)], 16, 4, 2, 8, backend="numba")
    spec = spec_for(case, window=60)
    decodes = [0, 1, 7, 8]  # rows; torch's own products of the chunk between them may differ by their threads
    alone = case.run(spec)[decodes]
    backend = choose_backend("numba", CPU, 16)
    torch.set_num_threads(num_threads)
    try:
        for _ in range(3):
            assert torch.equal(case.run(spec, backend)[decodes], alone)
    finally:
        torch.set_num_threads(1)


def test_decodes_are_split_by_keys_and_none_is_lost() -> None:
    ends = [1000, 1, 1, 500, 500, 1]
    assert key_bounds(ends, 1) == [0, 6] and key_bounds(ends, 2) == [0, 2, 6]
    assert key_bounds([], 3) == [0, 0, 0, 0]
    for num_threads in range(1, 9):
        bounds = key_bounds(ends, num_threads)
        assert len(bounds) == num_threads + 1 and bounds == sorted(bounds) and (bounds[0], bounds[-1]) == (0, 6)


@pytest.fixture
def precisions() -> Iterator[list[str]]:
    """Set the process's product precision to `ieee` before the test. Return its value at each product."""
    matmul = torch.backends.mkldnn.matmul
    before, bmm = matmul.fp32_precision, torch.bmm
    matmul.fp32_precision = "ieee"
    seen: list[str] = []

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(matmul.fp32_precision)
        return bmm(*args, **kwargs)

    with mock.patch.object(torch, "bmm", watched):
        yield seen
    matmul.fp32_precision = before


def test_bf16_chunks_borrow_the_product_precision_of_the_process(precisions: list[str]) -> None:
    case = Case([(9, 30), (4, 1)], 4, 4, 2, 8, torch.bfloat16)
    case.run(spec_for(case))
    assert precisions == ["bf16", "ieee"]
    assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"


def test_the_product_precision_is_put_back_after_an_error(precisions: list[str]) -> None:
    case = Case([(9, 30)], 4, 4, 2, 8, torch.bfloat16)
    with (
        mock.patch.object(torch, "bmm", side_effect=RuntimeError("stop")),
        pytest.raises(RuntimeError, match="stop"),
    ):
        case.run(spec_for(case))
    assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"


def test_float32_models_never_multiply_in_bf16(precisions: list[str]) -> None:
    case = Case([(9, 30), (4, 1)], 4, 4, 2, 8)
    case.run(spec_for(case))
    assert precisions == ["ieee", "ieee"]


def test_where_nothing_can_be_cached_the_kernel_is_compiled_all_the_same() -> None:
    no_folder = RuntimeError("cannot cache function 'attend': no locator available")
    with mock.patch.object(compiling, "KernelCache", side_effect=no_folder):
        assert callable(attention_decode.compile_kernel.__wrapped__(attention_decode.FLOAT32, 8, 8, 2, 4))


def test_two_threads_inside_put_the_precision_back() -> None:
    """The first thread to enter leaves before the second one. The value that the second one saw is not the original."""
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        first, second = sdpa._fast_products(True), sdpa._fast_products(True)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert matmul.fp32_precision == "bf16"
        second.__exit__(None, None, None)
        assert matmul.fp32_precision == "ieee"
    finally:
        matmul.fp32_precision = before


@pytest.mark.skipif(not has_avx512_bf16(), reason="this processor has no bfloat16 products")
@pytest.mark.parametrize("head_dim", [32, 64, 96])
@pytest.mark.parametrize("num_rows", [1, 6, 7, 30])
def test_kernels_keep_to_the_scratch_that_they_ask_for(head_dim: int, num_rows: int) -> None:
    """The memory after the scratch is unchanged."""
    page_size, kv_heads, group, start = 16, 2, 3, 12
    num_pages = -(-(start + num_rows) // page_size)
    torch.manual_seed(num_rows)
    keys, values = torch.randn(2, num_pages, kv_heads, page_size, head_dim).bfloat16()
    query = torch.randn(num_rows, kv_heads * group, head_dim).bfloat16()
    pages, sinks = torch.arange(num_pages), torch.full((kv_heads * group,), -torch.inf)
    out = torch.empty_like(query)
    no_cap, scaling = np.float32(0), np.float32(head_dim**-0.5)
    at_once = rows_at_once(group)
    needed = attention_prefill.scratch_floats(num_rows, group, head_dim, head_dim)
    scratch = torch.full((needed + 64,), 7.0)
    attention_prefill.attend(
        query.data_ptr(), kv_heads * group * head_dim // 2, head_dim // 2, keys.data_ptr(), values.data_ptr(), kv_heads,
        group, head_dim, head_dim, page_size, pages.data_ptr(), start, 1, num_rows, at_once, 0, kv_heads, scaling,
        no_cap, 0, sinks.data_ptr(), scratch.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    assert bool((scratch[needed:] == 7).all()) and bool(out.isfinite().all())
    needed = attention_decode_simd.scratch_floats(kv_heads * group, head_dim, num_pages * page_size, page_size)
    scratch = torch.full((needed + 64,), 7.0)
    places, tables, ends = torch.zeros(3, 1, dtype=torch.int64)
    ends[0] = num_pages * page_size
    attention_decode_simd.compile_kernel(head_dim, group, page_size)(
        query.data_ptr(), kv_heads * group * head_dim, head_dim, keys.data_ptr(), values.data_ptr(), kv_heads,
        places.data_ptr(), pages.data_ptr(), tables.data_ptr(), ends.data_ptr(), 0, scaling, no_cap, sinks.data_ptr(),
        scratch.data_ptr(), out.data_ptr(), 0, 1,
    )  # fmt: skip
    assert bool((scratch[needed:] == 7).all()) and bool(out[0].isfinite().all())
