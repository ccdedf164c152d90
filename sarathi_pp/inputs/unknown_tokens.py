"""A count of text prompts that the tokenizer does not know. If there are some, it may be the wrong tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A tokenizer does not know a prompt if more than this share of its tokens is the unknown token. Many tokenizers write a
# whole word, or a run of words, as one unknown token, beside tokens for the start and the spaces.
_SHARE = 0.3


@dataclass(slots=True)
class UnknownTokens:
    """A count of text prompts with many unknown tokens.

    Args:
        token_id: id of the unknown token. None if the tokenizer has none, because it has tokens for any text.
        num_prompts: number of prompts that were counted.
        num_unknown: number of prompts among them with many unknown tokens.
    """

    token_id: int | None = None
    num_prompts: int = 0
    num_unknown: int = 0

    def count(self, token_ids: Sequence[int]) -> None:
        """Count one prompt, given by its token ids."""
        self.num_prompts += 1
        if self.token_id is not None:
            self.num_unknown += token_ids.count(self.token_id) > _SHARE * len(token_ids)

    def warning(self) -> str | None:
        """Return a warning for the user; None if no prompt had many unknown tokens."""
        if not self.num_unknown:
            return None
        return (
            f"{self.num_unknown:,} of {self.num_prompts:,} prompts have more than {_SHARE:.0%} unknown tokens (id "
            f"{self.token_id}): the tokenizer does not know this text. Check that its files belong to the model"
        )
