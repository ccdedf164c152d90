"""A stage that draws keeps the rules of each sequence with its microbatches, also after an abort."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.core.plan import Chunk, MicroBatch, SamplingRow
from sarathi_pp.drawing.drawer import Drawer
from sarathi_pp.stages.model_stage import ModelStage

VOCAB = 50
ROW = SamplingRow(1, 0.0, 0, 1.0, 0.0, 1)
ONLY_SEVEN = DrawRules(num_prompt=1, allowed_token_ids=(7,)).to_bytes()


def microbatch(index: int, sequence: int, rules: bytes = b"", freed: tuple[int, ...] = ()) -> MicroBatch:
    chunk = Chunk(sequence, 0, 0, 1, token_ids=(1,), new_pages=(0,), sampling=ROW, rules=rules)
    return MicroBatch(index, (chunk,), freed, head_on_first=True)


def first_stage() -> ModelStage:
    """Return a first stage whose LM head likes the last token best."""
    model: Any = SimpleNamespace(has_lm_head=False, embed=True, bytes_read=0, steps=[0])
    head: Any = SimpleNamespace(forward=lambda rows: torch.arange(VOCAB).float().repeat(len(rows), 1), bytes_read=0)
    kv: Any = SimpleNamespace(num_pages=10, num_slots=0, page_size=16)
    return ModelStage(model, kv, 8, torch.float32, torch.device("cpu"), head)


def test_a_microbatch_that_was_never_sent_leaves_no_rules_to_the_next_one_with_its_index():
    stage = first_stage()
    stage.prepare(microbatch(0, 0, ONLY_SEVEN))  # computing fails, so the index is used again
    again = microbatch(0, 1, freed=(0,))
    stage.prepare(again)
    (token,) = stage.prepare_head(again)(torch.zeros(1, 8)).tokens
    assert token.token_id == VOCAB - 1


def test_rules_hold_for_the_microbatch_that_brought_them_and_all_later_ones_until_the_sequence_is_freed():
    stage, drawer = first_stage(), Drawer()
    first = microbatch(0, 0, ONLY_SEVEN)
    stage.prepare(first)
    (token,) = stage.prepare_head(first)(torch.zeros(1, 8)).tokens
    assert token.token_id == 7
    assert drawer.prepare(first)[0].rules.allowed_token_ids == (7,)
    decode = Chunk(0, 0, 1, 1, True, (7,), (), ROW)
    assert list(drawer.prepare(MicroBatch(1, (decode,)))) == [0]
    assert drawer.prepare(microbatch(2, 1, freed=(0,))) == {}
    assert drawer._histories == {}
