"""What to change next: at most three pieces of advice, drawn from the figures of a report.

Every gain is an estimate of how much sooner the same work would be done. It rests on one identity: compute and
bubble of all stages add up to P x wall_s, so a second of bubble, summed over stages, costs the run 1/P second.

    rule             is about
    bubble           a bubble above 15 %: what can be done against each of its causes
    starvation       time in which nothing could be issued
    few_decodes      fewer decodes than stages to spread them over
    slow_stage       a layer split that makes the slowest stage faster
    few_sequences    fewer than four sequences at once: too few to share a pass
    short_prompts    prompts that fit into one chunk, so that nothing is evened out
    one_request      one request at a time, whose first token waits for the passes of its chunks
    kv_fragmentation more than 30 % of the room in the KV pages held empty
    flat_chunks      chunk throughput that stays while requests in flight grow (needs two runs)

The thresholds of 15 %, 30 %, four sequences and 100 ms are rules of thumb from practice with chunked prefill;
the gain decides whether a rule speaks. A figure that a report lacks silences the rules that need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from sarathi_pp.report.remedies import (
    TILE,
    Remedy,
    Report,
    better_split,
    equal_contexts,
    even_layers,
    fills_chunks,
    hide_transfers,
    in_tiles,
    is_chunked,
    keep_busy,
    larger_chunks,
    longer_run,
    most_running,
    num_chunks,
    pages_ran_out,
    smaller_chunks,
)

_MOST = 3
# Of the run; below this an estimate says nothing.
_WORTHWHILE = 0.01
_HIGH_BUBBLE = 0.15
_STARVED = 0.05
_FRAGMENTED = 0.30
_FEW_SEQUENCES = 4
_QUICK_S = 0.1
_FLASH_PAGE = 256
# Runs are compared where requests in flight grow by half; below this growth chunk throughput is flat.
_MORE_INFLIGHT = 1.5
_FLAT = 1.05


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to change. gain_s: estimated seconds saved of the run; None where it saves no time or unknown."""

    rule: str
    text: str
    option: str
    gain_s: float | None


def advise(report: Report) -> list[Advice]:
    """The most worthwhile advice for one run first, one piece an option; empty where nothing came back."""
    if not report["completed"] or not report["wall_s"]:
        return []
    found = [*(rule(report) for rule in _RULES), *_bubble(report)]
    return _best(advice for advice in found if advice is not None)


def advise_comparison(reports: Sequence[Report]) -> list[Advice]:
    """What several runs show together; runs that differ in policy, stages or chunk size are not compared."""

    def setting(report: Report) -> tuple[str, int, int]:
        return report["policy"], report["stages"], report["chunk_size"]

    usable = [report for report in reports if report["completed"] and report["wall_s"]]
    found = []
    for _, runs in groupby(sorted(usable, key=setting), key=setting):
        for fewer, more in pairwise(sorted(runs, key=_requests_inflight)):
            advice = _flat_chunks(fewer, more)
            if advice is not None:
                found.append(advice)
    return _best(found)


def _best(found: Iterable[Advice]) -> list[Advice]:
    """By gain, unknown ones last; of two that change the same option to anything, the better."""
    by_option: dict[str, Advice] = {}
    for advice in sorted(found, key=lambda advice: -math.inf if advice.gain_s is None else advice.gain_s, reverse=True):
        by_option.setdefault(advice.option.split()[0], advice)
    return list(by_option.values())[:_MOST]


def _bubble(report: Report) -> Iterator[Advice | None]:
    """What can be done against each cause, if there is bubble enough."""
    ratio, causes = report["bubble_ratio"], report.get("causes")
    if ratio is None or ratio <= _HIGH_BUBBLE or not causes:
        return
    total_s = report["stages"] * report["wall_s"] * ratio
    for name, (called, make) in _CAUSES.items():
        remedy = make(report)
        if remedy is not None:
            seen = f"The bubble is {ratio:.1%}; {causes[name]:.1f} of its {total_s:.1f} stage seconds are {called}."
            yield _advice(report, "bubble", seen, remedy, causes[name] / report["stages"])


def _starvation(report: Report) -> Advice | None:
    causes, stages = report.get("causes"), report["stages"]
    if not causes or causes["starvation_s"] <= _STARVED * stages * report["wall_s"]:
        return None
    idle_s = causes["starvation_s"] / stages
    seen = f"For want of anything to issue each stage stood idle for {idle_s:.1f} s on average."
    return _advice(report, "starvation", seen, keep_busy(report), idle_s)


