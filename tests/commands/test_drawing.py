"""Penalties, bans and log probabilities through the command line: stages, shards, replicas, and a resumed run."""

from __future__ import annotations

import json

import pytest

from tests.commands.processes import COMMAND, Files, run
from tests.exact.test_draw_rules import drawn_rules, generate

NEW_TOKENS = 12
pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(
    "shape",
    [
        ("--stages", "2"),
        ("--stages", "2", "--replicas", "2"),
        ("--stages", "2", "--tensor-parallel-size", "2"),
    ],
    ids=["stages", "replicas", "shards"],
)
def test_rows_with_rules_get_the_tokens_of_transformers(shape, reference, tmp_path):
    known, files = reference("llama"), Files(tmp_path)
    rows, expected = [], []
    for seed, prompt in enumerate(known.prompts[:8]):
        _, call = drawn_rules(prompt, seed)
        expected.append(list(generate(known, prompt, call)))
        ends = call.pop("eos_token_id", [])
        rows.append({"prompt_token_ids": prompt, **call, "stop_token_ids": ends, "logprobs": seed % 3})
    files.input.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--max-new-tokens", str(NEW_TOKENS), "--ignore-eos", "--chunk-size", "16", "--quiet", *shape)
    run((*COMMAND, *files.options(known.directory, *options)), tmp_path)
    if "--tensor-parallel-size" in shape:
        whole = files.output.read_bytes().splitlines(keepends=True)
        files.output.write_bytes(b"".join(whole[:3]) + whole[3][:20])
        run((*COMMAND, *files.options(known.directory, *options, "--resume")), tmp_path)
    for found, theirs, row in zip(files.rows(), expected, rows, strict=True):
        assert found["token_ids"] == theirs, row
        assert [one["id"] for one in found["logprobs"]] == theirs
        assert {len(one["top"]) for one in found["logprobs"]} == {row["logprobs"]}
        assert all(one["logprob"] <= 0 for one in found["logprobs"])
