"""The message that an answer to a conversation means: its content, its reasoning, and its tool calls with ids."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from hashlib import blake2b

from sarathi_pp.core.request import Completion
from sarathi_pp.inputs.ids import id_key
from sarathi_pp.inputs.row import Row
from sarathi_pp.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants to be called.

    Args:
        id: name of this call, for the message with its result.
        arguments: normally the JSON text of an object. Check it, because the model may write anything.
    """

    id: str
    name: str
    arguments: str

    def openai(self) -> dict[str, object]:
        """Return the call as the OpenAI API writes it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class AnswerMessage:
    """The parts of an answer that its response template has read. See `sarathi_pp.text.response.Message`."""

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]


def read_answer(row: Row, completion: Completion, tokenizer: Tokenizer) -> AnswerMessage | None:
    """Return the message of an answer; None if the answer is its plain text only. See `Tokenizer.read_response`."""
    if row.tools is None:
        return None
    message = tokenizer.read_response(completion, json.loads(row.tools))
    if message is None:
        return None
    calls = (
        ToolCall(_call_id(row, completion, place), call.name, call.arguments)
        for place, call in enumerate(message.calls)
    )
    return AnswerMessage(message.content, message.reasoning, tuple(calls))


def _call_id(row: Row, completion: Completion, place: int) -> str:
    """Return the id of a call. It is the same if a run is repeated.

    It differs between the turns of a conversation, and between the choices of a line.

    Some chat templates, such as Mistral's, only take ids of nine letters and digits.
    """
    tokens = array("i", (*completion.request.prompt_token_ids, *completion.token_ids, place, row.choice))
    return blake2b(tokens.tobytes(), key=id_key(row.id).to_bytes(8, "little")).hexdigest()[:9]
