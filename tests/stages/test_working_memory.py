"""The microbatch that a GPU's working memory is measured with, and the options that make it smaller."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.checkpoint.facts.mlp import MLPShape
from sarathi_pp.checkpoint.facts.support import ModelFacts
from sarathi_pp.core.policy import POLICIES, make_policy, parse_policy
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.drawing.scoring import SLICE_ROWS
from sarathi_pp.model.graphs import graph_shapes
from sarathi_pp.stages.working_memory import (
    LargestMicrobatch,
    deciding_shapes,
    estimate_working_bytes,
    smaller_options,
)


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


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "expected"),
    [
        (2048, 96, [(2048, False), (96, True)]),
        (64, 64, [(64, True), (64, False)]),
        (1, 1, [(1, True)]),
    ],
)
def test_graphs_take_the_memory_of_the_largest_with_logits_and_of_the_largest_without(num_tokens, num_seqs, expected):
    shapes = deciding_shapes(graph_shapes(num_tokens, num_seqs))
    assert [(shape.num_tokens, shape.decodes) for shape in shapes] == expected


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(8, 1), (64, 1), (512, 1), (512, 4), (512, 128)])
def test_an_estimate_has_the_logits_of_one_slice_of_scored_tokens_or_of_all_drawn_rows(num_tokens, num_rows):
    facts = ModelFacts("llama", "LlamaForCausalLM", 2, 16, 1, 1, 16, 100_000, 1000, "float32", False, "")
    largest = LargestMicrobatch(num_tokens, num_rows, 1000)
    found = estimate_working_bytes(facts, MLPShape(16, 2), largest, 4, has_lm_head=True, graphed=False)
    scored, drawn = min(SLICE_ROWS, num_tokens) * 4, num_rows * (4 + 4 + 1)
    # Scoring one row takes up to 64 bytes for each token of the vocabulary.
    assert max(scored, drawn) <= found / 100_000 <= max(scored + 64, drawn) + 2