def _few_decodes(report: Report) -> Advice | None:
    """By Little's law: the seconds that requests spend decoding, over the run's, are the decodes at a time."""
    stages, decoding_s = report["stages"], _decoding_s(report)
    if not decoding_s or stages == 1:
        return None
    decodes = decoding_s / report["wall_s"]
    if decodes >= stages:
        return None
    idle_s = report["per_stage"][0]["no_work_s"]
    causes = report.get("causes")
    if causes:
        idle_s = min(idle_s, causes["starvation_s"] / stages)
    seen = f"On average {decodes:.1f} sequences were decoding, and {stages} stages need at least {stages}."
    return _advice(report, "few_decodes", seen, keep_busy(report), idle_s)


def _slow_stage(report: Report) -> Advice | None:
    better = better_split(report)
    if better is None:
        return None
    computed_s = [stage["compute_s"] for stage in report["per_stage"]]
    slow, mean_s = computed_s.index(max(computed_s)), sum(computed_s) / len(computed_s)
    seen = f"Stage {slow} computed for {computed_s[slow]:.1f} s, the mean stage for {mean_s:.1f} s."
    remedy = Remedy(better.option, f"brings the slowest stage to {better.slowest_s:.1f} s")
    return _advice(report, "slow_stage", seen, remedy, better.gain_s)


def _few_sequences(report: Report) -> Advice | None:
    """Decodes read every weight once a pass, however many ride in it: fewer at once means more passes."""
    limit, requests, most = report.get("max_num_seqs"), report["requests"], most_running(report)
    decoding_s = _decoding_s(report)
    if not decoding_s:
        return None
    if most >= _FEW_SEQUENCES:
        return _few_in_pages(report, decoding_s)
    seen = f"At most {_counted(most, 'sequence')} ran at once: too few to share the passes that decodes need."
    if requests > most and most != limit:
        return None  # they came one after the other
    if requests > most:
        wanted = min(requests, _FEW_SEQUENCES * report["stages"])
        passes_s = min(report["wall_s"], decoding_s / most)
        remedy = Remedy(f"--max-num-seqs {wanted}", "lets more of them share", 1 - most / wanted)
        return _advice(report, "few_sequences", seen, remedy, passes_s)
    # Several stages are filled by the chunks of one prompt, so only a single stage has nothing to lose.
    further, pass_s = num_chunks(report) - report["completed"], report["itl_s"]["p50"]
    if report["stages"] > 1 or not is_chunked(report) or further <= 0 or pass_s is None:
        return None
    remedy = Remedy("--policy orca", "runs prompts whole, in fewer passes")
    return _advice(report, "few_sequences", seen, remedy, further * pass_s)


def _few_in_pages(report: Report, decoding_s: float) -> Advice | None:
    """The same where there are seats and requests enough, and KV pages for only a few of them.

    Fewer decodes than stages are the other rule's.
    """
    wall_s = report["wall_s"]
    decodes = decoding_s / wall_s
    if not report["stages"] <= decodes < _FEW_SEQUENCES or not pages_ran_out(report):
        return None
    seen = f"KV pages ran out with {decodes:.1f} sequences decoding at a time: too few to share a pass."
    remedy = Remedy("--kv-cache-memory", "of twice the size lets twice as many share", 0.5)
    return _advice(report, "few_sequences", seen, remedy, min(wall_s, decoding_s))


def _short_prompts(report: Report) -> Advice | None:
    causes, size = report.get("causes"), report["chunk_size"]
    mean = report["prompt_tokens"] / report["completed"]
    wanted = in_tiles(mean / 2)
    if not causes or not fills_chunks(report) or mean > size or wanted >= size:
        return None
    uneven_s = causes["prefill_variance_s"] + causes["prefill_decode_s"]
    seen = f"Prompts of {mean:.0f} tokens on average fit into one chunk of {size}, so chunking evens nothing out."
    remedy = Remedy(f"--chunk-size {wanted}", "cuts them in two", 0.5)
    return _advice(report, "short_prompts", seen, remedy, uneven_s / report["stages"])


def _one_request(report: Report) -> Advice | None:
    """With k chunks and P stages a first token takes k + P - 1 steps of one chunk; whole, P steps of k chunks.

    Whole it saves k - 1 passes over the weights, each of which costs no more than that of a decode.
    """
    first_s, pass_s = _first_token_s(report), report["itl_s"]["p50"]
    if 1 not in (report["requests"], report.get("max_num_seqs")) or not is_chunked(report) or not pass_s:
        return None
    chunks, stages = num_chunks(report) / report["completed"], report["stages"]
    if first_s is None or first_s <= _QUICK_S or chunks <= 1:
        return None
    whole_s = first_s * chunks * stages / (chunks + stages - 1) - (chunks - 1) * pass_s
    gain_s = first_s - whole_s
    seen = f"One request ran at a time, and its first token took {first_s:.2f} s in {chunks:.1f} chunks."
    how = f"runs prompts whole, for whoever wishes less than {_QUICK_S * 1000:.0f} ms: {gain_s:.2f} s sooner each"
    return _advice(report, "one_request", seen, Remedy("--policy orca", how), gain_s * report["completed"])


