"""`sarathi-pp generate`: turn options into a RunConfig, then start a launcher or one rank of a run."""

from __future__ import annotations

import shlex
import shutil
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from sarathi_pp.cli.option_group import SectionedCommand
from sarathi_pp.cli.options import (
    DEBUGGING,
    MEMORY,
    MODEL,
    PARALLELISM,
    RECOVERY,
    RUN,
    SAMPLING,
    SCHEDULE,
    run_config,
)

if TYPE_CHECKING:
    from sarathi_pp.cli.show import BatchConsoleDisplay
    from sarathi_pp.distributed.environment import RankEnvironment
    from sarathi_pp.outputs.journal import Start
    from sarathi_pp.run.preflight import BatchOptions

_STANDARD_INPUT = dict.fromkeys(("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"), "-")
_STANDARD_OUTPUT = dict.fromkeys(("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"), "-")


@click.command(
    cls=SectionedCommand,
    params=[
        *RUN.options(),
        *MODEL.options(),
        *MEMORY.options(),
        *PARALLELISM.options(),
        *SCHEDULE.options(),
        *SAMPLING.options(),
        *RECOVERY.options(),
        *DEBUGGING.options(),
    ],
)
def generate(**options: Any) -> int:
    """Answer a file of prompts with a pipeline of stages.

    Each line of input gives one line of output. A line that cannot run gives an error line, and the run continues
    (exit code 3 at the end). Sampling options are defaults that each line may override.
    """
    from sarathi_pp.distributed.environment import let_threads_sleep
    from sarathi_pp.process.signals import stoppable

    let_threads_sleep()
    with stoppable("the run"):
        return _generate(options)


def _generate(options: dict[str, Any]) -> int:
    from sarathi_pp.cli.show import BatchConsoleDisplay, RunConsole
    from sarathi_pp.distributed.environment import find_environment
    from sarathi_pp.inputs.input_file import is_stream
    from sarathi_pp.run.batch import run_batch
    from sarathi_pp.run.preflight import BatchOptions, is_unkept

    env = find_environment()
    batch_options = BatchOptions(
        config=run_config(options, env.world_size if env else None),
        input_path=_STANDARD_INPUT.get(options["input_path"], options["input_path"]),
        output_path=_STANDARD_OUTPUT.get(options["output_path"], options["output_path"]),
        start=_start(options),
        retry_errors=options["retry_errors"],
        force=options["force"],
        strict=options["strict"],
        verify=options["verify"] is not None,
        metrics_port=options["metrics_port"],
        how_to_resume=_how_to_resume(options, under_torchrun=env is not None and env.under_torchrun),
        input_format=options["input_format"],
    )
    run_dir = batch_options.config.run_dir
    # On each host, one rank shows its activity. Rank 0 shows the run.
    console = RunConsole(quiet=env is not None and env.local_rank != 0)
    display = BatchConsoleDisplay(
        console,
        quiet=options["quiet"],
        as_json=options["as_json"],
        metrics_port=options["metrics_port"],
        kept=None if run_dir is None and is_unkept(batch_options.output_path) else "report.json",
    )
    restarts = options["max_restarts"]
    if restarts and any(map(is_stream, (batch_options.input_path, batch_options.output_path))):
        raise click.UsageError("--max-restarts: a stream cannot be resumed; name files for --input and --output")
    if env is not None and env.store is None and restarts:
        raise click.UsageError("--max-restarts: torchrun itself restarts its processes; give the option to torchrun")
    with ExitStack() as held, display:
        batch_options = _with_scratch(batch_options, env, held)
        if env is None and (batch_options.config.num_ranks > 1 or restarts):
            return _launch(batch_options, display, restarts)
        return run_batch(batch_options, env, display)


def _with_scratch(batch_options: BatchOptions, env: RankEnvironment | None, held: ExitStack) -> BatchOptions:
    """Add a run directory that is removed at the end, if the user named none and keeps no output."""
    from sarathi_pp.run.preflight import is_unkept

    if batch_options.config.run_dir is not None or not is_unkept(batch_options.output_path):
        return batch_options
    if env is not None and env.store is not None:  # our launcher removes its own folder, however this rank ends
        return replace(batch_options, config=replace(batch_options.config, run_dir=Path(env.store).parent / "run"))
    scratch = Path(held.enter_context(TemporaryDirectory(prefix="sarathi-pp-")))
    return replace(batch_options, config=replace(batch_options.config, run_dir=scratch / "run"), scratch=scratch)


def _how_to_resume(options: dict[str, Any], *, under_torchrun: bool) -> str:
    """Return the advice for a run that is stopped: the command that resumes it, if that is possible."""
    from sarathi_pp.inputs.input_file import is_stream

    if any(map(is_stream, (options["input_path"], options["output_path"]))):
        return "a stream cannot be resumed: send the lines without an answer again"
    if under_torchrun:
        return "to resume, give --resume to the same command"
    program = ["sarathi-pp"] if shutil.which("sarathi-pp") else [sys.executable, "-m", "sarathi_pp"]
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--resume", "--overwrite")]
    return f"to resume:\n{shlex.join([*program, *arguments, '--resume'])}"


def _start(options: dict[str, Any]) -> Start:
    """Return the way in which the options treat an existing output: resume it, replace it, or refuse it ("new")."""
    if options["resume"] and options["overwrite"]:
        raise click.UsageError("--resume continues an output and --overwrite replaces it; give only one of them")
    for name in ("retry_errors", "force"):
        if options[name] and not options["resume"]:
            raise click.UsageError(f"--{name.replace('_', '-')} applies to a resumed run; give --resume too")
    return "resume" if options["resume"] else "replace" if options["overwrite"] else "new"


def _launch(batch_options: BatchOptions, display: BatchConsoleDisplay, max_restarts: int) -> int:
    """Check everything that needs no model, start the ranks, and return the exit code of the run."""
    from sarathi_pp.distributed.environment import mesh_of
    from sarathi_pp.distributed.launcher import descriptors_of, launch
    from sarathi_pp.run.batch import end_if_finished
    from sarathi_pp.run.preflight import check_lines, check_weights, identify, preflight

    with display.activity.phase("reading the model's configuration"):
        checked = preflight(batch_options)
    with display.activity.phase(f"reading {batch_options.input_path}"):
        checked = identify(batch_options, checked)
    if (code := end_if_finished(batch_options, checked, display)) is not None:
        return code
    check_lines(batch_options, checked, display)
    check_weights(batch_options, display)
    mesh = mesh_of(batch_options.config)
    descriptors = descriptors_of(batch_options.input_path, batch_options.output_path)
    display.leave_to_workers(batch_options.config.num_ranks)
    code = launch(mesh, sys.argv[1:], display, max_restarts=max_restarts, descriptors=descriptors)
    if code:
        checked.run_dir.write_end(code)
    return code
