"""Batch generation: read a file of prompts, write a file of answers and a report. Each rank calls `run_batch` once."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from signal import Signals as Signal
from typing import TYPE_CHECKING, Any

from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.distributed.network_interface import exposure
from sarathi_pp.distributed.refusal import refuse
from sarathi_pp.errors import EXIT_OK, EXIT_ROWS_FAILED, PeerLostError, SarathiError, StoppedError
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.process.signals import ignore_signals
from sarathi_pp.run.answer_file import answer_file
from sarathi_pp.run.display import BatchDisplay
from sarathi_pp.run.ending import Ending, exit_code, handle_signals
from sarathi_pp.run.joining import joined, ready
from sarathi_pp.run.preflight import (
    BatchOptions,
    Preflight,
    check_lines,
    check_weights,
    count_total,
    finished_before,
    follow,
    identify,
    is_unkept,
    preflight,
)
from sarathi_pp.run.restart import as_restarted, is_continuation, is_restart

if TYPE_CHECKING:
    from sarathi_pp.distributed.control_plane import ControlPlane
    from sarathi_pp.run.rank import Rank


def run_batch(options: BatchOptions, env: RankEnvironment | None, display: BatchDisplay) -> int:
    """Run this process as one rank of a batch, and return its exit code.

    Args:
        env: environment of this rank; None if it is the only rank.
        display: shows texts of this rank to the user.
    """
    alone, env = env is None, env or RankEnvironment()
    again = is_restart(options, env)
    ended = options.run_directory().read_exit_code() if again else None
    if ended is not None and ended != PeerLostError.exit_code:
        return ended  # torchrun restarts after every code except 0, but a restart only helps after a lost stage (75)
    with ExitStack() as held:
        try:
            options, checked = _check(options, env, display, again)
            if env.world_size == 1:
                checked = _inspect(options, env, display, again, checked)
                if alone and (code := end_if_finished(options, checked, display)) is not None:
                    return code
            checked = _claim(options, env, again, held, checked)
        except SarathiError as error:
            return refuse(error, env, options.config.join_timeout_s, display)
        for note in checked.notes:
            display.say(note)
        for warning in checked.warnings:
            display.warn(warning)
        return _run_checked(options, checked, env, display, again)


def _run_checked(
    options: BatchOptions, checked: Preflight, env: RankEnvironment, display: BatchDisplay, again: bool
) -> int:
    """Run a rank that has passed the checks before joining: join the others, set up, do its part, make the report.

    Args:
        again: this start is a restart of an earlier one.

    Returns:
        The exit code of this process.
    """
    run_dir = checked.run_dir if env.rank == 0 else None
    ending = Ending(env, checked.config, display, run_dir, scratch=options.scratch, how_to_resume=options.how_to_resume)
    report: dict[str, Any] | None = None
    with exit_code(ending):
        with handle_signals(ending), joined(env, checked.config, display.activity) as plane:
            if env.world_size > 1:
                checked = _inspect_together(plane, options, display, again, checked)
            with ready(checked, plane, ending) as rank:
                facts: dict[str, Any] = {}
                with ending.signals.draining():
                    if env.rank == 0:
                        facts = answer_file(options, rank, display, ending.signals)
                    else:
                        _serve(rank, display)
                with display.activity.phase("collecting traces"):
                    finished = rank.finish(facts)
            if finished is not None:
                with display.activity.phase("explaining the bubble"):
                    report = display.fold(finished)
        if report is not None:
            ending.code = _exit_code_of(report)
            ending.note(ending.code)
            _show(report, options, display)
    return ending.code


def _serve(rank: Rank, display: BatchDisplay) -> None:
    """Compute this rank's part of the run until rank 0 ends it. Show the user which part that is."""
    first, end = rank.run.layers[rank.coordinate.stage]
    part = f"stage {rank.coordinate.stage} of {rank.run.num_stages}, layers {first}-{end - 1}, {rank.device}"
    display.say(f"joined as {part}")
    with display.activity.phase(f"serving as {part}"):
        rank.serve()


def _check(
    options: BatchOptions, env: RankEnvironment, display: BatchDisplay, again: bool
) -> tuple[BatchOptions, Preflight]:
    """Do the quick checks, before the ranks join.

    Args:
        again: this start is a restart of an earlier one.

    Returns:
        The options, changed if this start resumes an earlier one, and the facts that the checks have found.
    """
    with _refusing(options, env, again):
        if env.rank != 0:
            return options, follow(options)
        options = as_restarted(options, env, display)  # only rank 0 needs the output; other hosts may not see it
        # If the host of an earlier start was lost, that start's locks on files may last for a while.
        if again or is_continuation(options, env):
            options = replace(options, lock_patience_s=options.config.peer_timeout_s)
        with display.activity.phase("reading the model's configuration"):
            checked = preflight(options)
        exposed = exposure(env)
        warnings = (*checked.warnings, exposed) if exposed is not None else checked.warnings
        return options, replace(checked, warnings=warnings)


