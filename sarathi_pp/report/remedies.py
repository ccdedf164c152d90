"""What can be done against lost time: the option to change, and the share of that time which it saves.

Every remedy follows from a report alone, and is None where its option would change nothing in that run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sarathi_pp.core.policy import chooses_chunk_size, uses_chunk_size

# Chunk sizes are advised in multiples of this, the smallest tile of matrix units.
TILE = 16
_FULL_KV = 0.95
# Chunks are as long as they may be where they hold this share of that on average: each prompt's last one is shorter.
_FILLED = 0.7

Report = Mapping[str, Any]


class Remedy(NamedTuple):
    """An option against lost time. share: of that time, what it saves at most; 0 where it saves something else."""

    option: str
    how: str
    share: float = 1.0


class BetterSplit(NamedTuple):
    """layers: of each stage. slowest_s: compute of the slowest stage with them. gain_s: of the run, at most."""

    layers: list[int]
    slowest_s: float
    gain_s: float

    @property
    def option(self) -> str:
        return f"--layer-split {','.join(map(str, self.layers))}"


def better_split(report: Report) -> BetterSplit | None:
    """Layers that make the slowest stage faster, if there are any."""
    split, computed_s = report["layer_split"], [stage["compute_s"] for stage in report["per_stage"]]
    if len(split) < 2 or min(split) < 1 or min(computed_s) <= 0:
        return None
    found = even_split(split, computed_s)
    if found is None:
        return None
    layers, slowest_s = found
    gain_s = max(computed_s) - slowest_s
    causes = report.get("causes")
    if causes:
        gain_s = min(gain_s, causes["stage_imbalance_s"] / report["stages"])
    return BetterSplit(layers, slowest_s, gain_s) if gain_s > 0 else None


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


def smaller_chunks(report: Report) -> Remedy | None:
    if not is_chunked(report):
        return Remedy("--policy sarathi", "cuts prompts into chunks of equal size")
    if not fills_chunks(report):
        return None
    half = in_tiles(report["chunk_size"] / 2)
    return Remedy(f"--chunk-size {half}", "halves what a chunk costs", 0.5) if half < report["chunk_size"] else None


def larger_chunks(report: Report) -> Remedy | None:
    """Where prompts fill the chunks there are: half of those are saved, each about a microbatch."""
    chunks, size = num_chunks(report), report["chunk_size"]
    if not fills_chunks(report) or not chunks or report["prompt_tokens"] < _FILLED * size * chunks:
        return None
    share = min(1.0, chunks / report["microbatches"]) / 2
    return Remedy(f"--chunk-size {2 * size}", "halves the microbatches of prompts", share)


def equal_contexts(report: Report) -> Remedy | None:
    if policy_name(report) != "balanced":
        return Remedy("--policy balanced", "shares decodes out by the length of their contexts")
    limit = report.get("max_num_seqs")
    if limit is None or limit >= report["requests"] or most_running(report) < limit:
        return None
    # The spread of a sum of n contexts, over its mean, falls as 1 / sqrt(n).
    wanted = min(report["requests"], 2 * limit)
    return Remedy(f"--max-num-seqs {wanted}", "evens contexts out by number", 1 - math.sqrt(limit / wanted))


def even_layers(report: Report) -> Remedy | None:
    better = better_split(report)
    if better is None:
        return None
    share = better.gain_s * report["stages"] / report["causes"]["stage_imbalance_s"]
    return Remedy(better.option, "evens out what the layers of each stage cost", share)


def hide_transfers(report: Report) -> Remedy | None:
    """One more in flight where the coordinator waited for that limit, more sequences where it waited for those."""
    stages, inflight, limited_s = report["stages"], report["inflight"], report.get("issue_limited_s")
    if limited_s is None or limited_s <= sum(report["issue_waits_s"].values()) / 2:
        return _more_seats(report, "keeps some to compute while the tokens of others travel") or larger_chunks(report)
    if inflight >= 2 * stages:
        return larger_chunks(report)
    return Remedy(f"--inflight {inflight + 1}", "gives stages a microbatch to compute while another one travels")


def longer_run(report: Report) -> Remedy | None:
    """Stages for which there is never a microbatch look like a pipeline that is always filling."""
    stages, inflight = report["stages"], report["inflight"]
    if stages == 1:
        return None
    if inflight < stages:
        return Remedy(f"--inflight {stages}", f"gives all {stages} stages a microbatch, where {inflight} had one")
    return Remedy("--input", "with twice the requests fills and drains the pipeline once for both halves", 0.5)


def keep_busy(report: Report) -> Remedy:
    """More to issue: pages, places for sequences, or requests, whichever ran out."""
    requests, stages = report["requests"], report["stages"]
    if pages_ran_out(report):
        return Remedy("--kv-cache-memory", "of twice the size holds more sequences at once: pages ran out")
    more = _more_seats(report, "lets more of the waiting requests run")
    if more is not None:
        return more
    if 1 < requests < stages:
        return Remedy(f"--stages {requests}", f"is about as fast, on {stages - requests} fewer (an estimate)", 0)
    return Remedy("--input", "with twice the requests gives them something to do while these wait", 0.5)


def _more_seats(report: Report, how: str) -> Remedy | None:
    """Where there were requests for them: all seats were taken, and fewer than there were requests."""
    limit, requests = report.get("max_num_seqs"), report["requests"]
    if not limit or requests <= limit or most_running(report) < limit:
        return None
    return Remedy(f"--max-num-seqs {min(requests, 2 * limit)}", how)


def most_running(report: Report) -> int:
    """Sequences at once; a report that does not tell is taken to have had as many as it might."""
    might = min(report["requests"], report.get("max_num_seqs") or report["requests"])
    return int(min(might, report.get("peak_running", might)))


def pages_ran_out(report: Report) -> bool:
    return bool(report["preemptions"] or report["kv"]["peak_used"] >= _FULL_KV * report["kv"]["pages"])


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
