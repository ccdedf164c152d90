"""Facts of a run that no trace holds, from run.json and report.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sarathi_pp.report.run_reader import read_run
from tests.report.test_compare_command import make_run


def report_of(directory: Path, *, attempt: int | None = None, **files: Any) -> dict[str, Any]:
    for name, document in files.items():
        (directory / f"{name}.json").write_text(json.dumps(document))
    return read_run(directory, attempt, advised=False).report


def test_what_a_run_was_and_how_it_ended_is_in_its_report(tmp_path: Path) -> None:
    started = {"tensor_parallel_size": 2, "command": ["sarathi-pp", "generate"], "sarathi_pp": "0.1.0"}
    ended = {"resumed": {"rows": 3, "failed": 1}, "stopped_by": "SIGTERM"}
    run = make_run(tmp_path / "run", 2, 0.5)
    report = report_of(run, run=started, report=ended)
    assert {**started, **ended}.items() <= report.items()
    earlier = report_of(run, attempt=0)
    assert not {"resumed", "stopped_by"} & earlier.keys(), "report.json is about the last start"


@pytest.mark.parametrize("strange", [{"tensor_parallel_size": 1}, {"tensor_parallel_size": "2"}, {"command": "words"}])
def test_facts_that_say_nothing_are_left_out(strange: dict[str, Any], tmp_path: Path) -> None:
    report = report_of(make_run(tmp_path / "run", 2, 0.5), run=strange, report={"resumed": 3})
    assert not {"tensor_parallel_size", "command", "resumed"} & report.keys()
