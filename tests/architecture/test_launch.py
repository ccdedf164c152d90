"""launch/: set-up installs once and exactly the pinned packages, with any PATH. Scripts hold no machine's paths."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.machine import patient

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "launch").glob("*.sh"))

# A Python that only records its calls. Its `venv` copies it to the place of the new Python.
STAND_IN = """#!/bin/bash
echo "$@" >>"$CALLS"
case "$*" in
    "-V") echo Python 3.11.99 ;;
    "-m venv"*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
    "-m pip install"*) [ -z "$PIP_FAILS" ] ;;
    "-c import venv"*) [ "${0##*/}" != python3.12 ] ;;
esac
"""
BROKEN_SHIM = "#!/bin/bash\necho 'command not found' >&2\nexit 127\n"


class Checkout:
    """A copy of set-up's inputs, in a path with a space. Its own PATH has no Python."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a checkout"
        self.tools = folder / "bin"
        self.calls = folder / "calls"
        shutil.copytree(ROOT / "launch", self.root / "launch")
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root)
        self.tools.mkdir()
        for tool in ("bash", "cat", "cmp", "cp", "flock", "mkdir", "rm"):
            found = shutil.which(tool)
            assert found, tool
            (self.tools / tool).symlink_to(found)

    def add_python(self, name: str, script: str) -> None:
        (self.tools / name).write_text(script)
        (self.tools / name).chmod(0o755)

    def set_up(self, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """Run set-up. Return its outcome, and the calls of the simulated Python."""
        self.calls.write_text("")
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", 'source "$1/launch/setup.sh"; set_up "$1"', "-", str(self.root)],
            cwd="/",
            env={"PATH": str(self.tools), "CALLS": str(self.calls), "PIP_FAILS": "", **environment},
            capture_output=True,
            text=True,
            timeout=patient(30),
        )
        return run, self.calls.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def installs(calls: list[str]) -> list[str]:
    return [call for call in calls if call.startswith("-m pip install")]


def test_set_up_installs_once(checkout: Checkout) -> None:
    checkout.add_python("python3.11", STAND_IN)
    run, calls = checkout.set_up()
    assert run.returncode == 0, run.stderr
    assert len(installs(calls)) == 2
    assert all(f"-c {checkout.root}/constraints.txt" in call for call in installs(calls))
    run, calls = checkout.set_up()
    assert (run.returncode, run.stderr, calls) == (0, "", ["-V"])


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_an_edited_requirement_is_installed_into_the_same_environment(checkout: Checkout, name: str) -> None:
    checkout.add_python("python3.11", STAND_IN)
    checkout.set_up()
    with (checkout.root / name).open("a") as file:
        file.write("# edited\n")
    run, calls = checkout.set_up()
    assert run.returncode == 0, run.stderr
    assert installs(calls) and not any(call.startswith("-m venv") for call in calls)


def test_a_moved_checkout_gets_a_new_environment(checkout: Checkout) -> None:
    checkout.add_python("python3.11", STAND_IN)
    checkout.set_up()
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    run, calls = checkout.set_up()
    assert run.returncode == 0, run.stderr
    assert f"-m venv --clear {checkout.root}/.venv" in calls


def test_a_failed_installation_is_tried_again(checkout: Checkout) -> None:
    checkout.add_python("python3.11", STAND_IN)
    run, _ = checkout.set_up(PIP_FAILS="yes")
    assert run.returncode != 0
    run, calls = checkout.set_up()
    assert run.returncode == 0 and installs(calls)


def test_an_installation_that_failed_half_way_does_not_pass_for_the_one_before_it(checkout: Checkout) -> None:
    checkout.add_python("python3.11", STAND_IN)
    checkout.set_up()
    constraints = checkout.root / "constraints.txt"
    before = constraints.read_text()
    constraints.write_text(before + "# edited\n")
    checkout.set_up(PIP_FAILS="yes")
    constraints.write_text(before)
    _, calls = checkout.set_up()
    assert installs(calls)


def test_a_python_that_does_not_run_or_cannot_make_environments_is_passed_over(checkout: Checkout) -> None:
    checkout.add_python("python3.11", BROKEN_SHIM)
    checkout.add_python("python3.12", STAND_IN)
    checkout.add_python("python3", STAND_IN)
    run, calls = checkout.set_up()
    assert run.returncode == 0, run.stderr
    assert sum(call.startswith("-c import venv") for call in calls) == 2


def test_the_message_without_a_python(checkout: Checkout) -> None:
    checkout.add_python("python3", BROKEN_SHIM)
    run, _ = checkout.set_up()
    assert run.returncode == 1
    assert "no Python 3.11 or newer" in run.stderr and "try" in run.stderr


def test_the_message_without_the_venv_module(checkout: Checkout) -> None:
    checkout.add_python("python3.12", STAND_IN)
    run, _ = checkout.set_up()
    assert run.returncode == 1
    assert "python3.12 cannot make virtual environments" in run.stderr and "try" in run.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_name_no_machine(script: Path) -> None:
    parsed = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert parsed.returncode == 0, parsed.stderr
    assert not re.findall(r"/(?:home|root|opt|tmp|mnt|Users)/\S*", script.read_text())


@pytest.mark.parametrize("name", ["quickstart.sh", "test.sh"])
def test_the_two_commands_are_strict(name: str) -> None:
    script = ROOT / "launch" / name
    assert "\nset -euo pipefail\n" in script.read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_no_pipe_ends_before_its_writer(script: Path) -> None:
    # A writer with more output than a pipe holds is ended by SIGPIPE. Under pipefail this ends the script.
    assert not re.findall(r"\|\s*(?:head\b|grep -\w*q)", script.read_text())
