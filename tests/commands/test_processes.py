"""The same tokens from real processes over gloo, started in every way that a user starts them."""

from __future__ import annotations

import json
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from tests import thinning
from tests.commands.processes import COMMAND, Files, console_script, environment, free_port, run, torchrun
from tests.exact.references import NEW_TOKENS, Reference
from tests.machine import patient
from tests.model.families import FAMILIES, NUM_LAYERS, VARIED

WORKER = Path(__file__).with_name("families_worker.py")
COUNTING = Path(__file__).with_name("counting_worker.py")
GREEDY = ("--max-new-tokens", str(NEW_TOKENS), "--ignore-eos", "--chunk-size", "16", "--quiet")

pytestmark = pytest.mark.timeout(180)


def expect(files: Files, known: Reference, stages: int) -> None:
    """Check the answers and the run directory that belongs to them."""
    rows = files.rows()
    assert files.tokens() == list(known.outputs)
    assert [row["id"] for row in rows] == [str(number + 1) for number in range(len(known.prompts))]
    assert {(row["text"], row["finish_reason"]) for row in rows} == {(None, "length")}
    assert [row["num_prompt_tokens"] for row in rows] == [len(prompt) for prompt in known.prompts]
    assert files.exit_code() == 0
    # Like the references, this may be the oldest supported version.
    assert json.loads((files.run / "run.json").read_text())["transformers"] == version("transformers")
    report = files.report()
    assert (report["stages"], len(report["per_stage"]), report["failed"]) == (stages, stages, 0)
    assert report["requests"] == len(known.prompts)
    assert [stage["layers"] for stage in report["per_stage"]][-1][1] == NUM_LAYERS
    assert [path.name for path in files.traces()] == [
        f"trace-{stage:05d}-of-{stages:05d}.jsonl" for stage in range(stages)
    ]


@pytest.mark.parametrize(
    "stages",
    [1, pytest.param(2, marks=pytest.mark.oldest), *(pytest.param(more, marks=pytest.mark.full) for more in (3, 4))],
)
def test_generate_starts_its_own_stages(stages, reference, tmp_path):
    known, files = reference("llama"), Files(tmp_path)
    files.write_prompts(known.prompts)
    done = run((*COMMAND, *files.options(known.directory, "--stages", str(stages), "--json", *GREEDY)), tmp_path)
    expect(files, known, stages)
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed == files.report()


def shared_edges(files: Files) -> list[list[int]]:
    found: list[list[int]] = json.loads((files.run / "run.json").read_text())["shared_memory_edges"]
    return found


@pytest.mark.parametrize(
    ("stages", "shards", "options", "expected"),
    [
        pytest.param(3, 1, (), [[0, 1], [1, 2], [2, 0]], marks=pytest.mark.full),
        (2, 2, (), [[0, 2], [1, 3], [2, 0], [0, 1]]),
        (2, 1, ("--transport", "gloo"), []),
        (2, 1, ("--inflight", "128"), []),
    ],
    ids=["stages", "shards", "asked for gloo", "too many in flight"],
)
def test_stages_of_a_host_share_memory_unless_told_otherwise(stages, shards, options, expected, reference, tmp_path):
    known, files = reference("llama"), Files(tmp_path)
    files.write_prompts(known.prompts)
    shape = ("--stages", str(stages), "--tensor-parallel-size", str(shards))
    run((*COMMAND, *files.options(known.directory, *shape, *options, *GREEDY)), tmp_path)
    assert files.tokens() == list(known.outputs)
    assert shared_edges(files) == expected


def test_stages_that_do_not_find_each_others_sockets_send_by_gloo(reference, tmp_path):
    known, plan, answers = reference("llama"), tmp_path / "plan.json", tmp_path / "answers.json"
    case = {
        "model": str(known.directory),
        "run_dir": str(tmp_path / "run"),
        "prompts": known.prompts,
        "new_tokens": NEW_TOKENS,
    }
    plan.write_text(json.dumps([case]))
    said = run((*torchrun(3, WORKER.with_name("apart_worker.py")), str(plan), str(answers)), tmp_path).stderr
    assert json.loads(answers.read_text()) == [list(map(list, known.outputs))]
    assert said.count("shares no edge") == 3


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param(1, marks=pytest.mark.full),
        pytest.param(2, marks=pytest.mark.full),
        3,
        pytest.param(4, marks=pytest.mark.full),
    ],
)
def test_generate_joins_torchrun(stages, reference, tmp_path):
    known, files = reference("llama"), Files(tmp_path)
    files.write_prompts(known.prompts)
    run((*torchrun(stages, console_script(tmp_path)), *files.options(known.directory, *GREEDY)), tmp_path)
    expect(files, known, stages)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.full)])
