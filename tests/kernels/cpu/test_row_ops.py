"""Passes over rows in float32: exact up to rounding, and the same bits on every processor.

test_rewrite.py compares the modules that use them, also in bfloat16, with those of transformers.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from numpy.typing import NDArray
from sarathi_pp_kernels.cpu.row_ops import FLOAT32
from sarathi_pp_kernels.cpu.simd.target import target

from tests.processors import environment_of, why_not

pytestmark = pytest.mark.skipif(not target().lanes, reason="this processor has no AVX2")

ROOT = Path(__file__).parents[3]
Array = NDArray[Any]
ROWS, EPSILON = 5, 1e-5
HEADS, KV_HEADS, PAGE_SIZE, NUM_PAGES = 3, 2, 4, 6
# Each row's page, and its place in the page.
PAGES, OFFSETS = np.array([4, 4, 0, 2, 5]), np.array([2, 3, 0, 1, 0])


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def run(kernel: Any, *arguments: Any) -> None:
    kernel(*(one.ctypes.data if isinstance(one, np.ndarray) else one for one in arguments))


def norm_of(x: Array, weight: Array) -> Array:
    x = x.astype(np.float64)
    return weight * (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON))


def gated(width: int) -> tuple[Array, Array]:
    both, out = 8 * normal(width, ROWS, 2 * width), np.full((ROWS, width), 7, np.float32)
    run(FLOAT32.silu_multiply, both, out, 1, ROWS - 1, width)
    return both, out


def normed(width: int) -> tuple[Array, Array, Array]:
    x, weight, out = 3 * normal(width, ROWS, width), normal(1, width), np.full((ROWS, width), 7, np.float32)
    run(FLOAT32.rms_norm, x, weight, out, 1, ROWS - 1, width, EPSILON, 0)
    return x, weight, out


def added_and_normed(width: int) -> tuple[Array, Array, Array, Array]:
    x, added, weight = normal(width, ROWS, width), normal(2, ROWS, width), normal(1, width)
    out = np.full((ROWS, width), 7, np.float32)
    run(FLOAT32.add_rms_norm, x, added, weight, out, 1, ROWS - 1, width, EPSILON, 0)
    return x, added, weight, out


def rotated(head_dim: int, *, norms: bool) -> tuple[Array, ...]:
    """Return the rows, the keys and the values after the pass. All else in keys and values is 7."""
    rows = normal(3, ROWS, HEADS + 2 * KV_HEADS, head_dim)
    cos, sin = normal(4, ROWS, head_dim), normal(5, ROWS, head_dim)
    keys, values = (np.full((NUM_PAGES, KV_HEADS, PAGE_SIZE, head_dim), 7, np.float32) for _ in range(2))
    weights = (normal(6, head_dim), normal(7, head_dim)) if norms else (0, 0)
    run(
        *(FLOAT32.rotate_and_write, rows, HEADS, KV_HEADS, head_dim, cos, sin, keys, values, PAGES, OFFSETS),
        *(PAGE_SIZE, 1, ROWS - 1, *weights, EPSILON, 0),
    )
    return rows, keys, values


def test_a_gate_is_silu_times_the_other_half() -> None:
    for width in (16, 48, 1040):
        both, out = gated(width)
        x = both.astype(np.float64)
        expected = x[:, :width] / (1 + np.exp(-x[:, :width])) * x[:, width:]
        np.testing.assert_allclose(out[1:-1], expected[1:-1], rtol=4e-7)
        assert (out[[0, -1]] == 7).all(), "other rows are not touched"


def test_a_norm_divides_by_the_root_of_the_mean_square() -> None:
    for width in (16, 48, 1040):
        x, weight, out = normed(width)
        np.testing.assert_allclose(out[1:-1], norm_of(x, weight)[1:-1], rtol=5e-7)
        assert (out[[0, -1]] == 7).all()


def test_a_sum_is_rounded_once_and_then_normed() -> None:
    for width in (16, 48, 1040):
        x, added, weight, out = added_and_normed(width)
        before = normal(2, ROWS, width)
        before[1:-1] += x[1:-1]
        assert np.array_equal(added, before)
        np.testing.assert_allclose(out[1:-1], norm_of(added, weight)[1:-1], rtol=5e-7)
        assert (out[[0, -1]] == 7).all()


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("head_dim", [32, 96])
def test_heads_are_rotated_and_written_to_their_pages(head_dim: int, norms: bool) -> None:
    """Without norms, every product and sum is rounded as numpy's."""
    rows, keys, values = rotated(head_dim, norms=norms)
    before, cos, sin = normal(3, *rows.shape), normal(4, ROWS, 1, head_dim), normal(5, ROWS, 1, head_dim)
    heads = before[:, : HEADS + KV_HEADS]
    if norms:
        queries, new_keys = np.split(heads, [HEADS], axis=1)
        both = norm_of(queries, normal(6, head_dim)), norm_of(new_keys, normal(7, head_dim))
        heads = np.concatenate(both, axis=1)
    first, second = np.split(heads, 2, axis=-1)
    expected = heads * cos + np.concatenate((-second, first), axis=-1) * sin
    new, atol = slice(1, ROWS - 1), 2e-6 if norms else 0
    np.testing.assert_allclose(rows[new, :HEADS], expected[new, :HEADS], rtol=0, atol=atol)
    np.testing.assert_allclose(keys[PAGES, :, OFFSETS][new], expected[new, HEADS:], rtol=0, atol=atol)
    assert np.array_equal(values[PAGES, :, OFFSETS][new], before[new, HEADS + KV_HEADS :])
    for pages in (keys, values):
        pages[PAGES[new], :, OFFSETS[new]] = 7
        assert (pages == 7).all(), "only the places of these rows are written"
    assert np.array_equal(rows[[0, -1]], before[[0, -1]])


def test_nan_stays_in_its_row() -> None:
    x, out = normal(1, 3, 64), np.empty((3, 64), np.float32)
    x[1, 37] = np.nan
    run(FLOAT32.rms_norm, x, np.ones(64, np.float32), out, 0, 3, 64, EPSILON, 0)
    assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2]]).all()


def _arrays() -> Iterator[Array]:
    for width in (16, 48, 1040):
        yield from (gated(width)[-1], normed(width)[-1], *added_and_normed(width))
    for norms in (False, True):
        yield from rotated(96, norms=norms)


def digest() -> str:
    """Return a digest of the bits of all passes."""
    return hashlib.sha256(b"".join(array.tobytes() for array in _arrays())).hexdigest()


_DIGEST = """
from tests.kernels.cpu.test_row_ops import digest
print(digest())
"""


@pytest.mark.skipif(bool(why_not("avx2")), reason=str(why_not("avx2")))
def test_every_processor_gives_the_same_bits() -> None:
    """A register of AVX2 holds half a line."""
    environment = {
        **os.environ,
        **environment_of("avx2"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    }
    command = [sys.executable, "-c", _DIGEST]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == digest()
