"""The program that runs llama.cpp: its settings, its requests and its answers, with fake servers.

If launch/peers.sh has made an environment in .peers, the real server runs too.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sarathi_pp.bench.peers import llama_program, parse_peer
from tests.machine import patient

ROOT = Path(__file__).parents[2]
PEERS_DIR = ROOT / ".peers"
NAMES = [name for name in ("llama-cpp", "llama-cpp-native") if (PEERS_DIR / name / "bin" / "python").exists()]
REQUESTS = [{"prompt_token_ids": [row] * (200 + row), "output_tokens": 60 + row} for row in range(3)]
PREDICTED_S = 0.02


class Server(ThreadingHTTPServer):
    """A server that answers no request of a group before all of the group have arrived.

    Attributes:
        groups: the two requests of the warm-up, and the three of the work.
        answer: the answer to all requests; None for tokens that show the request.
    """

    daemon_threads = True

    def __init__(self, params: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.params, self.bodies, self.answer = params, [], params.answer
        self.groups = [threading.Barrier(number) for number in (2, 3)]
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def listening_address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            group = self.server.groups[0 if len(self.server.bodies) < 2 else 1]
            self.server.bodies.append(body)
        group.wait(patient(30))
        time.sleep(PREDICTED_S)
        tokens = [body["prompt"][0]] * body["n_predict"]
        answer = self.server.answer or {"tokens": tokens, "timings": {"predicted_ms": PREDICTED_S * 1000}}
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Engine(SimpleNamespace):
    """The parts of xllamacpp that the program uses. It keeps the server that the program starts."""

    server: Server

    def __init__(self, answer: dict[str, Any] | None = None) -> None:
        super().__init__(
            __version__="9",
            ggml_type=SimpleNamespace(GGML_TYPE_F32="f32"),
            llama_flash_attn_type=SimpleNamespace(LLAMA_FLASH_ATTN_TYPE_DISABLED="off"),
        )
        self.answer = answer

    def CommonParams(self) -> SimpleNamespace:
        parts = {name: SimpleNamespace() for name in ("model", "cpuparams", "cpuparams_batch")}
        return SimpleNamespace(answer=self.answer, flash_attn_type="auto", cache_type_k="f16", **parts)

    def Server(self, params: Any) -> Server:
        self.server = Server(params)
        return self.server


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    fake = Engine()
    monkeypatch.setitem(sys.modules, "xllamacpp", fake)  # type: ignore[arg-type]
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


def asked(folder: Path, dtype: str = "bfloat16", max_num_seqs: int = 32, pp: str = "1") -> Path:
    """Write the work of a contest whose model was converted before."""
    (folder / f"{dtype}.gguf").touch()
    path = folder / "asked.json"
    work: dict[str, Any] = {"model": "nowhere", "dtype": dtype, "max_num_seqs": max_num_seqs, "requests": REQUESTS}
    work["parameters"] = {"pp": pp}
    path.write_text(json.dumps(work))
    return path


def test_all_requests_arrive_at_once_and_are_answered_in_order(engine: Engine, tmp_path: Path) -> None:
    answered = llama_program.main(asked(tmp_path))
    assert answered["token_ids"] == [[row] * (60 + row) for row in range(3)]
    bodies = sorted(engine.server.bodies[2:], key=lambda body: body["n_predict"])
    assert [body["prompt"] for body in bodies] == [one["prompt_token_ids"] for one in REQUESTS]
    assert all(body["temperature"] == 0 and body["cache_prompt"] is False for body in bodies)
    assert [body["n_predict"] for body in engine.server.bodies[:2]] == [4, 4]  # the warm-up, which is not timed
    assert all(0 <= ttft <= answered["wall_s"] - PREDICTED_S for ttft in answered["ttft_s"])
    assert answered["version"] == "xllamacpp 9"


def test_every_request_that_runs_at_once_has_a_slot_with_room(engine: Engine, tmp_path: Path) -> None:
    llama_program.main(asked(tmp_path))
    params = engine.server.params
    assert params.n_parallel == 3 and params.n_ctx == 3 * 512  # 202 + 62 tokens, in steps of 256
    assert params.n_threads_http > 3 and params.cache_prompt is False and params.cache_ram_mib == 0
    assert (params.flash_attn_type, params.cache_type_k) == ("auto", "f16")


def test_no_more_slots_than_sequences_that_may_run(engine: Engine, tmp_path: Path) -> None:
    llama_program.main(asked(tmp_path, max_num_seqs=2))
    assert engine.server.params.n_parallel == 2


def test_float32_is_float32_in_the_cache_too(engine: Engine, tmp_path: Path) -> None:
    llama_program.main(asked(tmp_path, "float32"))
    params = engine.server.params
    assert (params.cache_type_k, params.cache_type_v, params.flash_attn_type) == ("f32", "f32", "off")


# A program that writes its options next to itself, and listens as they say. Its first answer is that it still loads.
PROGRAM = f"""#!{sys.executable}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

