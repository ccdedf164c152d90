"""The time of whole microbatches on a GPU: all layers of the large model, as a stage of a pipeline runs them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sarathi_pp.bench.gpu.document import Figures
from sarathi_pp.bench.gpu.plan import DECODE_SHARE, PIGGYBACK_FACTOR, PREFILL_SHARE, Bench
from sarathi_pp.bench.gpu.stage import Extents, GpuStage
from sarathi_pp.core.plan import SamplingRow
from sarathi_pp.drawing.sampling import sample

# The smallest time that a clock can show, so that no cost is 0.
_LEAST_S = 1e-9
# Largest number of kernels that the document lists per microbatch.
_MOST_KERNELS = 16


def microbatches(bench: Bench, figures: Figures) -> None:
    """Time a prompt chunk and a microbatch of decodes.

    The chunk is compared with the measured rate of matrix products, the decodes with that of reading memory.
    """
    stage, sizes = bench.large(), bench.sizes
    prefill, decodes = _prefill(bench), _decodes(bench)
    calls = [stage.microbatch(prefill), stage.microbatch(decodes)]
    if stage.has_graphs:
        calls += [stage.captured(prefill), stage.captured(decodes)]
    taken = bench.seconds(*calls)
    figures["attention"] = stage.model.backend.name
    figures["prefill"] = {"tokens": sizes.prefill, "eager": taken[0]}
    figures["decode"] = {"decodes": sizes.decodes, "context": sizes.context, "eager": taken[1]}
    if stage.has_graphs:
        figures["prefill"]["graph"], figures["decode"]["graph"] = taken[2:]
    # The last two are graphs if the stage has them, as in a pipeline.
    prefill_s, decode_s = (one["s"] for one in taken[-2:])
    share = stage.shape.flops(prefill, 1) / prefill_s / bench.rates["flops"]
    read = stage.shape.read_bytes(decodes, bench.dtype.itemsize) / decode_s / bench.rates["bytes_per_s"]
    figures["prefill"]["share_of_flops"], figures["decode"]["share_of_bandwidth"] = share, read
    bench.check(f"{sizes.prefill} prompt tokens: share of the products' rate", share, PREFILL_SHARE)
    bench.check(f"{sizes.decodes} decodes: share of the rate of reading", read, DECODE_SHARE)


def piggyback(bench: Bench, figures: Figures) -> None:
    """Measure the cost of a decode in a microbatch with a prompt chunk, and in a microbatch of decodes alone.

    Chunk and decodes together have as many tokens as the chunk size (SARATHI, arXiv 2308.16369, section 3).
    """
    stage, sizes = bench.large(), bench.sizes
    curve: list[Figures] = []
    figures |= {"chunk": sizes.chunk, "context": sizes.context, "curve": curve}
    for count in sizes.piggybacked:
        decodes: Extents = [(sizes.context, 1)] * count
        chunk: Extents = [(0, sizes.chunk - count)]
        # As graphs: otherwise the host launches the kernels of a few decodes more slowly than the device runs them.
        calls = [_launched(stage, extents) for extents in (decodes, chunk, [*chunk, *decodes])]
        alone, beneath, both = bench.seconds(*calls)
        cost_s = (both["s"] - beneath["s"]) / count
        # If the cost is smaller than the noise of two measurements, the noise is its upper bound.
        noise_s = sum(high - low for low, high in (beneath["quartiles_s"], both["quartiles_s"])) / count
        factor = alone["s"] / count / max(cost_s, noise_s, _LEAST_S)
        point = {"decodes": count, "alone": alone, "chunk": beneath, "both": both, "cost_s": cost_s, "noise_s": noise_s}
        curve.append({**point, "factor": factor})
        bench.save()
        if count <= 8:
            bench.check(f"{count} decodes next to a chunk cost less by", factor, PIGGYBACK_FACTOR)


def sampling(bench: Bench, figures: Figures) -> None:
    """Measure the time from the logits of a microbatch of decodes until the host has all drawn tokens."""
    rows, vocabulary = bench.sizes.decodes, bench.sizes.large.vocab_size
    logits = torch.randn(rows, vocabulary, dtype=bench.dtype, device=bench.device)
    kinds = {
        "greedy": SamplingRow(position=0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0),
        "temperature": SamplingRow(position=0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0),
        "top_k 50, top_p 0.95": SamplingRow(position=0, temperature=0.8, top_k=50, top_p=0.95, min_p=0.0, seed=0),
    }
    calls = [partial(sample, logits, [row] * rows) for row in kinds.values()]
    figures |= {"rows": rows, "vocabulary": vocabulary, **dict(zip(kinds, bench.seconds(*calls), strict=True))}


def kernels(bench: Bench, figures: Figures) -> None:
    """List the kernels in which a microbatch spends most of its time.

    If a check of `microbatches` fails, they show why.
    """
    stage = bench.large()
    for what, extents in (("prefill", _prefill(bench)), ("decode", _decodes(bench))):
        figures[what] = _profiled(bench, _launched(stage, extents))


def _prefill(bench: Bench) -> Extents:
    return [(0, bench.sizes.prefill)]


def _decodes(bench: Bench) -> Extents:
    return [(bench.sizes.context, 1)] * bench.sizes.decodes


def _launched(stage: GpuStage, extents: Extents) -> Callable[[], Tensor]:
    return stage.captured(extents) if stage.has_graphs else stage.microbatch(extents)


def _profiled(bench: Bench, call: Callable[[], Tensor]) -> list[Figures]:
    """Return the kernels of one call with the most time: for each, its total time and the number of its calls."""
    activity = torch.profiler.ProfilerActivity
    call()
    activities = [activity.CPU, *([activity.CUDA] if bench.on_gpu else [])]
    with warnings.catch_warnings(action="ignore"), torch.profiler.profile(activities=activities) as profiled:
        call()
        if bench.on_gpu:
            torch.cuda.synchronize(bench.device)
    kind, unit = ("self_device_time_total", "CUDA") if bench.on_gpu else ("self_cpu_time_total", "CPU")
    events = [event for event in profiled.key_averages() if event.device_type.name == unit]
    events.sort(key=lambda event: getattr(event, kind), reverse=True)
    longest = events[:_MOST_KERNELS]
    return [{"name": event.key[:160], "calls": event.count, "s": 1e-6 * getattr(event, kind)} for event in longest]
