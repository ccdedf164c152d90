"""The limits that a prompt must fit before it becomes a request."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sarathi_pp.errors import RowError
from sarathi_pp.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """The limits that decide whether a prompt can be computed.

    Args:
        max_model_len: most tokens of prompt and output together.
        num_pages: KV pages of the stage that has the fewest. All of them together must hold the sequence.
        page_size: tokens per page.
        vocab_size: number of rows of the embedding. Token ids are below it.
    """

    max_model_len: int
    num_pages: int
    page_size: int
    vocab_size: int

    def check_prompt(self, num_tokens: int) -> None:
        """Check that a prompt of this length can be computed. With max_model_len tokens it is legal, without output.

        Raises:
            RowError: `context_length_exceeded` or `kv_cache_exhausted`.
        """
        if num_tokens > self.max_model_len:
            raise RowError(
                "context_length_exceeded",
                f"the prompt has {num_tokens} tokens and max_model_len is {self.max_model_len}; shorten the prompt",
            )
        if num_tokens > self.num_pages * self.page_size:
            raise kv_cache_exhausted(f"the prompt has {num_tokens} tokens", self.num_pages, self.page_size)

    def small_kv_cache(self) -> str | None:
        """Return a warning if a request of max_model_len tokens does not fit into the KV cache."""
        held = self.num_pages * self.page_size
        if held >= self.max_model_len:
            return None
        return (
            f"the KV cache holds {held} tokens and max_model_len is {self.max_model_len}: a request that needs more "
            f"ends with the error kv_cache_exhausted. Raise --kv-cache-memory, or lower --max-model-len to {held}"
        )

    def clamp(self, sampling: SamplingParams) -> SamplingParams:
        """Return the sampling parameters with huge values replaced by ordinary ones of the same effect.

        top_k becomes 0 (no limit) if it is at least vocab_size, and no_repeat_ngram_size if it is above max_model_len.
        max_new_tokens becomes at most max_model_len, min_new_tokens at most max_new_tokens, and prompt_logprobs at most
        vocab_size.
        """
        most = min(sampling.max_new_tokens, self.max_model_len)
        return replace(
            sampling,
            top_k=0 if sampling.top_k >= self.vocab_size else sampling.top_k,
            no_repeat_ngram_size=(
                0 if sampling.no_repeat_ngram_size > self.max_model_len else sampling.no_repeat_ngram_size
            ),
            max_new_tokens=most,
            min_new_tokens=min(sampling.min_new_tokens, most),
            prompt_logprobs=(
                None if sampling.prompt_logprobs is None else min(sampling.prompt_logprobs, self.vocab_size)
            ),
        )


def kv_cache_exhausted(needed: str, num_pages: int, page_size: int) -> RowError:
    """Return the error of a request that the whole KV cache cannot hold.

    Args:
        needed: beginning of the message, such as "the prompt has 900 tokens".
    """
    return RowError(
        "kv_cache_exhausted",
        f"{needed}, and the KV cache holds {num_pages * page_size} ({num_pages} pages of {page_size}). Raise "
        f"--kv-cache-memory, and run again with --resume --retry-errors",
    )
