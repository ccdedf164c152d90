"""Run vLLM alone on the work of a contest: one JSON file in, one JSON line out (peers/__init__.py).

    python -P vllm_program.py REQUESTS.json

The settings are the best ones for such work: vLLM compiles the model and gets prompts as token ids. Its prefix cache is
on, as by its own default (`prefix=off` switches it off). The program runs in an environment of its own, with vLLM's
Python. Under torchrun (`launch=torchrun`) every rank makes the same calls and gets all answers, and rank 0 prints them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(asked: dict[str, Any]) -> dict[str, Any]:
    begin = time.perf_counter()
    import vllm

    given = asked["parameters"]
    prompts = [{"prompt_token_ids": one["prompt_token_ids"]} for one in asked["requests"]]
    sampling = [_greedy(vllm, one["output_tokens"]) for one in asked["requests"]]
    llm = vllm.LLM(
        model=asked["model"],
        dtype=asked["dtype"],
        skip_tokenizer_init=True,
        enable_prefix_caching=given["prefix"] == "on",
        max_num_seqs=asked["max_num_seqs"],
        max_model_len=max(len(one["prompt_token_ids"]) + one["output_tokens"] for one in asked["requests"]),
        max_num_batched_tokens=int(given["tokens"]),
        pipeline_parallel_size=int(given["pp"]),
        distributed_executor_backend="external_launcher" if given["launch"] == "torchrun" else None,
        disable_log_stats=False,
    )
    llm.generate(prompts[:2], [_greedy(vllm, 4)] * 2, use_tqdm=False)
    if not llm.reset_prefix_cache():  # no prompt of the work may be there before it starts
        sys.exit("vLLM did not empty its prefix cache after the warm-up")
    ready = time.perf_counter()
    answers = llm.generate(prompts, sampling, use_tqdm=False)
    end = time.perf_counter()
    return {
        "load_s": ready - begin,
        "wall_s": end - ready,
        "token_ids": [list(answer.outputs[0].token_ids) for answer in answers],
        "ttft_s": [answer.metrics.first_token_latency for answer in answers],
        "version": vllm.__version__,
    }


def _greedy(vllm: Any, output_tokens: int) -> Any:
    return vllm.SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)


if __name__ == "__main__":
    answered = main(json.loads(Path(sys.argv[1]).read_text()))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(answered), flush=True)
