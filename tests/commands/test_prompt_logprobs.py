"""Log probabilities of prompts and echoes through the command line, over stages and replicas."""

from __future__ import annotations

import json

import pytest
import torch

from tests.commands.processes import COMMAND, Files, run

pytestmark = pytest.mark.timeout(180)


def completion(name: str, **body: object) -> dict[str, object]:
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


@pytest.mark.parametrize("shape", [("--stages", "2"), ("--stages", "2", "--replicas", "2")], ids=["stages", "replicas"])
def test_prompts_and_echoes_have_the_log_probabilities_of_transformers(shape, reference, tmp_path):
    known, files = reference("llama"), Files(tmp_path)
    prompts = known.prompts[:6]
    rows = [{"prompt_token_ids": prompt, "prompt_logprobs": 2, "max_tokens": n % 2} for n, prompt in enumerate(prompts)]
    lines = [*rows, completion("echo", prompt=prompts[0], echo=True, logprobs=1, max_tokens=2)]
    files.input.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--ignore-eos", "--chunk-size", "16", "--quiet", *shape)
    run((*COMMAND, *files.options(known.directory, *options)), tmp_path)
    by_id = {row["id"]: row for row in map(json.loads, files.output.read_text().splitlines())}
    *found, echo = (by_id[name] for name in (*map(str, range(1, 7)), "batch_req_7"))
    for prompt, row, number in zip(prompts, found, range(6), strict=True):
        with torch.inference_mode():
            logits = known.model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
        first, *others = row["prompt_logprobs"]
        assert first is None and [one["id"] for one in others] == list(prompt[1:])
        theirs = [logits[place, token].item() for place, token in enumerate(prompt[1:])]
        assert [one["logprob"] for one in others] == pytest.approx(theirs, rel=0, abs=1e-4)
        assert {len(one["top"]) for one in others} <= {2}
        assert len(row["token_ids"]) == number % 2 and row["finish_reason"] == "length"
    choice = echo["response"]["body"]["choices"][0]
    shown, of_own = choice["logprobs"], found[0]["prompt_logprobs"]
    assert shown["token_logprobs"][: len(prompts[0])] == [None, *(one["logprob"] for one in of_own[1:])]
    assert {len(values) for values in shown.values()} == {len(prompts[0]) + 2}
    assert shown["top_logprobs"][0] is None and "prompt_logprobs" not in choice
