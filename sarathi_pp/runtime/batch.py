"""Batch generation: a file of prompts in, a file of answers out, a report beside it. One call a rank."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

from sarathi_pp.config import ResolvedRun, RunConfig
from sarathi_pp.core.partition import partition
from sarathi_pp.core.policy import make_policy, uses_chunk_size, wants_paragraphs
from sarathi_pp.core.profile import Profile
from sarathi_pp.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_ROWS_FAILED, ConfigError, SarathiError
from sarathi_pp.model.support import ModelFacts, check_model
from sarathi_pp.runtime.fetch import find_model
from sarathi_pp.runtime.generation_config import GenerationDefaults, read_generation_config
from sarathi_pp.runtime.place import Place, find_place
from sarathi_pp.runtime.rows import Row
from sarathi_pp.runtime.rundir import RunDirectory
from sarathi_pp.runtime.sink import FileSink, OutputClosedError, Sink, check_output
from sarathi_pp.runtime.snapshot import Snapshot
from sarathi_pp.runtime.source import FileSource, Limits, MemorySource, RequestMaker, check_input
from sarathi_pp.runtime.text import Tokenizer
from sarathi_pp.runtime.tuning import profile_mismatch, tuned
from sarathi_pp.runtime.watchdog import Watchdog
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.trace.summary import Analyse, figures

if TYPE_CHECKING:
    from sarathi_pp.runtime.job import Job


@dataclass(frozen=True, slots=True)
class BatchJob:
    config: RunConfig
    input_path: str
    output_path: str
    overwrite: bool
    metrics_port: int | None = None


@dataclass(frozen=True, slots=True)
class Preflight:
    """What is known of a job before any of its processes starts.

    config: the job's, with what the profile decides. model_dir: None where the stages are emulated by `profile`.
    """

    config: RunConfig
    model_dir: Path | None
    profile: Profile | None
    facts: ModelFacts
    defaults: GenerationDefaults
    run_dir: RunDirectory
    warnings: tuple[str, ...]


class Display(Protocol):
    """Who shows a run to the user; only rank 0 talks."""

    def warn(self, text: str) -> None: ...
    def progress(self, num_stages: int) -> AbstractContextManager[Callable[[Snapshot], None]]: ...
    def report(self, report: dict[str, Any]) -> None: ...
    def error(self, text: str) -> None: ...


def preflight(job: BatchJob) -> Preflight:
    """Refuse what can be refused without torch, before a worker starts and before a file is touched."""
    config = job.config
    make_policy(config.policy)
    check_input(job.input_path)
    check_output(job.output_path, job.input_path, overwrite=job.overwrite)
    if job.metrics_port is not None:
        from sarathi_pp.runtime.metrics import check_port

        check_port(job.metrics_port)
    run_dir = _run_directory(job)
    RunDirectory.check(run_dir.path, overwrite=job.overwrite)
    config, model_dir, profile, facts = _open_model(config)
    partition(facts.num_layers, config.stages, config.layer_split)
    facts.max_model_len(config.max_model_len)
    defaults = read_generation_config(model_dir) if model_dir is not None else GenerationDefaults()
    defaults = defaults.with_command(config.sampling_overrides)
    warnings = [*defaults.warnings, *profile_mismatch(config, facts)]
    if job.config.chunk_size is not None and not uses_chunk_size(config.policy):
        warnings.append(f"--policy {config.policy} does not use --chunk-size: its own rule says how long prompts run")
    return Preflight(config, model_dir, profile, facts, defaults, run_dir, tuple(warnings))


def _run_directory(job: BatchJob) -> RunDirectory:
    return RunDirectory(job.config.run_dir or RunDirectory.default_path(job.output_path))


def run_batch(job: BatchJob, place: Place | None, display: Display, analyse: Analyse = figures) -> int:
    """One rank of the run (the only one where place is None); returns the exit code of this process.

    analyse: makes the report of the run's traces.
    """
    rank = place or Place()
    try:
        checked = preflight(job) if rank.rank == 0 else _follow(job)
    except SarathiError as error:
        # torchrun ends with 1 whatever a rank ends with, and stops the others as soon as one has ended.
        if rank.world_size > 1:
            _run_directory(job).write_refusal(error.exit_code, overwrite=job.overwrite)
        raise
    with ExitStack() as held:
        if rank.rank == 0:
            held.enter_context(RunDirectory.claim(checked.run_dir.path, overwrite=job.overwrite))
            for warning in checked.warnings:
                display.warn(warning)
        return _run_checked(job, checked, rank, display, analyse)


def _run_checked(job: BatchJob, checked: Preflight, rank: Place, display: Display, analyse: Analyse) -> int:
    def drive(this: Job) -> None:
        if rank.rank != 0:
            this.serve()
        else:
            checked.run_dir.write_run(this.describe())
            _answer(job, checked, this, display)

    def work() -> int:
        located = mine.append
        report = _run_rank(checked, rank, leave, drive, located, analyse)
        if report is None:
            return EXIT_OK
        display.report(report)
        return EXIT_ROWS_FAILED if report["failed"] else EXIT_OK

    def leave(error: SarathiError) -> None:
        display.error(f"{type(error).__name__}: {error}")
        note(error.exit_code)

    def note(code: int) -> None:
        if mine and (code or rank.rank == 0):
            mine[-1].write_exit_code(code)

    # Where this rank may write: rank 0's directory is its own from here on, the others' is named by rank 0.
    mine: list[RunDirectory] = [checked.run_dir] if rank.rank == 0 else []
    return _end(work, rank, display.error, note)


def run_rows(
    config: RunConfig,
    place: Place | None,
    make_rows: Callable[[ResolvedRun, ModelFacts], Sequence[Row]],
    sink: Sink,
    display: Display,
    analyse: Analyse,
    overwrite: bool,
) -> int:
    """One rank of a run whose rows are made, not read; returns the exit code of this process.

    make_rows: called on rank 0, once the run is known. sink: gets what they end with, on rank 0. The run directory is
    thrown away unless the configuration names one; then `overwrite` says whether it may replace an earlier run's.
    """
    rank = place or Place()
    config, model_dir, profile, facts = _open_model(config)
    # Inside the launcher's own directory, which it removes, where there is one: a rank that fails does not tidy up.
    private = Path(rank.store).parent if rank.store else None
    with TemporaryDirectory(prefix="sarathi-pp-", dir=private) as scratch, ExitStack() as held:
        if config.run_dir is not None and rank.rank == 0:
            held.enter_context(RunDirectory.claim(config.run_dir, overwrite=overwrite))
        run_dir = RunDirectory(config.run_dir or Path(scratch) / "run")
        config = replace(config, run_dir=run_dir.path)
        checked = Preflight(config, model_dir, profile, facts, GenerationDefaults(), run_dir, ())

        def drive(this: Job) -> None:
            if rank.rank != 0:
                this.serve()
                return
            with ExitStack() as stack:
                observe = stack.enter_context(display.progress(this.run.num_stages))
                stack.push(lambda kind, error, trace: this.take_over() if error is not None else None)
                run_dir.write_run(this.describe())
                engine = this.engine((), lambda stop: None, observe)
                engine.run(MemorySource(make_rows(this.run, this.facts)), sink)
                engine.close()

        def leave(error: SarathiError) -> None:
            display.error(f"{type(error).__name__}: {error}")
            run_dir.write_exit_code(error.exit_code)

        def work() -> int:
            report = _run_rank(checked, rank, leave, drive, analyse=analyse)
            if report is not None:
                display.report(report)
            return EXIT_OK

        return _end(work, rank, display.error, run_dir.write_exit_code)


def serve_llm(config: RunConfig, say: Callable[[str], None]) -> int:
    """One worker rank of a Python program's LLM; returns the exit code of this process."""
    place = find_place()
    if place is None:
        raise ConfigError("a worker is started by the program whose LLM it serves; use `sarathi-pp generate`")
    model_dir = find_model(config.model)
    anywhere = RunDirectory(Path())  # rank 0 names the real one
    checked = Preflight(config, model_dir, None, check_model(model_dir), GenerationDefaults(), anywhere, ())

    def leave(error: SarathiError) -> None:
        """The program has the error too, and says it to its user."""

    def work() -> int:
        _run_rank(checked, place, leave, lambda this: this.serve())
        return EXIT_OK

    return _end(work, place, say, lambda code: None)


