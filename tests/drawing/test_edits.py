"""The rules of requests change scores as transformers' processors do, and as the order in DrawRules says."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers as t
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_pp.core.draw_rules import DrawRules, Failure
from sarathi_pp.core.plan import SamplingRow
from sarathi_pp.drawing.draw import Drawn, draw
from sarathi_pp.drawing.edits import BANNED, edited_scores
from sarathi_pp.drawing.grammar import NextMask
from sarathi_pp.drawing.history import History
from sarathi_pp.drawing.sampling import _narrow, sample
from sarathi_pp.errors import ProtocolError
from tests.thinning import examples

VOCAB = 12
tokens = st.integers(0, VOCAB - 1)
some = st.lists(tokens, max_size=4).map(tuple)
penalties = st.sampled_from([-2.0, 0.0, 0.0, 0.7, 2.0])
rules_strategy = st.builds(
    DrawRules,
    num_prompt=st.integers(1, 6),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=3).map(lambda d: tuple(d.items())),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.0, 1.3, 2.0]),
    frequency_penalty=penalties,
    presence_penalty=penalties,
    allowed_token_ids=st.none() | st.lists(tokens, min_size=1, max_size=6, unique=True).map(tuple),
    banned_token_ids=some,
    banned_at_start=some,
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    no_repeat_ngram_size=st.integers(0, 3),
    min_tokens=st.integers(0, 5),
    end_token_ids=some,
)

masks = st.none() | st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB)


class FixedMask:
    """A guide whose mask is always the same."""

    def __init__(self, kept: list[bool]) -> None:
        self._bits = np.array([sum(one << token for token, one in enumerate(kept))], np.uint32)

    def add(self, token_id: int) -> None:
        pass

    def next_mask(self) -> NextMask:
        return NextMask(cast(Any, self), [], self._bits)


def expected_scores(logits: list[float], ids: list[int], rules: DrawRules) -> list[float]:
    """The documented order, in float64, one token at a time. A banned token is -inf."""
    output, scores = ids[rules.num_prompt :], []
    for token, logit in enumerate(logits):
        score = logit + dict(rules.logit_bias).get(token, 0)
        if token in ids:
            score = score * rules.repetition_penalty if score < 0 else score / rules.repetition_penalty
        score -= rules.frequency_penalty * output.count(token) + rules.presence_penalty * (token in output)
        size = rules.no_repeat_ngram_size
        before = tuple(ids[len(ids) - size + 1 :]) if len(ids) >= size - 1 else None
        seen = {tuple(ids[at : at + size]) for at in range(len(ids) - size + 1)} if size else set()
        banned = (
            token in rules.banned_token_ids
            or (not output and token in rules.banned_at_start)
            or (rules.allowed_token_ids is not None and token not in rules.allowed_token_ids)
            or (before is not None and (*before, token) in seen)
            or any(word[-1] == token and ids[len(ids) - len(word) + 1 :] == list(word[:-1]) for word in rules.bad_words)
            or (len(output) < rules.min_tokens and token in rules.end_token_ids)
        )
        scores.append(-math.inf if banned else score)
    return scores


@settings(max_examples=examples(300))
@given(
    st.lists(st.tuples(rules_strategy, st.lists(tokens, min_size=6, max_size=20)), min_size=1, max_size=4), st.data()
)
def test_scores_follow_the_documented_order(cases, data):
    edits, expected = [], []
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    logits = 5 * torch.randn(len(cases), VOCAB, generator=generator)
    for row, (rules, ids) in enumerate(cases):
        history = History(DrawRules.from_bytes(rules.to_bytes()))
        cut = data.draw(st.integers(0, len(ids)))
        overlap = data.draw(st.integers(0, cut))
        history.extend(0, ids[:cut])
        history.extend(cut - overlap, ids[cut - overlap :])
        edits.append(history.edit())
        expected.append(expected_scores(logits[row].tolist(), ids, rules))
    before = logits.clone()
    found = edited_scores(logits, dict(enumerate(edits))).double()
    assert torch.equal(logits, before)
    found[found == BANNED] = -math.inf
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-5)


def processors(rules: DrawRules) -> t.LogitsProcessorList:
    """Return transformers' processors of these rules, in the order of its `generate`."""
    found = t.LogitsProcessorList()
    if rules.logit_bias:
        found.append(t.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in rules.logit_bias]))
    if rules.repetition_penalty != 1:
        found.append(t.RepetitionPenaltyLogitsProcessor(rules.repetition_penalty))
    if rules.no_repeat_ngram_size:
        found.append(t.NoRepeatNGramLogitsProcessor(rules.no_repeat_ngram_size))
    if rules.bad_words:
        found.append(t.NoBadWordsLogitsProcessor([list(word) for word in rules.bad_words]))
    if rules.min_tokens:
        found.append(t.MinNewTokensLengthLogitsProcessor(rules.num_prompt, rules.min_tokens, list(rules.end_token_ids)))
    if rules.banned_token_ids:
        found.append(t.SuppressTokensLogitsProcessor(list(rules.banned_token_ids)))
    if rules.banned_at_start:
        found.append(t.SuppressTokensAtBeginLogitsProcessor(list(rules.banned_at_start), rules.num_prompt))
    return found


