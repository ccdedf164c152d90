"""An LLM: a model on its stages, ready for the calls of a Python program."""

from __future__ import annotations

import atexit
import json
import os
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from sarathi_pp.api.arguments import Arguments
from sarathi_pp.api.call import Answers
from sarathi_pp.api.outputs import RequestOutput
from sarathi_pp.api.prompts import Messages, Prompt, chat_lines, params_of_each, prompt_lines
from sarathi_pp.api.terminal import Terminal
from sarathi_pp.checkpoint.facts.support import check_model, check_shards
from sarathi_pp.checkpoint.fetch import find_model
from sarathi_pp.config import stages_among
from sarathi_pp.core.partition import partition
from sarathi_pp.core.policy import module_being_imported, parse_policy
from sarathi_pp.distributed.control_plane import ControlPlane
from sarathi_pp.distributed.environment import RankEnvironment, find_environment, mesh_of
from sarathi_pp.distributed.launcher import Workers
from sarathi_pp.distributed.start_watch import watching_start
from sarathi_pp.errors import ConfigError, InputError, RowError, SarathiError
from sarathi_pp.inputs.chat.messages import read_messages
from sarathi_pp.inputs.generation_config import GenerationDefaults, read_generation_config
from sarathi_pp.inputs.parse import ParsedLine
from sarathi_pp.inputs.request_maker import RequestMaker
from sarathi_pp.inputs.row import Row
from sarathi_pp.inputs.source import MemorySource
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.process.call_thread import Call, CallThread
from sarathi_pp.process.watchdog import Watchdog
from sarathi_pp.run.auto_options import tuned
from sarathi_pp.run.preflight import Preflight
from sarathi_pp.run.rank import Driver, Rank, set_up
from sarathi_pp.run.setup import Member, agree_on_start
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.text.tokenizer import Tokenizer
from sarathi_pp.trace.clock import SystemClock

# Seconds in which an interrupted call may end its microbatch and clean up. Then the interrupt is raised.
_ABORT_S = 5.0
# A report waits up to _TRACES_S seconds until the traces hold all answers, and reads them every _LOOK_S seconds.
# Answers of a lost replica are in no trace that is read. After a loss, it waits for _WRITTEN_S, which writing usually
# takes.
_TRACES_S = 5.0
_WRITTEN_S = 1.0
_LOOK_S = 0.1
# Seconds in which the thread of a closed LLM may end. It has no more work.
_TIDY_S = 5.0
# Only one LLM is set up at a time, because that changes the environment and torch's number of threads.
_one_set_up = threading.Lock()
# Held by the one LLM that may be open on ranks that torchrun has started.
_among_ranks = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Answering:
    """The objects with which rank 0 turns prompts into requests, and requests into answers."""

    tokenizer: Tokenizer
    driver: Driver
    maker: RequestMaker


