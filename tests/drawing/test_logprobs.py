"""Log probabilities are those of the model's own logits, whatever else is in the microbatch."""

from __future__ import annotations

import pytest
import torch

from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.core.plan import SamplingRow
from sarathi_pp.drawing.draw import draw
from sarathi_pp.drawing.history import History
from sarathi_pp.drawing.logprobs import token_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20, 70])
def test_they_are_the_softmax_of_the_logits(dtype, num_top):
    logits = (4 * torch.randn(64, generator=torch.Generator().manual_seed(3))).to(dtype)
    expected = logits.double().log_softmax(0)
    found = token_logprobs(logits, 9, num_top)
    assert found.logprob == pytest.approx(expected[9].item(), rel=1e-12)
    order = sorted(range(64), key=lambda token: (-logits[token].item(), token))[:num_top]
    assert [token for token, _ in found.top] == order
    assert [logprob for _, logprob in found.top] == pytest.approx(expected[order].tolist(), rel=1e-12)


def test_equal_logits_come_by_id():
    logits = torch.zeros(40)
    logits[7] = logits[3] = 1
    assert [token for token, _ in token_logprobs(logits, 0, 4).top] == [3, 7, 0, 1]


def test_rules_and_temperature_do_not_change_them_and_neither_do_other_rows():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    history = History(DrawRules(num_prompt=1, logprobs=2, logit_bias=((11, 90.0),)))
    history.extend(0, [1])
    rows = [SamplingRow(4, 0.7, 0, 1.0, 0.0, 5)] * 3
    together = draw(logits, rows, {1: history.edit()})
    (alone,) = draw(logits[1:2], rows[:1], {0: history.edit()})
    assert together[1] == alone and alone.token_id == 11
    assert alone.logprobs == token_logprobs(logits[1], 11, 2)
    assert together[0].logprobs is None
    wanted = History(DrawRules(num_prompt=1, logprobs=0))
    wanted.extend(0, [1])
    plain = draw(logits, rows, {})
    assert [one.token_id for one in draw(logits, rows, {2: wanted.edit()})] == [one.token_id for one in plain]