def _follow(job: BatchJob) -> Preflight:
    """What a rank other than 0 needs to know; it reads no input and writes no output."""
    return Preflight(*_open_model(job.config), GenerationDefaults(), _run_directory(job), ())


def _open_model(config: RunConfig) -> tuple[RunConfig, Path | None, Profile | None, ModelFacts]:
    """The model's directory, or the profile that stands in for it, and the facts of either."""
    if config.emulate is None:
        model_dir = find_model(config.model)
        facts = check_model(model_dir)
        return tuned(config, facts), model_dir, None, facts
    from sarathi_pp.runtime.emulated import emulated_facts, with_profile
    from sarathi_pp.runtime.profile_file import read_profile

    profile = read_profile(config.emulate)
    facts = emulated_facts(profile, config.page_size)
    return with_profile(tuned(config, facts), profile), None, profile, facts


def _run_rank(
    checked: Preflight,
    place: Place,
    leave: Callable[[SarathiError], None],
    drive: Callable[[Job], None],
    located: Callable[[RunDirectory], None] = lambda run_dir: None,
    analyse: Analyse = figures,
) -> dict[str, Any] | None:
    """Join, set up, let `drive` do this rank's work, leave; rank 0 gets the report."""
    watchdog = Watchdog(leave)
    if place.store is not None:
        watchdog.follow_parent()
    else:
        watchdog.heed_sigterm(place.rank)
    with _uncollected():
        from sarathi_pp.runtime.job import Job
        from sarathi_pp.runtime.topology import Topology

        topology = Topology(place)
        model_dir = checked.model_dir or Path()
        this = Job(
            checked.config,
            model_dir,
            checked.facts,
            topology,
            checked.run_dir,
            SystemClock(),
            watchdog,
            located,
            checked.profile,
        )
    try:
        drive(this)
        report = this.finish(analyse)
    except BaseException:
        this.abandon()
        raise
    topology.leave()
    return report


