"""The analytic cost: right in kind for every shape, and near what was measured where something was."""

from __future__ import annotations

from typing import Any

import pytest

from sarathi_pp.core.cost import Load
from sarathi_pp.core.estimate import DEVICE_SPEEDS, estimate_cost

# The model of examples/measure/measure_300m.py.
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3712,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
    "weight_bytes": 2,
    "speed": DEVICE_SPEEDS["cpu"],
}
HALVES = [(0, 8), (8, 16)]


def test_it_is_within_a_factor_of_two_of_what_a_profile_measured() -> None:
    """Two stages on two AVX512-BF16 cores: see the README."""
    first, last = estimate_cost(HALVES, **SHAPE).stages
    assert 1 / 2 < first.a0 / 20e-3 < 2
    assert 1 / 2 < first.a1 / 0.75e-3 < 2
    assert 1 / 2 < first.a2 / 5e-7 < 2
    assert 1 / 2 < first.a3 / 7e-7 < 2
    assert 1 / 2 < last.head_s / 2.6e-4 < 2


@pytest.mark.parametrize("device", sorted(DEVICE_SPEEDS))
def test_each_term_counts_its_flops_or_its_bytes(device: str) -> None:
    speed = DEVICE_SPEEDS[device]
    model = estimate_cost([(0, 3), (3, 4)], **SHAPE | {"speed": speed})
    first, last = model.stages
    weights = 1024 * 64 * (16 + 8 + 8 + 16) + 3 * 1024 * 3712
    assert first.a0 == pytest.approx(3 * (2 * weights / speed.bytes_per_s + speed.layer_s))
    assert first.a1 == pytest.approx(3 * 2 * weights * speed.tile / speed.flops[2])
    assert first.a2 == pytest.approx(3 * 4 * 16 * 64 * 4 / speed.flops[2])
    assert first.a3 == pytest.approx(3 * 2 * 8 * 64 * 2 / speed.bytes_per_s)
    assert first.page_bytes == 16 * 3 * 2 * 8 * 64 * 2
    assert last.a0 == pytest.approx(first.a0 / 3 + 2 * 1024 * 32000 / speed.bytes_per_s)
    assert (first.head_s, last.head_s) == (0.0, pytest.approx(2 * 1024 * 32000 / speed.flops[2]))
    assert model.tile == speed.tile


def test_experts_are_all_read_and_only_some_computed() -> None:
    dense = estimate_cost([(0, 1), (1, 2)], **SHAPE).stages[0]
    sparse = estimate_cost([(0, 1), (1, 2)], **SHAPE, num_experts=8, experts_per_token=1).stages[0]
    assert sparse.a1 == dense.a1 and sparse.a0 > 4 * dense.a0


def test_float32_reads_twice_the_bytes() -> None:
    half, full = (estimate_cost([(0, 1)], **SHAPE | {"weight_bytes": size}).stages[0] for size in (2, 4))
    assert full.a3 == pytest.approx(2 * half.a3) and full.page_bytes == 2 * half.page_bytes
    assert full.a1 > half.a1


def test_stages_add_up_whatever_the_cut() -> None:
    load = Load(300, 1e5, 20, 20_000)
    totals = [
        sum(model.seconds(stage, load) for stage in range(len(model.stages)))
        for model in (estimate_cost(cut, **SHAPE) for cut in ([(0, 16)], HALVES, [(0, 1), (1, 9), (9, 16)]))
    ]
    assert totals == pytest.approx([totals[0]] * 3)
