"""The Python API, in the shape that users of other engines know.

    with LLM("path/to/model", stages=2) as llm:
        for output in llm.generate(["12+30=", "1+1="], SamplingParams(max_new_tokens=8)):
            print(output.prompt, output.outputs[0].text)

`stages=N` starts N - 1 worker processes on this machine; this process is the coordinator and the first stage. With
`replicas=R` there are R such pipelines, which share the prompts out.
In a script under torchrun each process makes the same LLM and is one stage: on rank 0 `generate` answers; on
the others it serves until rank 0 closes its LLM, and every call returns an empty list.
"""

from __future__ import annotations

import atexit
import json
import logging
import operator
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch

from sarathi_pp.config import RunConfig, SamplingParams, stages_among
from sarathi_pp.core.partition import partition
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.core.request import FinishReason
from sarathi_pp.distributed.control_plane import Topology
from sarathi_pp.distributed.environment import Place, find_place, mesh_of
from sarathi_pp.distributed.launcher import Workers
from sarathi_pp.distributed.start_watch import watching_start
from sarathi_pp.engine.dispatcher import Dispatcher
from sarathi_pp.engine.engine import Engine
from sarathi_pp.errors import ConfigError, RowError, SarathiError
from sarathi_pp.inputs.generation_config import GenerationDefaults, read_generation_config
from sarathi_pp.inputs.parse import ParsedLine, Row
from sarathi_pp.inputs.source import Limits, MemorySource, RequestMaker
from sarathi_pp.model.checkpoint.support import ModelFacts, check_model, check_shards
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.outputs.sink import FinishedRow, MemorySink
from sarathi_pp.process.call_thread import Call, CallThread
from sarathi_pp.process.watchdog import Watchdog
from sarathi_pp.run.auto_options import tuned
from sarathi_pp.run.fetch import find_model
from sarathi_pp.run.setup import Job
from sarathi_pp.text.tokenizer import Tokenizer
from sarathi_pp.trace.clock import SystemClock

_log = logging.getLogger(__name__)

# For a call that was interrupted: until then it ends its microbatch and tidies up before the interrupt is raised.
_ABORT_S = 5.0
# For the thread of a closed LLM, which has nothing more to do.
_TIDY_S = 5.0
# One LLM at a time: setting up changes the environment and torch's number of threads.
_one_set_up = threading.Lock()
_among_ranks = threading.Lock()

Prompt = str | Sequence[int]
Messages = list[dict[str, object]]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """text is None for a model without tokenizer files. token_ids: all generated ids, end of sequence included."""

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt's answer. Where the prompt cannot run, `error` says why and `outputs` is empty."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    error: RowError | None = None
    metrics: dict[str, object] = field(default_factory=dict)


