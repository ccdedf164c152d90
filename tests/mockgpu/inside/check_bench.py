"""`bench gpu` on a device: its parts that use one process. Other tests cover whole pipelines."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sarathi_pp.bench.gpu import suite
from sarathi_pp.bench.gpu.plan import Bench, Figures, Sizes
from sarathi_pp.bench.gpu.stage import ModelShape
from sarathi_pp.bench.gpu.suite import bench_gpu
from sarathi_pp.trace.clock import SystemClock

TINY = ModelShape(16, 32, 1, 2, 1, 64)
SIZES = Sizes(
    large=TINY,
    small=TINY,
    matrix=64,
    array_bytes=1 << 16,
    prefill=8,
    decodes=2,
    context=12,
    chunk=6,
    piggybacked=(2,),
    attention={"chunk": ((20, 40),), "decodes": ((100, 1), (30, 1)), "mixed": ((20, 9), (30, 1))},
    layers=2,
    repeats=1,
    warm_s=0.0,
)


def exact(bench: Bench, figures: Figures) -> None: ...


def contest(bench: Bench, figures: Figures) -> None: ...


@pytest.mark.filterwarnings("ignore:.*CUDA is not available.*:UserWarning")
def test_every_part_runs_on_a_device(monkeypatch):
    monkeypatch.setattr(suite, "exact", exact)
    monkeypatch.setattr(suite, "contest", contest)
    # Only the host's operations are seen here, and the interpreter of kernels has hundreds of thousands.
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: nullcontext(SimpleNamespace(key_averages=list)))
    *_, last = bench_gpu(torch.device("cuda", 0), SystemClock(), 250.0, SIZES)
    document = last.document
    errors = {name: part["traceback"] for name, part in document.items() if isinstance(part, dict) and "error" in part}
    assert not errors, next(iter(errors.values()))
    assert document["machine"]["device"] == "Mock GPU"
    assert document["nccl"]["sum"] == 1.0
    for what in ("prefill", "decode"):
        assert {"eager", "graph"} <= set(document["microbatches"][what])
    chunk, decodes, mixed = document["attention"]["of_a_layer"].values()
    assert set(chunk) == {"triton", "varlen", "sdpa", "dense"} and set(mixed) == {"triton", "varlen", "sdpa"}
    assert decodes["share_of_bandwidth"] > 0
    met = {check["what"]: check["met"] for check in document["checks"]}
    assert {f"{name}: nearer to float32 than transformers by" for name in ("triton", "varlen", "sdpa")} <= {
        what for what, found in met.items() if found
    }
    assert any(what.startswith("chunk: Triton beside") for what in met)
