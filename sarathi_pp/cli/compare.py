"""`sarathi-pp compare`: runs side by side, with figures computed from their traces."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from sarathi_pp.cli.options import RUN
from sarathi_pp.cli.report import page_parts, refuse_two_on_stdout, writing
from sarathi_pp.process.activity import Activity
from sarathi_pp.report.comparison import compare as compare_reports
from sarathi_pp.report.comparison import render_comparison
from sarathi_pp.report.run_reader import advise_runs, read_run
from sarathi_pp.report.status import StatusLine


@click.command(params=RUN.options("--json"))
@click.argument("runs", metavar="RUN RUN...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write one page with the timelines of all runs.",
)
def compare(runs: tuple[Path, ...], as_json: bool, html: Path | None) -> None:
    """Show two or more run directories side by side. Ratios are to the first run."""
    if len(runs) < 2:
        raise click.UsageError("give two or more run directories")
    printed = refuse_two_on_stdout({"--html": html}, as_json)
    found, activity = [], Activity()
    with StatusLine(Console(stderr=True), activity):
        for number, path in enumerate(runs, 1):
            with activity.phase(f"reading the traces of {path} ({number} of {len(runs)})"):
                found.append(read_run(path, advised=html is not None))
        comparison = compare_reports([(run.path.resolve().name, run.report) for run in found])
        labels = [run["label"] for run in comparison["runs"]]
        with activity.phase("simulating advice"):
            looked_for = advise_runs(dict(zip(labels, found, strict=True)))
    comparison |= {"advice": looked_for["advice"], "notes": [*comparison["notes"], *looked_for["notes"]]}
    if html is not None:
        from sarathi_pp.report.page.comparison_page import render_comparison_page

        shown = zip(labels, found, strict=True)
        parts = [part for label, run in shown for part in page_parts(label, run)]
        with writing(html) as file:
            file.write(render_comparison_page(comparison, parts))
    if as_json:
        click.echo(json.dumps(comparison))
    elif not printed:
        Console().print(render_comparison(comparison))
