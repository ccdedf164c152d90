"""Log probabilities of prompt tokens: which rows give them, in slices, each row alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from sarathi_pp.core.draw_rules import Failure
from sarathi_pp.core.plan import Chunk, MicroBatch, Scored
from sarathi_pp.drawing.logprobs import token_logprobs
from sarathi_pp.drawing.scoring import SLICE_ROWS, _on_gpu, score, scored_rows

VOCAB = 30


class Head:
    """An LM head whose logits are its rows. It records how many it gets, and requires that earlier logits are freed."""

    def __init__(self):
        self.sizes = []
        self.made = []

    def forward(self, rows):
        assert all(one.expired() for one in self.made), "logits of two slices are in memory"
        self.sizes.append(len(rows))
        logits = rows.clone()
        self.made.append(StorageWeakRef(logits.untyped_storage()))
        return logits


def microbatch(num_tokens=150):
    ids = tuple(place % VOCAB for place in range(num_tokens))
    return MicroBatch(
        0,
        (
            Chunk(1, 0, 10, 3, token_ids=(1, 2, 3)),
            Chunk(2, 0, 20, num_tokens, token_ids=ids, scored=Scored(25, 21 + num_tokens, 2, 7)),
            Chunk(3, 1, 0, 3, token_ids=(4, 5, 6), scored=Scored(1, 3, 0, -1)),
        ),
    )


def test_the_row_before_a_token_gives_its_log_probability():
    whole = microbatch()
    assert scored_rows(whole) == [*range(3 + 4, 3 + 150), 153, 154]


def test_logits_are_in_memory_slice_by_slice_and_each_row_counts_alone():
    whole, head = microbatch(), Head()
    rows = torch.randn(len(scored_rows(whole)), VOCAB, generator=torch.Generator().manual_seed(3))
    (long, short), failed = score(head, rows, whole)
    assert not failed and max(head.sizes) == SLICE_ROWS and sum(head.sizes) == len(rows)
    assert (long[:4], short[:4]) == ((2, 0, 25, 2), (3, 1, 1, 0))
    targets = [*((place - 20) % VOCAB for place in range(25, 170)), 7]
    expected = [token_logprobs(row, target, 2) for row, target in zip(rows[:-2], targets, strict=True)]
    assert long.logprobs == tuple(one.logprob for one in expected)
    assert long.top_ids == tuple(token for one in expected for token, _ in one.top)
    assert long.top_logprobs == tuple(logprob for one in expected for _, logprob in one.top)
    assert short.logprobs == tuple(token_logprobs(rows[-2 + n], 5 + n, 0).logprob for n in range(2))


def test_a_row_that_is_not_finite_fails_its_sequence_alone():
    whole = microbatch(100)
    rows = torch.zeros(len(scored_rows(whole)), VOCAB)
    rows[70, 3] = torch.inf
    (short,), (failed,) = score(Head(), rows, whole)
    assert short.sequence == 3 and (failed.sequence, failed.failure) == (2, Failure.NOT_FINITE)


# Equal logits are common, among them both zeros.
LOGIT = st.sampled_from([-3.5, -1e-40, -0.0, 0.0, 1.0, 2.5]) | st.floats(-(2.0**100), 2.0**100, width=32)


@given(st.lists(st.lists(LOGIT, min_size=5, max_size=5), min_size=1, max_size=4), st.integers(0, 7), st.integers(0, 4))
def test_a_gpu_finds_the_same_tokens(numbers, num_top, token_id):
    logits, wanted = torch.tensor(numbers), [(token_id, num_top), (0, 0), (4, 1), (2, 20)][: len(numbers)]
    for dtype in (torch.float32, torch.bfloat16):
        rows = logits.to(dtype)
        for found, row, pair in zip(_on_gpu(rows, wanted), rows, wanted, strict=True):
            expected = token_logprobs(row, *pair)
            assert [token for token, _ in found.top] == [token for token, _ in expected.top]
            logprobs = [found.logprob, *(logprob for _, logprob in found.top)]
            assert logprobs == pytest.approx(
                [expected.logprob, *(one for _, one in expected.top)], rel=1e-12, abs=1e-12
            )


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_has_no_numbers_on_a_gpu(wrong):
    rows = torch.zeros(3, VOCAB)
    rows[1, 7] = wrong
    first, bad, last = _on_gpu(rows, [(5, 2), (5, 2), (6, 0)])
    assert bad is None and [token for token, _ in first.top] == [0, 1] and last.top == ()
