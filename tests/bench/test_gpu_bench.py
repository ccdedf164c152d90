"""The script for GPUs, on CPU with tiny models: every part runs and gives its figures."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from sarathi_pp.bench.gpu import microbatches, pipelines, suite
from sarathi_pp.bench.gpu.plan import Bench, Figures, Sizes
from sarathi_pp.bench.gpu.stage import LLAMA_3_8B, ModelShape
from sarathi_pp.bench.gpu.suite import bench_gpu
from sarathi_pp.cli.main import cli
from sarathi_pp.core.cost.model import StageCost
from sarathi_pp.trace.clock import ManualClock, SystemClock

Part = Callable[[Bench, Figures], None]

CPU = torch.device("cpu")
TINY = ModelShape(32, 64, 2, 4, 2, 2048)
SIZES = Sizes(
    large=TINY,
    small=TINY,
    middle=TINY,
    rows=3,
    requests=2,
    longest=32,
    matrix=64,
    array_bytes=1 << 16,
    prefill=32,
    decodes=4,
    context=40,
    chunk=32,
    piggybacked=(2, 16),
    attention={"chunk 32 at 4": [(4, 32)], "4 decodes at 100": [(100, 1)] * 4},
    layers=2,
    repeats=3,
    warm_s=0.0,
)
PARTS = [
    "rates",
    "nccl",
    "exact",
    "contest",
    "microbatches",
    "piggyback",
    "sampling",
    "kernels",
    "profile",
    "logits",
    "attention",
]


@pytest.mark.timeout(300)
def test_every_part_runs_on_cpu():
    said: list[str] = []
    saved: list[str] = []
    for step in bench_gpu(CPU, SystemClock(), 280.0, SIZES):
        if step.ended:
            saved.append(json.dumps(step.document))
        else:
            said.append(step.part)
    document = step.document
    assert said == PARTS and len(saved) == len(PARTS)
    assert json.loads(saved[-1]) == (document := json.loads(json.dumps(document)))
    assert "microbatches" in json.loads(saved[4]) and "piggyback" not in json.loads(saved[4])
    errors = {part: document[part].get("error") for part in said if "error" in document[part]}
    assert not errors, errors
    assert document["machine"]["device"] == "cpu"
    assert document["machine"]["attention"]["sdpa"] is None and "cuda" in document["machine"]["attention"]["triton"]
    found = document["exact"]
    assert found["rows"] >= 2 and found["rows"] + found["near_ties"] == 3
    assert [run["rows_equal"] for run in found["runs"]] == [found["rows"]], found
    met = {check["what"]: check["met"] for check in document["checks"]}
    assert met["2 stages --attention sdpa: tokens equal transformers'"]
    assert document["microbatches"]["prefill"]["share_of_flops"] > 0
    for point in document["piggyback"]["curve"]:
        low, high = point["both"]["quartiles_s"]
        assert low <= point["both"]["s"] <= high and point["factor"] > 0
    assert [point["decodes"] for point in document["piggyback"]["curve"]] == [2, 16]
    assert document["sampling"]["greedy"]["s"] > 0
    chunk, decodes = document["attention"]["of_a_layer"].values()
    assert set(chunk) == {"numba", "sdpa", "dense"} and set(decodes) == {"numba", "sdpa"}
    for name in ("numba", "sdpa"):
        assert met[f"{name}: nearer to float32 than transformers by"], document["logits"]
    assert all(one["s"] > 0 and one["calls"] for what in ("prefill", "decode") for one in document["kernels"][what])
    assert document["contest"]["factor"] > 0
    (stage,) = document["profile"]["stages"]
    assert StageCost(**{**stage, "layers": tuple(stage["layers"])}).a1 > 0


def test_a_part_that_fails_is_a_check_that_is_not_met_and_the_others_go_on(monkeypatch):
    def exact(bench: Bench, figures: Figures) -> None:
        figures["rows"] = 3
        raise RuntimeError("no kernel image is available")

    def part(bench: Bench, figures: Figures) -> None:
        figures["flops"] = 1.0

    for name in PARTS:
        monkeypatch.setattr(suite, name, renamed(part, name))
    monkeypatch.setattr(suite, "exact", exact)
    *_, last = bench_gpu(CPU, SystemClock(), 10.0, SIZES)
    document = last.document
    assert document["exact"]["error"] == "RuntimeError: no kernel image is available"
    assert document["exact"]["rows"] == 3, "what it had before is kept"
    assert document["checks"] == [{"what": "exact runs", "seen": False, "wanted": True, "met": False}]
    assert all(document[name]["flops"] == 1.0 for name in PARTS if name != "exact")


def renamed(part: Part, name: str) -> Part:
    def other(bench: Bench, figures: Figures) -> None:
        part(bench, figures)

    other.__name__ = name
    return other


def test_a_pipeline_that_hangs_ends_its_run_alone(monkeypatch):
    """The error contains its output so far."""
    hanging = "import sys, time; print('at rank 1', file=sys.stderr, flush=True); time.sleep(60)"
    monkeypatch.setattr(pipelines, "_COMMAND", (sys.executable, "-c", hanging))
    clock = SystemClock()
    bench = Bench(CPU, torch.float32, SIZES, clock, clock.now() + 3)
    figures: Figures = {}
    pipelines.exact(bench, figures)
    (run,) = figures["runs"]
    assert run["rows_equal"] == 0 and "still running after" in run["said"] and "at rank 1" in run["said"]
    assert not bench.checks[0]["met"]


def test_a_difference_that_noise_hides_is_not_taken_for_nothing(monkeypatch):
    """Both microbatches take equally long, within a millisecond: a decode costs at most that, and perhaps that much."""
    bench = Bench(CPU, torch.float32, SIZES, ManualClock(), 1.0)
    stage = SimpleNamespace(has_graphs=False, microbatch=lambda extents: lambda: None)
    monkeypatch.setattr(Bench, "large", lambda bench: stage)
    taken = {"s": 0.010, "quartiles_s": [0.0095, 0.010]}
    monkeypatch.setattr(Bench, "seconds", lambda bench, *calls: [{"s": 0.004}, taken, taken])
    figures: Figures = {}
    microbatches.piggyback(bench, figures)
    point = figures["curve"][0]
    assert point["cost_s"] == 0 and point["factor"] == pytest.approx(0.004 / 0.001)
    assert bench.checks[0]["met"] is False


def test_what_there_is_no_time_for_is_said(monkeypatch):
    clock = ManualClock()

    def rates(bench: Bench, figures: Figures) -> None:
        clock.sleep(100)

    monkeypatch.setattr(suite, "rates", rates)
    steps = [(step.ended, copy.deepcopy(step.document)) for step in bench_gpu(CPU, clock, 50.0, SIZES)]
    assert steps[-1][0]
    document = steps[-1][1]
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
