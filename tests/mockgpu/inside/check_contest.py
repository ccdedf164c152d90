"""`bench gpu` on a device: the contest, in which transformers answers the same requests on it."""

from __future__ import annotations

import torch

from sarathi_pp.bench.gpu.document import Figures
from sarathi_pp.bench.gpu.pipelines import contest
from sarathi_pp.bench.gpu.plan import Bench, Sizes
from sarathi_pp.bench.gpu.stage import ModelShape
from sarathi_pp.trace.clock import SystemClock

SERVING = ("--chunk-size", "16", "--max-num-seqs", "2", "--enforce-eager", "--kv-cache-memory", "4MiB")


def test_both_come_to_an_end():
    clock = SystemClock()
    sizes = Sizes(middle=ModelShape(32, 64, 2, 4, 2, 256), requests=2, longest=16, serving=SERVING)
    bench = Bench(torch.device("cuda", 0), torch.bfloat16, sizes, clock, clock.now() + 250)
    figures: Figures = {}
    contest(bench, figures)
    assert figures["ours"] > 0 and figures["generate_batch"] > 0
    assert [check["seen"] for check in bench.checks] == [figures["factor"]]
