"""The simulator against real processes: the same microbatches in the same order, and the same times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sarathi_pp.analysis.bubbles import measure_bubbles
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.outputs.profile_file import read_profile
from sarathi_pp.report.policies import bubble_floor
from sarathi_pp.sim.experiment import Experiment, report_of, simulate
from sarathi_pp.sim.workload import parse_workload
from tests.commands.processes import COMMAND, Files, least_disturbed, run
from tests.commands.test_emulated import write_profile

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("awake")]

STAGES = 3
# Results come back in the middle of the first stage's next compute, tens of milliseconds before the order would change.
COSTS = {"a0": 0.1, "a1": 1.5e-3, "a3": 1e-6}
WORKLOAD = "fixed:n=9,prompt=48,output=4"


@pytest.mark.parametrize("policy", ["sarathi", pytest.param("orca", marks=pytest.mark.full)])
def test_a_gloo_run_and_its_simulation_agree(policy: str, tmp_path: Path) -> None:
    workload = parse_workload(WORKLOAD)
    path = write_profile(tmp_path / "profile.json", STAGES, **COSTS)
    experiment = Experiment(
        profile=read_profile(path), workload=workload, policy=parse_policy(policy), chunk_size=48, max_num_seqs=6
    )
    timeline = simulate(experiment)
    predicted = measure_bubbles(timeline)

    def measure(folder: Path) -> dict[str, Any]:
        files = Files(folder)
        prompts = [tuple(request.prompt_token_ids) for request in workload.requests()]
        files.write_prompts(prompts, max_new_tokens=4, ignore_eos=True)
        where = ("--input", str(files.input), "--output", str(files.output), "--stages", str(STAGES))
        options = ("--policy", policy, "--chunk-size", "48", "--max-num-seqs", "6", "--quiet")
        run((*COMMAND, "generate", "--emulate", str(path), *where, *options), folder, timeout_s=120)
        lines = map(json.loads, files.traces()[0].read_text().splitlines())
        return files.report() | {"order": [line["x"] for line in lines if line["e"] == "issued"]}

    def off(report: dict[str, Any]) -> float:
        """Measure the difference; a machine that pauses for tens of milliseconds changes the order: two results come at
        once.
        """
        return abs(report["bubble_ratio"] - predicted.bubble_ratio) + (report["order"] != expected)

    expected = [event.text for event in timeline.issued]
    report = least_disturbed(measure, tmp_path, off)
    assert report["order"] == expected
    assert predicted.wall_s == pytest.approx(report["wall_s"], rel=0.1)
    assert predicted.bubble_ratio == pytest.approx(report["bubble_ratio"], abs=0.03)
    assert bubble_floor(report) == pytest.approx(0, abs=0.02)


def test_replicas_of_a_gloo_run_and_of_its_simulation_agree(tmp_path: Path) -> None:
    """Each replica holds 6 of the 16 requests at first. It gets the others when these end."""
    workload = parse_workload("fixed:n=16,prompt=48,output=4")
    path = write_profile(tmp_path / "profile.json", 2, **COSTS)
    seats = {"chunk_size": 48, "max_num_seqs": 3}
    experiment = Experiment(
        profile=read_profile(path), workload=workload, policy=parse_policy("sarathi"), replicas=2, **seats
    )
    predicted = report_of(experiment)

    def measure(folder: Path) -> dict[str, Any]:
        files = Files(folder)
        prompts = [tuple(request.prompt_token_ids) for request in workload.requests()]
        files.write_prompts(prompts, max_new_tokens=4, ignore_eos=True)
        where = ("--input", str(files.input), "--output", str(files.output), "--replicas", "2", "--stages", "2")
        options = ("--policy", "sarathi", "--chunk-size", "48", "--max-num-seqs", "3", "--quiet")
        run((*COMMAND, "generate", "--emulate", str(path), *where, *options), folder, timeout_s=120)
        assert len(files.rows()) == 16
        return files.report()

    def off(report: dict[str, Any]) -> float:
        return max(abs(report["bubble_ratio"] - predicted["bubble_ratio"]), abs(_longer(report, predicted)) / 5)

    report = least_disturbed(measure, tmp_path, off)
    assert {*predicted} <= {*report}
    assert [one["requests"] for one in report["per_replica"]] == [8, 8]
    assert [one["requests"] for one in predicted["per_replica"]] == [8, 8]
    assert _longer(report, predicted) == pytest.approx(0, abs=0.1)
    assert predicted["bubble_ratio"] == pytest.approx(report["bubble_ratio"], abs=0.03)


def _longer(report: dict[str, Any], predicted: dict[str, Any]) -> float:
    return float(predicted["wall_s"] / report["wall_s"] - 1)
