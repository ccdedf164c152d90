"""What transformers' own `generate` answers to the same prompts: what every run must equal, token for token.

A prompt along whose answer the two best logits nearly tie says nothing about exactness, because a rounding
may decide it. Such prompts are replaced by the next draw here, from the reference alone, before any run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from tests.model.families import VOCAB_SIZE, build_model, write_checkpoint

# Around the windows (12), the chunk sizes (7, 16, 64) and the pages (4) of the runs, in no order.
LENGTHS = (33, 1, 64, 12, 7, 90, 16, 2, 23, 65, 4, 47, 17, 8, 71, 13, 3, 31, 5, 53, 11, 20, 15, 40)
NEW_TOKENS = 8
_LEAST_GAP = 1e-4  # between the two best logits, in shares of the largest absolute logit
_MOST_DRAWS = 20

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Reference:
    """One family's checkpoint, 24 prompts, and what transformers answers to them with end tokens disabled."""

    family: str
    directory: Path
    prompts: tuple[Tokens, ...]
    outputs: tuple[Tokens, ...]
    seed: int = 0
    config: PretrainedConfig | None = None

    @cached_property
    def model(self) -> Any:
        """transformers' own, of the checkpoint's weights."""
        return build_model(self.family, self.seed, self.config)

    def generate(self, prompt: Tokens, num_tokens: int, eos_token_ids: Sequence[int] = ()) -> Tokens:
        return generate(self.model, prompt, num_tokens, eos_token_ids)[0]

    def longer(self, num_tokens: int, longest_prompt: int) -> dict[Tokens, Tokens]:
        """Short prompts with answers of num_tokens, without those that nearly tie on the longer way."""
        prompts = [prompt for prompt in self.prompts if len(prompt) <= longest_prompt]
        answers = {prompt: generate(self.model, prompt, num_tokens) for prompt in prompts}
        return {prompt: output for prompt, (output, gap) in answers.items() if gap >= _LEAST_GAP}

    def prefixes(self, max_model_len: int) -> list[Tokens]:
        """The outputs where prompt and output together may have no more than max_model_len tokens."""
        return [
            output[: max(0, max_model_len - len(prompt))]
            for prompt, output in zip(self.prompts, self.outputs, strict=True)
        ]


def make_reference(family: str, directory: Path, seed: int = 0, config: PretrainedConfig | None = None) -> Reference:
    """Write the family's checkpoint, of that config where one is given, and answer its prompts."""
    model = write_checkpoint(family, directory, seed, config=config)
    answers = [_clear_prompt(model, length, 1000 * seed + place) for place, length in enumerate(LENGTHS)]
    prompts, outputs = zip(*answers, strict=True)
    return Reference(family, directory, prompts, outputs, seed, config)


def shared_reference(family: str, shared: Path) -> Reference:
    """The family's, made by the first of the processes that test side by side and one after the other.

    shared: a directory of theirs alone. Nobody may change a checkpoint in it.
    """
    found = shared / f"{family}-{transformers.__version__}"
    if not found.is_dir():
        with TemporaryDirectory(dir=shared) as scratch:
            made = Path(scratch, "made")
            reference = make_reference(family, made / "model")
            (made / "answers.json").write_text(json.dumps([reference.prompts, reference.outputs]))
            with suppress(OSError):  # another process was faster: what it made is the same
                made.rename(found)
    prompts, outputs = (tuple(map(tuple, each)) for each in json.loads((found / "answers.json").read_text()))
    return Reference(family, found / "model", prompts, outputs)


def _clear_prompt(model: Any, length: int, seed: int) -> tuple[Tokens, Tokens]:
    """The first of the seed's draws whose answer is decided by more than rounding, and the answer."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(_MOST_DRAWS):
        prompt = tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist())
        output, gap = generate(model, prompt, NEW_TOKENS)
        assert len(output) == NEW_TOKENS, "an end token ended the answer, and they are disabled"
        if gap >= _LEAST_GAP:
            return prompt, output
    raise AssertionError(f"{type(model).__name__}: {_MOST_DRAWS} prompts of {length} tokens all nearly tie")


def generate(model: Any, prompt: Tokens, num_tokens: int, eos_token_ids: Sequence[int] = ()) -> tuple[Tokens, float]:
    """transformers' greedy answer to one prompt alone, and its smallest gap between the two best logits.

    Without eos_token_ids no token ends the answer, whatever the model's configuration says.
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
