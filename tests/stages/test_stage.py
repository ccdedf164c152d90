from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sarathi_pp.core.plan import Chunk, MicroBatch
from sarathi_pp.errors import ProtocolError
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.layer_cache import plain_caches
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
