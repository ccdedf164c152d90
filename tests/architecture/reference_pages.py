"""The reference pages that are made from the code: the command line, RunConfig, exit codes, supported models.

To write them again:

python -m tests.architecture.reference_pages
"""

from __future__ import annotations

import html
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import click

from sarathi_pp import errors
from sarathi_pp.checkpoint.facts.families import FAMILIES, LEFT_OUT
from sarathi_pp.checkpoint.facts.wrapper import TEXT_PARTS, WRAPPERS
from sarathi_pp.cli.main import cli
from sarathi_pp.config import RunConfig, names_of, option_of
from sarathi_pp.sampling_params import SamplingParams

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
NOTE = "<!-- Written by `python -m tests.architecture.reference_pages`. Do not edit. -->"

# Fields that only the command line sets.
_OF_COMMANDS = {"sampling_overrides"}
# The meaning of each exit code, for a user.
EXIT_CODES = {
    0: "Every line was answered.",
    2: "An option or a model that cannot work, or ranks that do not come together. No request was started.",
    3: "The run finished. Some lines got an error line.",
    65: "A file that exists and cannot be used.",
    66: "A model, file or tensor that does not exist.",
    70: "An internal error, or an error of a policy.",
    74: "Output that cannot be written.",
    75: "A stage died, stopped answering or ran out of memory, or a signal ended the run. `--resume` continues it.",
    77: "Refused for safety: pickled weights, remote code, or a path that leaves the model directory.",
    130: "Interrupted by Ctrl-C. `--resume` continues the run.",
}


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    commands = {name: cli.get_command(click.Context(cli), name) for name in cli.list_commands(click.Context(cli))}
    found = {f"cli-{name}.md": _command_page(name, command) for name, command in commands.items() if command}
    return {
        "cli.md": _cli_page(commands),
        **found,
        "config.md": _config_page(),
        "exit-codes.md": _exit_codes_page(),
        "supported-models.md": _models_page(),
    }


