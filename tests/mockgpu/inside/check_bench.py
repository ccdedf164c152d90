"""`bench gpu` on a device: its parts that use one process. Other tests cover whole pipelines."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sarathi_pp.bench.gpu.parts import NAMES
from sarathi_pp.bench.gpu.plan import Sizes
from sarathi_pp.bench.gpu.stage import ModelShape
from sarathi_pp.bench.gpu.worker import make_bench, run_parts

TINY = ModelShape(16, 32, 1, 2, 1, 64)
SIZES = Sizes(
    large=TINY,
    wide=ModelShape(512, 32, 1, 2, 1, 64),
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
# The others run whole pipelines.
PARTS = [name for name in NAMES if name not in ("exact", "contest")]


@pytest.mark.filterwarnings("ignore:.*CUDA is not available.*:UserWarning")
def test_every_part_runs_on_a_device(monkeypatch, tmp_path):
    # Only the host's operations are seen here, and the interpreter of kernels has hundreds of thousands.
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: nullcontext(SimpleNamespace(key_averages=list)))
    bench = make_bench(torch.device("cuda", 0), SIZES.to_json())
    bench.folder = tmp_path
    run_parts(bench, dict.fromkeys(PARTS, 250.0), math.inf)
    document = bench.parts
    errors = {name: part["traceback"] for name, part in document.items() if "error" in part}
    assert not errors, next(iter(errors.values()))
    assert [*document] == PARTS and document["machine"]["device"] == "Mock GPU"
    assert document["nccl"]["sum"] == 1.0
    for what in ("prefill", "decode"):
        assert {"eager", "graph"} <= set(document["microbatches"][what])
    chunk, decodes, mixed = document["attention"]["of_a_layer"].values()
    for found, others in ((chunk, {"dense"}), (decodes, {"share_of_bandwidth"}), (mixed, set())):
        backends = {name: taken for name, taken in found.items() if name not in ("share_of_bandwidth", "rivals")}
        assert {*found} - {"rivals"} == {"triton", "varlen", "sdpa"} | others
        assert all(taken["s"] > 0 for taken in backends.values()), backends
    assert decodes["share_of_bandwidth"] > 0
    tiles = {head: document["tiles"][f"heads of {head}"] for head in (8, 256)}
    assert all({*of_head} == {"chunk", "mixed"} for of_head in tiles.values()), "decodes alone have no other tile"
    names = [
        "128 rows x 64 keys",
        "64 rows x 64 keys",
        "128 rows x 32 keys, 128 registers",
        "128 rows x 64 keys, ahead",
    ]
    assert list(tiles[8]["chunk"]) == names
    assert list(tiles[256]["mixed"]) == ["64 rows x 32 keys", "128 rows x 32 keys"]
    assert all(taken["s"] > 0 for of_head in tiles.values() for found in of_head.values() for taken in found.values())
    checks = [check for name in PARTS for check in json.loads((tmp_path / f"{name}.json").read_text())["checks"]]
    met = {check["what"]: check["met"] for check in checks}
    assert {f"{name}: nearer to float32 than transformers by" for name in ("triton", "varlen", "sdpa")} <= {
        what for what, found in met.items() if found
    }
    assert any(what.startswith("chunk: Triton next to") for what in met)
    others = [found for what, found in met.items() if what.endswith("is near to the tile in use")]
    assert others == [True] * 8
