"""`sarathi-pp compare` on run directories made of synthetic traces."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sarathi_pp.cli.compare import compare
from sarathi_pp.errors import MissingError, OutputError
from sarathi_pp.trace.events import encode
from sarathi_pp.trace.recorder import trace_name
from tests.analysis.schedules import Schedule, constant


def make_run(path: Path, stages: int, seconds: float) -> Path:
    attempt = path / "attempt-0000"
    attempt.mkdir(parents=True)
    for stage, trace in enumerate(Schedule(12, stages, constant(seconds)).events()):
        (attempt / trace_name(stage, stages)).write_text("".join(encode(event) + "\n" for event in trace))
    (path / "run.json").write_text(json.dumps({"model": f"model of {path.name}", "dtype": "float32"}))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    return [str(make_run(tmp_path / name, stages, 1 / stages)) for name, stages in (("one", 1), ("two", 2))]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(compare, arguments, env={"COLUMNS": "80"})


def test_table(runs: list[str]) -> None:
    result = run(*runs)
    assert result.exit_code == 0, result.output
    assert result.output.split()[:5] == ["figure", "1", "stage", "2", "stages"]
    settings = next(line for line in result.output.splitlines() if line.startswith("model "))
    assert settings.split()[1:] == ["model", "of", "one", "model", "of", "two"]


def test_json_is_one_document(runs: list[str]) -> None:
    result = run(*runs, "--json")
    (line,) = result.stdout.splitlines()
    comparison = json.loads(line)
    assert [run["label"] for run in comparison["runs"]] == ["1 stage", "2 stages"]
    assert [run["stages"] for run in comparison["runs"]] == [1, 2]
    assert comparison["figures"]["wall_s"]["values"] == [12.0, 6.5]


def test_html_shows_every_run(runs: list[str], tmp_path: Path) -> None:
    result = run(*runs, "--html", str(tmp_path / "page.html"))
    assert result.exit_code == 0, result.output
    page = (tmp_path / "page.html").read_text()
    assert "1 stage" in page and "2 stages" in page


def test_html_says_what_keeps_runs_from_being_compared(runs: list[str], tmp_path: Path) -> None:
    notes = json.loads(run(*runs, "--json", "--html", str(tmp_path / "page.html")).stdout)["notes"]
    assert notes and all(
        f'<p class="note">{escape(note)}</p>' in (tmp_path / "page.html").read_text() for note in notes
    )


def test_one_run_is_refused(runs: list[str]) -> None:
    result = run(runs[0])
    assert result.exit_code == 2
    assert "two or more run directories" in result.stderr


def test_a_directory_without_traces_is_refused(runs: list[str], tmp_path: Path) -> None:
    assert isinstance(run(*runs, str(tmp_path)).exception, MissingError)


def test_a_page_that_cannot_be_written(runs: list[str], tmp_path: Path) -> None:
    assert isinstance(run(*runs, "--html", str(tmp_path / "none" / "page.html")).exception, OutputError)
