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

from sarathi_pp.analysis.replicas import figures
from sarathi_pp.config import RunConfig, SamplingParams, stages_among
from sarathi_pp.core.partition import partition
from sarathi_pp.core.policy import module_being_imported, parse_policy
from sarathi_pp.core.request import FinishReason
from sarathi_pp.distributed.control_plane import ControlPlane
from sarathi_pp.distributed.environment import RankEnvironment, find_environment, mesh_of
from sarathi_pp.distributed.launcher import Workers
from sarathi_pp.distributed.start_watch import watching_start
from sarathi_pp.engine.progress import Progress
from sarathi_pp.errors import ConfigError, RowError, SarathiError
from sarathi_pp.inputs.generation_config import GenerationDefaults, read_generation_config
from sarathi_pp.inputs.parse import ParsedLine
from sarathi_pp.inputs.request_maker import RequestMaker
from sarathi_pp.inputs.row import Row
from sarathi_pp.inputs.source import MemorySource
from sarathi_pp.model.checkpoint.fetch import find_model
from sarathi_pp.model.checkpoint.support import check_model, check_shards
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.outputs.sink import FinishedRow, MemorySink
from sarathi_pp.process.call_thread import Call, CallThread
from sarathi_pp.process.watchdog import Watchdog
from sarathi_pp.run.auto_options import tuned
from sarathi_pp.run.preflight import Preflight
from sarathi_pp.run.rank import Driver, Rank, set_up
from sarathi_pp.run.setup import Member, agree_on_start
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
class _Answering:
    """What rank 0 turns prompts into requests with, and requests into answers."""

    tokenizer: Tokenizer
    driver: Driver
    maker: RequestMaker


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
        _refuse_in_an_import()
        env = find_environment()
        self._env = env or RankEnvironment()
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
            scratch = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="sarathi-pp-")))
            checked = _check(cast(str, model), stages, options, env, scratch / "run")
            # Leaving the others comes behind stopping the workers: a thread that waits for one then ends.
            joined = self._held.enter_context(ExitStack())
            self._workers = Workers(scratch / "store", mesh_of(checked.config), first_rank=1)
            self._held.callback(self._workers.stop)
            with _one_set_up:
                self._rank = self._set_up(checked, joined, started=env is not None)
                self._answering = self._prepare()
            atexit.register(self.close)
        except BaseException:
            self._thread.call(self._held.close)
            raise

    def _set_up(self, checked: Preflight, joined: ExitStack, *, started: bool) -> Rank:
        """Start the workers and join them, load this rank's stage.

        Args:
            joined: closed to leave the others.
            started: torchrun has started the ranks.
        """
        config, workers = checked.config, self._workers
        if started and self._env.world_size > 1:
            joined.enter_context(_only_one())
        try:
            with ExitStack() as watched:
                if not started and config.num_ranks > 1:
                    self._env = workers.rank_environment(0)
                    # In a thread that no signal interrupts, so that each worker is known that was started.
                    self._thread.call(partial(workers.start, ("worker", json.dumps(asdict(config), default=str))))
                    watched.enter_context(watching_start(workers, config.join_timeout_s))
                plane = ControlPlane.join(self._env, config.join_timeout_s, config.peer_timeout_s, mesh_of(config))
            joined.callback(plane.leave)
            member = Member(checked, plane, Watchdog(None), self._clock)
            rank = set_up(member, agree_on_start(member))
        except BaseException as error:
            if config.run_dir is not None and self._env.rank == 0 and isinstance(error, SarathiError):
                checked.run_dir.write_exit_code(error.exit_code)  # it was refused: another may start there
            raise
        self._held.callback(rank.abandon)
        return rank

    def _prepare(self) -> _Answering | None:
        """Rank 0's part: what turns prompts into requests and answers them. None on other ranks."""
        rank = self._rank
        if self._env.rank != 0:
            return None
        rank.checked.run_dir.write_run(rank.describe())
        tokenizer = rank.checked.tokenizer()
        listener = _Logged()
        driver = rank.driver(tokenizer, listener)
        maker = rank.request_maker(tokenizer, listener)
        self._thread.call(partial(_compute_here, torch.get_num_threads(), rank.device))
        return _Answering(tokenizer, driver, maker)

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
        if self._answering is not None:
            if self._answering.driver.is_lost:
                return None
            self._answering.driver.close()
        finished = self._rank.finish()
        return finished.keep(figures(finished.traces, finished.facts)) if finished is not None else None

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
        if self._env.rank != 0:
            if not self._closing:
                try:
                    self._rank.serve()
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
        assert self._answering is not None, "rank 0 alone answers"
        rows = []
        for line, one in zip(lines, params, strict=True):
            self._check_going_on(call)
            rows.append(self._row(self._answering.maker, line, one))
        sink = MemorySink(self._answering.tokenizer)
        self._answering.driver.run(MemorySource(rows), sink, _Calling(self, call))
        finished = {ended.row.line: ended for ended in sink.finished}
        return [_output(line, finished[row.line]) for line, row in zip(lines, rows, strict=True)]

    def _check_going_on(self, call: Call[list[RequestOutput]]) -> None:
        """Raise if the caller was interrupted, or another thread closes this LLM."""
        call.check()
        self._check_open()

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

    def _row(self, maker: RequestMaker, line: ParsedLine, params: SamplingParams | None) -> Row:
        index = self._next_index
        self._next_index += 1
        numbered = replace(line, line=index + 1, id=index, overrides=asdict(params) if params else {})
        if params is not None:
            maker = replace(maker, defaults=GenerationDefaults())
        now_s = self._clock.now()
        try:
            return Row(index + 1, index, "own", request=maker.make(numbered, index, now_s), arrival_s=now_s)
        except RowError as error:
            return Row(index + 1, index, "own", error=error, arrival_s=now_s)


