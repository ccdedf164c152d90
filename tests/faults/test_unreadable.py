"""Files that the system does not let a run read or make: the run ends with one line and the code of its cause."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands.processes import COMMAND, environment
from tests.machine import patient
from tests.missing import missing

ADDER = Path(__file__).parents[2] / "examples" / "tiny-adder"

pytestmark = pytest.mark.timeout(120)

# Root may read everything. Without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, file modes count for root too.
AS_ANYBODY = """
import ctypes, os, sys
dropped = [ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) for capability in (1, 2)]
os.execv(sys.argv[1], sys.argv[1:]) if not any(dropped) else sys.exit(99)
"""
FRONT = (sys.executable, "-c", AS_ANYBODY) if os.getuid() == 0 else ()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(ADDER, tmp_path / "model")
    (tmp_path / "in.jsonl").write_text('{"prompt": "1+2="}\n')
    yield tmp_path
    for path in (tmp_path / "closed", tmp_path / "out.jsonl.run"):
        if path.exists():
            path.chmod(0o700)


def generate(folder: Path, *options: str, output: str = "out.jsonl") -> tuple[int, str]:
    files = ("--model", str(folder / "model"), "-i", str(folder / "in.jsonl"), "-o", str(folder / output))
    command = (*FRONT, *COMMAND, "generate", *files, "--quiet", *options)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=patient(100), check=False)
    if done.returncode == 99:
        missing("root cannot let go of reading everything here")
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"])
def test_a_file_of_the_model(name, folder):
    (folder / "model" / name).chmod(0)
    code, said = generate(folder)
    assert code == 65 and said.startswith("InputError: ") and said.count("\n") == 1, said
    assert f"model/{name} cannot be read: Permission denied" in said or name == "generation_config.json"


def test_a_model_in_a_directory_of_somebody_else(folder):
    (folder / "closed").mkdir()
    (folder / "model").rename(folder / "closed" / "model")
    (folder / "model").symlink_to(folder / "closed" / "model")
    (folder / "closed").chmod(0)
    code, said = generate(folder)
    assert code == 65 and said.count("\n") == 1 and "Permission denied" in said, said


def test_a_run_directory(folder):
    (folder / "closed").mkdir(mode=0)
    code, said = generate(folder, "--run-dir", str(folder / "closed" / "run"))
    assert code == 74 and said.count("\n") == 1 and "closed/run cannot be used: Permission denied" in said, said
    (folder / "out.jsonl.run").mkdir(mode=0)
    for options in ((), ("--overwrite",)):
        code, said = generate(folder, *options)
        assert code == 74 and said.count("\n") == 1 and "out.jsonl.run cannot be used: Permission denied" in said, said


def test_a_name_that_leaves_no_room_for_that_of_the_run_directory(folder):
    code, said = generate(folder, output="o" * 253)
    assert code == 74 and said.count("\n") == 1 and "File name too long; name another --run-dir" in said, said


def test_what_nobody_thought_of_is_an_internal_error(monkeypatch, capsys):
    from sarathi_pp.cli import generate as module
    from sarathi_pp.cli.main import main

    def fail(options: dict[str, Any]) -> int:
        raise OSError("something new")

    monkeypatch.setattr(module, "_generate", fail)
    with pytest.raises(SystemExit) as left:
        main(["generate", "-i", "in", "-o", "out"])
    assert left.value.code == 70 and "OSError: something new" in capsys.readouterr().err
