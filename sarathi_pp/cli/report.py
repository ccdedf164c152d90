"""`sarathi-pp report`: the figures of a run, folded anew from its traces."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
from rich.console import Console

from sarathi_pp.errors import MissingError
from sarathi_pp.report.table import render
from sarathi_pp.trace.summary import summarise


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--attempt", type=click.IntRange(min=0), help="Which start of the run.  [default: the last]")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of the table.")
def report(run: Path, attempt: int | None, as_json: bool) -> None:
    """Show the bubble report of RUN, a run directory; of a run that is still on or was killed, too."""
    found = summarise(_traces(run, attempt))
    if as_json:
        click.echo(json.dumps(found))
    else:
        Console().print(render(found))


def _traces(run: Path, attempt: int | None) -> list[Path]:
    """One trace a stage, stage 0 first. Raises MissingError where the directory holds none or not all."""
    attempts = sorted(run.glob("attempt-*")) if attempt is None else [run / f"attempt-{attempt:04d}"]
    traces = sorted(attempts[-1].glob("trace-*-of-*.jsonl")) if attempts else []
    if not traces:
        raise MissingError(f"{attempts[-1] if attempts else run} holds no trace; give the directory of a run")
    expected = int(re.findall(r"-of-(\d+)", traces[0].name)[0])
    if len(traces) != expected:
        raise MissingError(f"{traces[0].parent} holds {len(traces)} of {expected} traces")
    return traces
