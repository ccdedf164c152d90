from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sarathi_pp.checkpoint.facts.layer_cache import PagedCache, StateCache, plain_caches
from sarathi_pp.core.plan import Chunk, MicroBatch
from sarathi_pp.errors import ProtocolError
from sarathi_pp.model.inputs import StageInputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.stages.model_stage import ModelStage

CPU = torch.device("cpu")


@pytest.mark.parametrize("pages", [(4,), (-1,), (0, 9)])
def test_pages_outside_the_shard_are_refused_before_anything_is_read(pages):
    """The compiled kernel checks no bounds, and a negative page would wrap around."""
    kv = KVShard((0, 1), 4, 16, plain_caches(1, 1, 8), torch.float32, CPU)
    stage = ModelStage(SimpleNamespace(has_lm_head=False, bytes_read=0), kv, 8, torch.float32, CPU)
    microbatch = MicroBatch(0, (Chunk(0, 0, 0, 16 * len(pages), token_ids=(1,) * 16 * len(pages), new_pages=pages),))
    with pytest.raises(ProtocolError, match=r"m0\[s0:0\+\d+\] brings the KV pages .*; this stage has the pages 0 to 3"):
        stage.prepare(microbatch)(None)


def stage_with_slots(num_slots: int) -> ModelStage:
    caches = (StateCache((3, 8)), PagedCache(1, 8, 8))
    kv = KVShard((0, 2), 4, 16, caches, torch.float32, CPU, num_slots=num_slots)
    return ModelStage(SimpleNamespace(has_lm_head=False, bytes_read=0), kv, 8, torch.float32, CPU)


def chunk(sequence: int, epoch: int, start: int, slot: int = -1) -> Chunk:
    """Return a chunk of two tokens. The first one of an epoch brings a page."""
    return Chunk(sequence, epoch, start, 2, token_ids=(1, 2), new_pages=() if start else (0,), slot=slot)


def slots_of(stage: ModelStage, *chunks: Chunk, freed: tuple[int, ...] = ()) -> list[int]:
    spans, _ = stage._spans(MicroBatch(0, chunks, freed))
    return [span.slot for span in spans]


def test_a_sequence_keeps_its_slot_until_it_is_freed():
    stage = stage_with_slots(4)
    assert slots_of(stage, chunk(0, 0, 0, slot=3), chunk(1, 0, 0, slot=0)) == [3, 0]
    assert slots_of(stage, chunk(1, 0, 2), chunk(0, 0, 2)) == [0, 3]
    assert slots_of(stage, chunk(0, 1, 0, slot=1), chunk(2, 0, 0, slot=3), freed=(0,)) == [1, 3]
    assert slots_of(stage, chunk(0, 1, 2), chunk(1, 0, 4), freed=(2,)) == [1, 0]
    assert stage._slots.keys() == {0, 1}


@pytest.mark.parametrize(("slot", "named"), [(4, 4), (-1, None)])
def test_a_slot_that_the_stage_lacks_is_refused_before_anything_is_read(slot, named):
    stage = stage_with_slots(4)
    with pytest.raises(ProtocolError, match=f"m0.*: s0:0.2 has the state slot {named}; this .* the slots 0 to 3"):
        stage.prepare(MicroBatch(0, (chunk(0, 0, 0, slot=slot),)))


def test_a_sequence_that_was_freed_has_no_slot():
    stage = stage_with_slots(4)
    slots_of(stage, chunk(0, 0, 0, slot=2))
    with pytest.raises(ProtocolError, match="s0:2.2 has the state slot None"):
        slots_of(stage, chunk(0, 0, 2), freed=(0,))


def test_a_warm_up_uses_a_slot_that_every_stage_has():
    seen: list[int] = []

    def forward(x: torch.Tensor, inputs: StageInputs, kv: KVShard) -> torch.Tensor:
        seen.extend(span.slot for span in inputs.spans)
        return torch.zeros(1, 8)

    stage = stage_with_slots(1)
    stage.model = SimpleNamespace(embed=True, forward=forward)
    stage._warm([(8, 8, True), (20, 1, False)])
    assert seen == [0, 0]
