"""Warming up a stage compiles every attention kernel that a run will launch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sarathi_pp_kernels.triton.attention_work import Blocks, Extent, cut_work

from sarathi_pp.stages.model_stage import warming

# From setup.py; an H100's processors.
NUM_TOKENS, NUM_KEYS, PROCESSORS = 256, 4096, 132


def kernel(extents: list[tuple[int, int]], group: int, num_kv_heads: int) -> tuple[bool, bool]:
    """Return the compiler's input for a microbatch of (start, tokens), in addition to the model's own constants."""
    laid, row = [], 0
    for start, count in extents:
        laid.append(Extent(row, count, start, 0))
        row += count
    work = cut_work(laid, Blocks.of(group, 128, 2), None, num_kv_heads, PROCESSORS, torch.device("cpu"))
    return work.has_many, work.partial_rows > 0


def warmed(group: int, num_kv_heads: int) -> set[tuple[bool, bool]]:
    microbatches = warming(NUM_TOKENS, NUM_KEYS, on_device=True)
    return {
        kernel([(end - count, count) for end, count, _ in microbatch], group, num_kv_heads)
        for microbatch in microbatches
    }


@pytest.mark.parametrize(("group", "num_kv_heads"), [(4, 8), (8, 8), (4, 2), (1, 32), (8, 1), (5, 8)])
def test_all_four(group: int, num_kv_heads: int) -> None:
    assert warmed(group, num_kv_heads) == {(False, False), (False, True), (True, False), (True, True)}


@given(
    st.lists(st.tuples(st.integers(0, 6000), st.one_of(st.just(1), st.integers(2, 600))), min_size=1, max_size=8),
    st.sampled_from([(4, 8), (8, 8), (1, 32)]),
)
def test_no_microbatch_has_another(extents: list[tuple[int, int]], heads: tuple[int, int]) -> None:
    assert kernel(extents, *heads) in warmed(*heads)
