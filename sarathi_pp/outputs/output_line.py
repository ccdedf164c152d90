"""The output line of an input line that has ended, in our own form or in OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sarathi_pp.core.prompt_logprobs import PromptLogprobs
from sarathi_pp.errors import RowError
from sarathi_pp.inputs.row import Row
from sarathi_pp.outputs.answer_message import AnswerMessage, read_answer
from sarathi_pp.outputs.finished_row import EndedRequest
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

    def of_answers(self, choices: Sequence[EndedRequest]) -> bytes:
        """Return the line of an input line whose choices all have an answer. They come in order."""
        row, first = choices[0].row, choices[0].answer
        if row.form != "own":
            return _encoded(row, self._openai_record(choices))
        counts, of_prompt = {"num_prompt_tokens": len(first.request.prompt_token_ids)}, own_prompt_logprobs(first)
        if len(choices) == 1:
            parts, metrics = self._parts(choices[0], counts), choices[0].metrics or {}
            return _encoded(row, {"id": row.id, **parts, **of_prompt, "metrics": metrics})
        outputs = [{**self._parts(one, {}), "metrics": one.metrics or {}} for one in choices]
        return _encoded(row, {"id": row.id, **counts, **of_prompt, "outputs": outputs})

    def _parts(self, ended: EndedRequest, counts: Mapping[str, object]) -> dict[str, object]:
        """Return the text of an answer, its parts, its tokens and its end, in our own form.

        Args:
            counts: counts of the input line, if it has no other answer.
        """
        answer, message = ended.answer, read_answer(ended.row, ended.answer, self.tokenizer)
        return {
            "text": self.tokenizer.finish(answer),
            **(_message_keys(message) if message else {}),
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            **counts,
            "num_output_tokens": len(answer.token_ids),
            **({} if answer.logprobs is None else {"logprobs": own_logprobs(answer)}),
        }

    def _openai_record(self, choices: Sequence[EndedRequest]) -> dict[str, object]:
        """Return an output line in OpenAI's form."""
        row, first = choices[0].row, choices[0].answer
        num_prompt = len(first.request.prompt_token_ids)
        num_output = sum(len(one.answer.token_ids) for one in choices)
        chat = row.form == "openai-chat"
        body = {
            "id": f"chatcmpl-{row.line}" if chat else f"cmpl-{row.line}",
            "object": "chat.completion" if chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [
                {"index": index, **self._choice(one, first.prompt_logprobs)} for index, one in enumerate(choices)
            ],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_output,
                "total_tokens": num_prompt + num_output,
                # The prompt counts once, as its first choice found it.
                "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
            },
        }
        response = {"status_code": 200, "request_id": f"req_{row.line}", "body": body}
        return {"id": f"batch_req_{row.line}", "custom_id": row.id, "response": response, "error": None}

    def _choice(self, ended: EndedRequest, of_prompt: PromptLogprobs | None) -> dict[str, object]:
        """Return the answer of one choice in OpenAI's form.

        Args:
            of_prompt: log probabilities of the prompt, which only the first choice has.
        """
        row, answer = ended.row, replace(ended.answer, prompt_logprobs=of_prompt)
        chat, text = row.form == "openai-chat", self.tokenizer.finish(answer)
        message = read_answer(row, answer, self.tokenizer)
        logprobs = openai_logprobs(answer, self.tokenizer, is_chat=chat, is_echo=row.echo is not None)
        if row.echo is not None and text is not None:
            text = row.echo + text
        parts = {"content": text} if message is None else _message_keys(message)
        calls = message is not None and message.tool_calls and answer.finish_reason == "stop"
        return {
            **({"message": {"role": "assistant", **parts}} if chat else {"text": text}),
            "logprobs": logprobs,
            # An echo shows them in its `logprobs`.
            **({} if row.echo is not None and logprobs is not None else own_prompt_logprobs(answer)),
            "finish_reason": "tool_calls" if calls else answer.finish_reason,
        }


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


def _message_keys(message: AnswerMessage) -> dict[str, object]:
    """Return the parts of a message. Reasoning and calls are left out if it has none."""
    reasoning = {} if message.reasoning is None else {"reasoning": message.reasoning}
    calls = {"tool_calls": [call.openai() for call in message.tool_calls]} if message.tool_calls else {}
    return {"content": message.content, **reasoning, **calls}
