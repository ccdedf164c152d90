"""The program that runs llama.cpp: its settings, its requests and its answers, with a fake server.

If `launch/peers.sh llama-cpp` has made the environment in .peers, the real one runs too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sarathi_pp.bench.peers import llama_program, parse_peer
from tests.machine import patient

ROOT = Path(__file__).parents[2]
PEERS_DIR = ROOT / ".peers"
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


def asked(folder: Path, dtype: str = "bfloat16", max_num_seqs: int = 32) -> Path:
    """Write the work of a contest whose model was converted before."""
    (folder / f"{dtype}.gguf").touch()
    path = folder / "asked.json"
    work = {"model": "nowhere", "dtype": dtype, "max_num_seqs": max_num_seqs, "requests": REQUESTS}
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


@pytest.mark.skipif(not (PEERS_DIR / "llama-cpp").exists(), reason="launch/peers.sh llama-cpp has not run here")
def test_float32_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = ROOT / "examples" / "tiny-adder"
    path, choice = tmp_path / "asked.json", parse_peer("llama-cpp:dtype=float32")
    requests = [{"prompt_token_ids": [1, *range(4, 10 + row)], "output_tokens": 8} for row in range(3)]
    path.write_text(json.dumps({"model": str(model), "dtype": "float32", "max_num_seqs": 2, "requests": requests}))
    command = choice.command(choice.python(PEERS_DIR), path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=True, env={})
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for request, tokens in zip(requests, json.loads(done.stdout.splitlines()[-1])["token_ids"], strict=True):
        ids = torch.tensor([request["prompt_token_ids"]])
        settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = reference.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert tokens == expected[0, ids.shape[1] :].tolist()
