"""The microbatch that a GPU's working memory is measured with, and the options that make it smaller."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.core.policy import POLICIES, make_policy, parse_policy
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.stages.working_memory import LargestMicrobatch, smaller_options


@given(
    st.sampled_from(sorted(POLICIES)),
    st.integers(1, 4),
    st.integers(1, 300),
    st.integers(1, 40),
    st.integers(1, 200),
    st.sampled_from([1, 4, 16, 256]),
)
def test_it_has_all_tokens_in_sequences_of_legal_lengths(policy, stages, chunk_size, seqs, longest, page_size):
    pages = seqs * -(-longest // page_size)
    limits = Limits(stages, chunk_size, seqs, longest, page_size, pages, stages)
    largest = LargestMicrobatch.of(parse_policy(policy), limits)
    assert largest.num_tokens == make_policy(policy).max_tokens(limits)
    assert largest.num_rows == min(seqs, largest.num_tokens)
    spans = largest.spans(page_size)
    assert sum(span.num_tokens for span in spans) == largest.num_tokens and len(spans) >= largest.num_rows
    assert all(span.num_tokens >= 1 and span.start >= 0 for span in spans)
    assert max(span.start + span.num_tokens for span in spans) == longest
    assert not any(page for span in spans for page in span.pages)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("sarathi", "--chunk-size or --max-num-seqs"),
        ("orca", "--max-model-len or --max-num-seqs"),
        ("gllm", "--max-num-seqs"),
    ],
)
def test_only_options_that_help_are_named(policy, options):
    assert smaller_options(parse_policy(policy), Limits(2, 256, 8, 100_000, 16, 50_000, 2)) == options
