"""Stages that several ranks share, as real processes: the tokens of transformers, and the effect of a lost rank."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from sarathi_pp import LLM, SamplingParams
from tests.commands.processes import COMMAND, Files, console_script, environment, run, torchrun
from tests.exact.references import NEW_TOKENS
from tests.faults.jobs import started
from tests.machine import patient

GREEDY = ("--max-new-tokens", str(NEW_TOKENS), "--ignore-eos", "--chunk-size", "16", "--quiet")

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(
    "family", [pytest.param("llama", marks=pytest.mark.full), pytest.param("qwen3", marks=pytest.mark.full), "mixtral"]
)
def test_two_stages_of_two_ranks_give_transformers_tokens(family, reference, tmp_path):
    known, files = reference(family), Files(tmp_path)
    files.write_prompts(known.prompts)
    shape = ("--stages", "2", "--tensor-parallel-size", "2")
    run((*COMMAND, *files.options(known.directory, *shape, *GREEDY)), tmp_path)
    assert files.tokens() == list(known.outputs)
    report = files.report()
    assert (report["stages"], report["tensor_parallel_size"], report["failed"]) == (2, 2, 0)
    for stage in report["per_stage"]:
        assert 0 < stage["collective_s"] < stage["compute_s"]
    names = sorted(path.name for path in (files.run / "attempt-0000").iterdir())
    assert names == [
        *(f"shard-0001-trace-{stage:05d}-of-00002.jsonl" for stage in range(2)),
        *(f"trace-{stage:05d}-of-00002.jsonl" for stage in range(2)),
    ]
    folded = json.loads(run((*COMMAND, "report", str(files.run), "--json"), tmp_path).stdout)
    assert folded["microbatches"] == report["microbatches"]


@pytest.mark.parametrize(
    "shape",
    [("--tensor-parallel-size", "2"), pytest.param(("--replicas", "2", "--tp-size", "2"), marks=pytest.mark.full)],
)
def test_under_torchrun_the_stages_are_what_the_ranks_leave(shape, reference, tmp_path):
    known, files = reference("llama"), Files(tmp_path)
    files.write_prompts(known.prompts)
    run((*torchrun(4, console_script(tmp_path)), *files.options(known.directory, *shape, *GREEDY)), tmp_path)
    assert files.tokens() == list(known.outputs)
    assert files.report()["stages"] == (2 if len(shape) == 2 else 1)


@pytest.mark.parametrize("rank", [pytest.param(1, marks=pytest.mark.full), 3])
def test_a_lost_shard_ends_the_run_with_its_name(rank, reference, tmp_path):
    """Rank 1 is the other rank of the coordinator's stage. Rank 3 belongs to the last stage and sends no results."""
    known, files = reference("llama"), Files(tmp_path)
    files.write_prompts([prompt for _ in range(20) for prompt in known.prompts])
    shape = ("--stages", "2", "--tensor-parallel-size", "2", "--max-new-tokens", "40", "--ignore-eos")
    with started(files, known.directory, *shape) as run_:
        run_.wait_for_lines(5)
        run_.stage(rank).send_signal(signal.SIGKILL)
        said = run_.end(60)
    assert run_.process.returncode == 75, said
    assert f"shard 1 of stage {rank // 2} (rank {rank})" in said
    assert files.exit_code() == 75


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [("llama", 3, "KV heads, which is not a multiple of it"), ("phi3", 2, "is not proven exact in tensor shards")],
)
def test_what_cannot_be_split_is_refused_before_anything_starts(family, size, message, reference, tmp_path):
    known, files = reference(family), Files(tmp_path)
    files.write_prompts(known.prompts[:1])
    done = subprocess.run(
        (*COMMAND, *files.options(known.directory, "--tensor-parallel-size", str(size))),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert done.returncode == 2 and message in done.stderr and "try" in done.stderr
    assert not files.output.exists()


def test_the_python_api_over_two_ranks_of_one_stage(reference):
    known = reference("qwen3")
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(str(known.directory), tensor_parallel_size=2, chunk_size=16, kv_cache_memory_bytes=16 << 20) as llm:
        outputs = llm.generate(known.prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == list(known.outputs)
