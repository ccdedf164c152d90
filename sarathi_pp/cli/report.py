"""`sarathi-pp report`: the figures of a run, computed from its traces and shown in any format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click
from rich.console import Console

from sarathi_pp.analysis.replicas import Replica
from sarathi_pp.cli.options import RUN
from sarathi_pp.errors import ConfigError, OutputError
from sarathi_pp.process import stdout
from sarathi_pp.process.activity import Activity
from sarathi_pp.report.run_reader import Run, read_run
from sarathi_pp.report.status import StatusLine
from sarathi_pp.report.table import render

if TYPE_CHECKING:
    from sarathi_pp.report.page.part import PagePart

_FILE = click.Path(path_type=Path, dir_okay=False)
_STDOUT = Path("-")


@click.command(params=RUN.options("--json"))
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--attempt", type=click.IntRange(min=0), help="Attempt of the run to show. Default: the last one.")
@click.option("--html", type=_FILE, help="Also write a page: timeline, causes and latencies.")
@click.option("--perfetto", type=_FILE, help="Also write a Chrome trace per replica, for ui.perfetto.dev.")
@click.option("--csv", type=_FILE, help="Also write a file per replica: a line per microbatch and stage.")
def report(
    run: Path, attempt: int | None, as_json: bool, html: Path | None, perfetto: Path | None, csv: Path | None
) -> None:
    """Show the bubble report of the run directory RUN. The run may still be running, or may have been killed.

    A file named - is standard output. Then nothing else is printed there.
    """
    printed = refuse_two_on_stdout({"--html": html, "--perfetto": perfetto, "--csv": csv}, as_json)
    activity = Activity()
    with StatusLine(Console(stderr=True), activity):
        with activity.phase(f"reading the traces of {run} and explaining the bubble"):
            found = read_run(run, attempt)
        with activity.phase("writing files"):
            _write_files(run, found, html, perfetto, csv)
    if as_json:
        click.echo(json.dumps(found.report))
    elif not printed:
        Console().print(render(found.report))


def _write_files(run: Path, found: Run, html: Path | None, perfetto: Path | None, csv: Path | None) -> None:
    if html is not None:
        from sarathi_pp.report.page.run_page import render_page

        title = run.resolve().name
        with writing(html) as file:
            file.write(render_page(title, found.report, page_parts(title, found)))
    if perfetto is not None:
        from sarathi_pp.analysis.perfetto import write_chrome_trace

        for path, replica in _each(perfetto, found):
            with writing(path) as file:
                write_chrome_trace(replica.timeline, file)
    if csv is not None:
        from sarathi_pp.analysis.csv_rows import write_csv

        for path, replica in _each(csv, found):
            with writing(path) as file:
                write_csv(replica.timeline, file)


def refuse_two_on_stdout(files: Mapping[str, Path | None], as_json: bool) -> bool:
    """Return whether one of the files goes to standard output.

    Raises:
        UsageError: more than one output goes there.
    """
    asked = [option for option, path in files.items() if path == _STDOUT]
    wanted = [f"{option} -" for option in asked] + ["--json"] * as_json
    if asked and len(wanted) > 1:
        raise click.UsageError(f"{' and '.join(wanted)} all go to standard output. Give a file to all but one")
    return bool(asked)


def page_parts(title: str, run: Run) -> list[PagePart]:
    """Return the pipelines that a page shows for a run: the run itself, or each of its replicas."""
    from sarathi_pp.report.page.part import PagePart

    if len(run.replicas) == 1:
        return [PagePart(title, run.replicas[0].timeline, run.replicas[0].bubbles, run.report)]
    return [PagePart(f"{title} replica {one.index}", one.timeline, one.bubbles, one.report) for one in run.replicas]


def _each(path: Path, run: Run) -> list[tuple[Path, Replica]]:
    """Return the path of one file per replica. With several replicas, a.csv becomes a.replica-0001.csv and so on."""
    if len(run.replicas) == 1:
        return [(path, run.replicas[0])]
    if path == _STDOUT:
        raise ConfigError(f"standard output cannot hold {len(run.replicas)} files, one per replica. Name a file")
    return [(path.with_name(f"{path.stem}.replica-{one.index:04d}{path.suffix}"), one) for one in run.replicas]


@contextmanager
def writing(path: Path) -> Iterator[TextIO]:
    """Open a file, or standard output for `-`.

    Raises:
        OutputError: the file cannot be written. The message names the file.
    """
    try:
        with stdout.utf8() if path == _STDOUT else path.open("w", encoding="utf-8", newline="") as file:
            yield file
    except BrokenPipeError:
        raise  # the reader has ended, for example `| head`
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
