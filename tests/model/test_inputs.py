"""Row positions and page slots, against a loop over tokens."""

from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_pp.model.inputs import CapturableInputs, Span, build_inputs

CPU = torch.device("cpu")


@st.composite
def spans_and_page_size(draw: st.DrawFn) -> tuple[list[Span], int]:
    page_size = draw(st.sampled_from([1, 3, 16]))
    extents = draw(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=6))
    needed = [-(-(start + num_tokens) // page_size) for start, num_tokens in extents]
    spare = [draw(st.integers(0, 2)) for _ in extents]
    ids = iter(draw(st.permutations(range(sum(needed) + sum(spare)))))
    tables = [[next(ids) for _ in range(used + more)] for used, more in zip(needed, spare, strict=True)]
    return [Span(*extent, table) for extent, table in zip(extents, tables, strict=True)], page_size


@settings(max_examples=60)
@given(case=spans_and_page_size())
def test_every_row_has_its_position_and_its_slot(case: tuple[list[Span], int]) -> None:
    spans, page_size = case
    inputs = build_inputs(spans, [0], page_size, CPU)

    tokens = [(span, position) for span in spans for position in range(span.start, span.start + span.num_tokens)]
    assert inputs.num_tokens == len(tokens)
    assert inputs.position_ids.tolist() == [position for _, position in tokens]
    assert inputs.write_pages.tolist() == [span.pages[position // page_size] for span, position in tokens]
    assert inputs.write_offsets.tolist() == [position % page_size for _, position in tokens]

    first_row = 0
    for span, rows in zip(spans, inputs.spans, strict=True):
        assert (rows.start, rows.num_tokens, rows.first_row) == (span.start, span.num_tokens, first_row)
        used = -(-rows.end // page_size)
        assert rows.pages.tolist() == list(span.pages)[:used]
        first_row += span.num_tokens


def test_index_tensors_are_int64_and_logit_rows_keep_their_order() -> None:
    inputs = build_inputs([Span(0, 3, [5]), Span(7, 1, (2, 9))], [3, 2], 4, CPU)
    assert inputs.logit_rows.tolist() == [3, 2]
    tensors = [inputs.position_ids, inputs.write_pages, inputs.write_offsets, inputs.logit_rows]
    assert {tensor.dtype for tensor in [*tensors, inputs.spans[0].pages]} == {torch.int64}


def test_a_microbatch_without_logits_is_legal() -> None:
    assert build_inputs([Span(0, 2, [1])], [], 4, CPU).logit_rows.tolist() == []


def test_all_logits_are_those_of_every_row_in_order() -> None:
    spans = [Span(0, 2, [1]), Span(5, 1, [2, 3])]
    for rows, every in (([0, 1, 2], True), ([1, 2], False), ([2, 1, 0], False), ([0, 1, 1], False), ([], False)):
        assert build_inputs(spans, rows, 4, CPU).all_logits is every
    # A graph's inputs are padded to its number of rows, so each has another place.
    assert not CapturableInputs(3, 3, 8, 4, CPU).load(spans, [0, 1, 2], [7, 8, 9]).all_logits


def test_a_page_table_may_grow_afterwards() -> None:
    table = array("q", [4, 6])
    inputs = build_inputs([Span(3, 2, table)], [], 4, CPU)
    table.append(8)
    table[0] = 0
    assert inputs.spans[0].pages.tolist() == [4, 6]


def test_a_table_that_is_too_short_never_reaches_into_the_neighbours() -> None:
    with pytest.raises(AssertionError, match=r"3\+2 needs 2 pages, has 1"):
        build_inputs([Span(3, 2, [0]), Span(0, 1, [1])], [], 4, CPU)


def test_a_span_without_tokens_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="no tokens"):
        build_inputs([Span(3, 0, [0])], [], 4, CPU)
