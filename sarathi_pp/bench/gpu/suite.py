"""The suite of `sarathi-pp bench gpu`, which checks and measures on one GPU all that sarathi_pp runs on GPUs.

    machine -> rates -> nccl -> exact -> contest
            -> microbatches -> piggyback -> sampling -> kernels -> profile -> logits -> attention

Each part is a function, which adds its figures to the document as it gets them. A check compares a measured value with
the value that a GPU must reach. An error ends only the part in which it happens. If the time is used up, the document
says that a part was left out. Whole pipelines run first, as separate processes: if a kernel fails in this process, this
process cannot use the GPU any more.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.nn import functional

import sarathi_pp
from sarathi_pp.bench.gpu.attention import attention, logits
from sarathi_pp.bench.gpu.microbatches import kernels, microbatches, piggyback, sampling
from sarathi_pp.bench.gpu.pipelines import contest, exact
from sarathi_pp.bench.gpu.plan import DECODE_SHARE, PREFILL_SHARE, Bench, Figures, Sizes
from sarathi_pp.core.cost.estimate import DeviceSpeed, estimate_cost
from sarathi_pp.distributed.transport import start_nccl_alone
from sarathi_pp.errors import ConfigError
from sarathi_pp.layer_shape import LayerShape
from sarathi_pp.model.attention import BACKENDS, why_not
from sarathi_pp.model.memory import give_back
from sarathi_pp.trace.clock import Clock

SCHEMA = "sarathi-pp/gpu/2"


@dataclass(frozen=True, slots=True)
class Step:
    """The start or the end of a part of the suite.

    Attributes:
        part: name of the part.
        ended: False if the part starts now.
        document: all figures so far.
    """

    part: str
    ended: bool
    document: Figures


def bench_gpu(device: torch.device, clock: Clock, budget_s: float, sizes: Sizes | None = None) -> Iterator[Step]:
    """Run the parts of the suite. Yield a step before and after each of them.

    Args:
        budget_s: seconds after which no further part starts.
        sizes: sizes of the measurements; None takes those for a GPU with a large model.

    Raises:
        ConfigError: torch finds no CUDA device.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("bench gpu needs a CUDA device, and torch finds no CUDA device here")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    begin_s = clock.now()
    bench = Bench(device, dtype, sizes or Sizes(), clock, begin_s + budget_s)
    document: Figures = {"schema": SCHEMA, "machine": machine(device), "checks": bench.checks}
    for part in (rates, nccl, exact, contest, microbatches, piggyback, sampling, kernels, profile, logits, attention):
        name = part.__name__
        figures: Figures = {}
        document[name] = figures
        if clock.now() > bench.end_s:
            figures["left_out"] = f"the {budget_s:g} s were over"
        else:
            yield Step(name, False, document)
            _run(part, bench, figures)
        document["took_s"] = clock.now() - begin_s
        yield Step(name, True, document)


def _run(part: Callable[[Bench, Figures], None], bench: Bench, figures: Figures) -> None:
    begin_s = bench.clock.now()
    try:
        part(bench, figures)
    except Exception as error:  # the other parts still run, and the error is a result
        figures |= {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        bench.check(f"{part.__name__} runs", False, True)
    figures["took_s"] = bench.clock.now() - begin_s


def machine(device: torch.device) -> Figures:
    found: Figures = {"device": "cpu", "sarathi_pp": sarathi_pp.__version__, "torch": torch.__version__}
    for name in ("transformers", "triton", "flash_attn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "processors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    found["attention"] = {name: why_not(name, device, None) for name in BACKENDS}
    return found


def rates(bench: Bench, figures: Figures) -> None:
    """Measure the rates of the device: large matrix products, and reading memory."""
    size, device = bench.sizes.matrix, bench.device
    left, right = (torch.randn(size, size, device=device, dtype=bench.dtype) for _ in range(2))
    (product,) = bench.seconds(lambda: functional.linear(left, right))
    array = torch.ones(bench.sizes.array_bytes // 4, device=device)
    (read,) = bench.seconds(array.sum)
    del array
    give_back()  # other processes use this device next
    bench.rates = {"flops": 2 * size**3 / product["s"], "bytes_per_s": bench.sizes.array_bytes / read["s"]}
    figures |= {**bench.rates, "product": product, "read": read}


def nccl(bench: Bench, figures: Figures) -> None:
    """Check that NCCL starts with a single rank. On one GPU it cannot run between several ranks."""
    if not bench.on_gpu:
        figures["left_out"] = "NCCL runs between GPUs"
        return
    figures["sum"] = start_nccl_alone(bench.device, "lo")
    bench.check("NCCL starts, and sums up a 1", figures["sum"] == 1.0, True)


def profile(bench: Bench, figures: Figures) -> None:
    """Write the figures that `simulate` needs: the measured speed of the device, and the costs of the large model."""
    shape, sizes = bench.sizes.large, bench.sizes
    itemsize = bench.dtype.itemsize
    # The shares that earlier parts have measured. If such a part failed, take the share that a GPU must reach.
    met = {check["what"]: check["seen"] for check in bench.checks}
    product_share = met.get(f"{sizes.prefill} prompt tokens: share of the products' rate", PREFILL_SHARE)
    read_share = met.get(f"{sizes.decodes} decodes: share of the rate of reading", DECODE_SHARE)
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