def _inspect(
    options: BatchOptions, env: RankEnvironment, display: BatchDisplay, again: bool, checked: Preflight
) -> Preflight:
    """Do the checks that may take long, because they read the whole input or all weights.

    Returns:
        `checked`, on rank 0 with the identity of this start.
    """
    if env.rank == 0:
        with display.activity.phase(f"reading {options.input_path}"):
            checked = identify(options, checked)
    if env.store is None and not again:  # otherwise our launcher, or the first start, has done these checks
        if env.rank == 0:
            check_lines(options, checked, display)
        if env.local_rank == 0:
            check_weights(options, display)
    return checked


def _inspect_together(
    plane: ControlPlane, options: BatchOptions, display: BatchDisplay, again: bool, checked: Preflight
) -> Preflight:
    """Do the long checks on all ranks. A rank that is done waits for the others, as long as they make progress."""
    from sarathi_pp.distributed.agreement import Agreement

    with Agreement(plane).step("checking the input and the weights"):
        return _inspect(options, plane.env, display, again, checked)


@contextmanager
def _refusing(options: BatchOptions, env: RankEnvironment, again: bool) -> Iterator[None]:
    """Write the exit code to the run directory if an error in the block refuses this start.

    This start has not claimed the run directory yet. So the directory may belong to another run, whose exit code must
    stay. See RunDirectory.write_refusal.
    """
    try:
        yield
    except SarathiError as error:
        # torchrun ends with 1 after any failure, and stops the other ranks as soon as one has failed. They must not
        # replace the code of the rank that failed. But the first rank of a host writes its code, because the signal may
        # have come from the user.
        stopped = env.local_rank != 0 and isinstance(error, StoppedError)
        if env.world_size > 1 and not stopped:
            # A signal must not interrupt the write. With several hosts, this rank still has to report the error to the
            # other hosts, so it keeps its signal handlers.
            if env.local_world_size == env.world_size:
                ignore_signals()
            known = options.start != "new" or again or (env.rank == 0 and is_continuation(options, env))
            options.run_directory().write_refusal(error.exit_code, overwrite=known, launch_id=env.launch_id)
        raise


def _claim(options: BatchOptions, env: RankEnvironment, again: bool, held: ExitStack, checked: Preflight) -> Preflight:
    """On rank 0, claim the run directory for this run until `held` is closed. Return the facts with that directory.

    Other ranks return `checked` unchanged.

    Args:
        again: this start is a restart of an earlier one.
    """
    if env.rank != 0:
        return checked
    claimed = RunDirectory.claim(
        checked.run_dir.path,
        overwrite=options.start == "replace",
        resume=options.start == "resume" or again,
        launch_id=env.launch_id,
        patience_s=min(options.lock_patience_s, options.config.join_timeout_s / 2),  # the other ranks wait meanwhile
    )
    return replace(checked, run_dir=held.enter_context(claimed))


def end_if_finished(options: BatchOptions, checked: Preflight, display: BatchDisplay) -> int | None:
    """Return the exit code if the output already has a line for each input line, otherwise None.

    Raises:
        InputError: see `finished_before`.
    """
    done = finished_before(options)
    if done is None:
        return None
    code = EXIT_ROWS_FAILED if done.num_errors else EXIT_OK
    display.nothing_left(done.num_rows, done.num_errors)
    checked.run_dir.write_end(code)
    return code


def _exit_code_of(report: dict[str, Any]) -> int:
    """Return the exit code of a run that ended in order, from its report."""
    if report["stopped_by"] is not None:
        return StoppedError.by(Signal[report["stopped_by"]], "the run").exit_code
    failed = report["failed"] or report.get("whole_run", report)["failed"] or report["resumed"]["failed"]
    return EXIT_ROWS_FAILED if failed else EXIT_OK


def _show(report: dict[str, Any], options: BatchOptions, display: BatchDisplay) -> None:
    """Show the report and the number of answers. Call it when the exit code is decided.

    If the reader of the text is slow, a signal ends the wait for it and does not change the exit code.
    """
    with suppress(StoppedError, KeyboardInterrupt):
        display.show(report)
        resumed, written = report["resumed"], report["written"]
        answered = resumed["rows"] + written["rows"]
        if report["stopped_by"] is not None:
            total = count_total(options)
            done = "" if total is None else f": {answered:,} of {total:,} answered, {total - answered:,} left"
            display.warn(f"stopped by {report['stopped_by']}{done}; {options.how_to_resume}")
        elif not is_unkept(options.output_path):
            failed = resumed["failed"] + written["failed"]
            errors = f" ({failed:,} of them errors)" if failed else ""
            display.say(f"{options.output_path}: {answered:,} answers{errors}")
            display.say(
                f"report: sarathi-pp report {shlex.quote(str(options.run_directory().path))} --html report.html"
            )
