"""Imports run one way, and neither the scheduling world nor a help text costs a torch import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.machine import patient

ROOT = Path(__file__).parents[2]

# A static contract misses the imports of a package's __init__ on the way to a module, so these are imported.
_IMPORT_EACH = """
import importlib, json, pkgutil, sys
wanted, forbidden = json.loads(sys.argv[1]), json.loads(sys.argv[2])
for name in wanted:
    module = importlib.import_module(name)
    if name != "sarathi_pp":
        wanted += [found.name for found in pkgutil.iter_modules(getattr(module, "__path__", ()), name + ".")]
    loaded = sorted(set(forbidden) & set(sys.modules))
    assert not loaded, f"importing {name} loads {', '.join(loaded)}"
print(len(wanted))
"""
_HELP = """
import sys
from sarathi_pp.cli.main import main
try:
    main(sys.argv[1:])
finally:
    loaded = {"torch", "transformers", "safetensors"} & set(sys.modules)
    assert not loaded, f"the help loads {loaded}"
"""
_LAUNCH = """
import sys
from sarathi_pp.cli.main import main
from sarathi_pp.distributed import launcher

class Workers(launcher.Workers):
    def start(self, arguments):
        print("loaded:", *({"torch", "transformers", "safetensors"} & set(sys.modules)))
    def wait(self, console, given_up):
        return 0

launcher.Workers = Workers
main([*sys.argv[2:], "--model", "examples/tiny-adder", "--stages", "2", "--output", sys.argv[1]])
"""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "100"}
    command = (sys.executable, "-P", "-c", code, *arguments)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patient(60))


def contracts() -> list[dict[str, object]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: list[dict[str, object]] = settings["tool"]["importlinter"]["contracts"]
    return found


def test_the_scheduling_world_and_the_package_itself_import_no_heavy_library() -> None:
    (pure,) = (contract for contract in contracts() if contract["name"] == "the scheduling world never imports torch")
    modules, forbidden = pure["source_modules"], pure["forbidden_modules"]
    assert isinstance(modules, list) and {"sarathi_pp.core", "sarathi_pp.wire.codec", "sarathi_pp.trace"} <= {*modules}
    assert isinstance(forbidden, list) and "torch" in forbidden
    run = run_python(_IMPORT_EACH, json.dumps(["sarathi_pp", *modules]), json.dumps(forbidden))
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > len(modules) + 10, "the packages among them were not walked"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--help",), ("generate", "report", "--version")),
        (("generate", "--help"), ("--model", "--input", "--output", "--stages", "--chunk-size", "--policy")),
    ],
    ids=["sarathi-pp", "generate"],
)
def test_help_is_given_without_loading_torch(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    run = run_python(_HELP, *arguments)
    assert run.returncode == 0, run.stderr
    assert all(word in run.stdout for word in words), run.stdout


@pytest.mark.parametrize("command", [("generate", "--input", "examples/prompts.jsonl"), ("profile",)])
def test_workers_are_started_without_loading_torch(command: tuple[str, ...], tmp_path: Path) -> None:
    """Workers load it for seconds themselves, and would start later by that time."""
    run = run_python(_LAUNCH, str(tmp_path / "output"), *command)
    assert (run.returncode, run.stdout) == (0, "loaded:\n"), run.stderr
