"""Remedies against lost time: an option that the user can change, and the reason why that may help.

Each function yields remedies that suit a report. It does not compute the time that a remedy saves. The simulator
(`sim/rerun.py`) does that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sarathi_pp.core.partition import partition_by_time
from sarathi_pp.core.policy import Policy, parse_policy, parse_recorded
from sarathi_pp.sim.rerun import Change, most_seats

# Advised chunk sizes are multiples of this number of tokens, the smallest tile of matrix units.
TILE = 16
# A KV cache of which this share was in use counts as full.
_FULL_KV = 0.95

Report = Mapping[str, Any]


class Remedy(NamedTuple):
    """An option that the user can change, and its effect.

    Attributes:
        option: the option with its value, such as "--chunk-size 256".
        how: the effect, as the end of a sentence: "makes microbatches smaller".
        change: the same change for the simulator.
        action: the beginning of that sentence, which asks the user for the change. None: "Use OPTION: it".
    """

    option: str
    how: str
    change: Change
    action: str | None = None

    @property
    def request(self) -> str:
        """Return the sentence that asks for the change, without its full stop."""
        return f"{self.action or f'Use {self.option}: it'} {self.how}"


def even_layers(report: Report) -> Iterator[Remedy]:
    """Yield the layer splits whose slowest stage computes least.

    Each layer of a stage is assumed to take the same time. The last stage may take longer per layer than the others.
    The cause may be the LM head, which no split removes, or a slower machine. Each of the two gives a split.
    """
    split: list[int] = report["layer_split"]
    computed_s: list[float] = [stage["compute_s"] for stage in report["per_stage"]]
    last = len(split) - 1
    if last < 1 or min(split) < 1 or min(computed_s) <= 0:
        return
    beyond_s = max(0.0, computed_s[last] - split[last] * sum(computed_s[:last]) / sum(split[:last]))
    found = {_even_split(split, computed_s, head_s) for head_s in (beyond_s, 0.0)}
    for counts in sorted(found - {tuple(split)}):
        option = f"--layer-split {','.join(map(str, counts))}"
        yield Remedy(option, "gives the stages more equal times", Change(layers=counts))


def _even_split(split: Sequence[int], computed_s: Sequence[float], head_s: float) -> tuple[int, ...]:
    """Return the fastest layer split, or the same split if no other one is faster.

    Args:
        split: number of layers per stage.
        computed_s: seconds that each stage computed.
        head_s: seconds of the last stage that do not depend on its layers.
    """
    last = len(split) - 1
    layer_s = [seconds / layers for seconds, layers in zip(computed_s, split, strict=True)]
    layer_s[last] -= head_s / split[last]

    def seconds(stage: int, first: int, end: int) -> float:
        return (end - first) * layer_s[stage] + head_s * (stage == last)

    layers = partition_by_time(sum(split), len(split), seconds)
    faster = max(seconds(stage, *span) for stage, span in enumerate(layers)) < max(computed_s)
    return tuple(end - first for first, end in layers) if faster else tuple(split)


def even_prefills(report: Report) -> Iterator[Remedy]:
    """Yield remedies for microbatches whose prefill takes unequal time."""
    if not is_chunked(report):
        yield _other_policy(report, "sarathi", "cuts prompts into chunks of equal size")
    yield from smaller_chunks(report, report["chunk_size"] / 2)
    yield from balance(report)


def even_decodes(report: Report) -> Iterator[Remedy]:
    """Yield remedies for microbatches whose decodes take unequal time."""
    yield from balance(report)
    yield from more_seats(report)


def hide_transfers(report: Report) -> Iterator[Remedy]:
    """Yield remedies for stages that wait for activations on their way."""
    inflight = report["inflight"]
    if inflight < 2 * report["stages"]:
        how = "gives stages a microbatch to compute while another one travels"
        yield Remedy(f"--inflight {inflight + 1}", how, Change(inflight=inflight + 1))
    yield from more_seats(report)
    yield from larger_chunks(report)


def fill_longer(report: Report) -> Iterator[Remedy]:
    """Yield remedies for a pipeline that fills and drains for a large part of the run.

    With fewer microbatches in flight than stages, some stage is always empty. In the figures, that looks like a
    pipeline that is still filling.
    """
    stages, inflight = report["stages"], report["inflight"]
    if inflight < stages:
        how = f"gives all {stages} stages a microbatch, instead of {inflight}"
        yield Remedy(f"--inflight {stages}", how, Change(inflight=stages))
    if stages > 1:
        yield from more_input()


def keep_busy(report: Report) -> Iterator[Remedy]:
    """Yield remedies for a coordinator that finds nothing to issue: more KV pages, seats and requests."""
    yield from more_pages(report)
    yield from more_seats(report)
    yield from more_input()


def balance(report: Report) -> Iterator[Remedy]:
    """Yield the policy `balanced`, if the run had another one."""
    if policy_name(report) != "balanced":
        yield _other_policy(report, "balanced", "makes microbatches of equal time")


def run_whole(report: Report) -> Iterator[Remedy]:
    """Yield the policy `orca`, which does not cut prompts, if the run cut them."""
    if is_chunked(report):
        yield _other_policy(report, "orca", "runs prompts whole, in fewer passes")


def _other_policy(report: Report, name: str, how: str) -> Remedy:
    """Return the change to another policy, with that policy's default chunk size.

    The run's chunk size was chosen for the policy of the run.
    """
    other, own = parse_policy(name), parse_recorded(policy_name(report))
    size = other.kind.default_chunk_size
    if not other.kind.uses_chunk_size:
        return Remedy(f"--policy {name}", how, Change(policy=other))
    if not other.kind.chooses_chunk_size:
        return Remedy(f"--policy {name} --chunk-size {size}", how, Change(policy=other, chunk_size=size))
    if report["chunk_size"] != (own.kind if own is not None else Policy).default_chunk_size:
        how += " (leave out --chunk-size)"
    return Remedy(f"--policy {name}", how, Change(policy=other))


def smaller_chunks(report: Report, size: float) -> Iterator[Remedy]:
    """Yield a chunk size of `size` tokens, rounded up to whole tiles, if it is smaller than that of the run."""
    wanted = in_tiles(size)
    if fills_chunks(report) and wanted < report["chunk_size"]:
        yield Remedy(f"--chunk-size {wanted}", "makes microbatches smaller", Change(chunk_size=wanted))


def larger_chunks(report: Report) -> Iterator[Remedy]:
    """Yield twice the chunk size."""
    if fills_chunks(report):
        wanted = 2 * report["chunk_size"]
        yield Remedy(f"--chunk-size {wanted}", "needs fewer microbatches", Change(chunk_size=wanted))


def more_seats(report: Report) -> Iterator[Remedy]:
    """Yield more seats (requests that run at once), if the run had more requests than seats, and memory for them."""
    limit, answered = report.get("max_num_seqs"), report["completed"]
    if not limit:
        return
    wanted = int(min(answered, most_seats(limit, report["stages"]), limit + _room_for_states(report)))
    if wanted > limit:
        yield Remedy(
            f"--max-num-seqs {wanted}",
            "lets more requests run at once, so that more of them share a pass",
            Change(max_num_seqs=wanted),
        )


def _room_for_states(report: Report) -> float:
    """Return the number of further sequences whose states fit, next to the KV pages that the run used.

    It is infinite if no layer keeps a state, and 0 if the memory of the states is not known.
    """
    if not report.get("state_bytes_per_sequence"):
        return math.inf
    kv, each = report["kv"], report.get("state_pages_per_sequence")
    unused = max(report.get("max_pages") or 0, kv["pages"]) - kv["peak_used"]
    return unused // each if each else 0


def more_pages(report: Report) -> Iterator[Remedy]:
    """Yield twice the number of KV pages, if they ran out. Only CPUs get this remedy.

    A GPU gives all its free memory to KV pages already. The number of pages of emulated stages is that of their
    profile.
    """
    held = report.get("kv_cache_bytes")
    if pages_ran_out(report) and held and report["device"] == "cpu":
        option = f"--kv-cache-memory {math.ceil(2 * held / 2**20)}MiB"
        how = "gives each stage twice the KV pages, so more sequences run at once"
        yield Remedy(option, how, Change(num_pages=2 * report["kv"]["pages"]))


def more_input() -> Iterator[Remedy]:
    """Yield more requests in the next run. A finished batch cannot grow."""
    action = "Put more requests into one run, if you have more: twice the requests in --input"
    yield Remedy("--input", "keep the stages busy for longer", Change(times=2), action)


def fewer_stages(report: Report) -> Remedy | None:
    """Return the remedy of one stage per request, if there are fewer requests than stages; otherwise None."""
    requests, stages, layers = report["completed"], report["stages"], sum(report["layer_split"])
    if not 1 < requests < stages or layers < requests:
        return None
    share, extra = divmod(layers, requests)
    split = tuple(share + (stage < extra) for stage in range(requests))
    devices = f"with {stages - requests} fewer devices, if the remaining ones can hold the model"
    return Remedy(f"--stages {requests}", devices, Change(layers=split))


def pages_ran_out(report: Report) -> bool:
    """Return whether sequences had to wait for KV pages: nearly all pages were in use, and the seats could use more."""
    kv, seats, longest = report["kv"], report.get("max_num_seqs"), report.get("max_model_len")
    if report["preemptions"]:
        return True
    if not seats or not longest or kv["peak_used"] < _FULL_KV * kv["pages"]:
        return False
    return bool(kv["pages"] < seats * -(-longest // kv["page_size"]))


def has_bound(report: Report) -> bool:
    """Return whether the policy keeps the time between tokens below a bound that the user has set."""
    return "tbt_slo" in str(report["policy"])


def num_chunks(report: Report) -> int:
    """Return the number of prefill chunks that were computed."""
    return int(round((report["chunk_throughput"] or 0.0) * report["wall_s"]))


def policy_name(report: Report) -> str:
    """Return the name of the run's policy without its options."""
    name, _, _ = str(report["policy"]).partition(":")
    return name


def is_chunked(report: Report) -> bool:
    """Return whether the run's policy cuts prompts into chunks of --chunk-size."""
    policy = parse_recorded(policy_name(report))
    return policy is not None and policy.kind.uses_chunk_size


def fills_chunks(report: Report) -> bool:
    """Return whether chunks have the length of --chunk-size. For some policies it is only an upper limit."""
    policy = parse_recorded(policy_name(report))
    return policy is not None and policy.kind.uses_chunk_size and not policy.kind.chooses_chunk_size


def in_tiles(tokens: float) -> int:
    """Return a number of tokens rounded up to whole tiles, at least one tile."""
    return max(TILE, math.ceil(tokens / TILE) * TILE)