@pytest.mark.parametrize("by_pass", [True, False])
def test_greedy_rows_take_the_best_score_of_the_documented_order(by_pass, monkeypatch):
    if not by_pass:
        monkeypatch.setattr("sarathi_pp.drawing.draw.has_pass", lambda device: False)

    @settings(max_examples=examples(200))
    @given(st.lists(st.tuples(rules_strategy, masks), min_size=1, max_size=4), st.integers(0, 999))
    def check(cases, seed):
        draw_ids = np.random.default_rng(seed)
        logits = 5 * torch.randn(len(cases) + 1, VOCAB, generator=torch.Generator().manual_seed(seed))
        edits, expected = {}, []
        for index, (rules, mask) in enumerate(cases):
            ids = draw_ids.integers(0, VOCAB, 12).tolist()
            history = History(rules, mask and FixedMask(mask))
            history.extend(0, ids)
            edits[index] = history.edit()
            scores = expected_scores(logits[index].tolist(), ids, rules)
            if mask:
                scores = [score if kept else -math.inf for score, kept in zip(scores, mask, strict=True)]
            has_one = max(scores) > -math.inf
            expected.append(Drawn(scores.index(max(scores))) if has_one else Drawn(0, Failure.NO_TOKEN))
        found = draw(logits, [row(20)] * (len(cases) + 1), edits)
        assert found == [*expected, Drawn(int(logits[-1].argmax()))]

    check()


@settings(max_examples=examples(300))
@given(rules_strategy, st.lists(tokens, min_size=6, max_size=20), st.integers(0, 999))
def test_scores_are_those_of_transformers_to_the_last_bit(rules, ids, seed):
    rules = replace(rules, frequency_penalty=0.0, presence_penalty=0.0, allowed_token_ids=None)
    if not rules.end_token_ids:
        rules = replace(rules, min_tokens=0)
    logits = 5 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    theirs = processors(rules)(torch.tensor([ids]), logits.clone())
    history = History(rules)
    history.extend(0, ids)
    ours = edited_scores(logits, {0: history.edit()})
    theirs[theirs == -math.inf] = BANNED
    assert torch.equal(ours, theirs)


