"""Recognise a start that continues an earlier one, which was lost.

A launch is one launcher, or one agent of torchrun, with all its starts of the run. The earlier start was of the same
launch, or of another agent with the same rendezvous id.
"""

from __future__ import annotations

from dataclasses import replace

from sarathi_pp.distributed.environment import RankEnvironment, rendezvous_of
from sarathi_pp.errors import ConfigError
from sarathi_pp.outputs.journal import holds_anything
from sarathi_pp.run.display import Display
from sarathi_pp.run.preflight import BatchOptions


def is_restart(options: BatchOptions, env: RankEnvironment) -> bool:
    """Return whether an earlier start of this same launch has used the run directory.

    torchrun's own count is not enough. It does not count restarts after hosts have joined or left.
    """
    return env.launch_id in options.run_directory().launches()


def is_continuation(options: BatchOptions, env: RankEnvironment) -> bool:
    """Return whether another agent of the same rendezvous used the run directory last, and its run was lost.

    torchrun numbers the ranks again when hosts join or leave. So rank 0 may be on a host that has just joined, with
    another agent. If the earlier run has ended, a new run with the same rendezvous id is not a continuation.
    """
    run_dir, rendezvous = options.run_directory(), rendezvous_of(env.launch_id)
    launches = run_dir.launches()
    if not rendezvous or not launches or env.launch_id in launches:
        return False
    return rendezvous_of(launches[-1]) == rendezvous and run_dir.is_unfinished()


def as_restarted(options: BatchOptions, env: RankEnvironment, display: Display) -> BatchOptions:
    """Return the options of this start. A restart resumes the run's own answers, even if the user gave no --resume.

    Raises:
        ConfigError: the answers are not kept. Or --overwrite would replace an output that may hold answers of this job.
    """
    if options.scratch is not None and env.restart > 0:
        raise ConfigError(
            f"a restart would repeat answers that --output {options.output_path} already got; name an output file"
        )
    if options.start == "resume":
        return options
    run_dir, continued = options.run_directory(), is_continuation(options, env)
    if not is_restart(options, env) and not continued:
        if env.restart > 0 and options.start == "replace" and holds_anything(options.output_path):
            raise ConfigError(
                f"a restart does not replace {options.output_path}: it may hold answers of this job from before the "
                f"restart; start again with --resume or with --overwrite"
            )
        return options
    begun = run_dir.read_run() or {}
    if begun.get("identity") is not None and begun.get("job") in run_dir.launches():
        if continued:
            display.warn(
                f"{options.output_path} is continued, because an earlier start of the rendezvous "
                f"{rendezvous_of(env.launch_id)} was lost; a new run needs another --rdzv-id (RDZV_ID)"
            )
        return replace(options, start="resume")
    # The earlier start ended before it had opened its output. An output that exists is then the file that --overwrite
    # replaces, or an empty file of the earlier start.
    return replace(
        options, start="replace" if options.start == "replace" or not holds_anything(options.output_path) else "new"
    )