options = sys.argv[1:]
port = options[options.index("--port") + 1]
Path(sys.argv[0]).with_name(f"{{Path(sys.argv[0]).name}}-{{port}}.json").write_text(json.dumps(options))
print("a line that is no result")

class Handler(BaseHTTPRequestHandler):
    loading = True

    def reply(self, code, answer):
        text = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        self.reply(503 if Handler.loading else 200, {{"build_info": "b5"}})
        Handler.loading = False

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert not Handler.loading
        self.reply(200, {{"tokens": [body["prompt"][0]] * body["n_predict"], "timings": {{"predicted_ms": 0.0}}}})

    def log_message(self, *args):
        pass

HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an environment with llama.cpp's programs, and say that this process runs in it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("llama-server", "ggml-rpc-server"):
        (folder / name).write_text(PROGRAM)
        (folder / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder


def options(programs: Path, name: str) -> list[dict[str, str]]:
    """Return the options with a value that each process of a program got."""
    lists = [json.loads(path.read_text()) for path in sorted(programs.glob(f"{name}-*.json"))]
    return [{a: b for a, b in pairwise(words) if a.startswith("--") and not b.startswith("--")} for words in lists]


def ended(port: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) != 0


def test_a_server_of_its_own_gets_the_same_settings(programs: Path, tmp_path: Path) -> None:
    answered = llama_program.main(asked(tmp_path, "float32"))
    assert answered["token_ids"] == [[row] * (60 + row) for row in range(3)]
    assert answered["version"] == "llama.cpp b5"
    (server,) = options(programs, "llama-server")
    assert (server["--parallel"], server["--ctx-size"], server["--cache-ram"]) == ("3", "1536", "0")
    assert (server["--cache-type-k"], server["--cache-type-v"], server["--flash-attn"]) == ("f32", "f32", "off")
    assert server["--threads"] == str(len(os.sched_getaffinity(0)))
    assert "--rpc" not in server and ended(server["--port"])


def test_a_pipeline_has_a_worker_per_rank_and_even_shares(programs: Path, tmp_path: Path) -> None:
    assert len(llama_program.main(asked(tmp_path, pp="2"))["token_ids"]) == 3
    (server,), workers = options(programs, "llama-server"), options(programs, "ggml-rpc-server")
    assert len(workers) == 2
    assert sorted(server["--rpc"].split(",")) == sorted(f"127.0.0.1:{worker['--port']}" for worker in workers)
    assert (server["--tensor-split"], server["--gpu-layers"], server["--threads"]) == ("1,1", "all", "1")
    assert {worker["--threads"] for worker in workers} == {str(max(1, len(os.sched_getaffinity(0)) // 2))}
    assert "--cache-type-k" not in server and all(ended(worker["--port"]) for worker in workers)


def test_a_server_that_does_not_start_ends_the_program(programs: Path, tmp_path: Path) -> None:
    (programs / "llama-server").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(SystemExit, match="llama-server ended with code 3"):
        llama_program.main(asked(tmp_path))


def test_an_answer_without_tokens_ends_the_program(engine: Engine, tmp_path: Path) -> None:
    engine.answer = {"error": {"message": "no such slot"}}
    with pytest.raises(SystemExit, match="did not answer a request: .*no such slot"):
        llama_program.main(asked(tmp_path))


def test_a_model_that_cannot_be_converted_ends_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 1))
    with pytest.raises(SystemExit) as raised:
        llama_program._converted("nowhere", "float32", tmp_path)
    assert raised.value.code == 1 and not list(tmp_path.iterdir())


def test_a_model_is_converted_once_per_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def converted(command: list[str], check: bool) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        Path(command[-2]).write_text(command[-1])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", converted)
    for dtype in ("float32", "q8_0", "float32"):
        assert llama_program._converted("nowhere", dtype, tmp_path).read_text() == dtype
    assert [command[-1] for command in commands] == ["float32", "q8_0"] and len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif(not NAMES, reason="launch/peers.sh has not made the environment of llama.cpp here")
def test_float32_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model, path = ROOT / "examples" / "tiny-adder", tmp_path / "asked.json"
    requests = [{"prompt_token_ids": [1, *range(4, 10 + row)], "output_tokens": 8} for row in range(3)]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = []
    for request in requests:
        ids = torch.tensor([request["prompt_token_ids"]])
        answer = reference.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        expected.append(answer[0, ids.shape[1] :].tolist())
    piped = ["llama-cpp-native:dtype=float32,pp=2"] if "llama-cpp-native" in NAMES else []
    for text in [f"{name}:dtype=float32" for name in NAMES] + piped:
        choice = parse_peer(text)
        work = {"model": str(model), "dtype": "float32", "max_num_seqs": 2, "requests": requests}
        path.write_text(json.dumps({**work, "parameters": dict(choice.parameters)}))
        command = choice.command(choice.python(PEERS_DIR), path)
        done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=True, env={})
        assert json.loads(done.stdout.splitlines()[-1])["token_ids"] == expected
