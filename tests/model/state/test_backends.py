"""The kernels of layers with a state, against the same operations in torch and against formulas in float64.

Run them as on a smaller processor: env $(python -m tests.processors avx2) pytest tests/model/state
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("numba")

from sarathi_pp.checkpoint.facts.layer_cache import PagedCache, StateCache
from sarathi_pp.model.dtypes import has_float_products
from sarathi_pp.model.inputs import StageInputs
from sarathi_pp.model.state.backend import DeltaRule, SelectiveScan
from sarathi_pp.model.state.choice import Backends, state_backend, state_widths, why_not_numba
from sarathi_pp.model.state.numba_backend import NumbaState
from sarathi_pp.model.state.torch_backend import TorchState
from tests.model.state.microbatch import CPU, NUM_SLOTS, Values, inputs

pytestmark = pytest.mark.skipif(not has_float_products(), reason="this processor has no AVX2")

DTYPES = (torch.float32, torch.bfloat16)
# A prompt of more rows than a tile, a chunk, a decode, and a prompt that is shorter than a convolution.
SPANS = inputs((0, 70, 2), (5, 9, 0), (30, 1, 1), (0, 1, 3))
NUM_ROWS, NEW_SLOTS = 81, [2, 3]
# (taps, channels), (key heads, value heads per key head, key_dim, value_dim), (heads, groups, head_dim, state_dim).
CONVOLUTIONS = ((2, 16), (3, 48), (4, 208))
DELTA_RULES = ((2, 2, 16, 32), (1, 1, 48, 16), (3, 1, 16, 48), (2, 3, 128, 128))
SCANS = ((4, 2, 16, 32), (3, 1, 32, 16), (6, 3, 16, 48), (4, 1, 64, 128))


def states_of(values: Values, blocks: int, rows: int) -> Tensor:
    """Return states in blocks of 16 columns. Slots that the microbatch does not read hold NaN."""
    states = Values(seed=9).normal(NUM_SLOTS, blocks, rows, 16)
    states[[*NEW_SLOTS, 4]] = torch.nan
    return states


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("taps, channels", CONVOLUTIONS)
def test_convolutions(taps: int, channels: int, silu: bool, dtype: torch.dtype) -> None:
    values = Values(dtype)
    conv = values.convolution(taps, channels, silu=silu)
    x = values.normal(NUM_ROWS, channels + 7)[:, :channels]
    before = values.normal(NUM_SLOTS, taps - 1, channels)
    before[[*NEW_SLOTS, 4]] = torch.nan
    latest = before.clone(), before.clone()
    out = NumbaState().convolve(x, conv, latest[0], SPANS)
    expected = TorchState().convolve(x, conv, latest[1], SPANS)
    torch.testing.assert_close(out, expected, rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert torch.equal(latest[0][:4], latest[1][:4]) and latest[0][4].isnan().all()
    whole = torch.cat([torch.zeros(taps - 1, channels), x[:70].float()])
    filtered = functional.conv1d(whole.T[None].double(), conv.weights.T[:, None].double(), groups=channels)[0].T
    filtered = filtered + conv.bias
    exact = functional.silu(filtered) if silu else filtered
    rtol, atol = (2e-2, 1e-3) if dtype == torch.bfloat16 else (1e-5, 1e-5)
    torch.testing.assert_close(out[:70].double(), exact, rtol=rtol, atol=atol)


def by_rows(rule: DeltaRule, rows: Tensor, gates: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one sequence in float64. The state is (value heads, key_dim, value_dim)."""
    keys = rule.key_heads * rule.key_dim
    query, key, value = rows.double().split([keys, keys, rule.value_heads * rule.value_dim], dim=1)
    share = rule.value_heads // rule.key_heads
    query, key = (one.view(len(rows), -1, rule.key_dim).repeat_interleave(share, 1) for one in (query, key))
    query, key = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (query, key))
    value = value.view(len(rows), -1, rule.value_dim)
    beta, logits = gates.double().chunk(2, dim=1)
    decay = (rule.rates * functional.softplus(logits + rule.gate_bias)).exp()
    beta, state, made = beta.sigmoid().to(gates.dtype).double(), state.double(), []
    for row in range(len(rows)):
        state = state * decay[row, :, None, None]
        delta = (value[row] - torch.einsum("hk,hkv->hv", key[row], state)) * beta[row, :, None]
        state = state + key[row, :, :, None] * delta[:, None]
        made.append(torch.einsum("hk,hkv->hv", query[row], state) * rule.key_dim**-0.5)
    return torch.stack(made), state