def _refuse_in_an_import() -> None:
    """Refuse an LLM at the top level of the module that a policy is imported from: the import would not end."""
    module = module_being_imported()
    if module is not None:
        raise ConfigError(
            f"{module} is imported for its policy, and starts an LLM; put what it runs below "
            f'if __name__ == "__main__":, or the policy into a module of its own'
        )


def _check(
    model: str, stages: int | None, options: dict[str, Any], env: RankEnvironment | None, unnamed: Path
) -> Preflight:
    """Refuse what can be refused before anything is started or loaded.

    Args:
        unnamed: the run directory if the options name none.
    """
    try:
        config = RunConfig(model=model, stages=1 if stages is None else stages, **options)
    except TypeError as error:
        raise ConfigError(f"LLM(): {error}; the options are the fields of RunConfig") from None
    if env is not None:
        shards = config.tensor_parallel_size
        config = replace(config, stages=stages_among(env.world_size, stages, config.replicas, shards))
    parse_policy(config.policy)
    model_dir = find_model(config.model)
    facts = check_model(model_dir)
    check_shards(model_dir, config.tensor_parallel_size)
    config = tuned(config, facts)
    partition(facts.num_layers, config.stages, config.layer_split)
    defaults = read_generation_config(model_dir, config.override_generation_config)
    defaults = defaults.with_command(config.sampling_overrides)
    run_dir = RunDirectory.unnamed(unnamed) if config.run_dir is None else RunDirectory(config.run_dir)
    if config.run_dir is not None and (env is None or env.rank == 0):
        RunDirectory.check(config.run_dir, overwrite=False)
    return Preflight(config, model_dir, None, facts, defaults, run_dir)


class _Logged:
    """A run's reports: warnings go to the log."""

    def report_progress(self, progress: Progress) -> None: ...

    def warn(self, text: str) -> None:
        _log.warning(text)


@dataclass(frozen=True, slots=True)
class _Calling:
    """A call is never asked to stop: it is ended by an error."""

    llm: LLM
    call: Call[list[RequestOutput]]

    def asked(self) -> None:
        self.llm._check_going_on(self.call)


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