def _page(title: str, *parts: str) -> str:
    return "\n\n".join((f"# {title}", NOTE, *parts)) + "\n"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *map(list, rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _code(text: str) -> str:
    """Return text as code in a table, in which Markdown has no way to write a bar that all readers understand."""
    return f"<code>{html.escape(text, quote=False).replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def _cli_page(commands: dict[str, click.Command | None]) -> str:
    rows = [
        (f"[`sarathi-pp {name}`](cli-{name}.md)", (command.get_short_help_str(200) if command else ""))
        for name, command in commands.items()
    ]
    return _page(
        "Command line",
        "`sarathi-pp COMMAND --help` prints the same text. An option that does not exist, or that cannot be honoured, "
        "is an\nerror with exit code 2. [Exit codes](exit-codes.md) lists all codes.",
        _table(("command", "use"), rows),
        "Shell completion comes from click, for bash, zsh and fish. Put this line into the shell's start-up file:",
        '```bash\neval "$(_SARATHI_PP_COMPLETE=bash_source sarathi-pp)"\n```',
    )


def _command_page(name: str, command: click.Command) -> str:
    parts = _command_parts(name, command)
    if isinstance(command, click.Group):
        for child in command.commands.values():
            parts += [f"## {name} {child.name}", *_command_parts(f"{name} {child.name}", child, level=3)]
    return _page(f"sarathi-pp {name}", *parts)


def _command_parts(name: str, command: click.Command, level: int = 2) -> list[str]:
    """Return the usage, the description, and a table of options for each section. level: of a section's heading."""
    context = click.Context(command, info_name=name, show_default=True)
    arguments = " ".join(one.make_metavar(context) for one in command.params if isinstance(one, click.Argument))
    sections: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for one in command.params:
        if isinstance(one, click.Option) and not one.hidden:
            sections[getattr(one, "section", "Options")].append(_option_row(one, context))
    parts = [f"```text\nsarathi-pp {name} {(arguments + ' ') if arguments else ''}[OPTIONS]\n```"]
    parts.append(inspect.cleandoc(command.help or "").partition("\f")[0].strip())
    for title, rows in sections.items():
        parts += [f"{'#' * level} {title}", _table(("option", "value", "default", "use"), rows)]
    return parts


def _option_row(option: click.Option, context: click.Context) -> tuple[str, str, str, str]:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag else _code(option.make_metavar(context))
    default = option.get_help_extra(context).get("default", "")
    if option.required:
        default = "required"
    return names, value, str(default), option.help or ""


def _config_page() -> str:
    texts, of_requests = _arguments(RunConfig), _arguments(SamplingParams)
    run = [
        (_names(one.name), _code(str(one.type)), _default(one), f"`{option_of(one.name)}`", texts[one.name])
        for one in fields(RunConfig)
        if one.name not in _OF_COMMANDS
    ]
    sampling = [
        (_names(one.name), _code(str(one.type)), _default(one), of_requests[one.name]) for one in fields(SamplingParams)
    ]
    return _page(
        "Configuration",
        "`LLM(model, **options)` takes the fields of `RunConfig`, and each field has an option on the command line.\n"
        "Some fields have more than one name. An unknown name is an error.",
        "## RunConfig",
        _table(("field", "type", "default", "option", "meaning"), run),
        "## SamplingParams",
        "One per request in Python. A line of the [input](input-format.md) uses the same names.",
        _table(("field", "type", "default", "meaning"), sampling),
    )


def _names(field: str) -> str:
    return ", ".join(f"`{name}`" for name in names_of(field))


def _arguments(kind: type) -> dict[str, str]:
    """Return the text of each line under `Args:` in a class's docstring, by the argument's name."""
    body = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", body, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in entries}


def _default(one: Field[Any]) -> str:
    if one.default is not MISSING:
        return f"`{one.default!r}`"
    return "`{}`" if one.default_factory is not MISSING else "required"


def _exit_codes_page() -> str:
    kinds: dict[int, list[str]] = defaultdict(list)
    for kind in vars(errors).values():
        if isinstance(kind, type) and hasattr(kind, "exit_code"):
            kinds[kind.exit_code].append(f"`{kind.__name__}`")
    rows = [(str(code), meaning, ", ".join(kinds[code])) for code, meaning in EXIT_CODES.items()]
    return _page(
        "Exit codes",
        "Every command ends with one of these codes. An error is printed as `Name: message`. Python programs catch\n"
        "the class of that name from `sarathi_pp.errors`. A wrong use of options prints `Error: message` and ends\n"
        "with 2. `sarathi-pp bench gpu` and `sarathi-pp check` have one more code: 1, if a check fails.",
        _table(("code", "meaning", "errors"), rows),
        "torchrun returns 1 for every failure. The code of a run is then in the file `exit_code` of its\n"
        "[run directory](run-directory.md#exit_code). A start that is refused may write no file, for example if an\n"
        "option has a wrong value. Or it leaves the file of an earlier run. Then the line `exitcode` of torchrun's\n"
        "table has the code. The scripts in `launch/` end with the code in all cases.",
    )


def _models_page() -> str:
    rows = [
        (
            f"`{family.model_type}`",
            f"`{family.architecture}`",
            "full, FP8, int4, int8" + (", MXFP4" if family.model_type == "gpt_oss" else ""),
            "yes" if family.widths is not None else "no",
        )
        for family in FAMILIES.values()
    ]
    wrapped = [
        (f"`{name}`", f"`{TEXT_PARTS[wrapper.text].family}`" + ("" if wrapper.fixed else ", or as `text_config` says"))
        for name, wrapper in WRAPPERS.items()
    ]
    return _page(
        "Supported models",
        "Stages of these architectures give the logits of the unmodified `transformers` model in the tests. The\n"
        "tests switch on what is special in each family: tied embeddings, biases, windows, soft caps, sinks,\n"
        "multipliers and layer patterns. `sarathi-pp doctor --models` prints this table.",
        _table(("`model_type`", "architecture", "stored weights", "tensor parallelism"), rows),
        "Weights are safetensors, in one file or sharded, from a directory or the Hugging Face Hub. Everything else\n"
        "is refused before a run starts: other architectures, dynamic rotary embeddings and custom\n"
        "code. Longrope is supported in phi3 only (Phi-3, Phi-3.5 and Phi-4-mini). Weights may be stored in\n"
        "full or in these [quantised forms](../guides/quantised-models.md): FP8, MXFP4 (gpt-oss), compressed-tensors,\n"
        "GPTQ and AWQ.\n"
        "`sarathi-pp doctor --model DIR` checks if a model can run.",
        "## Multimodal models",
        "Of these models the [text part](../guides/multimodal-models.md) runs, for rows without images:",
        _table(("`model_type`", "text part"), wrapped),
        "## Not supported",
        "These architectures of `transformers` are plain stacks of layers too. They are refused, with the reason:",
        _table(("architecture", "reason"), ((f"`{name}`", reason) for name, reason in LEFT_OUT.items())),
    )


if __name__ == "__main__":
    for name, text in pages().items():
        (REFERENCE / name).write_text(text)
