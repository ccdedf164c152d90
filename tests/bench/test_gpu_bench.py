"""The script for GPUs, on CPU and on models that are tiny: every part runs and gives its figures."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from sarathi_pp.bench import gpu
from sarathi_pp.bench.gpu import Sizes, bench_gpu
from sarathi_pp.bench.gpu_stage import LLAMA_3_8B, ModelShape
from sarathi_pp.cli.main import cli
from sarathi_pp.core.cost import StageCost
from sarathi_pp.trace.clock import ManualClock, SystemClock

CPU = torch.device("cpu")
TINY = ModelShape(32, 64, 2, 4, 2, 2048)
SIZES = Sizes(large=TINY, small=TINY, middle=TINY, rows=3, requests=2, longest=32, matrix=64, array_bytes=1 << 16)


@pytest.mark.timeout(300)
def test_every_part_runs_on_cpu(monkeypatch):
    monkeypatch.setattr(gpu, "_REPEATS", 1)
    said: list[str] = []
    document = json.loads(json.dumps(bench_gpu(CPU, SystemClock(), 280.0, said.append, SIZES)))
    assert said == ["rates", "exact", "logits", "microbatches", "piggyback", "attention", "profile", "contest"]
    errors = {part: document[part].get("error") for part in said if "error" in document[part]}
    assert not errors, errors
    assert document["machine"]["device"] == "cpu"
    assert document["machine"]["attention"]["sdpa"] is None and "cuda" in document["machine"]["attention"]["triton"]
    assert [run["rows_equal"] for run in document["exact"]["runs"]] == [3], document["exact"]
    met = {check["what"]: check["met"] for check in document["checks"]}
    assert met["2 stages --attention sdpa: tokens equal transformers'"]
    assert document["microbatches"]["prefill"]["share_of_flops"] > 0
    assert [point["decodes"] for point in document["piggyback"]["curve"]] == [2, 4, 8, 16, 32, 64]
    assert all({"numba", "sdpa"} <= set(by_name) for by_name in document["attention"]["s"].values())
    assert document["contest"]["factor"] > 0
    (stage,) = document["profile"]["stages"]
    assert StageCost(**{**stage, "layers": tuple(stage["layers"])}).a1 > 0


def test_a_part_that_fails_is_a_check_that_is_not_met_and_the_others_go_on(monkeypatch):
    def fail(bench: object) -> dict[str, object]:
        raise RuntimeError("no kernel image is available")

    def rates(bench: object) -> dict[str, object]:
        return {"flops": 1.0}

    fail.__name__ = "_exact"
    rates.__name__ = "_rates"
    monkeypatch.setattr(gpu, "_exact", fail)
    monkeypatch.setattr(gpu, "_rates", rates)
    for name in ("_logits", "_microbatches", "_piggyback", "_attention", "_profile", "_contest"):
        monkeypatch.setattr(gpu, name, rates)
    document = bench_gpu(CPU, SystemClock(), 10.0, lambda part: None, SIZES)
    assert document["exact"]["error"] == "RuntimeError: no kernel image is available"
    assert document["checks"] == [{"what": "exact runs", "seen": False, "wanted": True, "met": False}]
    assert document["rates"]["flops"] == 1.0


def test_what_there_is_no_time_for_is_said(monkeypatch):
    clock = ManualClock()

    def slow(bench: object) -> dict[str, object]:
        clock.sleep(100)
        return {}

    slow.__name__ = "_rates"
    monkeypatch.setattr(gpu, "_rates", slow)
    document = bench_gpu(CPU, clock, 50.0, lambda part: None, SIZES)
    assert document["rates"] == {"took_s": 100}
    assert {document[part]["left_out"] for part in ("exact", "attention")} == {"the 50 s were over"}


def test_without_a_gpu_the_command_says_so():
    result = CliRunner().invoke(cli, ["bench", "gpu"])
    assert result.exception is not None and "torch finds no CUDA device here" in str(result.exception)


def test_bench_itself_still_wants_a_model():
    result = CliRunner().invoke(cli, ["bench"], standalone_mode=False)
    assert "Missing option '--model'" in str(result.exception)


def test_work_of_a_microbatch():
    """Llama-3-8B: 6.98e9 weights in layers, 0.53e9 in the head."""
    assert LLAMA_3_8B.layer_weights == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    one = LLAMA_3_8B.flops([(0, 1)], 1)
    assert one == 2 * LLAMA_3_8B.layer_weights + 2 * 4096 * 128256 + 4 * 32 * 4096
    assert (
        LLAMA_3_8B.flops([(0, 3)], 0) - LLAMA_3_8B.flops([(0, 2)], 0)
        == 2 * LLAMA_3_8B.layer_weights + 4 * 32 * 4096 * 3
    )
    keys = LLAMA_3_8B.read_bytes([(9, 1)], 2) - LLAMA_3_8B.read_bytes([(8, 1)], 2)
    assert keys == 2 * 2 * 32 * 1024
