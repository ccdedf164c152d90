"""The instructions that kernels are made of, each against numpy or torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from numba import types
from numba.extending import intrinsic
from sarathi_pp_kernels.cpu.simd.compile import compiled
from sarathi_pp_kernels.cpu.simd.exp2 import FINE, power_by_bits
from sarathi_pp_kernels.cpu.simd.gate import silu_multiply_lines
from sarathi_pp_kernels.cpu.simd.memory import (
    load_bf16,
    load_float,
    load_half,
    load_index,
    load_word,
    round_lines,
    store_bf16,
    store_float,
    store_word,
)
from sarathi_pp_kernels.cpu.simd.norm import scale_lines, sum_of_squares
from sarathi_pp_kernels.cpu.simd.products import (
    BF16,
    FLOAT32,
    FLOAT32_BF16,
    add_weighted,
    dot_lines,
    dot_tile,
    multiply_rows,
)
from sarathi_pp_kernels.cpu.simd.registers import LANES, each_line, floats_at, index, load_line
from sarathi_pp_kernels.cpu.simd.rotary import rotate_lines
from sarathi_pp_kernels.cpu.simd.softmax import exponential, hide, largest, weigh_lines
from sarathi_pp_kernels.cpu.simd.target import has_avx512_bf16, target
from sarathi_pp_kernels.cpu.simd.transpose import pair, transpose

from sarathi_pp.model.fuse.packed_linear import pack_weight

needs_avx512_bf16 = pytest.mark.skipif(not has_avx512_bf16(), reason="this processor has no bfloat16 products")
needs_avx2 = pytest.mark.skipif(not target().lanes, reason="this processor has no AVX2")
DTYPES = [pytest.param(torch.bfloat16, marks=needs_avx512_bf16), pytest.param(torch.float32, marks=needs_avx2)]


@needs_avx512_bf16
@pytest.mark.parametrize("lines", [1, 2, 3])
@pytest.mark.parametrize("asks", [0, 1])
def test_sixteen_products_of_lines_each_in_its_lane(lines: int, asks: int) -> None:
    @compiled()
    def products(query, keys, out):  # type: ignore[no-untyped-def]
        dot_lines(lines, asks, query, keys, out, keys)

    torch.manual_seed(lines)
    query, keys = torch.randn(32 * lines).bfloat16(), torch.randn(16, 32 * lines).bfloat16()
    out = torch.full((20,), 7.0)
    products(query.data_ptr(), keys.data_ptr(), out.data_ptr())
    torch.testing.assert_close(out[:16].double(), keys.double() @ query.double(), rtol=1e-5, atol=1e-5)
    assert bool((out[16:] == 7).all())


@needs_avx512_bf16
@pytest.mark.parametrize(("heads", "lines"), [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("tokens", [1, 2, 10])
def test_weighted_values_are_added(heads: int, lines: int, tokens: int) -> None:
    """If there is no second token, its value counts for nothing, even if it is NaN."""
    odd = tokens % 2

    @compiled()
    def add(values, weights, step, sums, pairs):  # type: ignore[no-untyped-def]
        add_weighted(heads, lines, odd, values, weights, step, sums, pairs, values)

    torch.manual_seed(tokens)
    values = torch.randn(tokens + odd, 32 * lines).bfloat16()
    weights, sums = torch.randn(heads, tokens + 3).bfloat16(), torch.randn(heads, 32 * lines)
    expected = sums.double() + weights[:, :tokens].double() @ values[:tokens].double()
    values[tokens:] = torch.nan
    add(values.data_ptr(), weights.data_ptr(), tokens + 3, sums.data_ptr(), (tokens + 1) // 2)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [32, 96])
def test_rotated_lines_are_rounded_as_torchs(channels: int, dtype: torch.dtype) -> None:
    size = dtype.itemsize

    @compiled(fastmath=False)
    def rotate(source, to, cos, sin, lines):  # type: ignore[no-untyped-def]
        rotate_lines(size, source, to, cos, sin, lines)

    torch.manual_seed(channels)
    x, cos, sin = (torch.randn(channels).to(dtype) for _ in range(3))
    turned = torch.cat((-x[channels // 2 :], x[: channels // 2]))
    expected = x * cos + turned * sin
    rotate(x.data_ptr(), x.data_ptr(), cos.data_ptr(), sin.data_ptr(), channels // 32)
    assert torch.equal(x, expected)


@needs_avx512_bf16
@pytest.mark.parametrize(("rows", "panels"), [(1, 1), (6, 4), (12, 2), (28, 1)])
def test_a_tile_is_a_product(rows: int, panels: int) -> None:
    @compiled()
    def product(weight, words, x, pairs, begin, out, width):  # type: ignore[no-untyped-def]
        dot_tile(rows, panels, weight, words, x, pairs, 1, pairs, begin, out, width)

    torch.manual_seed(rows)
    inputs, width = 10, 16 * panels
    weight, x = torch.randn(width, inputs).bfloat16(), torch.randn(rows, inputs).bfloat16()
    begin = torch.randn(width)
    laid_out = pack_weight(weight).contiguous()
    # The rows of the output are farther apart than they are wide: the gaps are not touched.
    out = torch.full((rows, width + 3), 7.0)
    product(
        laid_out.data_ptr(), inputs // 2 * 16, x.data_ptr(), inputs // 2, begin.data_ptr(), out.data_ptr(), width + 3
    )
    expected = x.double() @ weight.double().T + begin.double()
    torch.testing.assert_close(out[:, :width].double(), expected, rtol=1e-5, atol=1e-5)
    assert bool((out[:, width:] == 7).all())


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(BF16, marks=needs_avx512_bf16, id="bf16"),
        *(
            pytest.param(kind, marks=needs_avx2, id=name)
            for kind, name in ((FLOAT32, "float32"), (FLOAT32_BF16, "both"))
        ),
    ],
)
@pytest.mark.parametrize(("panels", "level"), [(1, 1), (1, 2), (2, 2)])
def test_a_tile_of_every_height_is_a_product(kind: int, panels: int, level: int) -> None:
    @compiled()
    def product(rows, weight, x, lines, added, row, out, width):  # type: ignore[no-untyped-def]
        words = lines * 16
        multiply_rows(
            kind, 12, panels, level, rows, weight, words, x, lines, added, row, out, width, weight, 64
        )  # fmt: skip

    torch.manual_seed(kind)
    inputs, width = 10, 16 * panels
    weight, begin = torch.randn(width, inputs).bfloat16(), torch.randn(width)
    packed = pack_weight(weight) if kind != FLOAT32 else weight.float().view(panels, 16, inputs).permute(0, 2, 1)
    packed, dtype = packed.contiguous(), torch.bfloat16 if kind == BF16 else torch.float32
    for rows in range(2, 14, 2):
        x = torch.randn(rows, inputs).to(dtype)
        words = x.view(torch.int32).T.contiguous()
        # The rows of the output are farther apart than they are wide: the gaps are not touched.
        out = torch.full((rows, width + 3), 7.0, dtype=dtype)
        lines = packed.shape[1]
        pointers = packed.data_ptr(), words.data_ptr(), lines
        product(rows, *pointers, begin.data_ptr(), 0, out.data_ptr(), width + 3)
        expected = x.double() @ weight.double().T + begin.double()
        if kind != BF16:  # and once more, added to what is there
            product(rows, *pointers, out.data_ptr(), width + 3, out.data_ptr(), width + 3)
            expected += x.double() @ weight.double().T
        rounding = 2**-8 if kind == BF16 else 1e-5
        torch.testing.assert_close(out[:, :width].double(), expected, rtol=rounding, atol=1e-5)
        assert bool((out[:, width:] == 7).all())


@needs_avx512_bf16
def test_rounding_is_to_nearest_even_and_keeps_what_is_not_finite() -> None:
    @compiled()
    def convert(source, to, lines):  # type: ignore[no-untyped-def]
        round_lines(source, to, lines)

    torch.manual_seed(0)
    values = torch.randn(64) * torch.logspace(-30, 30, 64)
    values[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1 + 2**-8, 1 + 3 * 2**-8, -0.0])
    out = torch.empty(64, dtype=torch.bfloat16)
    convert(values.data_ptr(), out.data_ptr(), 4)
    assert torch.equal(out.view(torch.int16)[1:], values.bfloat16().view(torch.int16)[1:]) and bool(out[0].isnan())


@needs_avx512_bf16
@pytest.mark.parametrize("slope", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("rows", [1, 3, 6])
def test_weights_are_powers_of_two_and_their_sum(slope: float, rows: int) -> None:
    @compiled()
    def weigh(scores, step, to, to_step, lines, slope, tops, sums):  # type: ignore[no-untyped-def]
        weigh_lines(rows, scores, step, to, to_step, lines, slope, tops, sums)

    torch.manual_seed(1)
    scores, sums = 10 * torch.randn(rows, 170), torch.full((rows + 1,), 7.0)
    tops = scores[:, :160].amax(dim=1) * slope
    scores[:, 7] = -1e30
    out = torch.full((rows, 180), 7.0).bfloat16()

    def run() -> None:
        addresses = scores.data_ptr(), 170, out.data_ptr(), 180, 10
        weigh(*addresses, torch.tensor(slope).numpy()[()], tops.data_ptr(), sums.data_ptr())

    run()
    expected = torch.exp2(scores[:, :160].double() * slope - tops.double()[:, None])
    torch.testing.assert_close(out[:, :160].double(), expected, rtol=2**-8, atol=1e-37)
    torch.testing.assert_close(sums[:rows].double(), expected.sum(dim=1), rtol=2e-5, atol=0)
    assert bool((out[:, 7] == 0).all()) and bool((out[:, 160:] == 7).all()) and float(sums[rows]) == 7
    scores[-1, 9] = torch.nan
    run()
    assert bool(sums[rows - 1].isnan()) and bool(out[-1, 9].isnan()) and not bool(sums[: rows - 1].isnan().any())


@needs_avx512_bf16
@pytest.mark.parametrize("rows", [1, 3])
def test_the_largest_is_found_in_every_lane_and_beside_nan(rows: int) -> None:
    @compiled()
    def find(scores, step, lines, found):  # type: ignore[no-untyped-def]
        largest(rows, scores, step, lines, found)

    for place in (0, 5, 16, 47):
        values, found = -torch.rand(rows, 60) - 1, torch.full((rows + 1,), 7.0)
        values[:, place] = -0.5 - torch.arange(rows) / 8
        values[:, (place + 3) % 48], values[:, 48:] = torch.nan, 9
        find(values.data_ptr(), 60, 3, found.data_ptr())
        assert torch.equal(found, torch.tensor([-0.5 - row / 8 for row in range(rows)] + [7.0]))
    nothing, found = torch.full((rows, 16), -torch.inf), torch.zeros(rows)
    find(nothing.data_ptr(), 16, 1, found.data_ptr())
    assert bool((found == -torch.inf).all())


@needs_avx512_bf16
@pytest.mark.parametrize(("low", "high"), [(0, 64), (0, 1), (3, 17), (16, 32), (33, 33), (64, 64), (0, 0), (20, 9)])
def test_scores_outside_are_hidden(low: int, high: int) -> None:
    @compiled()
    def run(scores, low, high):  # type: ignore[no-untyped-def]
        hide(scores, low, high, 64)

    scores = torch.arange(70.0)
    scores[5:64:7] = torch.nan  # unwritten memory, and a broken sequence
    expected = scores.clone()
    expected[:low] = -1e30
    expected[high:64] = -1e30
    run(scores.data_ptr(), low, high)
    assert torch.equal(scores.nan_to_num(nan=-5.0), expected.nan_to_num(nan=-5.0))


@needs_avx512_bf16
@pytest.mark.parametrize("rows", [1, 2, 10, 16, 18, 28, 33])
@pytest.mark.parametrize("words", [1, 16, 41])
def test_rows_are_transposed_and_the_rest_is_nothing(rows: int, words: int) -> None:
    @compiled()
    def run(x, row_words, present, to, rows, words):  # type: ignore[no-untyped-def]
        transpose(x, row_words, present, to, rows, words)

    torch.manual_seed(rows)
    for present in {1, max(1, rows - 1), rows, rows + 3}:
        x = torch.randint(-(2**31), 2**31, (present, words + 3), dtype=torch.int32)
        to = torch.full((words * rows + 5,), 7, dtype=torch.int32)
        run(x.data_ptr(), words + 3, present, to.data_ptr(), rows, words)
        expected = torch.zeros(words, rows, dtype=torch.int32)
        expected[:, :present] = x[:rows, :words].T
        assert torch.equal(to[: words * rows].view(words, rows), expected) and bool((to[words * rows :] == 7).all())


@needs_avx512_bf16
@pytest.mark.parametrize("lines", [1, 5])
def test_two_rows_are_paired_and_one_alone_with_zeros(lines: int) -> None:
    @compiled()
    def run(low, high, has_high, to, step):  # type: ignore[no-untyped-def]
        pair(low, high, has_high, to, step, lines)

    low, high = torch.randint(-(2**15), 2**15, (2, 16 * lines), dtype=torch.int16)
    for has_high in (True, False):
        to = torch.full((lines, 20), 7, dtype=torch.int32)
        run(low.data_ptr(), high.data_ptr() if has_high else 0, has_high, to.data_ptr(), 20)
        halves = to[:, :16].contiguous().view(torch.int16).view(-1, 2)
        assert torch.equal(halves[:, 0], low) and bool((to[:, 16:] == 7).all())
        assert torch.equal(halves[:, 1], high if has_high else torch.zeros_like(high))


@needs_avx512_bf16
def test_a_gate_is_what_torch_makes_of_it() -> None:
    """This holds for every bfloat16, to the last bit. Only numbers too small for a full mantissa may become 0."""

    @compiled()
    def run(gate, up, to, lines):  # type: ignore[no-untyped-def]
        silu_multiply_lines(2, gate, up, to, lines)

    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    torch.manual_seed(1)
    up, out = torch.randn(2**16).bfloat16(), torch.empty(2**16, dtype=torch.bfloat16)
    up[49152:49160] = torch.tensor([torch.nan, torch.inf] * 4)  # with gates from 2 on
    run(gate.data_ptr(), up.data_ptr(), out.data_ptr(), 2**12)
    gated = torch.nn.functional.silu(gate)
    expected = gated * up
    same = (out.view(torch.int16) == expected.view(torch.int16)) | (out.isnan() & expected.isnan())
    tiny = torch.finfo(torch.bfloat16).tiny
    small = (gated.abs() <= tiny) | (expected.abs() <= tiny)
    assert bool((same | (small & (out.abs() <= 8 * tiny))).all()) and int((~same).sum()) < 1000


@needs_avx2
def test_a_gate_in_float32_is_exact_to_some_last_bits() -> None:
    @compiled(fastmath=False)
    def run(gate, up, to, lines):  # type: ignore[no-untyped-def]
        silu_multiply_lines(4, gate, up, to, lines)

    gate, up = torch.linspace(-120, 120, 2**16), torch.randn(2**16, generator=torch.Generator().manual_seed(1))
    gate[:5] = torch.tensor([torch.nan, -torch.inf, torch.inf, -0.0, 3e38])
    out = torch.full((2**16 + 1,), 7.0)
    run(gate.data_ptr(), up.data_ptr(), out.data_ptr(), 2**12)
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    # Below -88, exp(-x) leaves the range of float32, in torch too.
    assert bool((out[5:-1].double() - expected[5:]).abs().lt(3e-7 * expected[5:].abs() + 1e-36).all())
    assert out[:2].isnan().all() and out[2] == torch.inf * up[2] and out[3] == 0 and out[-1] == 7
    torch.testing.assert_close(out[4].double(), expected[4], rtol=1e-6, atol=0)


@intrinsic
def two_to_lines(typing, whole, rest, to, num_lines):  # type: ignore[no-untyped-def]
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        whole_, rest_, to_, num_lines_ = arguments
        with each_line(builder, num_lines_) as (line, _):
            values = power_by_bits(builder, load_line(builder, whole_, line), load_line(builder, rest_, line), FINE)
            builder.store(values, floats_at(builder, to_, builder.mul(line, index(LANES))), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@needs_avx2
@pytest.mark.parametrize("rest", [0.0, -0.5, 0.3])
def test_powers_of_two_are_rounded_once_from_nothing_to_infinity(rest: float) -> None:
    @compiled(fastmath=False)
    def run(whole, rest, to, lines):  # type: ignore[no-untyped-def]
        two_to_lines(whole, rest, to, lines)

    whole, rests, out = torch.arange(-160.0, 160), torch.full((320,), rest), torch.empty(320)
    whole[0] = rests[0] = torch.nan
    run(whole.data_ptr(), rests.data_ptr(), out.data_ptr(), 20)
    one = out[160]  # 2^(0 + rest)
    torch.testing.assert_close(one.double(), torch.tensor(rest).double().exp2(), rtol=1.2e-7, atol=0)
    assert out[0].isnan() and torch.equal(out[1:], (one.double() * whole[1:].double().exp2()).float())


@needs_avx2
@pytest.mark.parametrize("lines", [1, 2, 65])
def test_squares_are_summed_and_nan_is_seen_in_every_lane(lines: int) -> None:
    @compiled(fastmath=False)
    def run(source, lines):  # type: ignore[no-untyped-def]
        return sum_of_squares(source, lines)

    x = torch.randn(16 * lines + 1, generator=torch.Generator().manual_seed(lines))
    x[-1] = 1e9
    assert run(x.data_ptr(), lines) == pytest.approx(float(x[:-1].double().square().sum()), rel=1e-6)
    for lane in range(16):
        broken = x.clone()
        broken[16 * (lines - 1) + lane] = torch.nan
        assert run(broken.data_ptr(), lines) != run(broken.data_ptr(), lines)


@needs_avx2
@pytest.mark.parametrize("lines", [1, 3])
def test_lines_are_scaled_with_two_roundings(lines: int) -> None:
    @compiled(fastmath=False)
    def run(source, factor, weight, to, lines):  # type: ignore[no-untyped-def]
        scale_lines(source, factor, weight, to, lines)

    torch.manual_seed(lines)
    x, weight = torch.randn(16 * lines + 1), torch.randn(16 * lines)
    factor = torch.tensor(0.3)
    expected = torch.cat([x[:-1] * factor * weight, x[-1:]])
    run(x.data_ptr(), factor.numpy()[()], weight.data_ptr(), x.data_ptr(), lines)
    assert torch.equal(x, expected)


def test_the_exponential_is_as_exact_as_float32() -> None:
    @compiled()
    def each(source, to, count):  # type: ignore[no-untyped-def]
        for at in range(count):
            store_float(to, at, exponential(load_float(source, at)))

    values = torch.cat([-torch.logspace(-20, 1.9, 1000), torch.tensor([0.0, -80.5, -1e30, -torch.inf, torch.nan])])
    out = torch.empty_like(values)
    each(values.data_ptr(), out.data_ptr(), len(values))
    torch.testing.assert_close(out[:1001].double(), values[:1001].double().exp(), rtol=2e-7, atol=0)
    assert out[1001:1004].tolist() == [0, 0, 0] and bool(out[-1].isnan())


@needs_avx512_bf16
def test_loads_and_stores_count_in_elements() -> None:
    @compiled()
    def copy(words, halves, floats, rounded, indices, out, more):  # type: ignore[no-untyped-def]
        store_word(out, 1, load_word(words, 2))
        store_word(out, 2, load_half(halves, 3))
        store_bf16(more, 1, load_float(floats, 1))
        store_float(out, 3, load_bf16(rounded, 2))
        return load_index(indices, 1)

    words, halves = torch.tensor([1, 2, -3], dtype=torch.int32), torch.tensor([1, 2, 3, -4], dtype=torch.int16)
    floats, rounded = torch.tensor([0.0, 1.0039]), torch.tensor([1.0, 2.0, -2.5]).bfloat16()
    indices, out = torch.tensor([5, 1 << 40]), torch.zeros(4, dtype=torch.int32)
    more = torch.zeros(2, dtype=torch.bfloat16)
    found = copy(*(one.data_ptr() for one in (words, halves, floats, rounded, indices, out, more)))
    assert found == 1 << 40 and out[:3].tolist() == [0, -3, 65532]
    assert float(out[3:].view(torch.float32)) == -2.5 and float(more[1]) == float(torch.tensor(1.0039).bfloat16())