class LLM:
    """A model on its pipeline stages, ready to generate. The constructor loads it, and `close` ends it.

    Calls from several threads run one after the other. After an exception or an interrupt in a call, the next call
    works. If a stage was lost, it raises PeerLostError.

    Args:
        model: directory of the model, or its id on the Hugging Face Hub.
        stages: number of pipeline stages per replica. None: 1, or under torchrun the number that its processes allow.
        options: other fields of RunConfig (policy, chunk_size, dtype, kv_cache_memory_bytes, ...). The names that the
            command and vLLM use for these fields are accepted too.

    Raises:
        SarathiError: the errors with which the command line would exit.
    """

    def __init__(self, model: str | os.PathLike[str], *, stages: int | None = None, **options: Any) -> None:
        _refuse_in_an_import()
        env = find_environment()
        self._env = env or RankEnvironment()
        self._clock = SystemClock()
        self._arguments = Arguments(model, stages, options)
        self._terminal = Terminal(self._arguments, shown=self._env.rank == 0)
        self._next_index = self._num_ended = 0
        self._lock = threading.Lock()
        self._closing = self._closed = False
        self._end: Call[dict[str, Any] | None] | None = None
        self._final: dict[str, Any] | None = None
        # Everything to release at the end or after a failure, in reverse order.
        self._held = ExitStack()
        self._thread = CallThread("LLM")
        self._held.callback(self._thread.close)
        try:
            with self._arguments.named(), self._terminal.loading():
                scratch = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="sarathi-pp-")))
                with self._terminal.activity.phase("reading the model's configuration"):
                    checked = _check(self._arguments, stages, env, scratch / "run")
                # Leave the other ranks after the workers are stopped: then a thread that waits for a worker has ended.
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
        """Start the workers, join them and load this rank's stage.

        Args:
            joined: receives the cleanup that closes the connections to the other ranks.
            started: True if torchrun has started the ranks.
        """
        config, workers = checked.config, self._workers
        if started and self._env.world_size > 1:
            joined.enter_context(_only_one())
        try:
            with ExitStack() as watched:
                if not started and config.num_ranks > 1:
                    self._env = workers.rank_environment(0)
                    # Start them in a thread that no signal interrupts, so that every started worker is known.
                    self._thread.call(partial(workers.start, ("worker", json.dumps(asdict(config), default=str))))
                    watched.enter_context(watching_start(workers, config.join_timeout_s))
                mesh, activity = mesh_of(config), self._terminal.activity
                plane = ControlPlane.join(self._env, config.join_timeout_s, config.peer_timeout_s, mesh, activity)
            joined.callback(plane.leave)
            member = Member(checked, plane, Watchdog(None), self._clock)
            rank = set_up(member, agree_on_start(member))
        except BaseException as error:
            if config.run_dir is not None and self._env.rank == 0 and isinstance(error, SarathiError):
                checked.run_dir.write_exit_code(
                    error.exit_code
                )  # the start was refused, so another run may use the directory
            raise
        self._held.callback(rank.abandon)
        return rank

    def _prepare(self) -> _Answering | None:
        """Return the objects with which rank 0 answers prompts; None on other ranks."""
        rank = self._rank
        if self._env.rank != 0:
            return None
        rank.checked.run_dir.write_run(rank.describe())
        driver = rank.driver(self._terminal)
        maker = rank.request_maker(self._terminal)
        self._thread.call(partial(_compute_here, torch.get_num_threads(), rank.device))
        return _Answering(rank.tokenizer, driver, maker)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return the answers in the order of the prompts.

        Args:
            prompts: one prompt or a list of them. A prompt is a string, a list of token ids, or a dictionary with
                `prompt` or `prompt_token_ids`.
            sampling_params: one for all prompts, or a list with one per prompt. None: the values of the model's
                generation_config.json.
            use_tqdm: show the progress on standard error if it is a terminal.

        Raises:
            ConfigError: an argument has a wrong type.
            PeerLostError: a stage was lost.
        """
        return self._all(prompt_lines(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Return the answers to conversations. The model's chat template turns them into prompts. See `generate`.

        Args:
            messages: one conversation or a list of them. A conversation is a list of {"role": ..., "content": ...}.
            add_generation_prompt: end the prompt with the opening of the model's answer.
            continue_final_message: let the model continue the last message. Set add_generation_prompt to False then.
            tools: functions that the model may call, in OpenAI's form.
            chat_template_kwargs: variables for the chat template, such as {"enable_thinking": False}.

        Raises:
            RowError: an argument of the chat template is not legal.
        """
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        return self._all(chat_lines(messages, options), sampling_params, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Yield each answer when it is complete. `index` is the position of its prompt.

        The requests start with the first `next`. If the loop ends early, by `break` or an exception, the requests
        without an answer are cancelled. Arguments and errors are those of `generate`.
        """
        lines = prompt_lines(prompts)
        return self._answers(lines, params_of_each(sampling_params, len(lines)), shown=False)

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of transformers; None for a model without tokenizer files, and on ranks other than 0."""
        return self._answering.tokenizer.backend if self._answering is not None else None

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt with its output. It is at most the number of tokens that the KV cache holds."""
        run = self._rank.run
        return min(run.max_model_len, run.num_pages * run.page_size)

    def report(self) -> dict[str, Any] | None:
        """Return the report of all work so far, with the keys of report.json. After `close`, return the last report.

        Return None on ranks other than 0. Also return None after `close` if a stage was lost, or if the `with` block
        ended with an exception.

        Raises:
            MissingError: stages of other hosts keep their traces until `close`.
        """
        if self._answering is None:
            return None
        while self._end is None:
            try:
                with self._arguments.named():
                    return self._report_so_far()
            except (SarathiError, OSError):
                if self._end is None:  # otherwise another thread has closed this LLM
                    raise
        self._end.wait()
        return self._final

    def _report_so_far(self) -> dict[str, Any]:
        """Return the report from the traces. Ranks write them twice per second, so wait until they hold all answers."""
        from sarathi_pp.report.run_reader import explain  # scipy is slow to import

        start_s, num_ended = self._clock.now(), self._num_ended
        while True:
            so_far = self._rank.run_so_far()
            late = self._clock.now() >= start_s + (_WRITTEN_S if so_far.lost else _TRACES_S)
            try:
                run = explain(so_far.traces, so_far.facts)
                num_traced = run.report["completed"] + run.report["failed"]
                if late or num_traced >= num_ended or any(each.timeline.is_cut for each in run.replicas):
                    return so_far.counted(run.report)
            except InputError:  # a stage has written nothing yet
                if late:
                    raise
            self._clock.sleep(_LOOK_S)

    def close(self) -> dict[str, Any] | None:
        """End the workers. Return the report of all work, or None if there is no report.

        If another thread is still in a call, that call raises ConfigError. A second `close` waits for the first one and
        returns None. For advice, set `run_dir` and use `sarathi-pp report`.
        """
        with self._arguments.named():
            return self._finish(self._farewell)

    def _farewell(self) -> dict[str, Any] | None:
        """End the stages in order, and return the report; None if a stage was lost."""
        if self._answering is not None:
            if self._answering.driver.is_lost:
                return None
            self._answering.driver.close()
        finished = self._rank.finish()
        if finished is None:
            return None
        from sarathi_pp.report.run_reader import explain  # scipy is slow to import

        self._final = finished.keep([explain(finished.traces, finished.facts).report])
        return self._final

    def _finish(self, last: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """Call `last` and release everything, in the thread that no signal interrupts. A second call only waits.

        Args:
            last: the work before the release. It returns the report, or None if there is no report.
        """

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
            # Stop the workers: then the thread no longer waits for them.
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
        # Release everything without a message to the stages: after an error, they may not be listening.
        self._closing = True
        threading.Thread(target=self._workers.stop, name="stop workers", daemon=True).start()
        self._finish(lambda: None)

    def _all(
        self,
        lines: list[ParsedLine],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if not isinstance(use_tqdm, bool):
            raise ConfigError(f"use_tqdm is {use_tqdm!r:.60}; it must be True or False")
        answers = self._answers(lines, params_of_each(sampling_params, len(lines)), shown=use_tqdm)
        return sorted(answers, key=attrgetter("index"))

    def _answers(
        self, lines: list[ParsedLine], params: Sequence[SamplingParams | None], *, shown: bool
    ) -> Generator[RequestOutput, None, None]:
        """Yield each answer when it is complete. The end of the generator, at any point, ends the call."""
        with self._arguments.named():
            if self._answering is None:
                self._serve()
                return
            answers = Answers(lines, self._answering.tokenizer)
            call = Call[None](partial(self._answer, lines, params, answers, shown))
            try:
                with self._lock:
                    self._check_open()
                    self._thread.submit(call)
                yield from answers.until_end(call)
            except BaseException:
                call.cancel()
                if call.submitted:
                    call.wait(_ABORT_S)
                raise
            call.result()

    def _serve(self) -> None:
        """Compute this stage until rank 0 closes its LLM, on ranks other than 0."""
        if self._closing:
            return
        try:
            self._rank.serve()
        except BaseException:
            self._finish(lambda: None)
            raise
        self.close()

    def _answer(
        self,
        lines: list[ParsedLine],
        params: Sequence[SamplingParams | None],
        answers: Answers,
        shown: bool,
        call: Call[None],
    ) -> None:
        """Run one call, in the thread that runs all calls."""
        assert self._answering is not None, "only rank 0 answers"
        try:
            rows: list[Row] = []
            for line, each in zip(lines, params, strict=True):
                self._check_going_on(call)
                rows.append(self._row(self._answering.maker, line, each))
            answers.start(rows)
            order = self._rank.prefix_order()
            arranged = rows if order is None else order.arranged(rows)
            source = MemorySource([choice for row in arranged for choice in row.choices()])
            with self._terminal.calling(len(lines), shown=shown):
                driver = self._answering.driver
                driver.report_progress()
                driver.run(source, answers, _Calling(self, call))
        finally:
            self._num_ended += answers.num_ended
            answers.close()

    def _check_going_on(self, call: Call[None]) -> None:
        """Raise an error if the caller was interrupted, or if another thread closes this LLM."""
        call.check()
        self._check_open()

    def _check_open(self) -> None:
        if self._closing:
            raise ConfigError("this LLM is closed. Make a new one")

    def _row(self, maker: RequestMaker, line: ParsedLine, params: SamplingParams | None) -> Row:
        """Return the row of a prompt. Its number counts from the start of this LLM."""
        index = self._next_index
        self._next_index += 1
        overrides = _given(params)
        if params is not None:
            maker = replace(maker, defaults=GenerationDefaults(eos_token_ids=maker.defaults.eos_token_ids))
        now_s = self._clock.now()
        try:
            messages = None if line.messages is None else read_messages(line.messages)
            numbered = replace(line, line=index + 1, id=index, overrides=overrides, messages=messages)
            request, tools = maker.make(numbered, index, now_s), maker.offered_tools(numbered)
            return Row(index + 1, index, "own", request=request, arrival_s=now_s, tools=tools)
        except RowError as error:
            return Row(index + 1, index, "own", error=error, arrival_s=now_s)


def _given(params: SamplingParams | None) -> dict[str, object]:
    """Return the values of all fields, by name."""
    return {one.name: getattr(params, one.name) for one in fields(params)} if params is not None else {}


def _refuse_in_an_import() -> None:
    """Refuse an LLM at the top level of a policy's module, because the import of that module would not end."""
    module = module_being_imported()
    if module is not None:
        raise ConfigError(
            f"{module} is imported for its policy, and starts an LLM. Put the code that starts it below "
            f'if __name__ == "__main__":, or put the policy into its own module'
        )


def _check(arguments: Arguments, stages: int | None, env: RankEnvironment | None, unnamed: Path) -> Preflight:
    """Check the arguments and the model before any process starts and any weights are loaded.

    Args:
        unnamed: the run directory if the arguments give none.
    """
    config = arguments.config()
    if env is not None:
        shards = config.tensor_parallel_size
        config = replace(config, stages=stages_among(env.world_size, stages, config.replicas, shards))
    parse_policy(config.policy)
    model_dir = find_model(config.model)
    facts = check_model(model_dir)
    check_shards(model_dir, config.tensor_parallel_size)
    facts.prefix_cache(config.prefix_cache)  # raises for a model that has none
    config = tuned(config, facts)
    partition(facts.num_layers, config.stages, config.layer_split)
    defaults = read_generation_config(model_dir, config.override_generation_config)
    defaults = defaults.with_command(config.sampling_overrides)
    run_dir = RunDirectory.unnamed(unnamed) if config.run_dir is None else RunDirectory(config.run_dir)
    if config.run_dir is not None and (env is None or env.rank == 0):
        _check_run_dir(config.run_dir)
    return Preflight(config, model_dir, None, facts, defaults, run_dir)


def _check_run_dir(path: Path) -> None:
    """Refuse a run directory that an earlier run has used."""
    try:
        RunDirectory.check(path, overwrite=False)
    except ConfigError:
        raise ConfigError(f"the run directory {path} exists. Give run_dir the name of a new one") from None


@dataclass(frozen=True, slots=True)
class _Calling:
    """The stop check of one call. A call that must stop raises an error, and does not finish its running requests."""

    llm: LLM
    call: Call[None]

    def asked(self) -> None:
        self.llm._check_going_on(self.call)


def _compute_here(num_threads: int, device: torch.device) -> None:
    """Give the calling thread the device and the number of threads of the thread that set up the stage."""
    torch.set_num_threads(num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def _only_one() -> Iterator[None]:
    """Refuse a second LLM on ranks that torchrun has started: the other ranks serve one LLM until it is closed."""
    if not _among_ranks.acquire(blocking=False):
        raise ConfigError("another LLM is open in this program, which torchrun has started. Close that LLM first")
    try:
        yield
    finally:
        _among_ranks.release()