class LLM:
    """A model spread over `stages`, ready to generate; loaded by the constructor, let go by `close`.

    Calls from several threads run one after the other. After an exception in a call, an interrupt included, the next
    call works, or raises PeerLostError if a stage was lost.

    options: further fields of RunConfig (policy, chunk_size, dtype, kv_cache_memory_bytes, ...). An unknown one
    is an error. Raises the errors that the command line would exit with.
    """

    def __init__(self, model: str | os.PathLike[str], *, stages: int | None = None, **options: Any) -> None:
        place = find_place()
        try:
            config = RunConfig(model=cast(str, model), stages=1 if stages is None else stages, **options)
        except TypeError as error:
            raise ConfigError(f"LLM(): {error}; the options are the fields of RunConfig") from None
        if place is not None:
            shards = config.tensor_parallel_size
            config = replace(config, stages=stages_among(place.world_size, stages, config.replicas, shards))
        self._model_dir = model_dir = find_model(config.model)
        facts = check_model(model_dir)
        check_shards(model_dir, config.tensor_parallel_size)
        config = tuned(config, facts)
        parse_policy(config.policy)
        partition(facts.num_layers, config.stages, config.layer_split)
        self._defaults = read_generation_config(model_dir, config.override_generation_config).with_command(
            config.sampling_overrides
        )
        if config.run_dir is not None and (place is None or place.rank == 0):
            RunDirectory.check(config.run_dir, overwrite=False)
        self._place = place or Place()
        self._clock = SystemClock()
        self._next_index = 0
        self._lock = threading.Lock()
        self._closing = self._closed = False
        self._end: Call[dict[str, Any] | None] | None = None
        # What has to be let go of, last in first out, whether all goes well or nothing does.
        self._held = ExitStack()
        self._thread = CallThread("LLM")
        self._held.callback(self._thread.close)
        try:
            with _one_set_up:
                self._set_up(config, facts, started=place is not None)
            atexit.register(self.close)
        except BaseException:
            self._thread.call(self._held.close)
            raise

    def _set_up(self, config: RunConfig, facts: ModelFacts, *, started: bool) -> None:
        """Start the workers and join them, load this rank's stage.

        Args:
            started: torchrun has started the ranks.
        """
        if started and self._place.world_size > 1:
            self._held.enter_context(_only_one())
        scratch = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="sarathi-pp-")))
        joined = self._held.enter_context(ExitStack())
        self._workers = workers = Workers(scratch / "store", mesh_of(config), first_rank=1)
        self._held.callback(workers.stop)  # before leaving: a thread that waits for a worker then ends
        try:
            with ExitStack() as watched:
                if not started and config.num_ranks > 1:
                    self._place = workers.place(0)
                    # In a thread that no signal interrupts, so that each worker is known that was started.
                    self._thread.call(partial(workers.start, ("worker", json.dumps(asdict(config), default=str))))
                    watched.enter_context(watching_start(workers, config.join_timeout_s))
                topology = Topology(self._place, config.join_timeout_s, config.peer_timeout_s, mesh_of(config))
            joined.callback(topology.leave)
            run_dir = RunDirectory(config.run_dir) if config.run_dir else RunDirectory.unnamed(scratch / "run")
            self._job = Job(config, self._model_dir, facts, topology, run_dir, self._clock, Watchdog(None))
        except BaseException as error:
            if config.run_dir is not None and self._place.rank == 0 and isinstance(error, SarathiError):
                RunDirectory(config.run_dir).write_exit_code(error.exit_code)  # it was refused: another may start there
            raise
        self._held.callback(self._job.abandon)
        if self._place.rank == 0:
            self._prepare(run_dir, config, self._model_dir, facts)
            self._thread.call(partial(_compute_here, torch.get_num_threads(), self._job.device))

    def _serve(self) -> None:
        """A rank other than 0, until rank 0 closes its LLM."""
        if not self._job.seat.leads:
            self._job.serve()
            return
        eos_token_ids, vocab_size = self._defaults.eos_token_ids, self._job.facts.vocab_size
        tokenizer = Tokenizer.load(self._model_dir, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self._job.lead(eos_token_ids, tokenizer.stop_checker)

    def _prepare(self, run_dir: RunDirectory, config: RunConfig, model_dir: Path, facts: ModelFacts) -> None:
        """Rank 0's part."""
        run_dir.write_run(self._job.describe())
        eos_token_ids = self._defaults.eos_token_ids
        self._tokenizer = Tokenizer.load(model_dir, vocab_size=facts.vocab_size, eos_token_ids=eos_token_ids)
        self._driver: Engine | Dispatcher = self._job.driver(
            eos_token_ids, self._tokenizer.stop_checker, lambda snapshot: None, _log.warning
        )
        run = self._job.run
        limits = Limits(run.max_model_len, run.num_pages, run.page_size, facts.vocab_size)
        if (small := limits.small_kv_cache()) is not None:
            _log.warning(small)
        self._maker = RequestMaker(
            self._tokenizer, self._defaults, limits, config.seed, parse_policy(config.policy).kind.wants_paragraphs
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts, each a string or a list of token ids.

        sampling_params: for all prompts, or one each; None takes the model's generation_config.json.
        Raises PeerLostError if a stage is lost, ConfigError for arguments that are none of these.
        """
        if not isinstance(prompts, Sequence):
            raise ConfigError(f"prompts is {prompts!r:.60}; give a string, token ids, or a list of them")
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            return self._run([_prompt_line(prompts)], sampling_params)
        return self._run([_prompt_line(prompt) for prompt in prompts], sampling_params)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """The same for conversations, each a list of {"role", "content"}, through the model's chat template."""
        one = bool(messages) and isinstance(messages[0], dict)
        chats = cast(Sequence[Messages], [messages] if one else messages)
        return self._run([ParsedLine(0, None, "own", messages=chat) for chat in chats], sampling_params)

    def close(self) -> dict[str, Any] | None:
        """End the workers; returns the report of everything generated (None if there is none).

        A call of another thread that is still generating raises ConfigError. A second close waits for the first.
        Without causes and advice: with a `run_dir`, `sarathi-pp report` finds them.
        """
        return self._finish(self._farewell)

    def _farewell(self) -> dict[str, Any] | None:
        """Send the stages home; returns the report. None if they are lost."""
        if self._place.rank == 0:
            if self._driver.is_lost:
                return None
            self._driver.close()
        return self._job.finish()

    def _finish(self, last: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """Do this last thing and let go of everything, in the thread that no signal interrupts."""

        def work(call: Call[dict[str, Any] | None]) -> dict[str, Any] | None:
            if self._closed:
                return None
            self._closed = True
            try:
                return last()
            finally:
                self._held.close()

        with self._lock:
            first, self._closing = self._end is None, True
            if self._end is None:
                end = Call(work)
                self._thread.submit(end)
                self._end = end
        try:
            self._end.wait()
        except BaseException:
            # Whatever the thread waits for ends with the workers.
            threading.Thread(target=self._workers.stop, name="stop workers", daemon=True).start()
            raise
        atexit.unregister(self.close)
        self._thread.join(_TIDY_S)
        return self._end.result() if first else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # Let go without a word to the stages: something went wrong, and they may not be listening.
        self._closing = True
        threading.Thread(target=self._workers.stop, name="stop workers", daemon=True).start()
        self._finish(lambda: None)

    def _run(
        self, lines: list[ParsedLine], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        if self._place.rank != 0:
            if not self._closing:
                try:
                    self._serve()
                except BaseException:
                    self._finish(lambda: None)
                    raise
                self.close()
            return []
        params = self._params(sampling_params, len(lines))
        call = Call[list[RequestOutput]](partial(self._answer, lines, params))
        try:
            with self._lock:
                self._check_open()
                self._thread.submit(call)
            call.wait()
        except BaseException:
            call.cancel()
            if call.submitted:
                call.wait(_ABORT_S)
            raise
        return call.result()

    def _answer(
        self, lines: list[ParsedLine], params: Sequence[SamplingParams | None], call: Call[list[RequestOutput]]
    ) -> list[RequestOutput]:
        def go_on() -> None:
            call.check()
            self._check_open()

        rows = []
        for line, one in zip(lines, params, strict=True):
            go_on()
            rows.append(self._row(line, one))
        sink = MemorySink(self._tokenizer)
        self._driver.run(MemorySource(rows), sink, go_on)
        finished = {ended.row.line: ended for ended in sink.finished}
        return [_output(line, finished[row.line]) for line, row in zip(lines, rows, strict=True)]

    def _check_open(self) -> None:
        if self._closing:
            raise ConfigError("this LLM is closed; make a new one")

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams | None]:
        if given is None or isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, Sequence) or not all(isinstance(params, SamplingParams) for params in given):
            raise ConfigError(f"sampling_params is {given!r:.60}; give SamplingParams(...), or a list of them")
        if len(given) != count:
            raise ConfigError(f"{len(given)} sampling_params were given for {count} prompts; give one, or one each")
        return given

    def _row(self, line: ParsedLine, params: SamplingParams | None) -> Row:
        index = self._next_index
        self._next_index += 1
        numbered = replace(line, line=index + 1, id=index, overrides=asdict(params) if params else {})
        maker = self._maker if params is None else replace(self._maker, defaults=GenerationDefaults())
        now_s = self._clock.now()
        try:
            return Row(index + 1, index, "own", request=maker.make(numbered, index, now_s), arrival_s=now_s)
        except RowError as error:
            return Row(index + 1, index, "own", error=error, arrival_s=now_s)


def _compute_here(num_threads: int, device: torch.device) -> None:
    """Let the calling thread compute as the one does that has set up the stage."""
    torch.set_num_threads(num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def _only_one() -> Iterator[None]:
    """Refuse a second LLM among ranks that torchrun has started: the other ranks serve one until it is closed."""
    if not _among_ranks.acquire(blocking=False):
        raise ConfigError("another LLM is open in this program, which torchrun has started; close that one first")
    try:
        yield
    finally:
        _among_ranks.release()


def _prompt_line(prompt: object) -> ParsedLine:
    if isinstance(prompt, str):
        return ParsedLine(0, None, "own", prompt=prompt)
    try:
        return ParsedLine(0, None, "own", prompt_token_ids=tuple(map(operator.index, prompt)))  # type: ignore[call-overload]
    except TypeError:
        raise ConfigError(f"prompts holds {prompt!r:.60}; each must be a string or a list of token ids") from None


def _output(line: ParsedLine, ended: FinishedRow) -> RequestOutput:
    request = ended.row.request
    prompt_token_ids = tuple(request.prompt_token_ids) if request else ()
    if ended.completion is None:
        return RequestOutput(line.prompt, prompt_token_ids, (), error=ended.error)
    completion = ended.completion
    output = CompletionOutput(ended.text, completion.token_ids, completion.finish_reason)
    return RequestOutput(line.prompt, prompt_token_ids, (output,), metrics=dict(ended.metrics or {}))