def test_half_precision_runs(dtype, reference, tmp_path):
    known, files = reference("qwen3_moe"), Files(tmp_path)
    files.write_prompts(known.prompts)
    run((*COMMAND, *files.options(known.directory, "--stages", "2", "--dtype", dtype, *GREEDY)), tmp_path)
    assert files.report()["dtype"] == dtype
    tokens = files.tokens()
    assert {len(output) for output in tokens} == {NEW_TOKENS}
    same = sum(output[0] == exact[0] for output, exact in zip(tokens, known.outputs, strict=True))
    assert same >= 20  # of 24 first tokens: near float32, but not equal


def test_two_agents_with_run_directories_of_their_own_make_one_run(reference, tmp_path):
    """The test runs twice: files of the first run on the second host do not disturb the second run."""
    known, files = reference("llama"), Files(tmp_path)
    files.write_prompts(known.prompts)
    script = console_script(tmp_path)
    elsewhere = tmp_path / "second.run"
    for again in ((), ("--overwrite",)):
        agents, port = [], str(free_port())
        for rank, run_dir in enumerate((files.run, elsewhere)):
            agent = ("--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", port)
            options = files.options(known.directory, "--run-dir", str(run_dir), *GREEDY, *again)
            agents.append(
                subprocess.Popen(
                    (*torchrun(1, script, *agent), *options),
                    cwd=tmp_path,
                    env=environment(),
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        said = [agent.communicate(timeout=patient(90))[1] for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], said
        expect(files, known, 2)
        assert [path.name for path in elsewhere.rglob("*") if path.is_file()] == ["trace-00001-of-00002.jsonl"]
        (copied, own) = (files.traces()[1], next(elsewhere.rglob("trace-*")))
        assert copied.read_bytes() == own.read_bytes()


@pytest.mark.timeout(600)  # run alone, it also makes transformers' answers for all families
def test_families_run_as_two_processes(reference, tmp_path):
    """One start for all families: the processes join once, and each family is a Job of its own over new edges."""
    plan = tmp_path / "plan.json"
    answers = tmp_path / "answers.json"
    # By default, families whose layers differ. tests/exact has all of them in one process.
    known = [reference(family) for family in (FAMILIES if thinning.full else VARIED)]
    cases = [
        {
            "model": str(each.directory),
            "run_dir": str(tmp_path / each.family),
            "prompts": each.prompts,
            "new_tokens": NEW_TOKENS,
        }
        for each in known
    ]
    plan.write_text(json.dumps(cases))
    run((*torchrun(2, WORKER), str(plan), str(answers)), tmp_path, timeout_s=150)
    outputs = json.loads(answers.read_text())
    for each, output in zip(known, outputs, strict=True):
        assert [tuple(tokens) for tokens in output] == list(each.outputs), each.family
        report = json.loads((tmp_path / each.family / "report.json").read_text())
        assert report["layer_split"] == [3, 2] and report["completed"] == len(each.prompts)


def test_pages_are_counted_when_all_that_share_the_memory_have_loaded(reference, tmp_path):
    """A rank that counts pages before another rank has loaded would give away the memory for that rank's weights."""
    known, plan, answers = reference("llama"), tmp_path / "plan.json", tmp_path / "answers.json"
    case = {
        "model": str(known.directory),
        "run_dir": str(tmp_path / "run"),
        "prompts": known.prompts[:2],
        "new_tokens": 2,
    }
    plan.write_text(json.dumps([case]))
    said = run((*torchrun(2, COUNTING), str(plan), str(answers)), tmp_path).stderr
    loaded, counts = ([float(at) for at in re.findall(rf"{what} at (\S+)", said)] for what in ("loaded", "counts"))
    assert len(loaded) == len(counts) == 2
    assert max(loaded) <= min(counts)
