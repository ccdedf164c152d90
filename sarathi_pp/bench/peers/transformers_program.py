"""Run transformers alone on the work of a contest: one JSON file in, one JSON line out (peers/__init__.py).

    python -P transformers_program.py REQUESTS.json

batching=padded      `generate` on all prompts at once, padded on the left, until the longest output is done
batching=continuous  `generate_batch`, its continuous batching
pp=N                 `generate` on its own pipeline, under torchrun
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

Requests = list[dict[str, Any]]
Answer = Callable[[Any, Requests], list[list[int]]]
_PAGE = 256  # tokens per block of the cache, the default of transformers
# Most tokens of a batch on a GPU. They are enough for its full rate. With the default, 8,192, masks and scores may take
# tens of gigabytes.
_GPU_BATCH = 2048


def main(asked: dict[str, Any]) -> dict[str, Any]:
    begin = time.perf_counter()
    given = asked["parameters"]
    placed: dict[str, Any] = {}
    # torchrun gives each of several ranks one thread. Use all cores instead.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(given["pp"])))
    if int(given["pp"]) > 1:
        from transformers.distributed import DistributedConfig

        placed["distributed_config"] = DistributedConfig(pp_size=int(given["pp"]))
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=getattr(torch, asked["dtype"]), **placed)
    model.to(asked.get("device", "cpu"))
    model.generation_config.eos_token_id = None  # every request runs to its length
    requests: Requests = asked["requests"]
    # On a GPU the warm-up is the whole work. Graphs are captured and kernels are chosen when a shape first occurs, and
    # this must not count in the time.
    on_cpu = model.device.type == "cpu"
    warm_up = [{**one, "output_tokens": 2} for one in requests[:2]] if on_cpu else requests
    with _continuous(model, requests) if given["batching"] == "continuous" else nullcontext(_padded) as answer:
        answer(model, warm_up)
        ready = time.perf_counter()
        token_ids = answer(model, requests)
        end = time.perf_counter()
    return {
        "load_s": ready - begin,
        "wall_s": end - ready,
        "token_ids": token_ids,
        "ttft_s": None,
        "version": transformers.__version__,
        "attention": model.config._attn_implementation,
    }


def _padded(model: Any, requests: Requests) -> list[list[int]]:
    width = max(len(one["prompt_token_ids"]) for one in requests)
    ids = torch.zeros(len(requests), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(requests):
        prompt = torch.tensor(one["prompt_token_ids"])
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    longest = max(one["output_tokens"] for one in requests)
    settings = {"max_new_tokens": longest, "min_new_tokens": longest, "do_sample": False, "pad_token_id": 0}
    answers = model.generate(ids, attention_mask=mask, **settings)[:, width:]
    return [row[: one["output_tokens"]].tolist() for row, one in zip(answers, requests, strict=True)]


@contextmanager
def _continuous(model: Any, requests: Requests) -> Iterator[Answer]:
    """Start the manager that generate_batch uses, so that its cache exists before the first request.

    Yield a function that answers all requests with it.

    On a CPU the cache has room for all requests at once. On a GPU transformers chooses its size. With a given size,
    transformers would use the remaining memory for masks, which take gigabytes.
    """
    tokens = (len(one["prompt_token_ids"]) + one["output_tokens"] for one in requests)
    on_cpu = model.device.type == "cpu"
    num_blocks = sum(-(-count // _PAGE) for count in tokens) if on_cpu else None
    batch = None if on_cpu else _GPU_BATCH
    config = ContinuousBatchingConfig(allow_block_sharing=False, num_blocks=num_blocks, max_batch_tokens=batch)
    with model.continuous_batching_context_manager(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1), continuous_batching_config=config
    ) as manager:

        def answer(model: Any, requests: Requests) -> list[list[int]]:
            names = [
                manager.add_request(one["prompt_token_ids"], max_new_tokens=one["output_tokens"], eos_token_id=-1)
                for one in requests
            ]
            answers: dict[str, list[int]] = {}
            while len(answers) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.error:
                    sys.exit(f"generate_batch: {result.error}")
                if result is not None and result.is_finished():
                    answers[result.request_id] = list(result.generated_tokens)
                elif not manager.is_running():
                    sys.exit("generate_batch stopped before it had answered all requests")
            return [answers[name] for name in names]

        yield answer


if __name__ == "__main__":
    answered = main(json.loads(Path(sys.argv[1]).read_text()))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(answered), flush=True)
