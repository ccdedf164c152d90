"""The behaviour of OpenMP's idle threads is set before torch, which loads OpenMP, is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.processes import environment
from tests.machine import patient
from tests.model.families import write_checkpoint

# Prints the environment that torch's import sees, and stops there.
_WATCHED = """
import os, sys


class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)


sys.meta_path.insert(0, Watch())
from sarathi_pp.cli.main import main

main(sys.argv[1:])
"""


@pytest.mark.parametrize("command", ["generate", "profile"])
@pytest.mark.parametrize(("given", "found"), [(None, "passive"), ("active", "active")])
def test_it_is_told_to_sleep_unless_a_user_wants_otherwise(
    command: str, given: str | None, found: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    write_checkpoint("llama", model)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [1, 2, 3]}\n')
    options = ["--model", str(model), "--output", str(tmp_path / "output.json")]
    if command == "generate":
        options += ["--input", str(prompts)]
    variables = {name: value for name, value in environment().items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", _WATCHED, command, *options],
        env=variables if given is None else {**variables, "OMP_WAIT_POLICY": given},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patient(90),
    )
    assert done.stdout.splitlines()[-1:] == [found], done.stderr
