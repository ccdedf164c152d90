"""One input line on its way to an output line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal

from sarathi_pp.core.request import Request
from sarathi_pp.core.request_index import NEXT_CHOICE
from sarathi_pp.errors import RowError

Form = Literal["own", "openai-chat", "openai-completion"]


@dataclass(frozen=True, slots=True)
class Row:
    """One input line on its way to an output line: a request, or the error that is written instead of an answer.

    The text of the line is not kept, to save memory.

    Args:
        line: number of the line, from 1.
        id, form, nameless, extra: see ParsedLine.
        echo: the text of the prompt, which the output line repeats; None if it does not.
        arrival_s: time of arrival on the coordinator's clock, in seconds.
        tools: functions that a conversation offers to the model, as a JSON list. The response template then reads the
            output. None if it does not, because there are no messages or the tokenizer has none.
    """

    line: int
    id: object
    form: Form
    request: Request | None = None
    error: RowError | None = None
    arrival_s: float = 0.0
    nameless: bool = False
    extra: bytes = b""
    tools: bytes | None = None
    echo: str | None = None

    def __post_init__(self) -> None:
        assert (self.request is None) != (self.error is None), "a row is a request or an error"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids) if self.request else 0

    @property
    def held_tokens(self) -> int:
        """Memory of the line in tokens of 4 bytes: its prompt, its grammar, its extra keys and its tools."""
        rules = self.request.rules if self.request is not None else None
        grammar = "" if rules is None else rules.grammar
        return self.num_prompt_tokens + (len(grammar) + len(self.extra) + len(self.tools or b"")) // 4

    @property
    def num_choices(self) -> int:
        """Number of requests that share the input line, and its output line."""
        return self.request.sampling.n if self.request else 1

    @property
    def choice(self) -> int:
        """Number of this request among those of the input line, from 0."""
        return self.request.index // NEXT_CHOICE if self.request else 0

    def arriving(self, at_s: float) -> Row:
        """Return the row with this time of arrival, in seconds on the coordinator's clock."""
        request = None if self.request is None else replace(self.request, arrival_s=at_s)
        return replace(self, request=request, arrival_s=at_s)

    def choices(self) -> Iterator[Row]:
        """Yield the row of each choice of the input line, this one first. They share the prompt's tokens.

        Log probabilities of the prompt are equal for all choices, so only the first one wants them.
        """
        yield self
        for choice in range(1, self.num_choices):
            assert self.request is not None, "an error has one choice"
            seed = self.request.sampling.seed
            assert seed is not None, "requests carry a concrete seed"
            sampling = replace(
                self.request.sampling, seed=choice_seed(seed, choice), prompt_logprobs=None, logprobs_from=0
            )
            index = self.request.index + choice * NEXT_CHOICE
            yield replace(self, request=replace(self.request, index=index, sampling=sampling))


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of a choice: that of the input line for choice 0, otherwise a 63-bit hash of both numbers."""
    if not choice:
        return seed
    digest = blake2b(f"{seed}/choice {choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def shorten(message: str) -> str:
    """Cut the middle out of a long message, because it may quote a value that is as long as a line."""
    return message if len(message) <= 1000 else f"{message[:500]} ... {message[-200:]}"
