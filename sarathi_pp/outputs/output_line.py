"""The output line of an input line that has ended, in our own form or in OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from sarathi_pp.core.request import Completion
from sarathi_pp.errors import RowError
from sarathi_pp.inputs.row import Row
from sarathi_pp.outputs.answer_message import AnswerMessage, read_answer
from sarathi_pp.outputs.logprobs import openai_logprobs, own_logprobs, own_prompt_logprobs
from sarathi_pp.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OutputLines:
    """The maker of output lines.

    Args:
        tokenizer: turns output tokens into text.
        model: the model's name for output lines in OpenAI's form.
        created: unix time at which the run started, for the same lines.
    """

    tokenizer: Tokenizer
    model: str
    created: int

    def of_error(self, row: Row, error: RowError) -> bytes:
        """Return the line of an input line that has failed."""
        return _encoded(row, _error_record(row, error))

    def of_answer(self, row: Row, completion: Completion, metrics: Mapping[str, object]) -> bytes:
        """Return the line of an input line that has an answer.

        Args:
            metrics: see Sink.finish.
        """
        text, message = self.tokenizer.finish(completion), read_answer(row, completion, self.tokenizer)
        if row.form == "own":
            return _encoded(row, _own_record(row, completion, text, message, metrics))
        is_echo = row.echo is not None
        shown = openai_logprobs(completion, self.tokenizer, is_chat=row.form == "openai-chat", is_echo=is_echo)
        if row.echo is not None and text is not None:
            text = row.echo + text
        return _encoded(row, _openai_record(row, completion, text, message, shown, self.model, self.created))


def _encoded(row: Row, record: dict[str, object]) -> bytes:
    if row.extra:
        record["extra"] = json.loads(row.extra)
    return encode_line(record)


def encode_line(record: Mapping[str, object]) -> bytes:
    """Return one JSON line in UTF-8. If an id holds half a surrogate pair, which UTF-8 cannot encode, escape it."""
    try:
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _error_record(row: Row, error: RowError) -> dict[str, object]:
    reason: dict[str, object] = {"code": error.code, "message": error.message}
    if row.nameless:  # its id is its line number, which may be the own id of another line
        reason["line"] = row.line
    if row.form == "own":
        return {"id": row.id, "error": reason}
    return {"id": f"batch_req_{row.line}", "custom_id": row.id, "response": None, "error": reason}


def _own_record(
    row: Row, completion: Completion, text: str | None, message: AnswerMessage | None, metrics: Mapping[str, object]
) -> dict[str, object]:
    logprobs = {} if completion.logprobs is None else {"logprobs": own_logprobs(completion)}
    return {
        "id": row.id,
        "text": text,
        **(_message_keys(message) if message else {}),
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": len(completion.request.prompt_token_ids),
        "num_output_tokens": len(completion.token_ids),
        **logprobs,
        **own_prompt_logprobs(completion),
        "metrics": metrics,
    }


def _message_keys(message: AnswerMessage) -> dict[str, object]:
    """Return the parts of a message. Reasoning and calls are left out if it has none."""
    reasoning = {} if message.reasoning is None else {"reasoning": message.reasoning}
    calls = {"tool_calls": [call.openai() for call in message.tool_calls]} if message.tool_calls else {}
    return {"content": message.content, **reasoning, **calls}


def _openai_record(
    row: Row,
    completion: Completion,
    text: str | None,
    message: AnswerMessage | None,
    logprobs: object,
    model: str,
    created: int,
) -> dict[str, object]:
    """Return an output line in OpenAI's form.

    Args:
        message: the parts of the text; None if it has none.
        logprobs: see `openai_logprobs`.
        created: unix time at which the run started.
    """
    num_prompt, num_output = len(completion.request.prompt_token_ids), len(completion.token_ids)
    chat = row.form == "openai-chat"
    # An echo shows them in its `logprobs`.
    of_prompt = {} if row.echo is not None and logprobs is not None else own_prompt_logprobs(completion)
    parts = {"content": text} if message is None else _message_keys(message)
    answer = {"message": {"role": "assistant", **parts}} if chat else {"text": text}
    calls = message is not None and message.tool_calls and completion.finish_reason == "stop"
    body = {
        "id": f"chatcmpl-{row.line}" if chat else f"cmpl-{row.line}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": 0,
                **answer,
                "logprobs": logprobs,
                **of_prompt,
                "finish_reason": "tool_calls" if calls else completion.finish_reason,
            },
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        },
    }
    response = {"status_code": 200, "request_id": f"req_{row.line}", "body": body}
    return {"id": f"batch_req_{row.line}", "custom_id": row.id, "response": response, "error": None}
