"""The parts of the suite for GPUs, on CPU with tiny models: every part runs and gives its figures."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from sarathi_pp.bench.gpu import microbatches, pipelines, worker
from sarathi_pp.bench.gpu.document import Figures, GpuDocument
from sarathi_pp.bench.gpu.parts import NAMES
from sarathi_pp.bench.gpu.plan import Bench, Sizes
from sarathi_pp.bench.gpu.stage import LLAMA_3_8B, ModelShape
from sarathi_pp.bench.gpu.suite import bench_gpu
from sarathi_pp.bench.gpu.tiles import candidates
from sarathi_pp.bench.gpu.worker import make_bench, run_parts
from sarathi_pp.cli.main import cli
from sarathi_pp.core.cost.model import StageCost
from sarathi_pp.trace.clock import ManualClock, SystemClock

CPU = torch.device("cpu")
TINY = ModelShape(32, 64, 2, 4, 2, 2048)
SIZES = Sizes(
    large=TINY,
    wide=TINY,
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
    attention={"chunk 32 at 4": ((4, 32),), "4 decodes at 100": ((100, 1),) * 4},
    layers=2,
    repeats=3,
    warm_s=0.0,
)


def run_here(folder: Path, *names: str) -> tuple[dict[str, Figures], dict[str, bool]]:
    """Run parts in this process. Return their figures, and whether each check was met."""
    bench = make_bench(CPU, json.loads(json.dumps(SIZES.to_json())))
    bench.folder = folder
    run_parts(bench, dict.fromkeys(names, 280.0), math.inf)
    results = [json.loads((folder / f"{name}.json").read_text()) for name in names]
    assert all(result["ended"] for result in results)
    checks = [check for result in results for check in result["checks"]]
    assert {check["part"] for check in checks} <= {*names}
    figures = {name: result["figures"] for name, result in zip(names, results, strict=True)}
    return figures, {check["what"]: check["met"] for check in checks}


@pytest.mark.timeout(300)
def test_every_part_runs_on_cpu(tmp_path: Path) -> None:
    document, met = run_here(tmp_path, *NAMES)
    errors = {part: figures["error"] for part, figures in document.items() if "error" in figures}
    assert not errors, errors
    assert document["machine"]["device"] == "cpu"
    assert document["machine"]["attention"]["sdpa"] is None and "cuda" in document["machine"]["attention"]["triton"]
    found = document["exact"]
    assert found["rows"] >= 2 and found["rows"] + found["near_ties"] == 3
    assert [run["rows_equal"] for run in found["runs"]] == [found["rows"]], found
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
    assert document["contest"]["factor"] > 0 and document["contest"]["not_ahead"] > 0
    assert document["tiles"]["reason"] == "the triton backend does not run here"
    (stage,) = document["profile"]["stages"]
    assert StageCost(**{**stage, "layers": tuple(stage["layers"])}).a1 > 0


def test_sizes_reach_the_worker() -> None:
    assert Sizes.from_json(json.loads(json.dumps(SIZES.to_json()))) == SIZES
    assert Sizes.from_json(json.loads(json.dumps(Sizes().to_json()))) == Sizes()


def test_a_worker_ends_after_a_part_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its device may be broken. Figures and checks that the part had are kept."""

    def exact(bench: Bench, figures: Figures) -> None:
        figures["rows"] = 3
        bench.check("one pipeline", True, True)
        raise RuntimeError("no kernel image is available")

    monkeypatch.setitem(worker.PARTS, "exact", exact)
    bench = make_bench(CPU, SIZES.to_json())
    bench.folder = tmp_path
    run_parts(bench, {"exact": 9.0, "machine": 9.0}, math.inf)
    assert [path.name for path in tmp_path.iterdir()] == ["exact.json"]
    found = json.loads((tmp_path / "exact.json").read_text())
    assert found["ended"] and found["figures"]["rows"] == 3
    assert found["figures"]["error"] == "RuntimeError: no kernel image is available"
    assert [(check["what"], check["met"]) for check in found["checks"]] == [
        ("one pipeline", True),
        ("exact runs", False),
    ]


def test_a_part_without_the_rates_says_so(tmp_path: Path) -> None:
    found, met = run_here(tmp_path, "microbatches")
    assert "the part rates has no figures" in found["microbatches"]["error"] and not met["microbatches runs"]
    assert found["microbatches"]["prefill"]["eager"]["s"] > 0


def test_a_profile_has_the_shares_that_were_measured(tmp_path: Path) -> None:
    bench = make_bench(CPU, SIZES.to_json())
    bench.parts["rates"] = {"flops": 100.0, "bytes_per_s": 10.0}
    speeds = []
    for share in (None, 0.5):
        if share is not None:
            bench.parts["microbatches"] = {
                "prefill": {"share_of_flops": share},
                "decode": {"share_of_bandwidth": share},
            }
        run_parts(bench, {"profile": 9.0}, math.inf)
        speeds.append((bench.parts["profile"]["flops"], bench.parts["profile"]["bytes_per_s"]))
    assert speeds == [(60.0, 7.0), (50.0, 5.0)]


@pytest.mark.timeout(120)
def test_workers_pass_figures_on() -> None:
    """`profile` runs in another process than `rates`."""
    document = GpuDocument()
    for _ in bench_gpu(document, SystemClock(), 100.0, ("profile",), "cpu", SIZES.to_json()):
        pass
    assert document.complete == {"machine", "rates", "profile"} and document.met, document.to_json()
    assert document.parts["profile"]["flops"] == pytest.approx(0.6 * document.parts["rates"]["flops"])


def test_a_pipeline_that_hangs_ends_its_run_alone(monkeypatch):
    """The error contains its output so far."""
    hanging = "import sys, time; print('at rank 1', file=sys.stderr, flush=True); time.sleep(60)"
    monkeypatch.setattr(pipelines, "_COMMAND", (sys.executable, "-c", hanging))
    monkeypatch.setattr(pipelines, "_MOST_S", 2.0)
    bench = Bench(CPU, torch.float32, SIZES, SystemClock())
    run_parts(bench, {"exact": 200.0}, math.inf)
    (run,) = bench.figures["runs"]
    assert run["rows_equal"] == 0 and "still running after 2 s" in run["said"] and "at rank 1" in run["said"]
    assert not bench.checks[0]["met"] and "left_out" not in bench.figures


def test_a_pipeline_without_time_is_left_out(monkeypatch):
    """Its tokens are not known, so they are not wrong. The pipelines after it do not start."""
    monkeypatch.setattr(pipelines, "_COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(pipelines, "_pipelines", lambda bench: [(1, []), (2, [])])
    bench = Bench(CPU, torch.float32, SIZES, SystemClock())
    run_parts(bench, {"exact": 5.0}, math.inf)
    (run,) = bench.figures["runs"]
    assert "the time of the part was over after" in run["left_out"] and "rows_equal" not in run
    assert bench.figures["left_out"] == run["left_out"] and not bench.checks and "error" not in bench.figures


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


def test_contexts_are_cut_for_the_programs_that_a_processor_holds_of_a_tile():
    assert [blocks.many_programs for blocks in candidates(4, 128, 2).values()] == [1, 2, 2, 1]
    assert [blocks.many_programs for blocks in candidates(2, 256, 2).values()] == [1, 1]
