"""A policy of the user's own, in the directory where a command starts: every process of the run finds it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sarathi_pp.config import RunConfig
from sarathi_pp.errors import ConfigError
from sarathi_pp.run.preflight import BatchOptions, follow
from tests.commands.processes import COMMAND, ROOT, Files, console_script, environment, run, torchrun

pytestmark = pytest.mark.timeout(200)

MINE = """
from sarathi_pp.core.policy.sarathi import Sarathi

class Mine(Sarathi):
    pass

class Greedy(Sarathi):
    def pick(self, view):
        return [grant._replace(num_tokens=grant.num_tokens + 1) for grant in super().pick(view)]
"""
LIBRARY = """
from sarathi_pp import LLM, SamplingParams

with LLM({model!r}, stages=2, policy="own_policy:Mine:even=1", kv_cache_memory_bytes="16MiB") as llm:
    print(llm.generate(["12+30="], SamplingParams(max_new_tokens=8))[0].outputs[0].text)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_policy.py").write_text(MINE)
    return tmp_path


def emulated(files: Files, policy: str) -> tuple[str, ...]:
    files.write_prompts([(3, 4, 5)] * 6, max_new_tokens=4)
    where = ("--input", str(files.input), "--output", str(files.output), "--quiet")
    return ("generate", "--emulate", str(ROOT / "examples" / "emulated.json"), *where, "--policy", policy)


def simulate(folder: Path, policy: str) -> subprocess.CompletedProcess[str]:
    options = ("--preset", "gpt3-a100-tp8pp8", "--workload", "fixed:n=2,prompt=9,output=2", "--json")
    command = (*COMMAND, "simulate", "--policy", policy, *options)
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=60)


def test_the_current_directory_is_searched_last(folder: Path) -> None:
    """`python -P` leaves the directory out. A file in it does not hide an installed module."""
    (folder / "tabnanny.py").write_text(MINE)
    done = simulate(folder, "own_policy:Mine")
    assert done.returncode == 0, done.stderr
    assert [row["policy"] for row in json.loads(done.stdout)["runs"]] == ["own_policy:Mine"]
    hidden = simulate(folder, "tabnanny:Mine")
    assert hidden.returncode == 2 and "tabnanny has no Mine; its policies are: none" in hidden.stderr


@pytest.mark.parametrize("how", ["--stages", "torchrun"])
def test_every_stage_finds_it(how: str, folder: Path) -> None:
    files, policy = Files(folder), "own_policy:Mine:even=1"
    command = emulated(files, policy)
    if how == "--stages":
        run((*COMMAND, *command, "--stages", "2"), folder)
    else:
        run((*torchrun(2, console_script(folder)), *command), folder)
    assert len(files.rows()) == 6 and files.report()["policy"] == policy
    assert json.loads((files.run / "run.json").read_text())["policy"] == policy
    starts = [json.loads(path.read_text().splitlines()[0]) for path in files.traces()]
    assert [start["policy"] for start in starts] == [policy] * 2


def test_a_worker_of_an_llm_finds_it(folder: Path) -> None:
    (folder / "program.py").write_text(LIBRARY.format(model=str(ROOT / "examples" / "tiny-adder")))
    assert run((sys.executable, "program.py"), folder).stdout.strip() == "42"


def test_a_worker_of_an_llm_that_does_not_find_it_says_so(folder: Path) -> None:
    """Python searches the program's directory; the workers search the directory where the program was started."""
    (folder / "program.py").write_text(LIBRARY.format(model=str(ROOT / "examples" / "tiny-adder")))
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    command = (sys.executable, "../program.py")
    done = subprocess.run(command, cwd=elsewhere, env=environment(), capture_output=True, text=True, timeout=90)
    assert done.returncode == 1
    says = "there is no module own_policy; install it, add its folder to PYTHONPATH, or start in that folder"
    assert f"ConfigError: --policy own_policy:Mine: {says}" in done.stderr
    assert "rank 1 on" in done.stderr and "ended with exit code 2" in done.stderr


def test_a_run_ends_with_an_error_that_names_the_policy_and_the_rule_it_broke(folder: Path) -> None:
    command = (*COMMAND, *emulated(Files(folder), "own_policy:Greedy"), "--stages", "2")
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=90)
    assert done.returncode == 70
    assert done.stderr.startswith("PolicyError: the policy own_policy:Greedy granted 4 tokens of ")
    assert done.stderr.count("\n") == 1, "one message, no traceback"


def test_a_rank_whose_host_does_not_have_it_refuses_to_join() -> None:
    """Rank 0 has checked its own copy of the policy; the other ranks get the refusal."""
    job = BatchOptions(RunConfig(model="m", policy="on_other_hosts_only:Mine"), "in.jsonl", "out.jsonl")
    with pytest.raises(ConfigError, match="there is no module on_other_hosts_only"):
        follow(job)
