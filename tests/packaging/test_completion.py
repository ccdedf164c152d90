"""Shell completion by click: the lazy group offers commands without loading them, and a command offers its options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.processes import ROOT
from tests.machine import patient

PROGRAM = "import sys; from sarathi_pp.cli.main import main; sys.argv[0] = 'sarathi-pp'; main()"


def ask(instruction: str, words: str = "", at: int = 0) -> str:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    asked = {"_SARATHI_PP_COMPLETE": instruction, "COMP_WORDS": words, "COMP_CWORD": str(at)}
    done = subprocess.run(
        (sys.executable, "-P", "-c", PROGRAM),
        env={**os.environ, "PYTHONPATH": paths, **asked},
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("words", "at", "offered"),
    [
        ("sarathi-pp ge", 1, ["plain,generate"]),
        ("sarathi-pp do", 1, ["plain,doctor"]),
        ("sarathi-pp generate --max-new", 2, ["plain,--max-new-tokens"]),
        ("sarathi-pp generate --dtype b", 3, ["plain,bfloat16"]),
        ("sarathi-pp work", 1, []),
    ],
)
def test_what_is_offered(words: str, at: int, offered: list[str]) -> None:
    assert ask("bash_complete", words, at).split() == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell: str) -> None:
    assert "_SARATHI_PP_COMPLETE" in ask(f"{shell}_source")


def test_bash_completes_by_the_script(tmp_path: Path) -> None:
    """The script's function completes the words, as in a user's shell."""
    (program := tmp_path / "sarathi-pp").write_text(f"#!{sys.executable} -P\n{PROGRAM}\n")
    program.chmod(0o755)
    script = f"""
        {ask("bash_source")}
        COMP_WORDS=(sarathi-pp generate --policy-no --str) COMP_CWORD=3
        _sarathi_pp_completion sarathi-pp
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": paths}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=patient(60))
    assert done.stdout.split() == ["--strict"], done.stderr
