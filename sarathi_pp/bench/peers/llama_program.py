"""Run llama.cpp alone on the work of a contest: one JSON file in, one JSON line out (peers/__init__.py).

    python -P llama_program.py REQUESTS.json

First gguf_program.py writes the checkpoint as FILE.gguf next to REQUESTS.json, once per contest and type. Then the
server of llama.cpp starts and gets all requests at once on loopback. If the environment has a llama-server, built for
this processor, the server is that program. Otherwise it runs in this process, through the package xllamacpp.

pp=N        llama-server gives the layers to N workers (ggml-rpc-server), each with an equal share of the cores

The settings were faster than the others tried. Every request that runs at once has a slot with its own context. With
one context for all (`kv_unified`), attention reads the keys of all sequences. Prompts are computed in batches of 2048
tokens. The cache is float16, the default of llama.cpp. For float32 it is float32, as in all other engines, and flash
attention is off, because it is slower on a float32 cache. Nothing is reused between prompts.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

Requests = list[dict[str, Any]]
_HOST = "127.0.0.1"
_BATCH = 2048  # tokens
_CONTEXT_STEP = 256  # llama.cpp rounds contexts up to a multiple of it
_WAIT_S = 0.05  # between two looks whether a process listens


def main(path: Path) -> dict[str, Any]:
    begin = time.perf_counter()
    asked = json.loads(path.read_text())
    requests: Requests = asked["requests"]
    model = _converted(asked["model"], asked["dtype"], path.parent)
    programs = Path(sys.executable).parent
    built = (programs / "llama-server").exists()
    with _own_server(programs, asked, model) if built else _wheel_server(asked, model) as (address, version):
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
        "version": version,
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


def _settings(asked: dict[str, Any]) -> list[tuple[str, str, int]]:
    """Return each setting as its name in xllamacpp, the option of llama-server, and the value."""
    requests: Requests = asked["requests"]
    slots = min(asked["max_num_seqs"], len(requests))
    longest = max(len(one["prompt_token_ids"]) + one["output_tokens"] for one in requests)
    return [
        ("n_parallel", "--parallel", slots),
        ("n_ctx", "--ctx-size", slots * -(-longest // _CONTEXT_STEP) * _CONTEXT_STEP),
        ("n_batch", "--batch-size", _BATCH),
        ("n_ubatch", "--ubatch-size", _BATCH),
        ("n_threads_http", "--threads-http", len(requests) + 1),  # a waiting request holds one
        ("cache_ram_mib", "--cache-ram", 0),
        ("n_ctx_checkpoints", "--ctx-checkpoints", 0),
        ("slot_prompt_similarity", "--slot-prompt-similarity", 0),
        ("verbosity", "--verbosity", 1),  # errors only
    ]


@contextmanager
def _wheel_server(asked: dict[str, Any], model: Path) -> Iterator[tuple[str, str]]:
    """Run the server of xllamacpp. Yield its address, HOST:PORT, and its version."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    for name, _, value in _settings(asked):
        setattr(params, name, value)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    params.cache_prompt = params.cache_idle_slots = params.kv_unified = False
    params.fit_params = False  # it may change the context
    if asked["dtype"] == "float32":
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    yield server.listening_address.removeprefix("http://"), f"xllamacpp {xllamacpp.__version__}"


@contextmanager
def _own_server(programs: Path, asked: dict[str, Any], model: Path) -> Iterator[tuple[str, str]]:
    """Run the programs of llama.cpp in a folder. Yield the server's address, HOST:PORT, and its version."""
    ranks, cores = int(asked["parameters"]["pp"]), len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        command = [str(programs / "llama-server"), "--model", str(model), "--offline", "--no-ui", "--fit", "off"]
        command += ["--no-cache-prompt", "--no-cache-idle-slots", "--no-kv-unified"]
        for _, option, value in _settings(asked):
            command += [option, str(value)]
        if asked["dtype"] == "float32":
            command += ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"]
        if ranks > 1:
            worker = [str(programs / "ggml-rpc-server"), "--threads", str(max(1, cores // ranks))]
            workers = [stack.enter_context(_listening(worker)) for _ in range(ranks)]
            command += ["--rpc", ",".join(workers), "--gpu-layers", "all", "--tensor-split", ",".join("1" * ranks)]
        threads = str(cores if ranks == 1 else 1)  # with workers, the server itself only samples
        address = stack.enter_context(_listening([*command, "--threads", threads, "--threads-batch", threads]))
        while _ask(address, "GET", "/health")[0] != http.client.OK:  # it listens before it has loaded
            time.sleep(_WAIT_S)
        yield address, f"llama.cpp {_ask(address, 'GET', '/props')[1]['build_info']}"


@contextmanager
def _listening(command: list[str]) -> Iterator[str]:
    """Run a program with a port on loopback. Yield its address when it listens there, and end it afterwards."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port = probe.getsockname()[1]
    # Standard output is for the result alone.
    with subprocess.Popen([*command, "--host", _HOST, "--port", str(port)], stdout=sys.stderr) as process:
        try:
            while True:
                if process.poll() is not None:
                    sys.exit(f"{command[0]} ended with code {process.returncode}")
                with socket.socket() as probe:
                    if probe.connect_ex((_HOST, port)) == 0:
                        break
                time.sleep(_WAIT_S)
            yield f"{_HOST}:{port}"
        finally:
            process.terminate()


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
    _, answer = _ask(address, "POST", "/completion", body)
    arrival = time.perf_counter()
    if "tokens" not in answer:
        sys.exit(f"llama.cpp did not answer a request: {answer}")
    return answer, arrival


def _ask(address: str, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    """Send one request, and return the code and the JSON of the answer."""
    connection = http.client.HTTPConnection(address)
    connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))), flush=True)
