"""Each row's rotary embedding is that which transformers gives its sequence alone, to the last bit."""

import pytest
import torch
import transformers
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from sarathi_pp.model.inputs import LONG_FACTORS
from sarathi_pp.model.long_rotary import use_long_rotary
from tests.model.families import FAMILIES

AFTER = 30


class Base(torch.nn.Module):
    def __init__(self, config: transformers.Phi3Config) -> None:
        super().__init__()
        self.rotary_emb = Phi3RotaryEmbedding(config)


@pytest.mark.oldest
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_short_and_long_sequences_share_a_microbatch(dtype):
    config = FAMILIES["phi3_longrope"]()
    base = Base(config)
    use_long_rotary(base)
    x = torch.empty(1, dtype=dtype)
    ends = (AFTER, AFTER + 1, 1, 70)
    expected = [Phi3RotaryEmbedding(config)(x, torch.arange(end)[None]) for end in ends]
    positions = torch.cat([torch.arange(end) + LONG_FACTORS * (end > AFTER) for end in ends])
    for _ in range(2):  # transformers' module keeps the factors of its latest call
        found = base.rotary_emb(x, position_ids=positions[None])
        for ours, theirs in zip(
            found, map(torch.cat, zip(*[(c[0], s[0]) for c, s in expected], strict=True)), strict=True
        ):
            assert ours.dtype == dtype and torch.equal(ours[0], theirs)
    short = base.rotary_emb(x, position_ids=positions[None, :AFTER])
    assert all(map(torch.equal, short, expected[0]))
    assert not torch.equal(expected[0][0][0, 5], expected[1][0][0, 5]), "the two sets of factors differ"


def test_other_types_keep_their_module():
    base = Base(FAMILIES["phi3"]())
    before = base.rotary_emb
    use_long_rotary(base)
    use_long_rotary(torch.nn.Module())
    assert base.rotary_emb is before
