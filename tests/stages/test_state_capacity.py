"""States take their memory before pages are counted, and a model that keeps states has no prefix cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sarathi_pp.checkpoint.facts.layer_cache import PagedCache, StateCache, state_bytes
from sarathi_pp.checkpoint.facts.support import ModelFacts, check_model
from sarathi_pp.config import RunConfig
from sarathi_pp.errors import CapacityError, ConfigError
from sarathi_pp.stages import capacity
from sarathi_pp.stages.capacity import (
    count_pages,
    kv_cache_bytes,
    limits_of,
    make_shard,
    resolve,
    resolve_limits,
    shard_bytes,
    state_pages,
)
from sarathi_pp.stages.check_memory import CheckMemory
from sarathi_pp.stages.model_stage import ModelStages
from sarathi_pp.stages.working_memory import LargestMicrobatch

CPU, DTYPE = torch.device("cpu"), torch.float32
ADDER = Path(__file__).parents[2] / "examples" / "tiny-adder"
CONFIG = RunConfig(model=str(ADDER), stages=2, max_num_seqs=10, max_model_len=64)
PAGED, STATE = PagedCache(2, 16, 16), StateCache((3, 40), (2, 8, 8))
PAGE_BYTES, STATE_BYTES = 16 * 2 * 2 * 16 * 4, 4 * (3 * 40 + 2 * 8 * 8)
# The last stage has no pages.
CACHES = (STATE, PAGED, STATE, PAGED, STATE)
LAYERS = ((0, 4), (4, 5))


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return replace(check_model(ADDER), own_caches=CACHES)


def pages_of(facts: ModelFacts, budget: int, layers: tuple[int, int]) -> int:
    return count_pages(budget, facts, layers, resolve_limits(CONFIG, facts, 2, (), 16), DTYPE)


def test_pages_get_what_the_states_of_all_sequences_leave(facts: ModelFacts) -> None:
    states = 10 * 2 * STATE_BYTES
    assert pages_of(facts, states + 7 * 2 * PAGE_BYTES, LAYERS[0]) == 7
    assert pages_of(facts, states + 7 * 2 * PAGE_BYTES - 1, LAYERS[0]) == 6
    assert (
        pages_of(replace(facts, own_caches=()), states + 7 * 2 * PAGE_BYTES, LAYERS[0])
        == states // (4 * PAGE_BYTES) + 3
    )


def test_a_stage_without_pages_does_not_limit_their_number(facts: ModelFacts) -> None:
    assert pages_of(facts, 10 * STATE_BYTES, LAYERS[1]) == 10 * 4
    run = resolved(facts, [7, 40])
    assert run.num_pages == 7


def test_states_that_do_not_fit_are_refused_with_both_figures(facts: ModelFacts) -> None:
    states = 10 * 2 * STATE_BYTES
    with pytest.raises(CapacityError) as refused:
        pages_of(facts, states + 2 * PAGE_BYTES - 1, LAYERS[0])
    said = str(refused.value)
    assert f"need {states} bytes for the states of 10 sequences and {2 * PAGE_BYTES} for one KV page" in said
    assert f"{states + 2 * PAGE_BYTES - 1} are available" in said and "--max-num-seqs 9 or less" in said
    with pytest.raises(CapacityError, match=f"need {10 * STATE_BYTES} bytes for the states of 10 sequences, and"):
        pages_of(facts, 10 * STATE_BYTES - 1, LAYERS[1])


def resolved(facts: ModelFacts, pages: list[int], config: RunConfig = CONFIG) -> capacity.ResolvedRun:
    return resolve(
        config, facts, LAYERS, pages, page_size=16, dtype="float32", device="cpu", attention="sdpa", equal_decodes=True
    )


def test_the_shard_of_a_stage_has_a_slot_for_each_sequence(facts: ModelFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    run = resolved(facts, [7, 40])
    sizes = [shard_bytes(run, facts, layers, DTYPE) for layers in LAYERS]
    assert sizes == [10 * 2 * STATE_BYTES + 7 * 2 * PAGE_BYTES, 10 * STATE_BYTES]
    assert kv_cache_bytes(run, facts, DTYPE) == sizes[0]
    assert state_pages(run, facts, DTYPE) is None  # the last stage has a state, and no pages
    paged = (*facts.own_caches[:4], facts.own_caches[1])
    assert state_pages(run, replace(facts, own_caches=paged), DTYPE) == STATE_BYTES / PAGE_BYTES
    assert state_pages(run, replace(facts, own_caches=()), DTYPE) == 0
    first, last = (make_shard(run, facts, layers, DTYPE, CPU) for layers in LAYERS)
    assert (first.num_slots, last.num_slots) == (10, 10)
    tensors = [first.keys(1), first.values(1), first.keys(3), first.values(3)]
    tensors += [state(layer) for layer in (0, 2) for state in (first.conv_state, first.recurrent_state)]
    assert sum(tensor.nbytes for tensor in tensors) == sizes[0]
    assert make_shard(run, replace(facts, own_caches=()), LAYERS[0], DTYPE, CPU).num_slots == 0
    monkeypatch.setattr(capacity, "room_bytes", lambda device: 0)
    with pytest.raises(CapacityError, match="for the states of 10 sequences and 7 KV pages"):
        make_shard(run, facts, LAYERS[0], DTYPE, CPU)


def test_each_sequence_that_may_run_has_a_slot(facts: ModelFacts) -> None:
    run = resolved(facts, [7, 40])
    limits = resolve_limits(CONFIG, facts, 2, [7, 40], 16, equal_decodes=True)
    assert limits.num_slots == limits.max_num_seqs == 10
    assert replace(limits_of(run, facts), most_idle_pages=None) == limits
    assert limits_of(run, replace(facts, own_caches=())).num_slots == 0


@pytest.mark.parametrize("asked", ["auto", "off"])
def test_nothing_is_shared_if_layers_keep_states(asked: str, facts: ModelFacts) -> None:
    assert resolved(facts, [7, 40], replace(CONFIG, prefix_cache=asked)).prefix_cache == "off"
    plain = replace(facts, own_caches=())
    assert resolved(plain, [7, 40], replace(CONFIG, prefix_cache=asked)).prefix_cache == {"auto": "all"}.get(
        asked, "off"
    )


@pytest.mark.parametrize("asked", ["prompts", "all"])
def test_a_prefix_cache_is_refused_if_layers_keep_states(asked: str, facts: ModelFacts) -> None:
    with pytest.raises(ConfigError, match=f"--prefix-cache is {asked}; some layers keep one state .*. Give .* off, or"):
        resolved(facts, [7, 40], replace(CONFIG, prefix_cache=asked))


def test_the_largest_microbatch_is_measured_with_one_slot(facts: ModelFacts) -> None:
    spans = LargestMicrobatch(40, 4, 16).spans(16)
    assert {span.slot for span in spans} == {0} and len(spans) > 4


def test_a_check_counts_the_states_of_the_prompts_of_a_group(facts: ModelFacts) -> None:
    plain, states = (
        CheckMemory(replace(facts, own_caches=caches), [(0, 5)], 0, [0], 1 << 40)
        for caches in ((PAGED, *[StateCache((0, 0))] * 4), (PAGED, *[STATE] * 4))
    )
    lengths = [5, 6, 7]
    assert states._working_bytes((0, 5), lengths) == plain._working_bytes((0, 5), lengths) + 3 * 4 * STATE_BYTES


def test_stages_that_keep_states_have_no_graphs(
    facts: ModelFacts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stages = ModelStages(CONFIG, ADDER, facts, DTYPE, CPU)
    monkeypatch.setattr(stages, "_device", torch.device("cuda"))
    with caplog.at_level("INFO"):
        assert not stages._can_capture()
    assert "layers that keep states are not captured" in caplog.text


def test_by_default_states_take_2_gib_per_stage_at_most(facts: ModelFacts) -> None:
    config = replace(CONFIG, max_num_seqs=None)
    assert resolve_limits(config, facts, 2, (), 16).max_num_seqs == 128
    # As in Qwen3-Next: 36 layers with 32 heads of 128 channels.
    large = replace(facts, own_caches=(StateCache((3, 8192), (256, 128, 16)),) * 36)
    seats = resolve_limits(config, large, 2, (), 16).max_num_seqs
    assert seats == 2 * (2 << 30) // state_bytes(large.caches, 4) == 54
    assert resolve_limits(replace(CONFIG, max_num_seqs=99), large, 2, (), 16).max_num_seqs == 99
