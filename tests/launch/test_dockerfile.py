"""launch/Dockerfile, which no engine has built here: the files it copies exist and suffice for its commands."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

from tests.commands.processes import ROOT
from tests.machine import patient

TEXT = (ROOT / "launch" / "Dockerfile").read_text()
# A Python that only records its calls; its `venv` copies it to the path of a new Python.
STAND_IN = """#!/bin/bash
echo "$@" >>"$CALLS"
case "$*" in
    "-V") echo Python 3.11.99 ;;
    "-m venv"*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
esac
"""


def instructions(name: str) -> list[str]:
    joined = re.sub(r"\\\n\s*", "", TEXT)
    return [line.removeprefix(name).strip() for line in joined.splitlines() if line.startswith(f"{name} ")]


def copy_into(folder: Path) -> None:
    """Copy the files that a build would have in its WORKDIR by then."""
    for line in instructions("COPY"):
        *sources, target = shlex.split(line)
        for source in sources:
            there, here = ROOT / source, folder / (Path(source).name if target == "./" else target)
            if there.is_dir():
                shutil.copytree(there, here, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                shutil.copy(there, here)


def test_it_says_that_it_was_never_built() -> None:
    assert "Never built so far" in TEXT


def test_its_set_up_runs_on_what_it_copies(tmp_path: Path) -> None:
    """With a fake Python: the script is present, sources its files, and would install from the pins."""
    (folder := tmp_path / "app").mkdir()
    copy_into(folder)
    (python := tmp_path / "python3.11").write_text(STAND_IN)
    python.chmod(0o755)
    ours = [line for line in instructions("RUN") if "launch/" in line]
    assert ours == ["bash -c 'source launch/setup.sh; set_up /app'"]
    run = subprocess.run(
        shlex.split(ours[0].replace("/app", str(folder))),
        cwd=folder,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(tmp_path / "calls")},
        capture_output=True,
        text=True,
        timeout=patient(30),
    )
    assert run.returncode == 0, run.stderr
    installs = [call for call in (tmp_path / "calls").read_text().splitlines() if call.startswith("-m pip install")]
    assert len(installs) == 2 and all(f"-c {folder}/constraints.txt" in call for call in installs)


def test_what_it_copies_is_all_that_the_package_is_made_of(tmp_path: Path) -> None:
    import tomllib

    copy_into(tmp_path)
    settings = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    folders = settings["tool"]["setuptools"]["package-dir"]
    for name in settings["tool"]["setuptools"]["packages"]:
        first, *rest = name.split(".")
        assert Path(tmp_path, folders.get(first, first), *rest, "__init__.py").exists(), name
    named = (settings["project"]["readme"], *settings["project"]["license-files"])
    assert all((tmp_path / name).exists() for name in named)
    assert re.search(r"^FROM python:3\.1[1-4]-", TEXT, re.MULTILINE)
