"""Sampling as compiled, token for token."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.comparison import BF16, DEVICE, F32, NAMES, Pairs, compare, normal, sized

ROWS = sized([64], tiny=[6])[0]
CASES = sized([(16, F32), (4097, F32), (128256, F32), (128256, BF16)], tiny=[(17, F32)])
# Temperature, top_k, top_p, min_p.
CHOICES = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.8, 50, 0.95, 0.0),
    (1.7, 0, 0.9, 0.05),
    (0.3, 3, 0.5, 0.0),
    (1.0, 10**6, 0.05, 0.5),
]


@pytest.mark.parametrize(("vocab", "dtype"), CASES, ids=lambda value: NAMES.get(value, str(value)))
def test_greedy(vocab: int, dtype: torch.dtype) -> None:
    """A row with NaN gives -1. Of equal logits the lowest token counts."""
    from sarathi_pp_kernels.triton.sampling import greedy_tokens

    def greedy() -> Pairs:
        logits = normal(ROWS, vocab, dtype=dtype)
        logits[1, vocab // 2] = float("nan")
        logits[2, 3:] = logits[2, :3].max()
        wide = logits.double()
        token = torch.arange(vocab, device=DEVICE).expand(ROWS, vocab)
        best = torch.where(wide == wide.amax(-1, keepdim=True), token, vocab).amin(-1)
        best[1] = -1
        return {"tokens": (greedy_tokens(logits), best)}

    compare(greedy, 0.0)


@pytest.mark.parametrize(("vocab", "dtype"), CASES, ids=lambda value: NAMES.get(value, str(value)))
def test_draws(vocab: int, dtype: torch.dtype) -> None:
    from sarathi_pp_kernels.triton.sampling import drawn_tokens, reference_drawn_tokens

    def drawn() -> Pairs:
        logits = 3 * normal(ROWS, vocab, dtype=dtype)
        choices = torch.tensor(CHOICES, dtype=torch.float64)[torch.arange(ROWS) % len(CHOICES)]
        parameters = torch.cat([choices, torch.rand(ROWS, 1, dtype=torch.float64)], 1)
        return {"tokens": (drawn_tokens(logits, parameters.to(DEVICE)), reference_drawn_tokens(logits, parameters))}

    compare(drawn, 0.0)
