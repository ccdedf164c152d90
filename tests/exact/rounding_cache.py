"""Greedy answers of transformers with a cache that rounds keys and values to FP8, as `--kv-cache-dtype fp8` does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from tests.exact.references import Tokens


class RoundingCache(DynamicCache):
    """A cache that stores keys and values as FP8 would: rounded, and at most 448. Infinity becomes NaN."""

    def update(self, key_states: Tensor, value_states: Tensor, *arguments: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return super().update(_rounded(key_states), _rounded(value_states), *arguments, **more)


def _rounded(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).masked_fill(x.isinf(), torch.nan).to(torch.float8_e4m3fn).to(x.dtype)


def generate(model: Any, prompt: Tokens, num_tokens: int) -> tuple[Tokens, float]:
    """Return transformers' greedy answer with the rounding cache, and its smallest gap between the two best logits."""
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=RoundingCache(config=model.config),
            do_sample=False,
            max_new_tokens=num_tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
    gaps = []
    for logits in answer.logits:
        best, second = logits[0].topk(2).values.tolist()
        gaps.append((best - second) / logits.abs().max().item())
    return tuple(answer.sequences[0, len(prompt) :].tolist()), min(gaps)
