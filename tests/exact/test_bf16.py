"""bfloat16 runs: as near to float32 as transformers' own bfloat16, and no nearer.

Exact tokens are not promised there, because rounding decides a few of the tokens of any prompt.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from sarathi_pp_kernels.cpu.simd.target import has_avx512_bf16
from torch import Tensor

from sarathi_pp.checkpoint.facts.families import FAMILIES as SUPPORTED
from sarathi_pp.model.attention import numba as numba_attention
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from tests.engine.pipeline import CPU, run_pipeline, stage_models
from tests.exact.references import NEW_TOKENS
from tests.model.families import BRIEF, FAMILIES, build_model, thinned

CHUNKS = (16, 7, 1, 23)
# By default every third family runs end to end.
THINNED = [
    pytest.param(family, marks=[pytest.mark.full] if number % 3 or family in BRIEF else [])
    for number, family in enumerate(FAMILIES)
]

pytestmark = pytest.mark.timeout(60)


def sliced_logits(directory, token_ids: Tensor, dtype: torch.dtype, page_size: int) -> Tensor:
    """Compute the (T, vocab) logits of one sequence in chunks, through two stages."""
    facts, models = stage_models(directory, 2, dtype)
    kvs = [KVShard(model.layers, 16, page_size, facts.caches, dtype, CPU, num_slots=1) for model in models]
    is_long = facts.longrope_after is not None and sum(CHUNKS) > facts.longrope_after
    rows, start = [], 0
    for num_tokens in CHUNKS:
        span = Span(start, num_tokens, range(16), long_factors=is_long, slot=0)
        inputs = build_inputs([span], range(num_tokens), page_size, CPU)
        x = token_ids[start : start + num_tokens]
        for model, kv in zip(models, kvs, strict=True):
            x = model.forward(x, inputs, kv)
        rows.append(x)
        start += num_tokens
    return torch.cat(rows).float()


@pytest.mark.parametrize(
    ("family", "page_size"),
    [
        *(pytest.param(*case.values, 16, marks=case.marks) for case in thinned()),
        *(pytest.param(*case.values, 4, marks=case.marks) for case in thinned(few=True)),
    ],
)
def test_logits_are_no_farther_from_float32_than_those_of_transformers(family, page_size, reference):
    """Our own kernel accepts pages of 16 if heads have 16 channels."""
    known = reference(family)
    (prompt,) = (prompt for prompt in known.prompts if len(prompt) == sum(CHUNKS))
    token_ids = torch.tensor(prompt)
    with torch.inference_mode():
        exact = known.model(token_ids[None], use_cache=False).logits[0]
        theirs = build_model(family).to(torch.bfloat16)(token_ids[None], use_cache=False).logits[0].float()
    with mock.patch.object(numba_attention, "attend", wraps=numba_attention.attend) as kernel:
        ours = sliced_logits(known.directory, token_ids, torch.bfloat16, page_size)
    config = known.model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fits = head_dim == 16 or SUPPORTED[type(known.model).__name__].latent is not None
    assert kernel.called == (has_avx512_bf16() and page_size == 16 and fits)
    largest = exact.abs().max()
    our_error, their_error = (((logits - exact) / largest).square().mean().sqrt() for logits in (ours, theirs))
    print(f"{family}: root mean square error {our_error:.2e} of the largest logit; transformers {their_error:.2e}")
    assert 0 < our_error < 1.5 * their_error


@pytest.mark.parametrize("family", THINNED)
def test_outputs_are_produced_and_mostly_those_of_float32(family, reference):
    known = reference(family)
    outcome = run_pipeline(known.directory, known.prompts, stages=2, chunk_size=16, dtype=torch.bfloat16)
    assert {len(output) for output in outcome.tokens} == {NEW_TOKENS}
    same = sum(ours[0] == exact[0] for ours, exact in zip(outcome.tokens, known.outputs, strict=True))
    assert same >= 20  # of 24 first tokens
