"""A start that continues an earlier one: of the same launch, or of another agent of the same rendezvous."""

from __future__ import annotations

from dataclasses import replace

from sarathi_pp.distributed.environment import RankEnvironment, rendezvous_of
from sarathi_pp.errors import ConfigError
from sarathi_pp.outputs.journal import holds_anything
from sarathi_pp.run.display import Display
from sarathi_pp.run.preflight import BatchOptions


def is_restart(options: BatchOptions, env: RankEnvironment) -> bool:
    """Return whether the run directory is that of an earlier start of this very launch.

    torchrun's own count does not tell: a restart because hosts came or went is none to it.
    """
    return env.launch_id in options.run_directory().launches()


def is_continuation(options: BatchOptions, env: RankEnvironment) -> bool:
    """Whether another agent of the same rendezvous had the run directory last, and was lost.

    torchrun numbers ranks anew when hosts come and go: rank 0 may be on one that was not there before. A name that is
    used again, for a run after one that has ended, is no continuation.
    """
    run_dir, rendezvous = options.run_directory(), rendezvous_of(env.launch_id)
    launches = run_dir.launches()
    if not rendezvous or not launches or env.launch_id in launches:
        return False
    return rendezvous_of(launches[-1]) == rendezvous and run_dir.is_unfinished()


def as_restarted(options: BatchOptions, env: RankEnvironment, display: Display) -> BatchOptions:
    """A run that is started again goes on with what it has answered, however it was started at first.

    Raises ConfigError where an output is to be replaced that may be this job's own, which nobody can tell.
    """
    if options.scratch is not None and env.restart > 0:
        raise ConfigError(
            f"a restart would answer again what went to --output {options.output_path} before it; name an output file"
        )
    if options.start == "resume":
        return options
    run_dir, continued = options.run_directory(), is_continuation(options, env)
    if not is_restart(options, env) and not continued:
        if env.restart > 0 and options.start == "replace" and holds_anything(options.output_path):
            raise ConfigError(
                f"a restart does not replace {options.output_path}: it may be what this job has answered before it was "
                f"lost; start it again with --resume or with --overwrite"
            )
        return options
    begun = run_dir.read_run() or {}
    if begun.get("identity") is not None and begun.get("job") in run_dir.launches():
        if continued:
            display.warn(
                f"{options.output_path} is gone on with: an earlier start of the rendezvous "
                f"{rendezvous_of(env.launch_id)} was lost; a run of its own needs another --rdzv-id (RDZV_ID)"
            )
        return replace(options, start="resume")
    # It ended before it had opened its output. What is there then is what was to be replaced, or its own, without a
    # line.
    return replace(
        options, start="replace" if options.start == "replace" or not holds_anything(options.output_path) else "new"
    )
