"""What can be done against lost time: the option to change, and what that changes in the run.

A remedy says what is worth a try. What it saves is what the simulator says (`sim/rerun.py`), so none is held back here
for doing little; only where there is nothing to change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sarathi_pp.core.policy import auto_chunk_size, chooses_chunk_size, uses_chunk_size
from sarathi_pp.sim.rerun import Change

# Chunk sizes are advised in multiples of this, the smallest tile of matrix units.
TILE = 16
_FULL_KV = 0.95

Report = Mapping[str, Any]


class Remedy(NamedTuple):
    """An option, what it does, and the run with it."""

    option: str
    how: str
    change: Change


def even_split(split: Sequence[int], computed_s: Sequence[float]) -> tuple[list[int], float] | None:
    """The layers a stage that make the slowest one fastest, and its seconds; None if none beats `split`.

    split: layers of each stage, each at least 1. computed_s: their compute. A layer costs a stage what its
    own layers cost on average. The last stage may also owe its time to the head, which no split removes: it
    is charged by whichever of the two readings gives more.
    """
    per_layer_s = [seconds / layers for seconds, layers in zip(computed_s, split, strict=True)]
    last = len(split) - 1
    elsewhere_s = min(per_layer_s[:last], default=per_layer_s[last])

    def cost_s(stage: int, layers: int) -> float:
        own_s = layers * per_layer_s[stage]
        if stage < last or per_layer_s[last] <= elsewhere_s:
            return own_s
        return max(own_s, computed_s[last] - (split[last] - layers) * elsewhere_s)

    layers = [1] * len(split)
    for _ in range(sum(split) - len(split)):
        layers[min(range(len(split)), key=lambda stage: cost_s(stage, layers[stage] + 1))] += 1
    slowest_s = max(cost_s(stage, count) for stage, count in enumerate(layers))
    return (layers, slowest_s) if slowest_s < max(computed_s) else None


def even_layers(report: Report) -> Iterator[Remedy]:
    split, computed_s = report["layer_split"], [stage["compute_s"] for stage in report["per_stage"]]
    if len(split) < 2 or min(split) < 1 or min(computed_s) <= 0:
        return
    found = even_split(split, computed_s)
    if found is not None:
        layers, slowest_s = found
        how = f"brings the slowest stage from {max(computed_s):.1f} to {slowest_s:.1f} s of compute"
        yield Remedy(f"--layer-split {','.join(map(str, layers))}", how, Change(layers=tuple(layers)))


def even_prefills(report: Report) -> Iterator[Remedy]:
    if not is_chunked(report):
        yield _other_policy(report, "sarathi", "cuts prompts into chunks of equal size")
    yield from smaller_chunks(report, report["chunk_size"] / 2)
    yield from balance(report)


def even_decodes(report: Report) -> Iterator[Remedy]:
    yield from balance(report)
    yield from more_seats(report)


def hide_transfers(report: Report) -> Iterator[Remedy]:
    inflight = report["inflight"]
    if inflight < 2 * report["stages"]:
        how = "gives stages a microbatch to compute while another one travels"
        yield Remedy(f"--inflight {inflight + 1}", how, Change(inflight=inflight + 1))
    yield from more_seats(report)
    yield from larger_chunks(report)


def fill_longer(report: Report) -> Iterator[Remedy]:
    """Stages for which there is never a microbatch look like a pipeline that is always filling."""
    stages, inflight = report["stages"], report["inflight"]
    if inflight < stages:
        how = f"gives all {stages} stages a microbatch, where {inflight} had one"
        yield Remedy(f"--inflight {stages}", how, Change(inflight=stages))
    if stages > 1:
        yield from more_input()


def keep_busy(report: Report) -> Iterator[Remedy]:
    """More to issue: pages, seats, or requests, whichever ran out."""
    yield from more_pages(report)
    yield from more_seats(report)
    yield from more_input()


def balance(report: Report) -> Iterator[Remedy]:
    if policy_name(report) != "balanced":
        yield _other_policy(report, "balanced", "makes microbatches of equal time")


def run_whole(report: Report) -> Iterator[Remedy]:
    if is_chunked(report):
        yield _other_policy(report, "orca", "runs prompts whole, in fewer passes")


def _other_policy(report: Report, name: str, how: str) -> Remedy:
    """With the chunk size that it has by itself: the run's was chosen for another."""
    if uses_chunk_size(name) and report["chunk_size"] != auto_chunk_size(policy_name(report)):
        how += " (leave out --chunk-size)"
    return Remedy(f"--policy {name}", how, Change(policy=name))


def smaller_chunks(report: Report, size: float) -> Iterator[Remedy]:
    wanted = in_tiles(size)
    if fills_chunks(report) and wanted < report["chunk_size"]:
        yield Remedy(f"--chunk-size {wanted}", "makes microbatches smaller", Change(chunk_size=wanted))


def larger_chunks(report: Report) -> Iterator[Remedy]:
    if fills_chunks(report):
        wanted = 2 * report["chunk_size"]
        yield Remedy(f"--chunk-size {wanted}", "takes fewer microbatches", Change(chunk_size=wanted))


def more_seats(report: Report) -> Iterator[Remedy]:
    """Up to twice as many, and as many as four a stage."""
    limit, requests = report.get("max_num_seqs"), report["requests"]
    if limit and requests > limit:
        wanted = min(requests, max(2 * limit, 4 * report["stages"]))
        yield Remedy(f"--max-num-seqs {wanted}", "lets more of the requests run at once", Change(max_num_seqs=wanted))


def more_pages(report: Report) -> Iterator[Remedy]:
    if pages_ran_out(report) and report.get("attention") != "emulated":
        change = Change(num_pages=2 * report["kv"]["pages"])
        yield Remedy("--kv-cache-memory", "of twice the size holds more sequences at once: pages ran out", change)


def more_input() -> Iterator[Remedy]:
    yield Remedy("--input", "with twice the requests keeps the stages busy for longer", Change(times=2))


def fewer_stages(report: Report) -> Remedy | None:
    """As many stages as requests, where there are fewer of these: None elsewhere."""
    requests, stages, layers = report["requests"], report["stages"], sum(report["layer_split"])
    if not 1 < requests < stages or layers < requests:
        return None
    share, extra = divmod(layers, requests)
    split = tuple(share + (stage < extra) for stage in range(requests))
    return Remedy(f"--stages {requests}", f"on {stages - requests} fewer, where they hold it", Change(layers=split))


def pages_ran_out(report: Report) -> bool:
    return bool(report["preemptions"] or report["kv"]["peak_used"] >= _FULL_KV * report["kv"]["pages"])


def has_bound(report: Report) -> bool:
    """Whether the policy keeps the time between tokens below what somebody asked for."""
    return "tbt_slo" in str(report["policy"])


def num_chunks(report: Report) -> int:
    """Prefill chunks that were computed."""
    return int(round((report["chunk_throughput"] or 0.0) * report["wall_s"]))


def policy_name(report: Report) -> str:
    name, _, _ = str(report["policy"]).partition(":")
    return name


def is_chunked(report: Report) -> bool:
    return uses_chunk_size(policy_name(report))


def fills_chunks(report: Report) -> bool:
    """Whether --chunk-size says how long chunks are; some policies take it as the most there may be."""
    return is_chunked(report) and not chooses_chunk_size(policy_name(report))


def in_tiles(tokens: float) -> int:
    return max(TILE, math.ceil(tokens / TILE) * TILE)
