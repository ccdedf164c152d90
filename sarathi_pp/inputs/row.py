"""One input line on its way to an output line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sarathi_pp.core.request import Request
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


def shorten(message: str) -> str:
    """Cut the middle out of a long message, because it may quote a value that is as long as a line."""
    return message if len(message) <= 1000 else f"{message[:500]} ... {message[-200:]}"
