"""A killed run of tensor shards with grammars and log probabilities of prompts, and its resumption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands.processes import COMMAND, Files, run
from tests.faults.jobs import num_lines, started
from tests.text.grammar_model import write_grammar_model

SHARDS = ("--stages", "2", "--tensor-parallel-size", "2")
COMMON = ("--chunk-size", "16", "--max-num-seqs", "4")
NUM_ROWS = 60


def rows() -> list[dict[str, Any]]:
    """Return rows with a grammar, rows that score their prompts, and echoes. Some are sampled."""
    made: list[dict[str, Any]] = []
    for number in range(NUM_ROWS):
        common = {"prompt": f"hello world {number}", "max_tokens": 24, "temperature": float(number % 2), "seed": number}
        if number % 3 == 0:
            made.append({**common, "guided_regex": "([a-z]{2,4} ){2}[0-9]{3}"})
        elif number % 3 == 1:
            made.append({**common, "prompt_logprobs": 2, "logprobs_from": number % 4, "ignore_eos": True})
        else:
            body = {**common, "echo": True, "logprobs": 1}
            made.append({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
    return [{"id": str(number), **row} if "prompt" in row else row for number, row in enumerate(made)]


def answers(files: Files) -> dict[str, tuple[Any, list[float]]]:
    """Return by id the answer without times and log probabilities, and the log probabilities."""
    found = {}
    for row in map(json.loads, files.output.read_text().splitlines()):
        row.pop("metrics", None)
        if "custom_id" in row:
            (choice,) = row["response"]["body"]["choices"]
            answer: Any = (choice["text"], choice["finish_reason"], choice["logprobs"].pop("tokens"))
            logprobs = choice["logprobs"].pop("token_logprobs")
        else:
            answer, logprobs = row, [one and one["logprob"] for one in row.pop("prompt_logprobs", [])]
        logprobs = [1.0 if one is None else one for one in logprobs]  # the first token of a prompt has none
        assert found.setdefault(row.get("custom_id", row.get("id")), (answer, logprobs)) == (answer, logprobs)
    return found


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_killed_run_of_shards_is_resumed_to_the_answers_of_one_rank(tmp_path: Path) -> None:
    model = write_grammar_model(tmp_path / "model")
    text = "".join(json.dumps(row) + "\n" for row in rows())
    whole, killed = Files(tmp_path / "whole"), Files(tmp_path / "killed")
    for files in (whole, killed):
        files.folder.mkdir()
        files.input.write_text(text)
    run((*COMMAND, *whole.options(model, "--quiet", "--stages", "1", *COMMON)), whole.folder)
    with started(killed, model, *SHARDS, *COMMON) as first:
        first.wait_for_lines(5)
        first.kill_all()
    assert 5 <= num_lines(killed.output) < NUM_ROWS, "it was killed too late"
    with started(killed, model, *SHARDS, *COMMON, "--resume") as second:
        said = second.end()
        assert second.process.returncode == 0, said
    expected, found = answers(whole), answers(killed)
    assert found.keys() == expected.keys() and len(found) == NUM_ROWS
    for name, (answer, logprobs) in expected.items():
        assert found[name][0] == answer
        assert found[name][1] == pytest.approx(logprobs, rel=1e-4, abs=1e-4)
    assert killed.report()["resumed"]["rows"] >= 5
    guided = [answer for answer, _ in found.values() if isinstance(answer, dict) and int(answer["id"]) % 3 == 0]
    assert len(guided) == NUM_ROWS // 3 and all(answer["text"][-3:].isdecimal() for answer in guided)