@contextmanager
def _uncollected() -> Iterator[None]:
    """What is made inside stays for good: 370,000 objects of libraries.

    The collector would walk them again and again while they are made, a fifth of the time that it takes to import them,
    and later stop the stage for 0.25 s a time.
    """
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()


def _end(work: Callable[[], int], place: Place, say: Callable[[str], None], note: Callable[[int], None]) -> int:
    """Do the work and return its exit code, which `note` writes down; an error is said once.

    A rank among others that ends by an error does not come back from here: its communication threads are still
    inside gloo, and an interpreter that is torn down under them aborts.
    """
    try:
        code = work()
        note(code)
        return code
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except OutputClosedError as error:
        code = error.exit_code  # whoever read our output has left, and needs no message
    except SarathiError as error:
        code = error.exit_code
        if place.rank == 0 or not error.agreed:
            say(f"{type(error).__name__}: {error}")
    except Exception:
        code = SarathiError.exit_code
        where = f"stage {place.rank} (rank {place.rank}) failed:\n" if place.world_size > 1 else ""
        say(where + traceback.format_exc())
    try:
        note(code)
    finally:
        if place.world_size > 1:
            sys.stderr.flush()
            os._exit(code)
    return code


def _answer(job: BatchJob, checked: Preflight, rank: Job, display: Display) -> None:
    """Rank 0: every row of the input through the engine into the output."""
    config, run, clock = checked.config, rank.run, SystemClock()
    eos_token_ids, vocab_size = checked.defaults.eos_token_ids, checked.facts.vocab_size
    if checked.model_dir is None:
        tokenizer = Tokenizer(None, vocab_size=vocab_size)
    else:
        tokenizer = Tokenizer.load(checked.model_dir, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    limits = Limits(run.max_model_len, run.num_pages, run.page_size, checked.facts.vocab_size)
    maker = RequestMaker(tokenizer, checked.defaults, limits, config.seed, wants_paragraphs(config.policy))
    with ExitStack() as stack:
        sink = FileSink(job.output_path, tokenizer=tokenizer, clock=clock, model=config.model, overwrite=job.overwrite)
        stack.callback(sink.close)
        source = FileSource(
            job.input_path, maker, clock=clock, capacity=2 * run.max_num_seqs, request_rate=config.request_rate
        )
        stack.callback(source.close)
        stack.push(lambda kind, error, trace: rank.take_over() if error is not None else None)
        engine = rank.engine(
            eos_token_ids, tokenizer.stop_checker, stack.enter_context(display.progress(run.num_stages))
        )
        engine.run(source, sink)
        engine.close()
