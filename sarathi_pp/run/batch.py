"""Batch generation: a file of prompts in, a file of answers out, a report beside it. One call a rank."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import Signals as Signal
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

from sarathi_pp.analysis.replicas import figures
from sarathi_pp.analysis.summary import Analyse
from sarathi_pp.config import ResolvedRun, RunConfig
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.distributed.environment import Place, find_place, mesh_of, stopped_mark
from sarathi_pp.distributed.failure_cause import is_echo, report_cause
from sarathi_pp.distributed.network_interface import exposure
from sarathi_pp.distributed.refusal import refuse
from sarathi_pp.engine.progress import Snapshot
from sarathi_pp.errors import EXIT_OK, EXIT_ROWS_FAILED, ConfigError, PeerLostError, SarathiError, StoppedError
from sarathi_pp.inputs.generation_config import GenerationDefaults, read_generation_config
from sarathi_pp.inputs.parse import Row
from sarathi_pp.inputs.source import FileSource, Limits, MemorySource, RequestMaker, is_stream
from sarathi_pp.model.checkpoint.support import ModelFacts, check_model
from sarathi_pp.outputs.journal import Journal, LateJournal
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.outputs.sink import FileSink, Sink
from sarathi_pp.process.signals import Signals
from sarathi_pp.run.fetch import find_model
from sarathi_pp.run.preflight import (
    BatchJob,
    Preflight,
    as_restarted,
    check_lines,
    check_weights,
    finished_before,
    follow,
    identify,
    is_continuation,
    is_restart,
    open_model,
    preflight,
    run_directory,
)
from sarathi_pp.run.rank_main import SlowCheck, end, run_rank
from sarathi_pp.run.stop_notice import StopNotice
from sarathi_pp.text.tokenizer import Tokenizer
from sarathi_pp.trace.clock import SystemClock

if TYPE_CHECKING:
    from sarathi_pp.run.setup import Job


class Display(Protocol):
    """Who shows a run to the user; only rank 0 talks."""

    def warn(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...
    def progress(self, num_stages: int) -> AbstractContextManager[Callable[[Snapshot], None]]: ...
    def report(self, report: dict[str, Any]) -> None: ...
    def nothing_left(self, num_rows: int, num_errors: int) -> None: ...
    def error(self, text: str) -> None: ...


def run_batch(job: BatchJob, place: Place | None, display: Display, analyse: Analyse = figures) -> int:
    """One rank of the run (the only one where place is None); returns the exit code of this process.

    analyse: makes the report of the run's traces.
    """
    rank = place or Place()
    again = is_restart(job, rank)
    ended = run_directory(job).read_exit_code() if again else None
    if ended is not None and ended != PeerLostError.exit_code:
        return ended  # torchrun starts everything again that does not end with 0; only a lost stage is worth it
    slow: tuple[SlowCheck, ...] = ()
    with ExitStack() as held:
        try:
            job, checked = _check(job, rank, display, again)
            inspect = partial(_inspect, job, rank, display, again)
            if rank.world_size == 1:
                checked = inspect(checked)
                if place is None and (code := end_if_finished(job, checked, display)) is not None:
                    return code
            else:
                slow = (("checking the input and the weights", inspect),)
            checked = _claim(job, rank, again, held, checked)
        except SarathiError as error:
            return refuse(error, rank, job.config.join_timeout_s, display.error)
        for warning in checked.warnings:
            display.warn(warning)
        return _run_checked(job, checked, rank, display, analyse, slow)


def _check(job: BatchJob, rank: Place, display: Display, again: bool) -> tuple[BatchJob, Preflight]:
    """Do the checks that are quick, before ranks join. again: what runs is a restart of the job."""
    with _refusing(job, rank, again):
        if rank.rank != 0:
            return job, follow(job)
        job = as_restarted(job, rank, display.warn)  # the output is its own; other hosts may not even see it
        # A host that was lost may hold its locks for a while.
        if again or is_continuation(job, rank):
            job = replace(job, lock_patience_s=job.config.peer_timeout_s)
        checked, exposed = preflight(job), exposure(rank)
        warnings = (*checked.warnings, exposed) if exposed is not None else checked.warnings
        return job, replace(checked, warnings=warnings)


def _inspect(job: BatchJob, rank: Place, display: Display, again: bool, checked: Preflight) -> Preflight:
    """Do the checks that may take long, for which the whole input is read, or all weights."""
    if rank.rank == 0:
        checked = identify(job, checked)
    if rank.store is None and not again:  # otherwise our launcher, or the first start, has done it
        if rank.rank == 0:
            check_lines(job, checked, display.warn)
        if rank.local_rank == 0:
            check_weights(job)
    return checked


@contextmanager
def _refusing(job: BatchJob, rank: Place, again: bool) -> Iterator[None]:
    """Write down the code of a start that is refused before it has claimed the run directory."""
    try:
        yield
    except SarathiError as error:
        # torchrun ends with 1 whatever a rank ends with, and stops the others as soon as one has ended.
        if rank.world_size > 1:
            known = job.start != "new" or again or (rank.rank == 0 and is_continuation(job, rank))
            run_directory(job).write_refusal(error.exit_code, overwrite=known, job=rank.job)
        raise


def _claim(job: BatchJob, rank: Place, again: bool, held: ExitStack, checked: Preflight) -> Preflight:
    """Claim the run directory on rank 0, until `held` is closed."""
    if rank.rank != 0:
        return checked
    claimed = RunDirectory.claim(
        checked.run_dir.path,
        overwrite=job.start == "replace",
        resume=job.start == "resume" or again,
        job=rank.job,
        patience_s=min(job.lock_patience_s, job.config.join_timeout_s / 2),  # for which the other ranks wait
    )
    return replace(checked, run_dir=held.enter_context(claimed))


def end_if_finished(job: BatchJob, checked: Preflight, display: Display) -> int | None:
    """Return the exit code of a run whose output has a line for each row already, else None. Raises InputError."""
    done = finished_before(job)
    if done is None:
        return None
    code = EXIT_ROWS_FAILED if done.num_errors else EXIT_OK
    display.nothing_left(done.num_rows, done.num_errors)
    checked.run_dir.write_end(code)
    return code


def _run_checked(
    job: BatchJob, checked: Preflight, rank: Place, display: Display, analyse: Analyse, slow: Sequence[SlowCheck]
) -> int:
    """Run a rank to its end; returns its exit code. slow: see run_rank."""

    def drive(this: Job, signals: Signals, checked: Preflight) -> dict[str, Any]:
        stoppable.append(signals)
        with signals.draining():
            if rank.rank == 0:
                return _answer(job, checked, this, display, signals)
            _serve(checked, this)
            return {}

    def work() -> int:
        located = mine.append
        with _judged(mine):
            report = run_rank(checked, rank, leave, drive, located, analyse, slow)
        return _show(report, job, display)

    def leave(error: SarathiError) -> None:
        _judge(error, mine)
        _leave(error, _last_words(error, job, rank, working=bool(stoppable)), rank, note, say)

    def say(text: str) -> None:
        if not _is_echo(rank, stoppable):
            display.error(text)

    def note(code: int) -> None:
        if job.scratch is not None:
            shutil.rmtree(job.scratch, ignore_errors=True)  # here, because a rank that fails does not return
            return
        # Of several replicas one may end in any way and the run in another, which rank 0 knows; 75 replaces no code.
        others = code == PeerLostError.exit_code or (code and checked.config.replicas == 1)
        if mine and (others or rank.rank == 0):
            mine[-1].write_exit_code(code)

    # Where this rank may write: rank 0's directory is its own from here on, the others' is named by rank 0.
    mine: list[RunDirectory] = [checked.run_dir] if rank.rank == 0 else []
    stoppable: list[Signals] = []  # once this rank works
    return end(work, rank, mesh_of(checked.config).title(rank.rank), say, note)


def _show(report: dict[str, Any] | None, job: BatchJob, display: Display) -> int:
    """Show the report, which only rank 0 has, and return the exit code."""
    if report is None:
        return EXIT_OK
    display.report(report)
    if report["stopped_by"] is not None:
        display.warn(f"stopped by {report['stopped_by']}; {job.how_to_resume}")
        return StoppedError.by(Signal[report["stopped_by"]], "the run").exit_code
    failed = report["failed"] or report.get("whole_run", report)["failed"] or report["resumed"]["failed"]
    return EXIT_ROWS_FAILED if failed else EXIT_OK


def _last_words(error: SarathiError, job: BatchJob, rank: Place, *, working: bool) -> str:
    text = f"{type(error).__name__}: {error}"
    if rank.rank or not working or not isinstance(error, StoppedError):
        return text
    if rank.store is not None:
        stopped_mark(rank.store).touch()
    return f"{text}; {job.how_to_resume}"


def _is_echo(rank: Place, stoppable: Sequence[Signals]) -> bool:
    """Return whether rank 0 says what ends this rank, because a signal ends the run."""
    if rank.rank == 0:
        return False
    launched = rank.store is not None and stopped_mark(rank.store).exists()
    return launched or any(signals.asked() is not None for signals in stoppable)


@contextmanager
def _judged(run_dirs: Sequence[RunDirectory]) -> Iterator[None]:
    try:
        yield
    except SarathiError as error:
        _judge(error, run_dirs)
        raise


def _judge(error: SarathiError, run_dirs: Sequence[RunDirectory]) -> None:
    """Give an error the code 2 if the start before failed at the same place: schedulers start a 75 again.

    run_dirs: empty before this rank knows of one.
    """
    if error.at_start and run_dirs and run_dirs[-1].fails_again():
        error.exit_code = ConfigError.exit_code
        error.args = (f"{error}. The start before ended like this too, so another one will not help",)


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
    try:
        config, model_dir, profile, facts = open_model(config)
    except SarathiError as error:
        return refuse(error, rank, config.join_timeout_s, display.error)
    # Inside the launcher's own directory, which it removes, where there is one: a rank that fails does not tidy up.
    private = Path(rank.store).parent if rank.store else None
    with TemporaryDirectory(prefix="sarathi-pp-", dir=private) as scratch, ExitStack() as held:
        run_dir = RunDirectory(config.run_dir or Path(scratch) / "run")
        if config.run_dir is not None and rank.rank == 0:
            run_dir = held.enter_context(RunDirectory.claim(config.run_dir, overwrite=overwrite))
        config = replace(config, run_dir=run_dir.path)
        checked = Preflight(config, model_dir, profile, facts, GenerationDefaults(), run_dir)

        def drive(this: Job, signals: Signals, checked: Preflight) -> dict[str, Any]:
            if rank.rank != 0:
                this.serve()
                return {}
            with ExitStack() as stack:
                observe = stack.enter_context(display.progress(this.run.num_stages))
                stack.push(lambda kind, error, trace: this.take_over() if error is not None else None)
                run_dir.begin(this.describe())
                driver = this.driver((), lambda stop: None, observe)
                driver.run(MemorySource(make_rows(this.run, this.facts)), sink)
                driver.close()
            return {}

        def leave(error: SarathiError) -> None:
            _leave(error, f"{type(error).__name__}: {error}", rank, run_dir.write_exit_code, display.error)

        def work() -> int:
            report = run_rank(checked, rank, leave, drive, analyse=analyse)
            if report is not None:
                display.report(report)
            return EXIT_OK

        return end(work, rank, mesh_of(config).title(rank.rank), display.error, run_dir.write_exit_code)


def _leave(
    error: SarathiError, text: str, rank: Place, note: Callable[[int], None], say: Callable[[str], None]
) -> None:
    """Write down and say why this rank ends; the watchdog then ends it."""
    spoken = is_echo(error, rank)
    report_cause(rank)
    note(error.exit_code)
    if not spoken:
        say(text)


def serve_llm(config: RunConfig, say: Callable[[str], None]) -> int:
    """One worker rank of a Python program's LLM; returns the exit code of this process."""
    place = find_place()
    if place is None:
        raise ConfigError("a worker is started by the program whose LLM it serves; use `sarathi-pp generate`")
    parse_policy(config.policy)
    model_dir = find_model(config.model)
    # Rank 0 names the real one.
    anywhere = RunDirectory(Path()) if config.run_dir else RunDirectory.unnamed(Path())
    defaults = read_generation_config(model_dir, config.override_generation_config)
    checked = Preflight(config, model_dir, None, check_model(model_dir), defaults, anywhere)

    def drive(this: Job, signals: Signals, checked: Preflight) -> dict[str, Any]:
        _serve(checked, this)
        return {}

    def leave(error: SarathiError) -> None:
        """The program has the error too, and says it to its user."""

    def work() -> int:
        run_rank(checked, place, leave, drive)
        return EXIT_OK

    return end(work, place, mesh_of(config).title(place.rank), say, lambda code: None)


