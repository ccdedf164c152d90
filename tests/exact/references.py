"""Answers of transformers' own `generate` to the same prompts: every run must equal them, token for token.

This file imports neither torch nor transformers, because most readers of a reference do not need them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Lengths around the windows (12), the chunk sizes (7, 16, 64) and the pages (4) of the runs, in no order.
LENGTHS = (33, 1, 64, 12, 7, 90, 16, 2, 23, 65, 4, 47, 17, 8, 71, 13, 3, 31, 5, 53, 11, 20, 15, 40)
NEW_TOKENS = 8
LEAST_GAP = 1e-4  # between the two best logits, as a share of the largest absolute logit

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Reference:
    """One family's checkpoint, 24 prompts, and transformers' answers to them with end tokens disabled."""

    family: str
    directory: Path
    prompts: tuple[Tokens, ...]
    outputs: tuple[Tokens, ...]
    seed: int = 0
    config: PretrainedConfig | None = None

    @cached_property
    def model(self) -> Any:
        """Load transformers' own model with the checkpoint's weights."""
        from tests.model.families import build_model

        return build_model(self.family, self.seed, self.config)

    def log_softmax(self, ids: Sequence[int]) -> tuple[Any, float]:
        """Return transformers' log probabilities after each token, (T, vocab) of a model in float64.

        Also return what rounding may add: twice the largest error of transformers' own model in float32.
        """
        import torch

        with torch.inference_mode():
            exact, rounded = (
                model(torch.tensor([list(ids)])).logits[0].double().log_softmax(-1)
                for model in (self._wide_model, self.model)
            )
        return exact, 2 * float((exact - rounded).abs().max())

    @cached_property
    def _wide_model(self) -> Any:
        return copy.deepcopy(self.model).double()

    def generate(self, prompt: Tokens, num_tokens: int, eos_token_ids: Sequence[int] = ()) -> Tokens:
        from tests.exact.answers import generate

        return generate(self.model, prompt, num_tokens, eos_token_ids)[0]

    def longer(self, num_tokens: int, longest_prompt: int) -> dict[Tokens, Tokens]:
        """Return short prompts with answers of num_tokens, without those that nearly tie further on."""
        from tests.exact.answers import generate

        prompts = [prompt for prompt in self.prompts if len(prompt) <= longest_prompt]
        answers = {prompt: generate(self.model, prompt, num_tokens) for prompt in prompts}
        return {prompt: output for prompt, (output, gap) in answers.items() if gap >= LEAST_GAP}

    def prefixes(self, max_model_len: int) -> list[Tokens]:
        """Cut the outputs so that prompt and output together have at most max_model_len tokens."""
        return [
            output[: max(0, max_model_len - len(prompt))]
            for prompt, output in zip(self.prompts, self.outputs, strict=True)
        ]


References = Callable[[str], Reference]  # by family


def shared_reference(family: str, shared: Path) -> Reference:
    """Return the family's reference, made once for test processes that run at the same time or one after the other.

    If two processes ask for it at the same time, both make it. shared: a directory that only these processes use. No
    test may change a checkpoint in it.
    """
    found = shared / f"{family}-{version('transformers')}"
    if not found.is_dir():
        from tests.exact.answers import make_reference

        with TemporaryDirectory(dir=shared) as scratch:
            made = Path(scratch, "made")
            reference = make_reference(family, made / "model")
            (made / "answers.json").write_text(json.dumps([reference.prompts, reference.outputs]))
            with suppress(OSError):  # another process was faster, and made the same
                made.rename(found)
    prompts, outputs = (tuple(map(tuple, each)) for each in json.loads((found / "answers.json").read_text()))
    return Reference(family, found / "model", prompts, outputs)
