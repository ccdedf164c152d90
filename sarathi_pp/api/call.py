"""One call of an LLM: the queue through which its answers reach the caller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue

from sarathi_pp.api.outputs import CompletionOutput, RequestOutput
from sarathi_pp.core.request import Completion
from sarathi_pp.errors import RowError
from sarathi_pp.inputs.parse import ParsedLine
from sarathi_pp.inputs.row import Row
from sarathi_pp.outputs.answer_message import read_answer
from sarathi_pp.outputs.finished_row import EndedRequest, RowCollector, row_error
from sarathi_pp.process.call_thread import Call
from sarathi_pp.text.tokenizer import Tokenizer

# A caller that waits for an answer checks at this interval, in seconds, whether the call has ended.
_LOOK_S = 0.2


class Answers:
    """The sink of one call, to which the engine gives its answers. The caller reads them in another thread. See Sink.

    Args:
        lines: the prompts of the call, in order.
        tokenizer: turns output tokens into text.

    Attributes:
        num_ended: number of requests that have ended. A prompt with n outputs is n requests.
    """

    def __init__(self, lines: Sequence[ParsedLine], tokenizer: Tokenizer) -> None:
        self._lines = lines
        self._tokenizer = tokenizer
        self._queue: SimpleQueue[RequestOutput | None] = SimpleQueue()
        self._collector = RowCollector()
        self._first_line = 0
        self.num_ended = 0

    def start(self, rows: Sequence[Row]) -> None:
        """Store the line number of the first prompt, from which `index` in the answers counts.

        Args:
            rows: the rows of all prompts, in order.
        """
        self._first_line = rows[0].line if rows else 0

    def finish(self, row: Row, completion: Completion, metrics: Mapping[str, object]) -> None:
        self._add(EndedRequest(row, completion, metrics))

    def fail(self, row: Row, error: RowError) -> None:
        self._add(EndedRequest(row, error=error))

    def close(self) -> None:
        """Signal to the reader that no answer follows."""
        self._queue.put(None)

    def _add(self, ended: EndedRequest) -> None:
        if choices := self._collector.add(ended):
            error = row_error(choices)
            outputs = () if error is not None else tuple(map(self._output, choices))
            self._put(choices[0], outputs, error)
        self.num_ended += 1

    def _output(self, ended: EndedRequest) -> CompletionOutput:
        one, metrics = ended.completion, dict(ended.metrics or {})
        assert one is not None, "a failed choice fails its prompt"
        text, message = self._tokenizer.finish(one), read_answer(ended.row, one, self._tokenizer)
        parts = (None, None, ()) if message is None else (message.content, message.reasoning, message.tool_calls)
        return CompletionOutput(text, one.token_ids, one.finish_reason, one.logprobs, *parts, metrics)

    def _put(self, first: EndedRequest, outputs: tuple[CompletionOutput, ...], error: RowError | None) -> None:
        row, one = first.row, first.completion
        of_prompt = one.prompt_logprobs if one is not None else None
        prompt_logprobs = None if of_prompt is None else tuple(of_prompt.by_token())
        cached = one.cached_tokens if one is not None and error is None else None
        index = row.line - self._first_line
        metrics = outputs[0].metrics if outputs else {}
        token_ids = tuple(row.request.prompt_token_ids) if row.request else ()
        prompt = self._lines[index].prompt
        number = str(row.line - 1)
        facts = (dict(metrics), index, number, prompt_logprobs, cached)
        self._queue.put(RequestOutput(prompt, token_ids, outputs, error, *facts))

    def until_end(self, call: Call[None]) -> Iterator[RequestOutput]:
        """Yield each answer when it is complete, until the call has ended."""
        while True:
            ended = call.wait(0)
            try:
                output = self._queue.get(timeout=0 if ended else _LOOK_S)
            except Empty:
                if ended:
                    return
                continue
            if output is None:
                call.wait()
                return
            yield output
