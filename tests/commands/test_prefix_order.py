"""Batches whose prompts run in the order of their prefixes: the answers are those of any other order."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sarathi_pp import LLM, SamplingParams
from tests.commands.processes import COMMAND, Files, environment
from tests.faults.jobs import started, wait_for_lines
from tests.machine import patient

NUM_GROUPS, NUM_ROWS = 6, 24
PAGE = 4
OPTIONS = ("--page-size", str(PAGE), "--chunk-size", "16", "--max-num-seqs", "4", "--max-new-tokens", "9")
pytestmark = pytest.mark.timeout(240)


def rows() -> list[dict[str, Any]]:
    """Return rows of six groups, shuffled. Some draw, some have two outputs, and two cannot run."""
    draw = random.Random(3)
    begins = [[draw.randrange(3, 60) for _ in range(5 * PAGE)] for _ in range(NUM_GROUPS)]
    found: list[dict[str, Any]] = []
    for row in range(NUM_ROWS):
        prompt = begins[draw.randrange(NUM_GROUPS)] + [draw.randrange(3, 60) for _ in range(draw.randrange(1, 6))]
        sampled = {"temperature": 0.9, "n": 1 + row % 2, "logprobs": 1} if row % 3 == 0 else {"ignore_eos": True}
        found.append({"id": f"row {row}", "prompt_token_ids": prompt, **sampled})
    found[5] = {"id": "bad", "prompt_token_ids": [10**6]}
    found[17] = {"id": "worse", "temperature": -1, "prompt_token_ids": [3]}
    return found


def files_in(folder: Path) -> Files:
    folder.mkdir(exist_ok=True)
    files = Files(folder)
    files.input.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return files


def answer(files: Files, model: Path, *options: str) -> None:
    """Run the command to its end, which reports that rows failed."""
    with started(files, model, *OPTIONS, *options) as start:
        said = start.end()
        assert start.process.returncode == 3, said


def shown(files: Files) -> dict[str, dict[str, Any]]:
    """Return the output lines by id, without what reports times."""

    def untimed(found: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in found.items() if key != "metrics"}

    lines = [json.loads(line, object_hook=untimed) for line in files.output.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["id"]: line for line in lines}


def groups_as_admitted(run_dir: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Return the first page of each prompt, in the order in which rank 0's engine got the requests of all attempts."""
    traces = sorted(run_dir.glob("attempt-*/trace-00000-*"))
    events = [json.loads(line) for trace in traces for line in trace.read_text().splitlines()]
    return [tuple(prompts[event["index"] % 2**32][:PAGE]) for event in events if event["e"] == "arrived"]


def num_runs(groups: list[tuple[int, ...]]) -> int:
    """Return the number of pieces into which the order cuts the groups."""
    return 1 + sum(one != other for one, other in zip(groups, groups[1:], strict=False))


@pytest.fixture(scope="module")
def in_order(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return the files of a run in the order of the input."""
    files = files_in(tmp_path_factory.mktemp("input"))
    answer(files, model, "--order", "input")
    return files


@pytest.fixture(scope="module")
def model(reference: Any) -> Path:
    directory: Path = reference("llama").directory
    return directory


@pytest.mark.parametrize(
    ("shape", "window"),
    [
        pytest.param(("--stages", "2"), ("--order-window", "7"), id="stages-small"),
        pytest.param(("--replicas", "2"), (), id="replicas-default"),
        pytest.param(("--stages", "2"), (), marks=pytest.mark.full, id="stages-default"),
        pytest.param(("--replicas", "2"), ("--order-window", "7"), marks=pytest.mark.full, id="replicas-small"),
    ],
)
def test_the_answers_are_those_of_the_input_s_order(shape, window, model, in_order, tmp_path):
    files = files_in(tmp_path)
    answer(files, model, *shape, *window)
    assert shown(files) == shown(in_order) and len(shown(files)) == NUM_ROWS
    if shape[0] == "--stages":
        prompts = [row["prompt_token_ids"] for row in rows()]
        before, after = (groups_as_admitted(each.run, prompts) for each in (in_order, files))
        assert sorted(before) == sorted(after) and before[0] == after[0]
        assert num_runs(before) > num_runs(after) >= NUM_GROUPS
        assert (num_runs(after) > NUM_GROUPS) == bool(window), "a small window cuts groups"


@pytest.mark.parametrize("order", ["auto", "prefix"])
def test_without_the_prefix_cache_rows_keep_their_order_unless_the_user_names_another(order, model, in_order, tmp_path):
    files = files_in(tmp_path)
    answer(files, model, "--prefix-cache", "off", "--order", order)
    assert shown(files) == shown(in_order)
    prompts = [row["prompt_token_ids"] for row in rows()]
    before, after = (groups_as_admitted(each.run, prompts) for each in (in_order, files))
    assert before == after if order == "auto" else num_runs(after) == NUM_GROUPS


@pytest.mark.parametrize("orders", [("prefix", "input"), pytest.param(("input", "prefix"), marks=pytest.mark.full)])
def test_a_run_that_was_killed_resumes_in_another_order(orders, model, in_order, tmp_path):
    files = files_in(tmp_path)
    first, second = (("--order", order, "--stages", "2", "--resume") for order in orders)
    with started(files, model, *OPTIONS, *first) as start:
        start.wait_for_lines(5)
        start.kill_all()
    answer(files, model, *second)
    assert shown(files) == shown(in_order)
    assert files.report()["resumed"]["rows"] >= 5


def test_a_run_that_restarts_keeps_its_order(model, in_order, tmp_path):
    files = files_in(tmp_path)
    options = ("--order", "prefix", "--stages", "2", "--max-restarts", "1")
    with started(files, model, *OPTIONS, *options) as start:
        start.wait_for_lines(5)
        start.stage(1).kill()
        said = start.end()
        assert start.process.returncode == 3, said
    assert shown(files) == shown(in_order)


def test_a_library_call_returns_answers_in_the_order_of_its_prompts(model, tmp_path):
    prompts = [row["prompt_token_ids"] for row in rows() if row["id"].startswith("row")]
    params = SamplingParams(max_new_tokens=6, temperature=0.8, n=2, seed=1)
    found, orders = [], []
    for order in ("input", "prefix"):
        run_dir = tmp_path / order
        with LLM(model, order=order, page_size=PAGE, run_dir=run_dir, kv_cache_memory_bytes=1 << 24) as llm:
            found.append([[each.token_ids for each in one.outputs] for one in llm.generate(prompts, params)])
            assert [answer.index for answer in llm.generate(prompts, params)] == [*range(len(prompts))]
        orders.append(num_runs(groups_as_admitted(run_dir, prompts * 2)))
    assert found[0] == found[1]
    assert orders[0] > orders[1] == 2 * NUM_GROUPS


def test_a_stream_is_answered_while_it_is_written(model, tmp_path):
    """It keeps its order, although the prefix cache is on."""
    files = Files(tmp_path)
    command = (*COMMAND, "generate", "--model", str(model), "--input", "-", "--output", str(files.output))
    process = subprocess.Popen(
        (*command, "--kv-cache-memory", "16MiB", *OPTIONS, "--quiet"),
        stdin=subprocess.PIPE,
        cwd=tmp_path,
        env=environment(),
        text=True,
    )
    assert process.stdin is not None
    try:
        for count, row in enumerate(rows()[:2], start=1):
            process.stdin.write(json.dumps(row) + "\n")
            process.stdin.flush()
            wait_for_lines(process, files, count)
        process.stdin.close()
        assert process.wait(timeout=patient(60)) == 0
    finally:
        process.kill()
        process.wait()
