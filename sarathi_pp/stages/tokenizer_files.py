"""The tokenizer of a model directory, for the grammars of a stage that draws."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sarathi_pp.text.tokenizer_backend import load_backend


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files of the tokenizer in a model directory."""

    model_dir: Path

    def load(self) -> Any:
        """Return the tokenizer of transformers. Raise InputError if the files cannot be loaded."""
        return load_backend(self.model_dir)