def _serve(checked: Preflight, this: Job) -> None:
    """Every rank but rank 0: compute, and lead a replica where that is its seat."""
    if this.seat.leads:
        eos_token_ids = checked.defaults.eos_token_ids
        this.lead(eos_token_ids, _tokenizer(checked).stop_checker)
    else:
        this.serve()


def _tokenizer(checked: Preflight) -> Tokenizer:
    vocab_size = checked.facts.vocab_size
    if checked.model_dir is None:
        return Tokenizer(None, vocab_size=vocab_size)
    return Tokenizer.load(checked.model_dir, vocab_size=vocab_size, eos_token_ids=checked.defaults.eos_token_ids)


def _answer(job: BatchJob, checked: Preflight, rank: Job, display: Display, signals: Signals) -> dict[str, Any]:
    """Rank 0: every row of the input through the engine into the output; returns what the report says of that."""
    config, run, clock = checked.config, rank.run, SystemClock()
    tokenizer = _tokenizer(checked)
    limits = Limits(run.max_model_len, run.num_pages, run.page_size, checked.facts.vocab_size)
    if (small := limits.small_kv_cache()) is not None:
        display.warn(small)
    paragraphs = parse_policy(config.policy).kind.wants_paragraphs
    maker = RequestMaker(tokenizer, checked.defaults, limits, config.seed, paragraphs)
    with ExitStack() as stack:
        facts = {**rank.describe(), "identity": checked.identity, "job": rank.place.job}
        begun = False

        def begin() -> Journal:
            nonlocal begun
            journal = Journal.open(
                job.output_path,
                job.start,
                retry_errors=job.retry_errors,
                wait=signals.pause,
                patience_s=job.lock_patience_s,
            )
            try:
                checked.run_dir.begin(facts)
            except SarathiError:
                journal.close()
                raise
            begun = True
            return journal

        def withdraw(kind: object, error: BaseException | None, trace: object) -> None:
            if not begun and isinstance(error, SarathiError) and not error.at_start:
                checked.run_dir.withdraw()

        stack.push(withdraw)
        # Of a stream that turns out to have another format nothing is made or emptied.
        waits = is_stream(job.input_path) and not is_stream(job.output_path) and job.start != "resume"
        late = LateJournal(job.output_path, begin) if waits else None
        journal = late or begin()
        done = journal.done
        resumed = {"rows": done.num_rows, "failed": done.num_errors}
        sink = FileSink(journal, tokenizer=tokenizer, clock=clock, model=config.model)
        stack.callback(sink.close)
        source = FileSource(
            job.input_path,
            maker,
            clock=clock,
            capacity=2 * run.max_num_seqs * run.replicas,
            request_rate=config.request_rate,
            done=done,
            asked=job.input_format,
        )
        stack.callback(source.close)
        stack.push(lambda kind, error, trace: rank.take_over() if error is not None else None)
        observe = stack.enter_context(display.progress(run.num_stages * run.replicas))
        notice = StopNotice(observe, display.note)
        driver = rank.driver(checked.defaults.eos_token_ids, tokenizer.stop_checker, notice.observe, display.warn)
        signals.announce(notice.say)
        try:
            asked = driver.run(source, sink, signals.asked)
        except StoppedError as error:
            error.args = (f"{error}; {job.how_to_resume}",)
            raise
        if late is not None:
            late.open()
        driver.close()
    stopped_by = Signal(asked.number).name if asked is not None else None
    # What a lost replica has answered is in no trace that is folded.
    counts = {"completed": sink.num_finished, "failed": sink.num_failed} if run.replicas > 1 else {}
    return {"resumed": resumed, "stopped_by": stopped_by, **counts}
