"""`sarathi-pp doctor`: the parts that a run on this machine would use, and the reasons against the others."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sarathi_pp.checkpoint.facts.families import FAMILIES
from sarathi_pp.cli.options import DEBUGGING, MODEL, RUN
from sarathi_pp.errors import EXIT_OK, SarathiError
from sarathi_pp.process.activity import Activity
from sarathi_pp.report.status import StatusLine

if TYPE_CHECKING:
    from sarathi_pp.run.doctor import Diagnosis, Finding

_STYLES = {"used": "green", "unused": "dim", "doubtful": "yellow", "refused": "red"}


@click.command(params=[*MODEL.options("--model"), *DEBUGGING.options("--verify"), *RUN.options("--json")])
@click.option("--models", "list_models", is_flag=True, help="List the supported models and do nothing else.")
def doctor(model: str | None, verify: str | None, list_models: bool, as_json: bool) -> int:
    """Show the parts that a run on this machine would use, and the reasons against the others.

    With --model it also checks that the model is supported and that its files exist. The exit code is 0 if a run can
    start. Otherwise it is the exit code that the run would have.
    """
    if verify and model is None:
        raise click.UsageError("--verify reads the weight files of a model. Give --model too")
    if list_models:
        if model is not None:
            raise click.UsageError(
                "--models lists the supported models, and --model checks one model. Give one of the two"
            )
        _list_models(as_json)
        return EXIT_OK
    activity = Activity()
    with StatusLine(Console(stderr=True), activity), activity.phase("loading libraries"):
        try:
            from sarathi_pp.run.doctor import diagnose
        except ImportError as error:
            raise SarathiError(f"a library that every run needs cannot be loaded: {error}") from error
        with activity.phase("checking this machine"):
            found = diagnose(model, verify=verify is not None)
    Console(stderr=True).print(_render(found))
    if as_json:
        click.echo(json.dumps(found.document()))
    return found.exit_code


def _list_models(as_json: bool) -> None:
    """Print the architectures to standard output, one per line."""
    rows = [
        {"model_type": one.model_type, "architecture": one.architecture, "tensor_parallel": one.widths is not None}
        for one in FAMILIES.values()
    ]
    if as_json:
        click.echo(json.dumps({"models": rows}))
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("model_type", "architecture", "tensor shards"):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        table.add_row(str(row["model_type"]), str(row["architecture"]), "yes" if row["tensor_parallel"] else "-")
    Console().print(table)


def _render(found: Diagnosis) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for _ in ("topic", "name", "state", "detail"):
        table.add_column(overflow="fold")
    topic = ""
    for one in found.findings:
        table.add_row(one.topic if one.topic != topic else "", one.name, _state(one), Text(one.detail))
        topic = one.topic
    return Group(table, "", _verdict(found))


def _verdict(found: Diagnosis) -> Text:
    """Return the last line: a run can start, or it is refused, with the findings that refuse it."""
    refused = [f"{one.topic} {one.name}" for one in found.findings if one.state == "refused"]
    if refused:
        return Text(f"refused: {', '.join(refused)} (exit code {found.exit_code})", style="bold red")
    return Text("OK: a run can start", style="bold green")


def _state(one: Finding) -> Text:
    ending = f" ({one.exit_code})" if one.exit_code else ""
    return Text(one.state + ending, style=_STYLES[one.state])
