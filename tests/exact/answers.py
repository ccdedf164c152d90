"""Greedy answers of transformers to prompts that they decide by more than a rounding.

If the two best logits nearly tie along an answer, a rounding may decide it. Such a prompt shows nothing about
exactness. Before any run, the next draw replaces it here, from the reference alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from tests.exact.references import LEAST_GAP, LENGTHS, NEW_TOKENS, Reference, Tokens
from tests.model.families import VOCAB_SIZE, write_checkpoint

_MOST_DRAWS = 20


def make_reference(family: str, directory: Path, seed: int = 0, config: PretrainedConfig | None = None) -> Reference:
    """Write the family's checkpoint, with that config if given, and answer its prompts."""
    model = write_checkpoint(family, directory, seed, config=config)
    answers = [_clear_prompt(model, length, 1000 * seed + place) for place, length in enumerate(LENGTHS)]
    prompts, outputs = zip(*answers, strict=True)
    return Reference(family, directory, prompts, outputs, seed, config)


def _clear_prompt(model: Any, length: int, seed: int) -> tuple[Tokens, Tokens]:
    """Return the first of the seed's draws whose answer is decided by more than rounding, and the answer."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(_MOST_DRAWS):
        prompt = tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist())
        output, gap = generate(model, prompt, NEW_TOKENS)
        assert len(output) == NEW_TOKENS, "an end token ended the answer, and they are disabled"
        if gap >= LEAST_GAP:
            return prompt, output
    raise AssertionError(f"{type(model).__name__}: {_MOST_DRAWS} prompts of {length} tokens all nearly tie")


def generate(model: Any, prompt: Tokens, num_tokens: int, eos_token_ids: Sequence[int] = ()) -> tuple[Tokens, float]:
    """Return transformers' greedy answer to one prompt alone, and its smallest gap between the two best logits.

    Without eos_token_ids no token ends the answer, whatever the model's configuration contains.
    """
    settings = model.generation_config
    settings.eos_token_id = list(eos_token_ids) or None
    settings.pad_token_id = 0
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
    gap = float("inf")
    for logits in answer.logits:
        best, second = logits[0].topk(2).values.tolist()
        gap = min(gap, (best - second) / logits.abs().max().item())
    return tuple(answer.sequences[0, len(prompt) :].tolist()), gap
