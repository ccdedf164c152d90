"""The device itself, apart from our kernels: its name, its rates, NCCL, and the figures that a simulation needs."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.nn import functional

import sarathi_pp
from sarathi_pp.bench.gpu.document import Figures
from sarathi_pp.bench.gpu.plan import DECODE_SHARE, PREFILL_SHARE, Bench
from sarathi_pp.core.cost.estimate import DeviceSpeed, estimate_cost
from sarathi_pp.distributed.transport import start_nccl_alone
from sarathi_pp.layer_shape import LayerShape
from sarathi_pp.model.attention import BACKENDS, why_not
from sarathi_pp.model.memory import give_back


def machine(bench: Bench, figures: Figures) -> None:
    """Name the device, the versions of the libraries, and the attention backends that do not run here."""
    figures |= {"device": "cpu", "sarathi_pp": sarathi_pp.__version__, "torch": torch.__version__}
    for name in ("transformers", "triton", "flash_attn"):
        try:
            figures[name] = version(name)
        except PackageNotFoundError:
            figures[name] = None
    if bench.on_gpu:
        properties = torch.cuda.get_device_properties(bench.device)
        figures |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "processors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    figures["attention"] = {name: why_not(name, bench.device, None) for name in BACKENDS}


def rates(bench: Bench, figures: Figures) -> None:
    """Measure the rates of the device: large matrix products, and reading memory."""
    size, device = bench.sizes.matrix, bench.device
    left, right = (torch.randn(size, size, device=device, dtype=bench.dtype) for _ in range(2))
    (product,) = bench.seconds(lambda: functional.linear(left, right))
    array = torch.ones(bench.sizes.array_bytes // 4, device=device)
    (read,) = bench.seconds(array.sum)
    del array
    give_back()
    figures |= {"flops": 2 * size**3 / product["s"], "bytes_per_s": bench.sizes.array_bytes / read["s"]}
    figures |= {"product": product, "read": read}


def nccl(bench: Bench, figures: Figures) -> None:
    """Check that NCCL starts with a single rank. On one GPU it cannot run between several ranks."""
    if not bench.on_gpu:
        figures["left_out"] = "NCCL runs between GPUs"
        return
    figures["sum"] = start_nccl_alone(bench.device, "lo")
    bench.check("NCCL starts, and sums up a 1", figures["sum"] == 1.0, True)


def profile(bench: Bench, figures: Figures) -> None:
    """Write the figures that `simulate` needs: the measured speed of the device, and the costs of the large model."""
    shape = bench.sizes.large
    itemsize = bench.dtype.itemsize
    # The shares that `microbatches` has measured. If it has none, take those that a GPU must reach.
    measured = bench.parts.get("microbatches", {})
    product_share = measured.get("prefill", {}).get("share_of_flops", PREFILL_SHARE)
    read_share = measured.get("decode", {}).get("share_of_bandwidth", DECODE_SHARE)
    speed = DeviceSpeed(
        {itemsize: product_share * bench.rates["flops"], 2: product_share * bench.rates["flops"]},
        read_share * bench.rates["bytes_per_s"],
        tile=128 if bench.on_gpu else 1,
        layer_s=0.0,  # included in both shares
    )
    layer = LayerShape.plain(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    cost = estimate_cost(
        [(0, shape.num_layers)],
        shapes=[layer] * shape.num_layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        weight_bytes=itemsize,
        speed=speed,
    )
    figures |= {
        "flops": speed.flops[2],
        "bytes_per_s": speed.bytes_per_s,
        "tile": speed.tile,
        "stages": [asdict(stage) for stage in cost.stages],
    }
