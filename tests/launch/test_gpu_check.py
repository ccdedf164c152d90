"""launch/gpu_check.sh and the tier gpu of launch/test.sh: what they run, with a Python that only records its calls."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.processes import ROOT
from tests.machine import patient, slowness

STAND_IN = """#!/bin/bash
echo "$*" >>"$CALLS"
case "$*" in
    *"$FAILS"*) exit 1 ;;
    "- "*) echo "3 0" ;;
    "-m pytest -q"*)
        echo "slowness $SARATHI_PP_TEST_SLOWNESS" >>"$CALLS"
        [ -z "${TESTS:-}" ] || exec "$REAL" -m pytest -q -n 2 -p no:cacheprovider "$TESTS"
        ;;
esac
"""
# Records how long each program may run.
TIMEOUT = """#!/bin/bash
echo "timeout $*" >>"$CALLS"
exec "$TRUE_TIMEOUT" "$@"
"""
# The first test fails, and the others hang in the two workers.
HANGING = """
import time
import pytest

@pytest.mark.parametrize("number", range(6))
def test_number(number):
    if number:
        time.sleep(120)
    raise AssertionError("the sum is wrong")
"""


def run(folder: Path, script: str, *arguments: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run a script. Return its outcome, and the calls of Python."""
    calls = folder / "calls"
    for name, text in (("python", STAND_IN), ("timeout", TIMEOUT)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    calls.write_text("")
    own = {"PYTHON": f"{folder}/python", "CALLS": str(calls), "OUT": f"{folder}/out", "FAILS": "nothing"}
    own |= {"PATH": f"{folder}:{os.environ['PATH']}", "TRUE_TIMEOUT": str(shutil.which("timeout")), **variables}
    kept = {name: value for name, value in os.environ.items() if name != "SARATHI_PP_TEST_SLOWNESS"}
    command = ("bash", str(ROOT / "launch" / script), *arguments)
    done = subprocess.run(
        command, env={**kept, **own}, capture_output=True, text=True, timeout=patient(60), check=False
    )
    return done, calls.read_text()


def most_s(calls: str, program: str) -> int:
    """Return the seconds after which a program is killed."""
    (line,) = (line for line in calls.splitlines() if line.startswith("timeout ") and program in line)
    found = re.match(r"timeout (?:-s INT )?-k (\d+) (\d+) ", line)
    assert found, line
    return int(found[1]) + int(found[2])


def test_the_device_then_the_tests_then_the_measurements(tmp_path: Path) -> None:
    done, calls = run(tmp_path, "gpu_check.sh", "rates", "exact", BUDGET_S="300")
    assert done.returncode == 0, done.stdout + done.stderr
    places = [calls.index(call) for call in ("sarathi_pp doctor", "-m pytest -q", "sarathi_pp bench gpu --budget ")]
    assert places == sorted(places) and "tests/gpu\n" in calls
    assert f"--output {tmp_path}/out/gpu.json --parts rates,exact\n" in calls
    budget_s = int(calls.split("--budget ")[1].split()[0])
    assert 200 < budget_s <= 270, "the remaining time, without the time to end"
    assert "slowness 1\n" in calls, "a time limit does not grow with the workers"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"log.txt", "triton.tgz"}


def test_without_tests_and_names_all_that_is_missing_is_measured(tmp_path: Path) -> None:
    done, calls = run(tmp_path, "gpu_check.sh", TESTS_S="0")
    assert done.returncode == 0 and "-m pytest -q" not in calls and "--parts" not in calls
    assert "-m pytest --version" in calls.splitlines()[1], "an error that ends all tests is seen first"


@pytest.mark.parametrize(("budget_s", "tests_s"), [(100, 1000), (100, 30), (60, 1000), (560, 200)])
def test_everything_ends_within_the_budget(budget_s: int, tests_s: int, tmp_path: Path) -> None:
    done, calls = run(tmp_path, "gpu_check.sh", BUDGET_S=str(budget_s), TESTS_S=str(tests_s))
    assert done.returncode == 0, done.stdout
    left_s, spent_s = budget_s - 30, patient(10)  # nothing takes time here, except the start of programs
    assert most_s(calls, "doctor") <= min(95, left_s)
    assert min(tests_s + 20, left_s - spent_s) <= most_s(calls, "launch/test.sh") <= min(tests_s + 20, left_s)
    measured_s = int(calls.split("--budget ")[1].split()[0])
    assert left_s - spent_s <= measured_s <= left_s
    assert most_s(calls, "bench gpu") - measured_s + most_s(calls, "tar ") <= 30, "the seconds kept for the end"


def test_a_budget_without_time_for_anything_is_refused(tmp_path: Path) -> None:
    done, calls = run(tmp_path, "gpu_check.sh", BUDGET_S="59")
    assert done.returncode == 2 and "give at least 60" in done.stderr and not calls


def test_failures_are_printed_if_the_time_for_the_tests_is_over(tmp_path: Path) -> None:
    tests = tmp_path / "test_hanging.py"
    tests.write_text(HANGING)
    own = {"TESTS": str(tests), "REAL": sys.executable, "TESTS_S": str(int(patient(8)))}
    own["SARATHI_PP_TEST_SLOWNESS"] = str(slowness())
    done, calls = run(tmp_path, "gpu_check.sh", **own)
    assert done.returncode == 1 and "the sum is wrong" in done.stdout, done.stdout
    assert "1 failed" in done.stdout and "bench gpu" in calls


def test_an_earlier_document_is_completed(tmp_path: Path) -> None:
    document = tmp_path / "earlier.json"
    document.write_text("{}")
    run(tmp_path, "gpu_check.sh", TESTS_S="0", DOCUMENT=str(document))
    assert (tmp_path / "out" / "gpu.json").read_text() == "{}"
    document.write_text("[]")
    run(tmp_path, "gpu_check.sh", TESTS_S="0", DOCUMENT=str(document))
    assert (tmp_path / "out" / "gpu.json").read_text() == "{}", "the document in OUT is newer"


@pytest.mark.parametrize("fails", ["-m pytest", "bench gpu"])
def test_what_fails_gives_1_and_the_others_run(fails: str, tmp_path: Path) -> None:
    done, calls = run(tmp_path, "gpu_check.sh", FAILS=fails)
    assert done.returncode == 1 and "bench gpu" in calls and "-m pytest" in calls


def test_a_python_of_ones_own_is_for_the_tests_on_a_gpu(tmp_path: Path) -> None:
    done, calls = run(tmp_path, "test.sh", "gpu")
    assert done.returncode == 0 and "3 passed, 0 failed" in done.stdout and "-m pytest" in calls
    done, calls = run(tmp_path, "test.sh", "pure")
    assert done.returncode == 2 and "PYTHON is for the tier gpu only" in done.stderr
    done, calls = run(tmp_path, "test.sh", "gpu", FAILS="is_available")
    assert done.returncode == 1 and "finds no CUDA device" in done.stderr and "0 passed, 1 failed" in done.stdout
    assert "-m pytest" not in calls
