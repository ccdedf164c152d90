"""The `sarathi-pp` command: it parses, calls and shows. A command is loaded when it is used, so help is fast."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

import click

import sarathi_pp
from sarathi_pp.distributed.environment import speaks_for_host
from sarathi_pp.errors import EXIT_INTERRUPTED, EXIT_OK, MissingError, OutputError, SarathiError
from sarathi_pp.process import stdout

# The commands, each with its line in the help. A command without a line is hidden. The command NAME is the function
# NAME in the module sarathi_pp.cli.NAME.
_COMMANDS = {
    "generate": "Answer a file of prompts with a pipeline of stages.",
    "report": "Show the bubble report of a run.",
    "compare": "Show two or more runs side by side.",
    "simulate": "Run policies on a modelled pipeline.",
    "profile": "Measure what a model's stages cost on this machine.",
    "plan": "Say how to cut a model and its prompts, without running it.",
    "bench": "Run policies, and other engines, on the same work.",
    "doctor": "Say what a run here would use, and why not the others.",
    "check": "Compare a model's stages with transformers, layer by layer.",
    "worker": None,
    "agent": None,
}

# Error numbers of a full disk. An OSError with one of them may come from the library that prints.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, help_line in _COMMANDS.items() if help_line]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"sarathi_pp.cli.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, help_line in _COMMANDS.items() if help_line])


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(sarathi_pp.__version__, prog_name="sarathi-pp")
def cli() -> None:
    """Pipeline-parallel LLM inference whose bubbles are measured.

    Run it directly (--stages N starts N local workers) or under torchrun (each rank becomes one stage).
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script. Exit with a code that errors.py lists."""
    stdout.replace_unencodable()
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    try:
        _check_folder()
        code = cli.main(args=arguments, prog_name="sarathi-pp", standalone_mode=False)
        stdout.flush()
        return code if isinstance(code, int) else EXIT_OK
    except click.exceptions.Abort:
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        if speaks_for_host():
            with suppress(OSError):
                error.show()
        return error.exit_code
    except SarathiError as error:
        if speaks_for_host():
            with suppress(OSError):
                click.echo(f"{type(error).__name__}: {error}", err=True)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # an unexpected error is our bug: it ends with 70, not with 1 as launchers do
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            stdout.forget()
            with suppress(OSError):
                click.echo(f"OutputError: output cannot be written: {error}", err=True)
            return OutputError.exit_code
        with suppress(OSError):
            traceback.print_exc()
        return SarathiError.exit_code


def _check_folder() -> None:
    """Check that the current directory exists. Without it, libraries that are loaded later would end the process.

    Raises:
        MissingError: the directory has been removed.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise MissingError("the current directory has been removed; change to one that exists") from None