def _kv_fragmentation(report: Report) -> Advice | None:
    wasted, page_size = report["kv"]["fragmentation"], report["kv"].get("page_size")
    if wasted is None or wasted <= _FRAGMENTED or page_size == 1:
        return None
    if report.get("attention") == "flash" and page_size == _FLASH_PAGE:
        option, freed = f"--attention sdpa --page-size {TILE}", wasted * (1 - TILE / _FLASH_PAGE)
    else:
        option, freed = f"--page-size {page_size // 2}" if page_size else "--page-size", wasted / 2
    text = (
        f"{wasted:.0%} of the room in the KV pages held was empty. Smaller pages ({option}) are estimated to free "
        f"{freed:.0%} of what is held, room for {freed / (1 - freed):.0%} more sequences."
    )
    return Advice("kv_fragmentation", text, option, None)


def _flat_chunks(fewer: Report, more: Report) -> Advice | None:
    before, after = fewer["chunk_throughput"], more["chunk_throughput"]
    inflight = _requests_inflight(fewer), _requests_inflight(more)
    if not before or not fills_chunks(more) or inflight[1] < _MORE_INFLIGHT * inflight[0] or after > _FLAT * before:
        return None
    size = more["chunk_size"]
    tokens_per_s = more["prompt_tokens"] / more["wall_s"]
    text = (
        f"Requests in flight grew from {inflight[0]:.0f} to {inflight[1]:.0f} and chunk throughput only went from "
        f"{before:.1f} to {after:.1f} a second. Larger chunks (--chunk-size {2 * size}) are estimated to bring at "
        f"most {2 * tokens_per_s:,.0f} prompt tokens/s instead of {tokens_per_s:,.0f}."
    )
    return Advice("flat_chunks", text, f"--chunk-size {2 * size}", None)


def _advice(report: Report, rule: str, seen: str, remedy: Remedy, lost_s: float) -> Advice | None:
    """The remedy against lost_s seconds of the run; None where that is too little to speak of.

    No work is done before it is there: what is saved is saved after the run has last been up with its arrivals.
    """
    wall_s = report["wall_s"]
    lost_s = min(lost_s, wall_s - report.get("paced_until_s", 0.0))
    gain_s = lost_s * remedy.share
    if (gain_s if remedy.share else lost_s) < _WORTHWHILE * wall_s:
        return None
    if not remedy.share:
        return Advice(rule, f"{seen} {remedy.option} {remedy.how}.", remedy.option, None)
    digits = 1 if wall_s >= 10 else 2
    gain = f"estimated to save at most {gain_s:.{digits}f} of {wall_s:.{digits}f} s ({gain_s / wall_s:.0%})"
    return Advice(rule, f"{seen} {remedy.option} {remedy.how}, {gain}.", remedy.option, gain_s)


# What each cause is called, and what can be done about it.
_CAUSES: dict[str, tuple[str, Callable[[Report], Remedy | None]]] = {
    "prefill_variance_s": ("prefills of unequal length", smaller_chunks),
    "prefill_decode_s": ("prefills beside shorter decodes", smaller_chunks),
    "decode_context_s": ("decodes with unequal contexts", equal_contexts),
    "stage_imbalance_s": ("stages of unequal speed", even_layers),
    "communication_s": ("transfers between stages", hide_transfers),
    "host_s": ("the host's work between microbatches", larger_chunks),
    "starvation_s": ("time with nothing to issue", keep_busy),
    "ramp_s": ("filling and draining the pipeline", longer_run),
}

# Of two with the same gain the earlier one is given, and any of them before those of the bubble.
_RULES: tuple[Callable[[Report], Advice | None], ...] = (
    _slow_stage,
    _one_request,
    _few_decodes,
    _few_sequences,
    _short_prompts,
    _starvation,
    _kv_fragmentation,
)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _decoding_s(report: Report) -> float | None:
    """Seconds from first to last token, summed over requests; None where no token came."""
    first_s, last_s = report["ttft_s"]["mean"], report["e2el_s"]["mean"]
    return None if first_s is None or last_s is None else float(report["completed"] * (last_s - first_s))


def _first_token_s(report: Report) -> float | None:
    """Where one request runs at a time: the seconds a prompt takes, without the wait for those before it."""
    decoding_s = _decoding_s(report)
    if decoding_s is None:
        return None
    return float(min(report["ttft_s"]["mean"], (report["wall_s"] - decoding_s) / report["completed"]))


def _requests_inflight(report: Report) -> float:
    """Unfinished requests at a time, by Little's law, of which max_num_seqs run."""
    unfinished = report["completed"] * report["e2el_s"]["mean"] / report["wall_s"]
    return float(min(unfinished, report.get("max_num_seqs") or math.inf))
