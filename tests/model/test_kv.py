"""Written values are where readers look for them, and the pool costs nothing before the first write."""

from __future__ import annotations

import psutil
import pytest
import torch

from sarathi_pp.checkpoint.facts.layer_cache import PagedCache, StateCache, plain_caches, state_bytes
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard, page_bytes, page_dtype, to_float8

CPU = torch.device("cpu")


def shard(layers: tuple[int, int] = (0, 1), num_pages: int = 6, dtype: torch.dtype = torch.float32) -> KVShard:
    return KVShard(layers, num_pages, 4, plain_caches(layers[1], 2, 3), dtype, CPU)


def test_rows_go_to_their_page_head_and_offset_and_nowhere_else() -> None:
    kv = shard((4, 6))
    for layer in (4, 5):
        kv.keys(layer).fill_(-1)
        kv.values(layer).fill_(-1)
    inputs = build_inputs([Span(3, 4, [5, 2]), Span(1, 1, [0])], [], 4, CPU)
    key, value = torch.rand(5, 2, 3), torch.rand(5, 2, 3)

    kv.write(5, key, value, inputs)

    slots = [(5, 3), (2, 0), (2, 1), (2, 2), (0, 1)]
    for row, (page, offset) in enumerate(slots):
        assert torch.equal(kv.keys(5)[page, :, offset], key[row])
        assert torch.equal(kv.values(5)[page, :, offset], value[row])
    assert int((kv.keys(5) != -1).sum()) == key.numel()
    assert int((kv.values(5) != -1).sum()) == value.numel()
    assert bool((kv.keys(4) == -1).all()) and bool((kv.values(4) == -1).all())


def test_layers_keep_their_global_index() -> None:
    kv = shard((8, 10))
    assert kv.keys(8).data_ptr() != kv.keys(9).data_ptr() != kv.values(9).data_ptr()
    with pytest.raises(AssertionError, match=r"layer 10 is not one of this stage's \[8, 10\)"):
        kv.keys(10)
    with pytest.raises(AssertionError, match="layer 7"):
        kv.values(7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_page_bytes_is_what_a_page_takes(dtype: torch.dtype) -> None:
    kv = shard((2, 5), num_pages=7, dtype=dtype)
    held = sum(pool.nbytes for layer in range(2, 5) for pool in (kv.keys(layer), kv.values(layer)))
    assert held == 7 * page_bytes(plain_caches(3, 2, 3), 4, dtype)


def test_latent_values_are_a_part_of_the_keys() -> None:
    cache = PagedCache(1, 6, 4, latent=True)
    kv = KVShard((1, 2), 3, 4, [cache] * 2, torch.float32, CPU)
    kv.write_latent(1, latents := torch.rand(5, 1, 6), build_inputs([Span(2, 5, [2, 0])], [], 4, CPU))
    assert torch.equal(kv.keys(1)[0, 0, :3], latents[2:, 0])
    assert torch.equal(kv.values(1)[2, 0, 2:], latents[:2, 0, :4])
    assert page_bytes([cache], 4, torch.bfloat16) == 4 * 6 * 2


def test_layers_with_states_have_slots_and_no_pages() -> None:
    caches = [PagedCache(2, 3, 3), StateCache((3, 10), (2, 4, 5)), StateCache((2, 7))]
    kv = KVShard((0, 3), 6, 4, caches, torch.bfloat16, CPU, num_slots=5)
    assert kv.conv_state(1).shape == (5, 3, 10) and kv.conv_state(2).shape == (5, 2, 7)
    assert kv.recurrent_state(1).shape == (5, 2, 4, 5) and kv.recurrent_state(1).dtype == torch.float32
    held = kv.conv_state(1).nbytes + kv.recurrent_state(1).nbytes + kv.conv_state(2).nbytes
    assert held == 5 * state_bytes(caches, 2)
    assert page_bytes(caches, 4, torch.bfloat16) == 4 * 2 * (3 + 3) * 2


def test_pages_cost_no_memory_before_they_are_written() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    kv = KVShard((0, 2), 4096, 16, plain_caches(2, 8, 64), torch.float32, CPU)  # 512 MiB
    assert kv.keys(1).nbytes == 128 * 2**20
    assert process.memory_info().rss - before < 32 * 2**20


def test_float8_rounds_to_the_nearest_value_and_keeps_nan() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = codes[codes.isfinite()].unique().double()
    found = to_float8(every).float()
    finite = every.isfinite()
    assert torch.equal(found.isfinite(), finite)
    number = every[finite].double().clamp(-448, 448)
    place = torch.searchsorted(values, number).clamp(1, len(values) - 1)
    below, above = values[place - 1], values[place]
    # Of two values at the same distance, the even one is the multiple of twice the step between them.
    even_below = (below / (above - below)) % 2 == 0
    lower = (number - below < above - number) | ((number - below == above - number) & even_below)
    assert torch.equal(found[finite].double(), torch.where(lower, below, above))
    assert to_float8(torch.tensor([3e38, -465.0, 449.0])).float().tolist() == [448, -448, 448]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_infinity_becomes_nan_in_float8_so_that_logits_show_an_overflow(dtype: torch.dtype) -> None:
    overflown = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0], dtype=dtype)
    assert to_float8(overflown).view(torch.uint8).tolist() == [0x7F, 0xFF, 0x7F, 0x80]


def test_pages_in_float8_take_one_byte_per_value_and_states_keep_their_type() -> None:
    caches = [PagedCache(2, 8, 8), StateCache((2, 6), (3, 4, 5))]
    kv = KVShard((0, 2), 6, 4, caches, torch.bfloat16, CPU, pages=page_dtype("fp8", torch.bfloat16), num_slots=5)
    assert kv.keys(0).nbytes + kv.values(0).nbytes == 6 * page_bytes(caches, 4, torch.float8_e4m3fn) == 6 * 4 * 32
    assert kv.conv_state(1).dtype == torch.bfloat16 and kv.recurrent_state(1).dtype == torch.float32
    assert page_dtype("float32", torch.float32) == page_dtype("auto", torch.float32) == torch.float32
