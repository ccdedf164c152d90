"""`sarathi-pp agent generate ...`: torchrun for one node, with the run's exit code. Started by launch/multinode.sh."""

from __future__ import annotations

import click

from sarathi_pp.cli.generate import generate


@click.command(hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("command", type=click.Choice(["generate"]))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def agent(command: str, arguments: tuple[str, ...]) -> int:
    """Run the ranks of this node. torchrun's options come from its environment variables, PET_NNODES and so on."""
    options = generate.make_context(command, list(arguments)).params
    from sarathi_pp.runtime.agent import run_agent
    from sarathi_pp.runtime.rundir import RunDirectory

    run_dir = RunDirectory(options["run_dir"] or RunDirectory.default_path(options["output_path"]))
    return run_agent([command, *arguments], run_dir)
