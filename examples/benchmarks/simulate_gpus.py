"""Simulate Llama-3 8B, 70B and 405B on pipelines of 2 to 16 GPUs with three kinds of links.

    python examples/benchmarks/simulate_gpus.py --output docs/benchmarks/results/gpus-h100.json
    python examples/benchmarks/simulate_gpus.py --gpu gpu.json --output docs/benchmarks/results/gpus-measured.json

The document has bubble and throughput at the chunk size with most tokens per second, or says that the weights do not
fit. --gpu takes the measured rates of a document of `sarathi-pp bench gpu`. Without it the rates are from the data
sheet of an H100 SXM: 60 % of 989 TFLOP/s in bfloat16, 80 % of 3.35 TB/s, and 80 GB. Links have 80 % of their data
sheets: NVLink 4 with 450 GB/s each way, PCIe 5 x16 with 63 GB/s, 100 Gbit/s Ethernet with 12.5 GB/s. Each stage has one
GPU, and layers are divided evenly by time. Weights and KV take nine tenths of the memory.
"""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import click
from record import Record

from sarathi_pp.core.cost.estimate import DeviceSpeed, estimate_cost
from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.partition import partition_by_time
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.layer_shape import LayerShape
from sarathi_pp.sim.experiment import Experiment, report_of
from sarathi_pp.sim.workload import parse_workload

STAGES = (2, 4, 8, 16)
CHUNK_SIZES = (256, 512, 1024, 2048, 4096)
PAGE_SIZE, WEIGHT_BYTES = 16, 2
# Running sequences per stage.
SEQS_PER_STAGE = 64


@dataclass(frozen=True)
class Shape:
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    vocab_size: int = 128256

    def cost(self, layers: tuple[tuple[int, int], ...], speed: DeviceSpeed) -> CostModel:
        sizes = {name: value for name, value in asdict(self).items() if name not in ("num_layers", "vocab_size")}
        return estimate_cost(
            layers,
            shapes=[LayerShape.plain(**sizes)] * self.num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            weight_bytes=WEIGHT_BYTES,
            speed=speed,
            page_size=PAGE_SIZE,
        )

    def weights_bytes(self, num_layers: int, ends: int) -> int:
        """Return the size of the weights of a stage.

        Args:
            ends: matrices of vocabulary size that the stage holds: embedding, LM head, or both.
        """
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return WEIGHT_BYTES * (num_layers * layer + ends * self.hidden_size * self.vocab_size)


@dataclass(frozen=True)
class Link:
    latency_s: float
    bytes_per_s: float


SHAPES = {
    "8b": Shape(32, 4096, 14336, 32, 8),
    "70b": Shape(80, 8192, 28672, 64, 8),
    "405b": Shape(126, 16384, 53248, 128, 8),
}
LINKS = {
    "nvlink": Link(5e-6, 0.8 * 450e9),
    "pcie": Link(10e-6, 0.8 * 63e9),
    "100gbe": Link(30e-6, 0.8 * 12.5e9),
}
# Layers are launched in CUDA graphs. An eager launch would take 20 us per layer.
H100 = DeviceSpeed({2: 0.6 * 989e12}, 0.8 * 3.35e12, tile=128, layer_s=2e-6)


def profile_of(name: str, stages: int, link: str, speed: DeviceSpeed, memory_bytes: float) -> Profile | None:
    """Return the profile of a pipeline, or None if the weights and one long request do not fit."""
    shape = SHAPES[name]
    each = shape.cost(tuple((layer, layer + 1) for layer in range(shape.num_layers)), speed).stages
    # The time of a chunk of 512 tokens on each layer, and of the LM head on the last one.
    taken = [stage.a0 + stage.a1 * 512 / speed.tile + stage.head_s * SEQS_PER_STAGE for stage in each]
    layers = partition_by_time(shape.num_layers, stages, lambda stage, first, end: sum(taken[first:end]))
    cost = shape.cost(layers, speed)
    pages = min(
        int(0.9 * memory_bytes - shape.weights_bytes(end - first, (first == 0) + (end == shape.num_layers)))
        // stage.page_bytes
        for (first, end), stage in zip(layers, cost.stages, strict=True)
    )
    if pages * PAGE_SIZE < 8192:
        return None
    wire = LINKS[link]
    return Profile(
        model=f"llama-3-{name}",
        device="one GPU a stage",
        dtype="bfloat16",
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        cost=cost,
        link_latency_s=wire.latency_s,
        link_bytes_per_s=wire.bytes_per_s,
        jitter_cv=0.0,
        pages=min(pages, SEQS_PER_STAGE * stages * 8192 // PAGE_SIZE),
        max_num_seqs=SEQS_PER_STAGE * stages,
    )


def row(name: str, stages: int, link: str, spec: str, speed: DeviceSpeed, memory_bytes: float) -> dict[str, Any]:
    found: dict[str, Any] = {"model": name, "stages": stages, "link": link}
    profile = profile_of(name, stages, link, speed, memory_bytes)
    if profile is None:
        return {**found, "fits": False}
    reports = {
        size: report_of(
            Experiment(profile=profile, workload=parse_workload(spec), policy=parse_policy("balanced"), chunk_size=size)
        )
        for size in CHUNK_SIZES
    }
    best = max(reports, key=lambda size: reports[size]["total_tokens_per_s"])
    report = reports[best]
    return {
        **found,
        "fits": True,
        "layers": [list(stage.layers) for stage in profile.cost.stages],
        "kv_tokens": profile.pages * PAGE_SIZE,
        "chunk_size": best,
        "tokens_per_s": report["total_tokens_per_s"],
        "bubble_ratio": report["bubble_ratio"],
        "bubble_ratio_steady": report["bubble_ratio_steady"],
        "tokens_per_s_by_chunk_size": {size: one["total_tokens_per_s"] for size, one in reports.items()},
    }


def measured(path: Path) -> tuple[str, DeviceSpeed, float]:
    document = json.loads(path.read_bytes())
    found, machine = document["profile"], document["machine"]
    speed = replace(H100, flops={2: found["flops"]}, bytes_per_s=found["bytes_per_s"], tile=found["tile"])
    return machine["device"], speed, machine["memory_bytes"]


@click.command()
@click.option("--gpu", type=click.Path(path_type=Path, exists=True), help="Document of `sarathi-pp bench gpu`.")
@click.option("--workload", "spec", default="zipf:n=512,min=1024,max=4096,theta=0.4,pd=10", show_default=True)
@click.option("--models", default=",".join(SHAPES), show_default=True)
@click.option("--stages", default=",".join(map(str, STAGES)), show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
def main(gpu: Path | None, spec: str, models: str, stages: str, output: Path | None) -> None:
    record = Record.begin()
    device, speed, memory_bytes = measured(gpu) if gpu else ("H100 SXM, data sheet", H100, 80e9)
    cases = list(product(models.split(","), map(int, stages.split(",")), LINKS))
    with ProcessPoolExecutor() as pool:
        rows = list(pool.map(row, *zip(*((*case, spec, speed, memory_bytes) for case in cases), strict=True)))
    for one in rows:
        where = f"{one['model']:>5} {one['stages']:>3} stages {one['link']:>7}"
        if not one["fits"]:
            click.echo(f"{where}  does not fit")
            continue
        click.echo(
            f"{where}  chunk {one['chunk_size']:>5}  {one['tokens_per_s']:>9,.0f} tokens/s  "
            f"bubble {one['bubble_ratio']:6.1%}, steady {one['bubble_ratio_steady'] or 0:6.1%}"
        )
    record.write(output, {"device": device, "workload": spec, "rows": rows})


if __name__ == "__main__":
    main()
