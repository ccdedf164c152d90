"""Run llama.cpp alone on the work of a contest: one JSON file in, one JSON line out (peers/__init__.py).

    python -P llama_program.py REQUESTS.json

First gguf_program.py writes the checkpoint as FILE.gguf next to REQUESTS.json, once per contest and type. Then the
server of llama.cpp starts in this process, through the package xllamacpp, and gets all requests at once on loopback.

The settings were faster than the others tried. Every request that runs at once has a slot with its own context. With
one context for all (`kv_unified`), attention reads the keys of all sequences. Prompts are computed in batches of 2048
tokens. The cache is float16, the default of llama.cpp. For float32 it is float32, as in all other engines, and flash
attention is off, because it is slower on a float32 cache. Nothing is reused between prompts.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Requests = list[dict[str, Any]]
_BATCH = 2048  # tokens
_CONTEXT_STEP = 256  # llama.cpp rounds contexts up to a multiple of it


def main(path: Path) -> dict[str, Any]:
    import xllamacpp

    begin = time.perf_counter()
    asked = json.loads(path.read_text())
    requests: Requests = asked["requests"]
    model = _converted(asked["model"], asked["dtype"], path.parent)
    server = xllamacpp.Server(_settings(xllamacpp, asked, model))
    address = server.listening_address.removeprefix("http://")
    _answer_all(address, [{**one, "output_tokens": 4} for one in requests[:2]])
    ready = time.perf_counter()
    answers = _answer_all(address, requests)
    end = time.perf_counter()
    return {
        "load_s": ready - begin,
        "wall_s": end - ready,
        "token_ids": [answer["tokens"] for answer, _ in answers],
        # The server reports how long it generated after the first token, and the answer arrives right after the last.
        "ttft_s": [arrival - ready - answer["timings"]["predicted_ms"] / 1000 for answer, arrival in answers],
        "version": f"xllamacpp {xllamacpp.__version__}",
    }


def _converted(model: str, dtype: str, folder: Path) -> Path:
    """Return the GGUF file of a checkpoint in a type. An earlier run of the contest may have written it."""
    file = folder / f"{dtype}.gguf"
    if not file.exists():
        partial = file.with_suffix(".partial")
        program = Path(__file__).with_name("gguf_program.py")
        done = subprocess.run([sys.executable, "-P", str(program), model, str(partial), dtype], check=False)
        if done.returncode:  # it has said why
            sys.exit(done.returncode)
        partial.rename(file)
    return file


def _settings(xllamacpp: Any, asked: dict[str, Any], model: Path) -> Any:
    requests: Requests = asked["requests"]
    slots = min(asked["max_num_seqs"], len(requests))
    longest = max(len(one["prompt_token_ids"]) + one["output_tokens"] for one in requests)
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.verbosity = 1  # errors only
    params.fit_params = False  # it may change the context
    params.n_parallel = slots
    params.n_ctx = slots * -(-longest // _CONTEXT_STEP) * _CONTEXT_STEP
    params.n_batch = params.n_ubatch = _BATCH
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    params.n_threads_http = len(requests) + 1  # a waiting request holds one
    params.cache_prompt = params.cache_idle_slots = False
    params.cache_ram_mib = params.n_ctx_checkpoints = 0
    params.slot_prompt_similarity = 0.0
    if asked["dtype"] == "float32":
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return params


def _answer_all(address: str, requests: Requests) -> list[tuple[dict[str, Any], float]]:
    """Send all requests at once. Return the server's answers, each with the time of its arrival (perf_counter)."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: _answer(address, request), requests))


def _answer(address: str, request: dict[str, Any]) -> tuple[dict[str, Any], float]:
    body = {
        "prompt": request["prompt_token_ids"],
        "n_predict": request["output_tokens"],
        "samplers": ["temperature"],
        "temperature": 0,
        "cache_prompt": False,
        "return_tokens": True,
    }
    connection = http.client.HTTPConnection(address)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    text = connection.getresponse().read()
    arrival = time.perf_counter()
    connection.close()
    answer = json.loads(text)
    if "tokens" not in answer:
        sys.exit(f"llama.cpp did not answer a request: {answer}")
    return answer, arrival


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))), flush=True)
