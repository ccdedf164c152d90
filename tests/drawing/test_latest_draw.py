"""Token ids that only the stage knows: codes stand for them until the device puts the drawn ids in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sarathi_pp.checkpoint.facts.layer_cache import plain_caches
from sarathi_pp.core.plan import Chunk, MicroBatch
from sarathi_pp.core.sequence import EXPECTED
from sarathi_pp.drawing.latest_draw import LatestDraw
from sarathi_pp.errors import ProtocolError
from sarathi_pp.model.kv import KVShard
from sarathi_pp.stages.model_stage import ModelStage


def test_codes_are_replaced_and_other_ids_stay():
    latest = LatestDraw()
    latest.put([7, 3, 9], torch.tensor([50, 60, 70]))
    ids = torch.tensor([5, latest.code(9), 0, latest.code(7)])
    assert latest.fill(ids).tolist() == [5, 70, 0, 50]
    assert latest.fill(latest.fill(ids)).tolist() == [5, 70, 0, 50], "a second attempt fills the same ids again"


def test_a_failed_draw_gives_a_legal_id():
    """Its sequence ends when the host knows it. Until then the id is looked up in the embedding."""
    latest = LatestDraw()
    latest.put([7, 3], torch.tensor([-1, 60]))
    assert latest.fill(torch.tensor([latest.code(7), latest.code(3)])).tolist() == [0, 60]


def test_only_the_latest_draw_counts():
    latest = LatestDraw()
    latest.put([7, 3], torch.tensor([50, 60]))
    latest.put([3], torch.tensor([61]))
    assert latest.fill(torch.tensor([latest.code(3)])).tolist() == [61]
    with pytest.raises(ProtocolError, match="a decode of sequence 7 has no token id"):
        latest.code(7)


def test_a_stage_refuses_a_token_that_it_has_not_drawn():
    kv = KVShard((0, 1), 4, 16, plain_caches(1, 1, 8), torch.float32, torch.device("cpu"))
    model = SimpleNamespace(has_lm_head=True, embed=True, bytes_read=0)
    stage = ModelStage(model, kv, 8, torch.float32, torch.device("cpu"), ahead=True)
    with pytest.raises(ProtocolError, match="the stage drew none for it last"):
        stage.prepare(MicroBatch(0, (Chunk(0, 0, 3, 1, True, (EXPECTED,), (0,)),)))
