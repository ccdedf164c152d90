"""Several pipelines in one run: the tokens of one process, one output, one report; and the Python API over them."""

from __future__ import annotations

import csv
import json
import subprocess

import pytest

from sarathi_pp import LLM, SamplingParams
from tests.commands.processes import COMMAND, Files, console_script, environment, free_port, run, torchrun
from tests.exact.references import NEW_TOKENS, Reference
from tests.machine import patient

GREEDY = ("--max-new-tokens", str(NEW_TOKENS), "--ignore-eos", "--chunk-size", "16", "--quiet")

pytestmark = pytest.mark.timeout(240)


def expect(files: Files, known: Reference, replicas: int, stages: int) -> None:
    """Check the answers, and a report that counts everything of every replica once."""
    assert files.tokens() == list(known.outputs)
    assert files.exit_code() == 0
    report = files.report()
    assert (report["replicas"], report["stages"]) == (replicas, stages)
    assert (report["requests"], report["completed"], report["failed"]) == (len(known.prompts), len(known.prompts), 0)
    assert report["prompt_tokens"] == sum(map(len, known.prompts))
    assert report["output_tokens"] == NEW_TOKENS * len(known.prompts)
    assert [(one["replica"], one["stage"]) for one in report["per_stage"]] == [
        (replica, stage) for replica in range(replicas) for stage in range(stages)
    ]
    assert {one["wall_s"] for one in report["per_stage"]} == {report["wall_s"]}
    each = report["per_replica"]
    assert sum(one["requests"] for one in each) == len(known.prompts)
    assert all(one["requests"] > 0 for one in each), "one replica did everything"
    assert max(one["wall_s"] for one in each) <= report["wall_s"] * 1.001 + 0.01
    bubble_s = sum(one["wall_s"] - one["compute_s"] for one in report["per_stage"])
    if report["causes"] is not None:
        assert sum(report["causes"].values()) == pytest.approx(bubble_s, rel=0.01, abs=0.01)
    assert report["lost_replicas"] == []


@pytest.mark.parametrize(
    ("replicas", "stages"), [(2, 2), *(pytest.param(*shape, marks=pytest.mark.full) for shape in ((3, 1), (2, 3)))]
)
def test_replicas_of_our_own_launcher(replicas, stages, reference, tmp_path):
    known, files = reference("llama"), Files(tmp_path)
    files.write_prompts(known.prompts)
    shape = ("--replicas", str(replicas), "--stages", str(stages), "--json")
    done = run((*COMMAND, *files.options(known.directory, *shape, *GREEDY)), tmp_path)
    expect(files, known, replicas, stages)
    assert json.loads(done.stdout.splitlines()[-1]) == files.report()


def test_replicas_share_pages_and_give_equal_prompts_to_the_same_one(reference, tmp_path):
    known, files = reference("llama"), Files(tmp_path)
    files.write_prompts(known.prompts * 3)
    shape = ("--replicas", "2", "--stages", "2", "--page-size", "4")
    run((*COMMAND, *files.options(known.directory, *shape, *GREEDY)), tmp_path)
    assert files.tokens() == list(known.outputs) * 3
    cache = files.report()["prefix_cache"]
    assert cache["mode"] == "all" and cache["hit_rate"] > 0.2, "of three equal prompts, two share a replica"


def test_replicas_under_torchrun_and_what_reports_make_of_them(reference, tmp_path):
    known, files = reference("llama"), Files(tmp_path)
    files.write_prompts(known.prompts)
    options = files.options(known.directory, "--replicas", "2", *GREEDY)
    run((*torchrun(4, console_script(tmp_path)), *options), tmp_path)
    expect(files, known, 2, 2)
    page, chrome, lines = (tmp_path / name for name in ("run.html", "run.json", "run.csv"))
    shown = ("--html", str(page), "--perfetto", str(chrome), "--csv", str(lines), "--json")
    report = json.loads(run((*COMMAND, "report", str(files.run), *shown), tmp_path).stdout)
    assert report["completed"] == len(known.prompts) and report["replicas"] == 2
    assert "replica 0" in page.read_text() and "replica 1" in page.read_text()
    for replica in range(2):
        assert json.loads((tmp_path / f"run.replica-{replica:04d}.json").read_text())["traceEvents"]
        with (tmp_path / f"run.replica-{replica:04d}.csv").open(newline="") as file:
            spans = [line for line in csv.DictReader(file) if line["text"] != "head"]
        assert len(spans) == 2 * report["per_replica"][replica]["microbatches"]


def test_replicas_on_hosts_that_share_no_directory_bring_their_traces_to_rank_0(reference, tmp_path):
    known, files = reference("llama"), Files(tmp_path)
    files.write_prompts(known.prompts)
    script, port = console_script(tmp_path), str(free_port())
    agents = []
    for node in range(2):
        agent = ("--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", port)
        run_dir = files.run if node == 0 else tmp_path / "elsewhere"
        options = files.options(known.directory, "--replicas", "2", "--run-dir", str(run_dir), *GREEDY)
        command = (*torchrun(2, script, *agent), *options)
        agents.append(subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True))
    said = [agent.communicate(timeout=patient(120))[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    expect(files, known, 2, 2)
    found = sorted(path.relative_to(files.run / "attempt-0000") for path in files.run.rglob("trace-*"))
    assert [str(path) for path in found] == [
        f"replica-{replica:04d}/trace-{stage:05d}-of-00002.jsonl" for replica in range(2) for stage in range(2)
    ]


def test_a_number_of_processes_that_replicas_do_not_divide_is_refused(reference, tmp_path):
    known, files = reference("llama"), Files(tmp_path)
    files.write_prompts(known.prompts[:1])
    options = files.options(known.directory, "--replicas", "2", "--quiet")
    done = subprocess.run(
        (*torchrun(3, console_script(tmp_path)), *options),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=patient(90),
        check=False,
    )
    assert done.returncode == 1 and "torchrun started 3 processes" in done.stderr
    assert not files.output.exists()


def test_the_python_api_shares_prompts_over_replicas(reference):
    known = reference("llama")
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(str(known.directory), stages=1, replicas=2, chunk_size=16, kv_cache_memory_bytes=16 << 20) as llm:
        for _ in range(2):
            outputs = llm.generate(known.prompts, params)
            assert [output.outputs[0].token_ids for output in outputs] == list(known.outputs)
        report = llm.close()
    assert report is not None and report["completed"] == 2 * len(known.prompts)
    assert all(one["completed"] > 0 for one in report["per_replica"])