@settings(max_examples=examples(300))
@given(
    st.sampled_from([1.0, 0.9, 0.5, 0.2, 0.01]),
    st.sampled_from([0.0, 0.001, 0.05, 0.2, 0.9]),
    st.sampled_from([0.0, 0.001, 0.05, 0.2, 0.9]),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.integers(0, 999),
)
def test_the_last_filters_keep_the_tokens_of_transformers(typical, epsilon, eta, spread, seed):
    logits = spread * torch.randn(1, 40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scores = logits.clone()
    if typical < 1:
        scores = t.TypicalLogitsWarper(mass=typical)(None, scores)
    if epsilon:
        scores = t.EpsilonLogitsWarper(epsilon=epsilon)(None, scores)
    if eta:
        scores = t.EtaLogitsWarper(epsilon=eta)(None, scores)
    weights = (logits[0] - logits.max()).exp()
    _narrow(weights, DrawRules(num_prompt=1, typical_p=typical, epsilon_cutoff=epsilon, eta_cutoff=eta))
    assert torch.equal(weights > 0, scores[0] > -math.inf)


def row(position: int, temperature: float = 0.0) -> SamplingRow:
    return SamplingRow(position, temperature, 0, 1.0, 0.0, 5)


def edits_of(rules: DrawRules, ids=(1, 2, 3)) -> object:
    history = History(rules)
    history.extend(0, ids)
    return history.edit()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_without_rules_keep_their_tokens_beside_others(dtype, temperature):
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows = [row(9 + index, temperature) for index in range(5)]
    alone, _ = sample(logits, rows)
    banned = DrawRules(num_prompt=3, banned_token_ids=(alone[1], alone[3]))
    found, failures, _ = zip(*draw(logits, rows, {1: edits_of(banned), 3: edits_of(banned)}), strict=True)
    assert [found[at] for at in (0, 2, 4)] == [alone[at] for at in (0, 2, 4)]
    assert found[1] not in (alone[1], alone[3]) and found[3] not in (alone[1], alone[3])
    assert failures == (Failure.NONE,) * 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_rules_ban_every_token_fails_and_others_do_not(temperature):
    logits = torch.randn(3, 8)
    nothing = DrawRules(num_prompt=1, allowed_token_ids=(2,), banned_token_ids=(2,))
    only = DrawRules(num_prompt=1, allowed_token_ids=(2,))
    rows = [row(9, temperature)] * 3
    found, failures, _ = zip(*draw(logits, rows, {0: edits_of(nothing), 2: edits_of(only)}), strict=True)
    assert failures == (Failure.NO_TOKEN, Failure.NONE, Failure.NONE) and found[2] == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_logit_is_seen_even_if_its_token_is_banned(bad):
    logits = torch.randn(2, 8)
    logits[0, 3] = bad
    edit = edits_of(DrawRules(num_prompt=1, banned_token_ids=(3,)))
    drawn = draw(logits, [row(9)] * 2, {0: edit, 1: edit})
    assert [one.failure for one in drawn] == [Failure.NOT_FINITE, Failure.NONE]


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{}", b'{"num_prompt":1,"x":2}', b'{"num_prompt":"1"}', b'{"num_prompt":1,"bad_words":3}', b"\xff"]
    + [b'{"num_prompt":1' + b"0" * 400 + b"}"]
    + [b'{"num_prompt":1.5}', b'{"num_prompt":1,"logit_bias":[[1,NaN]]}', b'{"num_prompt":1,"min_tokens":true}'],
)
def test_other_bytes_are_no_rules(text):
    with pytest.raises(ProtocolError, match="are not the rules of a request"):
        DrawRules.from_bytes(text)


@given(rules_strategy)
def test_rules_travel_as_bytes(rules):
    assert DrawRules.from_bytes(rules.to_bytes()) == rules
    assert DrawRules(num_prompt=7).to_bytes() == b'{"num_prompt":7}'


def test_a_token_takes_constant_time_and_the_arrays_grow():
    history = History(DrawRules(num_prompt=2, repetition_penalty=1.1, frequency_penalty=1.0))
    history.extend(0, list(range(3000)))
    history.extend(3000, [5, 5])
    edit = history.edit()
    assert np.array_equal(edit.seen, np.arange(3000)) and edit.counts[5] == 3 and edit.counts[1] == 0


def test_no_temperature_lets_a_banned_token_through():
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(2))
    edit = edits_of(DrawRules(num_prompt=1, allowed_token_ids=(5, 9)))
    for temperature in (1e30, 1e38, 1e300):
        found = {draw(logits, [row(place, temperature)], {0: edit})[0].token_id for place in range(60)}
        assert found == {5, 9}
