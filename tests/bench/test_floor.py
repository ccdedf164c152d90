"""The floor against a count of every product, one at a time."""

from __future__ import annotations

import pytest

from sarathi_pp.bench.floor import Floor, shared_tokens
from sarathi_pp.core.cost.estimate import DeviceSpeed, estimate_cost
from sarathi_pp.layer_shape import LayerShape

FLOPS, BYTES_PER_S, LAYERS = 1e6, 1e3, 3
LAYER = LayerShape.plain(hidden_size=8, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=3)
SPEED = DeviceSpeed({2: FLOPS, 4: FLOPS}, BYTES_PER_S, tile=1, layer_s=0.0, attention_share=1.0)
WHOLE = estimate_cost([(0, LAYERS)], shapes=[LAYER] * LAYERS, hidden_size=8, vocab_size=50, weight_bytes=2, speed=SPEED)
WEIGHTS = 8 * (4 + 2 + 2) * 3 + 4 * 3 * 8 + 3 * 8 * 24


def test_every_product_of_every_position_counts_once() -> None:
    prompt, output = 7, 5
    flops = 0.0
    for position in range(prompt + output - 1):  # the last output token is never used in a computation
        flops += 2 * WEIGHTS * LAYERS
        flops += LAYERS * 4 * (4 * 3) * (position + 0.5)  # half of the diagonal, as a causal product needs
    flops += output * 2 * 8 * 50
    assert Floor.of(WHOLE, [(prompt, output)]).arithmetic_s == pytest.approx(flops / FLOPS)


def test_weights_are_read_once_a_step_and_keys_by_every_decode() -> None:
    weight_bytes, kv_bytes = 2 * (WEIGHTS * LAYERS + 8 * 50), LAYERS * 2 * 2 * 3 * 2
    keys = [key + 1 for key in range(7, 11)] + [key + 1 for key in range(4, 5)]
    floor = Floor.of(WHOLE, [(7, 5), (4, 2)])
    assert floor.reading_s == pytest.approx((5 * weight_bytes + sum(keys) * kv_bytes) / BYTES_PER_S)
    assert floor.seconds == max(floor.arithmetic_s, floor.reading_s)


def test_a_workload_that_only_reads_prompts_is_bound_by_arithmetic() -> None:
    floor = Floor.of(WHOLE, [(1000, 1)] * 10)
    assert floor.seconds == floor.arithmetic_s > floor.reading_s


def test_tokens_that_prompts_share_are_computed_once() -> None:
    """A prompt of 5 tokens after 4 shared ones costs what the positions 4 to 8 cost, and reads all keys."""
    shared, apart = Floor.of(WHOLE, [(9, 3), (9, 3)], [0, 4]), Floor.of(WHOLE, [(9, 3), (9, 3)])
    flops = sum(2 * WEIGHTS * LAYERS + LAYERS * 4 * (4 * 3) * (position + 0.5) for position in range(4))
    assert apart.arithmetic_s - shared.arithmetic_s == pytest.approx(flops / FLOPS)
    assert apart.reading_s == shared.reading_s


def test_each_distinct_beginning_is_computed_by_one_prompt() -> None:
    prompts = [(1, 2, 3), (1, 2, 4, 5), (9,), (1, 2, 3), (1,), (1, 2, 4, 6, 7)]
    assert shared_tokens(prompts) == [1, 2, 0, 2, 0, 3]
    distinct = {prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)}
    # The second (1, 2, 3) computes its last token again.
    assert sum(map(len, prompts)) - sum(shared_tokens(prompts)) == len(distinct) + 1
    assert shared_tokens([(1, 2), (2, 1)]) == [0, 0] and shared_tokens([]) == []
