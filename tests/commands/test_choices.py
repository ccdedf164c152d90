"""Several outputs of one input line, through the command line and the Python API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sarathi_pp import LLM, SamplingParams
from sarathi_pp.inputs.row import choice_seed
from tests.commands.processes import COMMAND, Files, run

N = 4
SAMPLED = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True}
ADDER = Path(__file__).parents[2] / "examples" / "tiny-adder"
pytestmark = pytest.mark.timeout(180)


def answered(files: Files, model: Path, rows: list[dict[str, Any]], *options: str) -> list[dict[str, Any]]:
    files.input.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run((*COMMAND, *files.options(model, "--chunk-size", "8", "--quiet", *options)), files.folder)
    return [json.loads(line) for line in files.output.read_text().splitlines()]


def shown(output: dict[str, Any]) -> tuple[object, ...]:
    return tuple(output[key] for key in ("text", "token_ids", "finish_reason", "num_output_tokens", "logprobs"))


@pytest.mark.parametrize("shape", [("--stages", "2"), ("--stages", "1", "--replicas", "2")], ids=["stages", "replicas"])
def test_choices_are_those_of_rows_with_their_seeds(shape, reference, tmp_path):
    known = reference("llama")
    prompts = [prompt[:30] for prompt in known.prompts[:6]]
    rows = [
        {"id": str(seed), "prompt_token_ids": prompt, **SAMPLED, "seed": seed, "logprobs": 2}
        for seed, prompt in enumerate(prompts)
    ]
    single = [
        {**row, "id": f"{row['id']}{choice}", "seed": choice_seed(row["seed"], choice)}
        for row in rows
        for choice in range(N)
    ]
    for name in ("many", "alone"):
        (tmp_path / name).mkdir()
    many = Files(tmp_path / "many")
    found = answered(many, known.directory, rows, *shape, "--n", str(N))
    alone = {line["id"]: shown(line) for line in answered(Files(tmp_path / "alone"), known.directory, single, *shape)}
    assert sorted(line["id"] for line in found) == [row["id"] for row in rows]
    for line in found:
        assert [shown(output) for output in line["outputs"]] == [alone[f"{line['id']}{choice}"] for choice in range(N)]
        assert len({tuple(output["token_ids"]) for output in line["outputs"]}) > 1
        assert all(output["metrics"]["e2el_s"] > 0 for output in line["outputs"])
    report = many.report()
    counts = report.get("whole_run", report)
    assert (counts["completed"], counts["failed"], report["written"]) == (24, 0, {"rows": 6, "failed": 0})


def test_a_cut_output_is_resumed_by_whole_lines(tmp_path):
    files = Files(tmp_path)
    rows: list[dict[str, Any]] = [
        {
            "id": str(number),
            "prompt": f"{number}+3=",
            **SAMPLED,
            "n": 3,
            "prompt_logprobs": 1,
            "logprobs_from": number % 3,
        }
        for number in range(4)
    ]
    body = {"prompt": "1+2=", "echo": True, "logprobs": 1, "max_tokens": 3, "temperature": 1.0, "n": 3}
    rows += [{"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} for name in "45"]
    whole = answered(files, ADDER, rows)
    lines = files.output.read_bytes().splitlines(keepends=True)
    files.output.write_bytes(b"".join(lines[:2]) + lines[2][:-20])
    again = answered(files, ADDER, rows, "--resume")
    assert files.output.read_bytes().startswith(b"".join(lines[:2]))

    def without_times(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for line in found:
            for answer in (line, *line.get("outputs", [])):
                answer.pop("metrics", None)
            if "response" in line:
                line["response"]["body"].pop("created", None)
                line["response"]["body"]["usage"].pop("prompt_tokens_details")
        return sorted(found, key=lambda line: str(line.get("custom_id", line["id"])))

    found = without_times(again)
    assert found == without_times(whole)
    *own, echo, _ = found
    assert all(len(line["prompt_logprobs"]) == 5 - int(line["id"]) % 3 for line in own)
    for choice in echo["response"]["body"]["choices"]:
        first, *others = choice["logprobs"]["token_logprobs"]
        assert first is None and len(others) > 4 and choice["text"].startswith("1+2=")
    assert len(again) == 6
    assert (files.report()["resumed"]["rows"], files.report()["requests"]) == (2, 12)


def test_a_prompt_has_n_outputs_in_python():
    sampling = SamplingParams(max_new_tokens=8, temperature=1.0, seed=3, n=N, logprobs=1)
    single = [SamplingParams(8, 1.0, seed=choice_seed(3, choice), logprobs=1) for choice in range(N)]
    with LLM(str(ADDER), stages=1) as model:
        many, greedy, plain = model.generate(
            ["12+30=", "1+2=", "2+2="], [sampling, SamplingParams(n=2), SamplingParams(8)]
        )
        alone = model.generate(["12+30="] * N, single)
    assert [(one.text, one.token_ids, one.logprobs) for one in many.outputs] == [
        (one.outputs[0].text, one.outputs[0].token_ids, one.outputs[0].logprobs) for one in alone
    ]
    assert all(one.metrics["e2el_s"] > 0 for one in many.outputs)
    assert many.metrics == many.outputs[0].metrics
    assert (greedy.outputs, greedy.error.code) == ((), "invalid_parameter")
    assert "n is 2, and at temperature 0" in greedy.error.message
    assert (many.index, greedy.index, plain.index, plain.outputs[0].text) == (0, 1, 2, "4")
