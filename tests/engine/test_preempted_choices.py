"""Several outputs of one prompt, on a KV cache that is too small for all of them, are those of single requests."""

from __future__ import annotations

import pytest

from sarathi_pp import LLM, SamplingParams
from sarathi_pp.inputs.row import choice_seed
from tests.commands.processes import ROOT

ADDER = ROOT / "examples" / "tiny-adder"
PROMPTS = ["1+1=", "12+30=" * 2, "40+2=" * 2]
N = 4
KIB = 1024
COMMON = {"max_tokens": 30, "temperature": 1.0, "ignore_eos": True, "logprobs": 1, "prompt_logprobs": 1}


@pytest.mark.timeout(120)
def test_preempted_choices_are_those_of_single_requests():
    many = [SamplingParams(n=N, seed=seed, **COMMON) for seed in range(len(PROMPTS))]
    with LLM(str(ADDER), dtype="float32", kv_cache_memory_bytes=64 * KIB, policy="orca") as llm:
        found = llm.generate(PROMPTS, many)
        report = llm.report()
    assert report is not None and report["preemptions"] >= N
    single = [SamplingParams(seed=choice_seed(seed, one), **COMMON) for seed in range(len(PROMPTS)) for one in range(N)]
    with LLM(str(ADDER), dtype="float32", kv_cache_memory_bytes=KIB * KIB) as llm:
        alone = llm.generate([prompt for prompt in PROMPTS for _ in range(N)], single)
        report = llm.report()
    assert report is not None and report["preemptions"] == 0
    outputs = [(one.token_ids, one.text, one.logprobs) for row in found for one in row.outputs]
    assert outputs == [(one.token_ids, one.text, one.logprobs) for row in alone for one in row.outputs]
    assert {len(tokens) for tokens, _, _ in outputs} == {30} and len({tokens for tokens, _, _ in outputs}) > N
    assert [row.prompt_logprobs for row in found] == [row.prompt_logprobs for row in alone[::N]]
