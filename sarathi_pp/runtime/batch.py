"""Batch generation: a file of prompts in, a file of answers out, a report beside it. One call a rank."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sarathi_pp.config import RunConfig
from sarathi_pp.core.partition import partition
from sarathi_pp.core.policy import USES_CHUNK_SIZE, make_policy
from sarathi_pp.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_ROWS_FAILED, SarathiError
from sarathi_pp.model.support import ModelFacts, check_model
from sarathi_pp.runtime.fetch import find_model
from sarathi_pp.runtime.generation_config import GenerationDefaults, read_generation_config
from sarathi_pp.runtime.rundir import RunDirectory
from sarathi_pp.runtime.sink import FileSink, check_output
from sarathi_pp.runtime.snapshot import Snapshot
from sarathi_pp.runtime.source import FileSource, Limits, RequestMaker, check_input
from sarathi_pp.runtime.text import Tokenizer
from sarathi_pp.runtime.topology import Place
from sarathi_pp.trace.clock import SystemClock

if TYPE_CHECKING:
    from sarathi_pp.runtime.job import Job


@dataclass(frozen=True, slots=True)
class BatchJob:
    config: RunConfig
    input_path: str
    output_path: str
    overwrite: bool


@dataclass(frozen=True, slots=True)
class Preflight:
    """What is known of a job before any of its processes starts."""

    model_dir: Path
    facts: ModelFacts
    defaults: GenerationDefaults
    run_dir: RunDirectory
    warnings: tuple[str, ...]


class Display(Protocol):
    """Who shows a run to the user; only rank 0 talks."""

    def warn(self, text: str) -> None: ...
    def progress(self) -> AbstractContextManager[Callable[[Snapshot], None]]: ...
    def report(self, report: dict[str, Any]) -> None: ...
    def error(self, text: str) -> None: ...


def preflight(job: BatchJob) -> Preflight:
    """Refuse what can be refused without torch, before a worker starts and before a file is touched."""
    config = job.config
    make_policy(config.policy)
    check_input(job.input_path)
    check_output(job.output_path, job.input_path, overwrite=job.overwrite)
    run_path = config.run_dir or RunDirectory.default_path(job.output_path)
    RunDirectory.check(run_path, overwrite=job.overwrite)
    model_dir = find_model(config.model)
    facts = check_model(model_dir)
    partition(facts.num_layers, config.stages, config.layer_split)
    defaults = read_generation_config(model_dir).with_command(config.sampling_overrides)
    warnings = list(defaults.warnings)
    if config.chunk_size is not None and config.policy.partition(":")[0] not in USES_CHUNK_SIZE:
        warnings.append(f"--policy {config.policy} runs whole prompts and does not use --chunk-size")
    return Preflight(model_dir, facts, defaults, RunDirectory(run_path), tuple(warnings))


def run_batch(job: BatchJob, place: Place | None, display: Display) -> int:
    """One rank of the run (the only one where place is None); returns the exit code of this process."""
    checked = preflight(job) if place is None or place.rank == 0 else _follow(job)
    rank = place or Place()
    if rank.rank == 0:
        checked = _open_run(job, checked)
        for warning in checked.warnings:
            display.warn(warning)
    code = EXIT_OK
    try:
        code = _run_rank(job, checked, rank, display)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except SarathiError as error:
        code = error.exit_code
        if rank.rank == 0 or not error.agreed:
            display.error(f"{type(error).__name__}: {error}")
    except Exception:
        code = SarathiError.exit_code
        where = f"stage {rank.rank} (rank {rank.rank}) failed:\n" if rank.world_size > 1 else ""
        display.error(where + traceback.format_exc())
    if rank.rank == 0 or code:
        checked.run_dir.write_exit_code(code)
    return code


def _follow(job: BatchJob) -> Preflight:
    """What a rank other than 0 needs to know; it reads no input and writes no output."""
    model_dir = find_model(job.config.model)
    run_path = job.config.run_dir or RunDirectory.default_path(job.output_path)
    return Preflight(model_dir, check_model(model_dir), GenerationDefaults(), RunDirectory(run_path), ())


def _open_run(job: BatchJob, checked: Preflight) -> Preflight:
    run_dir = RunDirectory.create(checked.run_dir.path, overwrite=job.overwrite)
    return replace(checked, run_dir=run_dir)


def _run_rank(job: BatchJob, checked: Preflight, place: Place, display: Display) -> int:
    from sarathi_pp.runtime.job import Job

    clock = SystemClock()

    def leave(error: SarathiError) -> None:
        display.error(f"{type(error).__name__}: {error}")
        checked.run_dir.write_exit_code(error.exit_code)

    rank = Job(job.config, checked.model_dir, checked.facts, place, checked.run_dir, clock, leave)
    try:
        if place.rank != 0:
            rank.serve()
        else:
            checked.run_dir.write_run(rank.describe())
            _answer(job, checked, rank, clock, display)
        report = rank.finish()
    except BaseException:
        rank.abandon()
        raise
    if report is None:
        return EXIT_OK
    display.report(report)
    return EXIT_ROWS_FAILED if report["failed"] else EXIT_OK


def _answer(job: BatchJob, checked: Preflight, rank: Job, clock: SystemClock, display: Display) -> None:
    """Rank 0: every row of the input through the engine into the output."""
    config, run = job.config, rank.run
    eos_token_ids = checked.defaults.eos_token_ids
    tokenizer = Tokenizer.load(checked.model_dir, vocab_size=checked.facts.vocab_size, eos_token_ids=eos_token_ids)
    limits = Limits(run.max_model_len, run.num_pages, run.page_size, checked.facts.vocab_size)
    maker = RequestMaker(tokenizer, checked.defaults, limits, config.seed)
    with ExitStack() as stack:
        sink = FileSink(job.output_path, tokenizer=tokenizer, clock=clock, model=config.model, overwrite=job.overwrite)
        stack.callback(sink.close)
        source = FileSource(
            job.input_path, maker, clock=clock, capacity=2 * run.max_num_seqs, request_rate=config.request_rate
        )
        stack.callback(source.close)
        engine = rank.engine(eos_token_ids, tokenizer.stop_checker, stack.enter_context(display.progress()))
        engine.run(source, sink)
        engine.close()
