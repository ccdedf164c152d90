"""Every example for users is run as its text says; an example without an entry here fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sarathi_pp.trace.events import Head
from sarathi_pp.trace.recorder import read_trace
from tests.commands.processes import COMMAND, ROOT, TORCHRUN, environment, free_port
from tests.launch.nodes import write_token_ids
from tests.machine import patient

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh"))

# Lines that each example prints, in this order.
SAYS = {
    "add_a_model.py": [
        r"without an entry: .*GraniteSWAForCausalLM",
        r"windows none: relative error \de-0[0-3]",
        r"windows by_type: relative error \de-0[67], 45 of 45 greedy tokens",
    ],
    "add_a_policy.py": [
        r"simulated, sarathi: \d+ tokens/s, median time to first token 2\.\d+ s",
        r"simulated, add_a_policy:ShortestFirst:among=64: \d+ tokens/s, median time to first token 1\.\d+ s",
        r"24 of 24 answers have the same tokens",
    ],
    "batch_and_resume.sh": [r"stopped with code 75 before all of 240", r"resumed: 240 answers to 240 rows"],
    "chunk_sizes.sh": [r"sarathi +128 ", r"sarathi +1024 ", r"balanced +\d+ "],
    "compare_policies.sh": [r"\borca\b", r"\bsarathi\b", r"\bbalanced\b", r"starvation s"],
    "fault_drill.py": [
        r"code 75, \d+ of 150 answers",
        r"resumed: 150 answers",
        r"code 0, 150 of 150 answers",
        r"replicas that were lost: \[1\]",
        r"the same answers",
    ],
    "library.py": [
        r"37\+48=85  \(stop\)",
        r"sampled: ",
        r"refused: .*100000.*next to it: 85",
        r"first of 60: prompt \d+",
        r"\d+ answers, \d+ tokens/s",
    ],
    "read_trace.py": [r"\d+ microbatches in ", r"stage 0, .* bubble ", r"stage 1, ", r"the same as in report.json"],
    "torchrun.sh": [r"exit code 0, 24 answers", r"requests: 24 of 24 ok", r"bubble by cause"],
    "two_nodes.sh": [r"24 answers on node 0, and on node 1: answers.jsonl.run", r"trace-00001-of-00002.jsonl"],
}

pytestmark = pytest.mark.timeout(290)


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_runs_and_shows_what_it_says(name: str, tmp_path: Path) -> None:
    assert name in SAYS, f"say in {Path(__file__).name} what {name} shows"
    folder = () if name.endswith(".py") else (str(tmp_path),)
    tools = Path(sys.executable).parent
    variables = environment()
    variables |= {"PATH": f"{tools}:{variables['PATH']}", "HF_HUB_OFFLINE": "1", "MASTER_PORT": str(free_port())}
    run = subprocess.run(
        (sys.executable if name.endswith(".py") else "bash", str(EXAMPLES / name), *folder),
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=patient(280),
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(".*?".join(SAYS[name]), run.stdout, re.DOTALL), run.stdout


def test_the_library_runs_under_torchrun_and_rank_0_prints(tmp_path: Path) -> None:
    command = (str(TORCHRUN), "--standalone", "--nproc-per-node", "2", str(EXAMPLES / "library.py"))
    run = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=patient(200), check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("37+48=85") == run.stdout.count("bubble ") == 1


def test_the_bubble_by_hand_counts_heads_that_the_first_stage_computes(tmp_path: Path) -> None:
    profile = json.loads((EXAMPLES / "emulated.json").read_text())
    profile["stages"][1]["head_s"] = 0.006  # more than the first stage's layers take, so that some heads move
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    write_token_ids(tmp_path / "prompts.jsonl", 60)
    files = ("--emulate", "profile.json", "--input", "prompts.jsonl", "--output", "answers.jsonl")
    for command in (
        (*COMMAND, "generate", *files, "--stages", "2", "--quiet"),
        (sys.executable, str(EXAMPLES / "read_trace.py"), "answers.jsonl.run"),
    ):
        run = subprocess.run(
            command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=patient(60), check=False
        )
        assert run.returncode == 0, run.stdout + run.stderr
    assert "the same as in report.json" in run.stdout
    (trace,) = (tmp_path / "answers.jsonl.run" / "attempt-0000").glob("trace-00000-*")
    assert any(isinstance(event, Head) for event in read_trace(trace)), "no head was moved"


def test_the_index_names_them_all_and_no_other() -> None:
    index = re.findall(r"^\| \[(.+?)\]\(\1\) \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(index) == SCRIPTS == sorted(SAYS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_says_at_its_head_how_to_run_it(name: str) -> None:
    head = (EXAMPLES / name).read_text().partition("\n\n")[0] + (EXAMPLES / name).read_text()[:600]
    command = "python" if name.endswith(".py") else "bash"
    assert f"{command} examples/{name}" in head
