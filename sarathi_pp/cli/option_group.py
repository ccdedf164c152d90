"""Options in named groups. Each option is declared once, and help lists each group under its name.

    MODEL = OptionGroup("Model", Option("--model", help=...), Option("--dtype", help=...))

    @click.command(cls=SectionedCommand, params=[*MODEL.options(), *SCHEDULE.options("--policy")])

A command may also use click's own options. Help lists options without a section last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from click.types import OptionHelpExtra

_WITHOUT_SECTION = "Other options"


class SectionedOption(click.Option):
    """An option of one command.

    Args:
        names: as for click.option. Names with dashes are the option's, and one without dashes is the parameter's.
        section: heading above it in the command's help.
        settings: those of click.Option.
    """

    def __init__(self, names: Sequence[str], *, section: str, **settings: Any) -> None:
        super().__init__(names, **settings)
        self.section = section

    def get_help_extra(self, ctx: click.Context) -> OptionHelpExtra:
        """Show a default that is described in words without click's parentheses."""
        extra = super().get_help_extra(ctx)
        return {**extra, "default": self.show_default} if isinstance(self.show_default, str) else extra


class Option:
    """An option as it is declared, before a command has it. It takes the arguments of click.option."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names = names
        self.settings = settings


class OptionGroup:
    """The options of one section of the help. A command uses all of them, some, or an option with changed settings."""

    def __init__(self, title: str, *options: Option) -> None:
        self.title = title
        self._options = {option.names[0]: option for option in options}

    def options(self, *names: str) -> list[SectionedOption]:
        """Return new options for a command: those with these first names, or all options of the group."""
        return [self.option(name) for name in names or self._options]

    def option(self, name: str, parameter: str | None = None, **changed: Any) -> SectionedOption:
        """Return one new option for a command.

        Args:
            name: the option's first name, such as `--model`.
            parameter: name of the command's parameter; None keeps the option's own.
            changed: settings for this command only, such as `required` or `default`.
        """
        declared = self._options[name]
        names = declared.names if parameter is None else (*declared.names, parameter)
        settings = {"section": self.title, **declared.settings, **changed}
        if changed.get("multiple"):
            settings["help"] += " May be repeated."
        return SectionedOption(names, **settings)


class SectionedCommand(click.Command):
    """A command whose help has a section for each group of its options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _write_sections(self, ctx, formatter)


class SectionedGroup(click.Group):
    """A command with subcommands, whose help has a section for each group of its options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _write_sections(self, ctx, formatter)
        self.format_commands(ctx, formatter)


def _write_sections(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the help of a command's options, with one section per group."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            sections.setdefault(getattr(parameter, "section", _WITHOUT_SECTION), []).append(record)
    for title, records in sections.items():
        with formatter.section(title):
            formatter.write_dl(records)
