"""Advice that is tried on the simulator; a run that other work disturbs differs from its simulation and gets none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.processes import COMMAND, Files, run
from tests.commands.test_report_commands import command

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("awake")]


def test_advice_is_tried_with_what_the_run_allowed(tmp_path: Path) -> None:
    """The run had one seat for twelve requests, and `report` learns this limit from run.json alone."""
    run(command(tmp_path, 2, "--quiet", "--max-num-seqs", "1"), tmp_path)
    files = Files(tmp_path)
    first = json.loads((files.run / "report.json").read_text())
    again = json.loads(run((*COMMAND, "report", str(files.run), "--json"), tmp_path).stdout)
    for report in (first, again):
        advice = {one["option"]: one["gain_s"] for one in report["advice"]}
        gain_s = advice.get("--max-num-seqs 8")
        assert gain_s is not None, report["notes"]
        assert 0.3 * report["wall_s"] < gain_s < report["wall_s"]
    page = tmp_path / "run.html"
    run((*COMMAND, "compare", str(files.run), str(files.run), "--html", str(page)), tmp_path)
    assert page.read_text().count("Use --max-num-seqs 8:") == 2
