"""`sarathi-pp report`: the figures of a run, folded anew from its traces, in every form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import click
from rich.console import Console

from sarathi_pp.cli.runs import read_run
from sarathi_pp.errors import OutputError
from sarathi_pp.report.table import render

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--attempt", type=click.IntRange(min=0), help="Which start of the run.  [default: the last]")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of the table.")
@click.option("--html", type=_FILE, help="Also write a page: timeline, causes, latencies. It needs no network.")
@click.option("--perfetto", type=_FILE, help="Also write a Chrome trace, for ui.perfetto.dev.")
@click.option("--csv", type=_FILE, help="Also write a line for each microbatch on each stage.")
def report(
    run: Path, attempt: int | None, as_json: bool, html: Path | None, perfetto: Path | None, csv: Path | None
) -> None:
    """Show the bubble report of RUN, a run directory; of a run that is still on or was killed, too."""
    found = read_run(run, attempt)
    if html is not None:
        from sarathi_pp.report.page import PageRun, render_page  # its plotting library is slow to import

        with writing(html) as file:
            file.write(render_page([PageRun(run.resolve().name, found.timeline, found.bubbles, found.report)]))
    if perfetto is not None:
        from sarathi_pp.trace.perfetto import write_chrome_trace

        with writing(perfetto) as file:
            write_chrome_trace(found.timeline, file)
    if csv is not None:
        from sarathi_pp.trace.rows import write_csv

        with writing(csv) as file:
            write_csv(found.timeline, file)
    if as_json:
        click.echo(json.dumps(found.report))
    else:
        Console().print(render(found.report))


@contextmanager
def writing(path: Path) -> Iterator[TextIO]:
    """Raises OutputError naming the file where it cannot be written."""
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            yield file
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
