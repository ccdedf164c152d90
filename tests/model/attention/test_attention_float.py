"""Attention in float32 by blocks of keys: exact, and the bits of a row depend on nothing but the row."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from sarathi_pp_kernels.cpu import attention_float
from sarathi_pp_kernels.cpu.simd.target import target
from torch import Tensor

from sarathi_pp.model.attention import choose_backend
from sarathi_pp.model.attention.numba import tile_height
from sarathi_pp.model.attention.spec import AttentionSpec
from sarathi_pp.model.inputs import Span, build_inputs
from tests.model.microbatches import CPU, Case, spec_for
from tests.processors import environment_of, why_not
from tests.thinning import examples

pytestmark = pytest.mark.skipif(not target().lanes, reason="this processor has no AVX2")
ROOT = Path(__file__).parents[3]
# (heads, KV heads, channels of a head, tokens of a page). All run the same kernel.
SHAPES = [(1, 1, 16, 16), (4, 2, 64, 16), (7, 1, 80, 48), (6, 2, 32, 1024), (3, 3, 112, 32), (8, 1, 256, 16)]
# Positions next to the borders of pages, of the keys that are read at a time, and of blocks.
STARTS = [0, 1, 15, 16, 31, 200, 500, 511, 512, 513, 1020, 1530]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def part(case: Case, spec: AttentionSpec, start: int, end: int) -> Tensor:
    """Return the output of rows [start, end) of a case that is one prompt from its first token on, computed alone."""
    (span,) = case.inputs.spans
    inputs = build_inputs([Span(start, end - start, span.pages.tolist(), prompt=True)], [], case.page_size, CPU)
    return choose_backend("numba", CPU, case.page_size)(case.query[start:end], case.kv, case.layer, inputs, spec)


@settings(max_examples=examples(80))
@given(
    extents=st.lists(
        st.tuples(st.sampled_from(STARTS), st.one_of(st.integers(1, 7), st.integers(8, 60))), min_size=1, max_size=3
    ),
    shape=st.sampled_from(SHAPES),
    window=st.one_of(st.none(), st.integers(1, 700)),
    softcap=st.one_of(st.none(), st.just(1.5)),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_microbatch_is_exact(
    extents: list[tuple[int, int]],
    shape: tuple[int, int, int, int],
    window: int | None,
    softcap: float | None,
    sinks: bool,
    seed: int,
) -> None:
    *heads, head_dim, page_size = shape
    case = Case(extents, page_size, *heads, head_dim, seed=seed, backend="numba")
    assert attention_float.fits(head_dim, head_dim, page_size)
    spec = spec_for(case, window=window, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(case.run(spec).double(), case.expected(spec), atol=3e-6, rtol=0)


@settings(max_examples=examples(20))
@given(
    cuts=st.sets(st.integers(1, 1099), max_size=40),
    shape=st.sampled_from(SHAPES[1:3]),
    window=st.sampled_from([None, 1, 16, 37, 512, 600]),
    sinks=st.booleans(),
)
def test_no_cut_of_a_prompt_changes_a_bit(
    cuts: set[int], shape: tuple[int, int, int, int], window: int | None, sinks: bool
) -> None:
    *heads, head_dim, page_size = shape
    case = Case([(0, 1100)], page_size, *heads, head_dim, backend="numba")
    spec = spec_for(case, window=window, sinks=sinks)
    parts = [part(case, spec, start, end) for start, end in pairwise([0, *sorted(cuts), 1100])]
    assert torch.equal(torch.cat(parts), case.run(spec))


@pytest.mark.parametrize("window", [None, 1, 40, 530])
def test_a_decode_has_the_bits_of_a_prompt_row(window: int | None) -> None:
    """Decodes read pages where they are; of the prompt, keys are copied into panels, and rows are computed by six."""
    case = Case([(0, 1050)], 16, 4, 2, 64, backend="numba")
    spec = spec_for(case, window=window, softcap=20.0, sinks=True)
    whole = case.run(spec)
    for row in (*range(40), *range(500, 530), 1023, 1024, 1025, 1049):
        assert torch.equal(part(case, spec, row, row + 1)[0], whole[row]), row


@pytest.mark.parametrize("num_threads", [2, 3, 8])
def test_threads_divide_a_prompt_and_change_no_bit(num_threads: int) -> None:
    case = Case([(300, 70), (0, 5), (40, 1)], 16, 6, 2, 32, backend="numba")
    spec = spec_for(case, window=200)
    alone = case.run(spec)
    assert tile_height(70, 370, 6, case.kv, 1) == 72 and tile_height(70, 370, 6, case.kv, num_threads) <= 36
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(case.run(spec), alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("group", [1, 3, 8, 100])
def test_tiles_have_limited_memory_and_some_rows_for_each_thread(group: int) -> None:
    for num_rows in (1, 5, 112, 5000):
        height = attention_float.tile_rows(num_rows, group, 1)
        assert height % 6 == 0 and (height >= num_rows or height * group > 512 - 6 * group)
        shared = attention_float.tile_rows(num_rows, group, 4)
        assert shared % 6 == 0 and 6 <= shared <= height + 12


@pytest.mark.parametrize("pool", ["keys", "values"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_broken_sequence_is_seen_and_stays_alone(pool: str, poison: float) -> None:
    case = Case([(39, 9), (32, 1), (7, 1), (9, 7)], 16, 4, 2, 32, backend="numba")
    spec = spec_for(case)
    clean = case.run(spec)
    for broken_span in (0, 1):
        page = case.inputs.spans[broken_span].pages[0]
        getattr(case.kv, pool)(case.layer)[page] = poison
    broken = case.run(spec)
    assert not bool(broken[:10].isfinite().any())
    assert torch.equal(broken[10:], clean[10:])


@pytest.mark.parametrize("scale", [1e-30, 30.0, 1e4])
def test_tiny_and_large_scores_give_weights_that_add_up(scale: float) -> None:
    """The largest score may be in any block. Weights far below it become 0, and never subnormal numbers."""
    case = Case([(0, 1300)], 16, 2, 1, 32, backend="numba")
    case.query *= scale
    spec = spec_for(case)
    torch.testing.assert_close(case.run(spec).double(), case.expected(spec), atol=2e-6 * max(1.0, scale), rtol=1e-5)


@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("num_rows", [1, 4, 5, 7, 30])
def test_the_kernel_keeps_to_the_scratch_that_it_asks_for(head_dim: int, num_rows: int) -> None:
    needed = attention_float.scratch_floats(num_rows, 6, 2, head_dim, head_dim)
    scratch, out = attend(num_rows, head_dim, np.full(needed + 64, 7, np.float32))
    assert bool((scratch[needed:] == 7).all()) and bool(np.isfinite(out).all())


def test_a_small_tile_may_need_more_scratch_than_a_large_one() -> None:
    """Tiles of few rows keep the scores of all heads at once, and others those of six rows."""
    one, five = (attention_float.scratch_floats(rows, 64, 64, 16, 16) for rows in (1, 5))
    assert five >= one > 2 * 512 * 16 + 6 * (512 + 16) + 6 * 18, "the memory of five rows alone"


def attend(num_rows: int, head_dim: int, scratch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute one tile after 600 keys with 6 heads and 2 KV heads. Return the scratch memory and the output."""
    random, start, page_size = np.random.default_rng(num_rows), 600, 16
    num_pages = -(-(start + num_rows) // page_size)
    keys, values = random.standard_normal((2, num_pages, 2, page_size, head_dim), np.float32)
    query = random.standard_normal((num_rows, 6, head_dim), np.float32)
    out, sinks, pages = np.empty_like(query), np.full(6, -np.inf, np.float32), random.permutation(num_pages)
    place, count, table, end = np.array([[0], [num_rows], [0], [start + 1]])
    attention_float.attend(
        query.ctypes.data, 6 * head_dim, head_dim, keys.ctypes.data, values.ctypes.data, 2, 3, head_dim, head_dim,
        page_size, place.ctypes.data, count.ctypes.data, pages.ctypes.data, table.ctypes.data, end.ctypes.data, 0,
        np.float32(head_dim**-0.5), np.float32(0), sinks.ctypes.data, scratch.ctypes.data, out.ctypes.data, 0, 1,
    )  # fmt: skip
    return scratch, out


def digest() -> str:
    """Return a digest of the bits of tiles of one and of several rows."""
    outputs = [attend(rows, 80, np.zeros(1 << 20, np.float32))[1].tobytes() for rows in (1, 30)]
    return hashlib.sha256(b"".join(outputs)).hexdigest()


@pytest.mark.skipif(bool(why_not("avx2")), reason=str(why_not("avx2")))
def test_every_processor_gives_the_same_bits() -> None:
    environment = os.environ | environment_of("avx2")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    told = "from tests.model.attention.test_attention_float import digest; print(digest())"
    found = subprocess.run([sys.executable, "-c", told], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == digest()