def in_heads(states: Tensor, heads: int) -> Tensor:
    """Return the blocks of one slot as (heads, rows, channels)."""
    blocks, rows, columns = states.shape
    return states.view(heads, blocks // heads, rows, columns).permute(0, 2, 1, 3).reshape(heads, rows, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", DELTA_RULES)
@pytest.mark.parametrize("backend", [NumbaState, TorchState])
def test_delta_rules(backend: Callable[[], Any], sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    values = Values(dtype)
    rule = values.delta_rule(*sizes)
    width = 2 * rule.key_heads * rule.key_dim + rule.value_heads * rule.value_dim
    rows, gates = values.normal(NUM_ROWS, width), values.normal(NUM_ROWS, 2 * rule.value_heads)
    states = states_of(values, rule.value_heads * rule.value_dim // 16, rule.key_dim)
    before = states.clone()
    out = backend().apply_delta_rule(rows, gates, rule, states, SPANS)
    assert out.dtype == dtype and states[4].isnan().all()
    for span in SPANS.spans:
        part = slice(span.first_row, span.first_row + span.num_tokens)
        begin = in_heads(before[span.slot], rule.value_heads)
        exact, state = by_rows(rule, rows[part], gates[part], begin if span.start else torch.zeros_like(begin))
        atol = 4e-3 if dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(out[part].double(), exact, rtol=0, atol=atol)
        torch.testing.assert_close(in_heads(states[span.slot], rule.value_heads).double(), state, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SCANS)
@pytest.mark.parametrize("backend", [NumbaState, TorchState])
def test_scans(backend: Callable[[], Any], sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    values = Values(dtype)
    scan = values.scan(*sizes)
    width, shared = scan.heads * scan.head_dim, scan.groups * scan.state_dim
    rows, steps = values.normal(NUM_ROWS, width + 2 * shared), values.normal(NUM_ROWS, scan.heads + 3)[:, 3:]
    states = states_of(values, width // 16, scan.state_dim)
    before = states.clone()
    out = backend().scan(rows, steps, scan, states, SPANS)
    assert out.dtype == torch.float32 and states[4].isnan().all()
    dt = functional.softplus(steps + scan.step_bias.to(dtype)).double()
    x, b, c = rows.double().split([width, shared, shared], dim=1)
    b, c = (one.view(NUM_ROWS, scan.groups, -1).repeat_interleave(scan.heads // scan.groups, 1) for one in (b, c))
    x = x.view(NUM_ROWS, scan.heads, -1)
    for span in SPANS.spans:
        begin = in_heads(before[span.slot], scan.heads).double()
        state = begin if span.start else torch.zeros_like(begin)
        for row in range(span.first_row, span.first_row + span.num_tokens):
            kept = state * (scan.rates * dt[row]).exp()[:, None, None]
            state = kept + torch.einsum("hn,hp->hnp", b[row], x[row] * dt[row, :, None])
            exact = torch.einsum("hn,hnp->hp", c[row], state) + scan.skips[:, None] * x[row]
            torch.testing.assert_close(out[row].double(), exact, rtol=1e-4, atol=2e-4)
        torch.testing.assert_close(in_heads(states[span.slot], scan.heads).double(), state, rtol=1e-4, atol=1e-4)


def cuts() -> Iterator[list[StageInputs]]:
    """Yield microbatches that compute a prompt of 70 rows in slot 1, each list with another cut."""
    yield [inputs((0, 70, 1))]
    yield [inputs((at, 1, 1)) for at in range(70)]
    yield [inputs((at, 7, 1)) for at in range(0, 70, 7)]
    yield [inputs((0, 64, 1)), inputs((64, 6, 1))]
    yield [inputs((0, 30, 1), (30, 1, 1), (31, 39, 1))]


def results(operation: Callable[[slice, StageInputs], Tensor], state: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for microbatches in cuts():
        state.fill_(torch.nan)
        made, at = [], 0
        for one in microbatches:
            made.append(operation(slice(at, at + one.num_tokens), one))
            at += one.num_tokens
        yield torch.cat(made), state[1].clone()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_every_cut_and_number_of_threads_gives_the_same_bits(num_threads: int, dtype: torch.dtype) -> None:
    values, backend = Values(dtype), NumbaState()
    conv, rule, scan = values.convolution(4, 208, silu=True), values.delta_rule(2, 2, 48, 32), values.scan(4, 2, 32, 48)
    x, gates, steps = values.normal(70, 208), values.normal(70, 8), values.normal(70, 4)
    keyed, scanned = values.normal(70, 320), values.normal(70, 320)
    latest, of_rule, of_scan = (
        torch.empty(2, 3, 208, dtype=dtype),
        torch.empty(2, 8, 48, 16),
        torch.empty(2, 8, 48, 16),
    )
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    lone = [
        next(results(lambda part, one: backend.convolve(x[part], conv, latest, one), latest)),
        next(results(lambda p, one: backend.apply_delta_rule(keyed[p], gates[p], rule, of_rule, one), of_rule)),
        next(results(lambda p, one: backend.scan(scanned[p], steps[p], scan, of_scan, one), of_scan)),
    ]
    torch.set_num_threads(num_threads)
    try:
        made = zip(
            results(lambda part, one: backend.convolve(x[part], conv, latest, one), latest),
            results(lambda p, one: backend.apply_delta_rule(keyed[p], gates[p], rule, of_rule, one), of_rule),
            results(lambda p, one: backend.scan(scanned[p], steps[p], scan, of_scan, one), of_scan),
            strict=True,
        )
        for cut in made:
            for pair, first in zip(cut, lone, strict=True):
                assert torch.equal(pair[0], first[0]) and torch.equal(pair[1], first[1])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", [NumbaState, TorchState])
def test_spans_of_one_sequence_are_computed_in_their_order(backend: Callable[[], Any]) -> None:
    values = Values()
    conv, x, latest = values.convolution(4, 16, silu=True), values.normal(6, 16), torch.full((2, 3, 16), torch.nan)
    whole = backend().convolve(x, conv, latest.clone(), inputs((0, 6, 1)))
    parts = backend().convolve(x, conv, latest, inputs((0, 1, 1), (1, 1, 1), (2, 3, 1), (5, 1, 1)))
    torch.testing.assert_close(parts, whole)


def test_nan_stays_in_its_sequence() -> None:
    values = Values()
    rule = values.delta_rule(2, 1, 16, 16)
    rows, gates = values.normal(20, 96), values.normal(20, 4)
    rows[3, 40] = torch.nan  # a key
    states = torch.zeros(2, 2, 16, 16)
    out = NumbaState().apply_delta_rule(rows, gates, rule, states, inputs((0, 10, 0), (0, 10, 1)))
    assert out[3:10].isnan().any() and out[:3].isfinite().all() and out[10:].isfinite().all()
    assert states[0].isnan().any() and states[1].isfinite().all()


@pytest.mark.parametrize("slot", [-1, NUM_SLOTS])
def test_a_slot_outside_the_states_is_an_error(slot: int) -> None:
    values = Values()
    latest = torch.zeros(NUM_SLOTS, 1, 16)
    with pytest.raises(AssertionError, match="slots"):
        NumbaState().convolve(values.normal(1, 16), values.convolution(2, 16, silu=False), latest, inputs((0, 1, slot)))


def test_rows_that_no_span_has_are_an_error() -> None:
    """The padding rows of a CUDA graph belong to no sequence."""
    padded = inputs((0, 3, 0))._replace(position_ids=torch.zeros(4, dtype=torch.int64))
    for backend in (NumbaState(), TorchState()):
        with pytest.raises(AssertionError, match="rows"):
            backend.convolve(torch.zeros(4, 16), Values().convolution(2, 16, silu=False), torch.zeros(1, 1, 16), padded)


def test_the_choice() -> None:
    backends = Backends()
    assert backends.choose(torch.float32, CPU, (128, 16)).name == "numba"
    assert backends.choose(torch.bfloat16, CPU, (128,)).name == "numba"
    assert backends.choose(torch.float32, CPU, (128, 24)).name == "torch", "kernels compute lines of 16 channels"
    assert backends.choose(torch.float16, CPU, (128,)).name == "torch"
    assert backends.choose(torch.float32, torch.device("meta"), (128,)).name == "torch"
    assert Backends(kernels=False).choose(torch.float32, CPU, (128,)).name == "torch"
    assert backends.choose(torch.float32, CPU, (16,)) is backends.choose(torch.float32, CPU, (32,))


def test_a_scan_with_one_state_of_columns_that_16_does_not_divide() -> None:
    """Such a head has one block. Only torch computes it."""
    values = Values()
    scan: SelectiveScan = values.scan(2, 1, 6, 8)
    rows, steps = values.normal(5, 28), values.normal(5, 2)
    states = torch.full((1, 2, 8, 6), torch.nan)
    whole = TorchState().scan(rows, steps, scan, states, inputs((0, 5, 0)))
    parts = [TorchState().scan(rows[:2], steps[:2], scan, states, inputs((0, 2, 0)))]
    for at in (2, 3, 4):
        parts.append(TorchState().scan(rows[at : at + 1], steps[at : at + 1], scan, states, inputs((at, 1, 0))))
    torch.testing.assert_close(torch.cat(parts), whole)


def test_the_choice_for_a_model_is_that_of_its_layers() -> None:
    wide, narrow = StateCache((3, 40), (8, 32, 16)), StateCache((3, 40), (4, 32, 24))
    for caches, widths, name in (
        ((wide, PagedCache(2, 24, 24)), (16, 32), "numba"),
        ((narrow,), (24, 32), "torch"),
        ((StateCache((2, 64)),), (64,), "numba"),
        ((StateCache((2, 40)),), (40,), "torch"),
    ):
        assert state_widths(caches) == widths
        assert state_backend(caches, torch.float32, CPU) == Backends().choose(torch.float32, CPU, widths).name == name
    assert state_backend((PagedCache(2, 24, 24),), torch.float32, CPU) is None


def test_the_reason_against_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_numba(torch.float32, CPU, (16, 24)) == "24 channels are no multiple of 16"
    assert why_not_numba(torch.float16, CPU, (16,)) == "not in float16"
    assert why_not_numba(torch.float32, torch.device("cuda"), (16,)) == "not on cuda"
    monkeypatch.setattr("sarathi_pp.model.state.choice.has_float_products", lambda: False)
    assert "the package numba" in (why_not_numba(torch.float32, CPU, (16,)) or "")
