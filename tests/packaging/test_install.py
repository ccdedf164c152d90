"""The wheel and the source distribution: they contain the whole package, and installed elsewhere they run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.commands.processes import ROOT

pytestmark = pytest.mark.timeout(280)

BUILD_SDIST = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"


def run(*command: str | Path, cwd: Path, timeout_s: float = 200, **more: str) -> subprocess.CompletedProcess[str]:
    """Run without the variables that lead to this checkout: only installed modules can be imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    environment = {**kept, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", **more}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution from a copy of the checkout, so that no build output gets into the checkout."""
    checkout, made = tmp_path_factory.mktemp("checkout") / "sarathi_pp", tmp_path_factory.mktemp("sdist")
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
    shutil.copytree(ROOT, checkout, ignore=left_out)
    run(sys.executable, "-c", BUILD_SDIST, str(made), cwd=checkout)
    (found,) = made.glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the source distribution, so that it cannot contain more than that."""
    made = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(made, filter="data")
    (source,) = (path for path in made.iterdir() if path.is_dir())
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-index", "--no-build-isolation", "--no-deps")
    run(*pip, "-w", str(made), str(source), cwd=made)
    (found,) = made.glob("*.whl")
    return found


def modules() -> set[str]:
    sources = ((ROOT, "sarathi_pp"), (ROOT / "kernels", "sarathi_pp_kernels"))
    return {str(path.relative_to(root)) for root, name in sources for path in (root / name).rglob("*.py")}


def test_both_hold_every_module_and_what_lies_beside_them(sdist: Path, wheel: Path) -> None:
    beside = {"sarathi_pp/py.typed", "sarathi_pp/report/page/page.css", "sarathi_pp/report/page/page.js"}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == modules() | beside
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name.replace("sarathi_pp_kernels", "kernels/sarathi_pp_kernels", 1) for name in modules()} <= names
    assert beside | {"README.md", "LICENSE", "pyproject.toml"} <= names


@dataclass(frozen=True, slots=True)
class Installed:
    """A separate environment. python: its interpreter."""

    home: Path

    @classmethod
    def make(cls, home: Path) -> Installed:
        venv.create(home, with_pip=False)
        return cls(home)

    @property
    def python(self) -> Path:
        return self.home / "bin" / "python"

    @property
    def library(self) -> Path:
        (found,) = self.home.glob("lib/python*/site-packages")
        return found

    def install(self, *options: str | Path, **more: str) -> None:
        """Install packages; an index may be slow. more: additions to the environment."""
        pip = (sys.executable, "-m", "pip", "--python", self.python, "install", "-q", "--no-compile")
        run(*pip, *options, cwd=self.home, timeout_s=700, **more)

    def run_the_main_job(self, elsewhere: Path) -> None:
        """Run the main job in a new folder."""
        where = "import sarathi_pp, sarathi_pp_kernels; print(sarathi_pp.__file__); print(sarathi_pp_kernels.__file__)"
        found = run(self.python, "-c", where, cwd=self.home).stdout.split()
        packages = [self.library / "sarathi_pp", self.library / "sarathi_pp_kernels"]
        assert [Path(path).parent for path in found] == packages

        shutil.copytree(ROOT / "examples" / "tiny-adder", elsewhere / "model")
        shutil.copy(ROOT / "examples" / "prompts.jsonl", elsewhere)
        command = self.home / "bin" / "sarathi-pp"
        options = ("--stages", "2", "--device", "cpu", "--kv-cache-memory", "16MiB", "--json", "--quiet")
        files = ("--model", "model", "--input", "prompts.jsonl", "--output", "answers.jsonl")
        done = run(command, "generate", *files, *options, cwd=elsewhere)
        report = json.loads(done.stdout.splitlines()[-1])
        assert (report["stages"], report["requests"], report["failed"]) == (2, 24, 0)
        assert len((elsewhere / "answers.jsonl").read_text().splitlines()) == 24
        page = elsewhere / "page.html"
        run(command, "report", "answers.jsonl.run", "--html", str(page), cwd=elsewhere)
        assert (ROOT / "sarathi_pp" / "report" / "page" / "page.js").read_text().strip()[:40] in page.read_text()


@pytest.mark.timeout(900)
def test_the_wheel_brings_all_that_the_main_job_takes(wheel: Path, tmp_path: Path) -> None:
    """Dependencies come from the package index and pip's variables, as the README says, and not from elsewhere."""
    installed = Installed.make(tmp_path / "home")
    from_outside = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    installed.install("-c", ROOT / "constraints.txt", f"{wheel}[cpu]", **from_outside)
    installed.run_the_main_job(tmp_path / "elsewhere")
