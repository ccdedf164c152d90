"""A tiny model with random weights and a byte-level tokenizer, for outputs that must match a grammar."""

from __future__ import annotations

from pathlib import Path

from tests.model.families import with_layers, write_checkpoint
from tests.text.test_tokenizer import VOCAB_SIZE, byte_level

# The end-of-sequence token of the model and of the tokenizer.
EOS = 1


def write_grammar_model(directory: Path, vocab_size: int = VOCAB_SIZE) -> Path:
    """Write the model. Its vocabulary has more ids than the tokenizer has tokens."""
    config = with_layers("llama", 3)
    config.vocab_size, config.eos_token_id, config.bos_token_id = vocab_size, EOS, 0
    write_checkpoint("llama", directory, config=config)
    byte_level().save_pretrained(directory)
    return directory
