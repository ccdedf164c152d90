"""`sarathi-pp agent generate ...`: torchrun for one node, with the run's exit code. launch/multinode.sh starts it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import click

from sarathi_pp.cli.generate import generate


@click.command(hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("command", type=click.Choice(["generate"]))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def agent(command: str, arguments: tuple[str, ...]) -> int:
    """Run the ranks of this node. torchrun's options come from its environment variables, PET_NNODES and so on."""
    options = generate.make_context(command, list(arguments)).params
    from sarathi_pp.outputs.run_directory import RunDirectory
    from sarathi_pp.run.preflight import is_unkept
    from sarathi_pp.run.torchrun_agent import run_agent

    output, named = options["output_path"], options["run_dir"]
    if named is None and is_unkept(output):
        with TemporaryDirectory(prefix="sarathi-pp-") as scratch:
            kept = f"{scratch}/run"
            return run_agent([command, *arguments, "--run-dir", kept], RunDirectory(Path(kept)))
    return run_agent([command, *arguments], RunDirectory(named or RunDirectory.default_path(output)))
