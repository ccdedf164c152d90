"""Batch generation: a file of prompts in, a file of answers out, a report beside it. One call a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from signal import Signals as Signal
from typing import TYPE_CHECKING, Any

from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.distributed.network_interface import exposure
from sarathi_pp.distributed.refusal import refuse
from sarathi_pp.errors import EXIT_OK, EXIT_ROWS_FAILED, PeerLostError, SarathiError, StoppedError
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.run.answer_file import answer_file
from sarathi_pp.run.display import Display
from sarathi_pp.run.ending import Ending, exit_code, heeding
from sarathi_pp.run.joining import joined, ready
from sarathi_pp.run.preflight import (
    BatchOptions,
    Preflight,
    as_restarted,
    check_lines,
    check_weights,
    finished_before,
    follow,
    identify,
    is_continuation,
    is_restart,
    preflight,
    run_directory,
)

if TYPE_CHECKING:
    from sarathi_pp.distributed.control_plane import ControlPlane


def run_batch(job: BatchOptions, env: RankEnvironment | None, display: Display) -> int:
    """Run one rank, the only one if env is None. Returns the exit code of this process."""
    alone, env = env is None, env or RankEnvironment()
    again = is_restart(job, env)
    ended = run_directory(job).read_exit_code() if again else None
    if ended is not None and ended != PeerLostError.exit_code:
        return ended  # torchrun starts everything again that does not end with 0; only a lost stage is worth it
    with ExitStack() as held:
        try:
            job, checked = _check(job, env, display, again)
            if env.world_size == 1:
                checked = _inspect(job, env, display, again, checked)
                if alone and (code := end_if_finished(job, checked, display)) is not None:
                    return code
            checked = _claim(job, env, again, held, checked)
        except SarathiError as error:
            return refuse(error, env, job.config.join_timeout_s, display)
        for warning in checked.warnings:
            display.warn(warning)
        return _run_checked(job, checked, env, display, again)


def _run_checked(job: BatchOptions, checked: Preflight, env: RankEnvironment, display: Display, again: bool) -> int:
    run_dir = checked.run_dir if env.rank == 0 else None
    ending = Ending(env, checked.config, display, run_dir, scratch=job.scratch, how_to_resume=job.how_to_resume)
    with exit_code(ending), heeding(ending), joined(env, checked.config) as plane:
        if env.world_size > 1:
            checked = _inspect_together(plane, job, display, again, checked)
        with ready(checked, plane, ending) as rank:
            facts: dict[str, Any] = {}
            with ending.signals.draining():
                if env.rank == 0:
                    facts = answer_file(job, rank, display, ending.signals)
                else:
                    rank.serve()
            finished = rank.finish(facts)
        if finished is not None:
            ending.code = _show(display.report(finished), job, display)
    return ending.code


def _check(job: BatchOptions, env: RankEnvironment, display: Display, again: bool) -> tuple[BatchOptions, Preflight]:
    """Do the checks that are quick, before ranks join. again: what runs is a restart of the job."""
    with _refusing(job, env, again):
        if env.rank != 0:
            return job, follow(job)
        job = as_restarted(job, env, display)  # the output is its own; other hosts may not even see it
        # A host that was lost may hold its locks for a while.
        if again or is_continuation(job, env):
            job = replace(job, lock_patience_s=job.config.peer_timeout_s)
        checked, exposed = preflight(job), exposure(env)
        warnings = (*checked.warnings, exposed) if exposed is not None else checked.warnings
        return job, replace(checked, warnings=warnings)


def _inspect(job: BatchOptions, env: RankEnvironment, display: Display, again: bool, checked: Preflight) -> Preflight:
    """Do the checks that may take long, for which the whole input is read, or all weights."""
    if env.rank == 0:
        checked = identify(job, checked)
    if env.store is None and not again:  # otherwise our launcher, or the first start, has done it
        if env.rank == 0:
            check_lines(job, checked, display)
        if env.local_rank == 0:
            check_weights(job)
    return checked


def _inspect_together(
    plane: ControlPlane, job: BatchOptions, display: Display, again: bool, checked: Preflight
) -> Preflight:
    """Do them while the other ranks wait, which they do for as long as this one gets on."""
    from sarathi_pp.distributed.agreement import Agreement

    with Agreement(plane).step("checking the input and the weights"):
        return _inspect(job, plane.env, display, again, checked)


@contextmanager
def _refusing(job: BatchOptions, env: RankEnvironment, again: bool) -> Iterator[None]:
    """Write down the code of a start that is refused before it has claimed the run directory."""
    try:
        yield
    except SarathiError as error:
        # torchrun ends with 1 whatever a rank ends with, and stops the others as soon as one has ended.
        if env.world_size > 1:
            known = job.start != "new" or again or (env.rank == 0 and is_continuation(job, env))
            run_directory(job).write_refusal(error.exit_code, overwrite=known, job=env.job)
        raise


def _claim(job: BatchOptions, env: RankEnvironment, again: bool, held: ExitStack, checked: Preflight) -> Preflight:
    """Claim the run directory on rank 0, until `held` is closed."""
    if env.rank != 0:
        return checked
    claimed = RunDirectory.claim(
        checked.run_dir.path,
        overwrite=job.start == "replace",
        resume=job.start == "resume" or again,
        job=env.job,
        patience_s=min(job.lock_patience_s, job.config.join_timeout_s / 2),  # for which the other ranks wait
    )
    return replace(checked, run_dir=held.enter_context(claimed))


def end_if_finished(job: BatchOptions, checked: Preflight, display: Display) -> int | None:
    """Return the exit code of a run whose output has a line for each row already, else None. Raises InputError."""
    done = finished_before(job)
    if done is None:
        return None
    code = EXIT_ROWS_FAILED if done.num_errors else EXIT_OK
    display.nothing_left(done.num_rows, done.num_errors)
    checked.run_dir.write_end(code)
    return code


def _show(report: dict[str, Any], job: BatchOptions, display: Display) -> int:
    """Say how the run ended; returns the exit code."""
    if report["stopped_by"] is not None:
        display.warn(f"stopped by {report['stopped_by']}; {job.how_to_resume}")
        return StoppedError.by(Signal[report["stopped_by"]], "the run").exit_code
    failed = report["failed"] or report.get("whole_run", report)["failed"] or report["resumed"]["failed"]
    return EXIT_ROWS_FAILED if failed else EXIT_OK
