"""Advice about the next run: at most three changes, drawn from the figures of a report and tried on the simulator.

A rule sees a problem in the report and names the options that may help. Each option is tried alone: the recorded run
is simulated as it was and with the option (`sim/rerun.py`). The time that the option saves is its expected gain. A rule
gives its best option as advice, and only if the gain is large enough. So no option that does nothing in this run is
advised. The exception is a run that the simulator cannot repeat: its advice has no gain, and says that it is not tried.

    rule             is about
    bubble           a bubble above 15 %: remedies for each of its causes
    starvation       time in which nothing could be issued
    few_decodes      fewer decodes than stages to spread them over
    slow_stage       a layer split that makes the slowest stage faster
    few_sequences    fewer than four sequences at once: too few to share a pass
    shared_pages     seats all in use while requests wait, and free KV pages because requests share them
    short_prompts    prompts that fit into one chunk, so chunking does not make times more equal
    untested         the largest cause of a run that the simulator cannot repeat: its first remedy, said to be untested
    one_request      one request at a time, whose first token waits for the passes of its chunks
    kv_fragmentation more than 30 % of the room in used KV pages is empty, and pages run out
    flat_chunks      chunk throughput stays the same while requests in flight grow (two runs: the larger one is tried)

The thresholds of 15 %, 30 %, four sequences and 100 ms are rules of thumb from practice with chunked prefill.
The gain decides whether a rule gives advice. If a report lacks a figure, the rules that need it give no advice. KV
fragmentation is about room, not about the time of the run, so its gain is an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple, Protocol

from sarathi_pp.report import formats
from sarathi_pp.report.remedies import (
    Remedy,
    Report,
    balance,
    even_decodes,
    even_layers,
    even_prefills,
    fewer_stages,
    fill_longer,
    fills_chunks,
    has_bound,
    hide_transfers,
    keep_busy,
    larger_chunks,
    more_pages,
    more_seats,
    num_chunks,
    pages_ran_out,
    run_whole,
    smaller_chunks,
)
from sarathi_pp.report.vocabulary import CAUSES, cause_name, kv_cache_dtype, prefix_cache_mode
from sarathi_pp.sim.rerun import Change

_APART = "Each was tried alone: their gains do not add up."
_MOST = 3
# Share of the wall time. A smaller gain is within the error of the simulation.
_WORTHWHILE = 0.03
# With shared pages, more seats are advised if the pages that they would need are at most this share of all.
_ROOMY = 0.9
# Requests count as waiting if on average this number times the seats are unfinished.
_QUEUED = 1.5
# Smaller shares would be shown as 0%.
_NOTHING = 0.005
# Fewer stages are advised if the run takes longer by at most this share.
_ABOUT_AS_FAST = 0.15
_HIGH_BUBBLE = 0.15
_STARVED = 0.05
_FRAGMENTED = 0.30
_FEW_SEQUENCES = 4
_QUICK_S = 0.1
# Runs are compared if requests in flight grow by at least half. Chunk throughput is flat if it grows by 5 % or less.
_MORE_INFLIGHT = 1.5
_FLAT = 1.05
# Two runs are compared only if these keys are equal in both.
_SETTING = ("model", "dtype", "device", "attention", "policy", "stages", "layer_split", "chunk_size", "inflight")


class Trial(Protocol):
    """A simulated run to which changes are applied, like `Rerun`.

    saved: share of the wall time that a change saves. sooner: share of the time to the first token that it saves.
    """

    def saved(self, change: Change) -> float: ...
    def sooner(self, change: Change) -> float: ...


@dataclass(frozen=True, slots=True)
class Advice:
    """One change for the user to make.

    Attributes:
        option: the option with its new value.
        gain_s: seconds of the run that it saves on the simulator. None if it saves no time.
    """

    rule: str
    text: str
    option: str
    gain_s: float | None


class _Proposal(NamedTuple):
    """A problem that a rule saw, and the remedies that might help."""

    rule: str
    seen: str
    remedies: Iterable[Remedy]


def advise(report: Report, trial: Trial | None = None, *, untried: str | None = None) -> list[Advice]:
    """Return the advice for one run, the largest gain first, with one piece per option.

    The list is empty if no microbatch came back. If the user has set a bound on the time between tokens, the user has
    chosen to spend time on it. Then the only advice about time is about the layer split.

    Args:
        trial: applies changes to the run. None gives no advice about time.
        untried: the reason for which there is no trial, as a sentence without its full stop. With it, the advice
            contains a guess that was not tried.
    """
    if not report["completed"] or not report["wall_s"]:
        return []
    found = [_kv_fragmentation(report)]
    if trial is not None:
        bound = has_bound(report)
        proposals = (proposal for rule in ((_slow_stage,) if bound else _RULES) for proposal in rule(report))
        found += [_tried(report, proposal, trial) for proposal in proposals]
        found += [] if bound else [_spare_stages(report, trial), _one_request(report, trial)]
    elif untried is not None and not has_bound(report):
        found.append(_untested(report, untried))
    return _best(advice for advice in found if advice is not None)


def apart(advice: Iterable[Report]) -> str | None:
    """Return a sentence for below several pieces of advice; None unless at least two of them have a predicted gain."""
    return _APART if sum(one.get("gain_s") is not None for one in advice) > 1 else None


class ComparedRun(NamedTuple):
    """A run to compare with others.

    trial: returns the simulated run that changes are applied to. It returns None if the run cannot be simulated.
    """

    label: str
    report: Report
    trial: Callable[[], Trial | None]

    @property
    def setting(self) -> list[str]:
        named = (str(self.report.get(name)) for name in _SETTING)
        return [*named, prefix_cache_mode(self.report), str(kv_cache_dtype(self.report))]


def advise_comparison(runs: Iterable[ComparedRun]) -> list[Advice]:
    """Return the advice that only several runs together can give. Runs are compared if their settings are equal."""
    usable = [run for run in runs if run.report["completed"] and run.report["wall_s"]]
    found = []
    for _, alike in groupby(sorted(usable, key=lambda run: run.setting), key=lambda run: run.setting):
        for fewer, more in pairwise(sorted(alike, key=lambda run: _requests_inflight(run.report))):
            proposal = _flat_chunks(fewer, more)
            trial = more.trial() if proposal is not None else None
            if proposal is not None and trial is not None:
                found.append(_tried(more.report, proposal, trial))
    return _best(advice for advice in found if advice is not None)


def _best(found: Iterable[Advice]) -> list[Advice]:
    """Return the advice with the largest gains first and unknown gains last, the better one per option."""
    by_option: dict[str, Advice] = {}
    for advice in sorted(found, key=lambda advice: -math.inf if advice.gain_s is None else advice.gain_s, reverse=True):
        by_option.setdefault(advice.option.split()[0], advice)
    return list(by_option.values())[:_MOST]


def _tried(report: Report, proposal: _Proposal, trial: Trial) -> Advice | None:
    """Return the remedy that saves most, or None if its gain is too small. If two save the same, take the earlier."""
    shares = {remedy: trial.saved(remedy.change) for remedy in proposal.remedies}
    if not shares or max(shares.values()) < _WORTHWHILE:
        return None
    remedy = max(shares, key=lambda remedy: shares[remedy])
    wall_s = report["wall_s"]
    gain_s = shares[remedy] * wall_s
    of = "of every" if remedy.change.times > 1 else "of"
    gain = f"In the simulator this saves {_told(report, gain_s)} {of} {_told(report, wall_s)} s ({gain_s / wall_s:.0%})"
    return Advice(proposal.rule, f"{proposal.seen} {remedy.request}. {gain}.", remedy.option, gain_s)


def _untested(report: Report, reason: str) -> Advice | None:
    """Return the first remedy against the largest cause that has one, or else for seats that shared pages allow.

    Return None if there is none.
    """
    for proposal in (*_bubble(report), *_shared_pages(report)):
        for remedy in proposal.remedies:
            return Advice("untested", f"{proposal.seen} {remedy.request}. Not tried: {reason}.", remedy.option, None)
    return None


def _told(report: Report, seconds: float) -> str:
    """Return seconds with one decimal, or with two in a short run."""
    return f"{seconds:.{1 if report['wall_s'] >= 10 else 2}f}"


def _bubble(report: Report) -> Iterator[_Proposal]:
    """Yield a proposal per cause, the largest cause first, if the bubble is large enough."""
    ratio, causes = report["bubble_ratio"], report.get("causes")
    if ratio is None or ratio <= _HIGH_BUBBLE or not causes:
        return
    run_s = report["stages"] * report["wall_s"]
    for name in sorted(_REMEDIES, key=lambda name: causes[name], reverse=True):
        if causes[name] >= _WORTHWHILE * run_s:
            lost, idle = _told(report, causes[name]), _told(report, ratio * run_s)
            cause = f"{cause_name(name)} ({CAUSES[name]})"
            seen = f"The bubble is {ratio:.1%}: {idle} idle stage seconds. {lost} of these seconds are {cause}."
            yield _Proposal("bubble", seen, _REMEDIES[name](report))


def _starvation(report: Report) -> Iterator[_Proposal]:
    causes, stages = report.get("causes"), report["stages"]
    if causes and causes["starvation_s"] > _STARVED * stages * report["wall_s"]:
        idle = _told(report, causes["starvation_s"] / stages)
        seen = f"Each stage was idle for {idle} s on average, because nothing could be issued."
        yield _Proposal("starvation", seen, keep_busy(report))


def _few_decodes(report: Report) -> Iterator[_Proposal]:
    seen = _lack_of_decodes(report)
    if seen is not None:
        yield _Proposal("few_decodes", seen, keep_busy(report))


def _spare_stages(report: Report, trial: Trial) -> Advice | None:
    """Return the advice to use fewer stages, if some stages never have a decode."""
    seen, remedy = _lack_of_decodes(report), fewer_stages(report)
    share = trial.saved(remedy.change) if seen is not None and remedy is not None else -math.inf
    if seen is None or remedy is None or share < -_ABOUT_AS_FAST:
        return None
    takes = f"{abs(share):.0%} {'more' if share < 0 else 'less'} time" if abs(share) > _NOTHING else "the same time"
    gain_s = share * report["wall_s"] if share >= _WORTHWHILE else None
    text = f"{seen} Use {remedy.option}: in the simulator the run takes {takes}, {remedy.how}."
    return Advice("few_decodes", text, remedy.option, gain_s)


def _lack_of_decodes(report: Report) -> str | None:
    """Return a sentence if on average fewer sequences decode than there are stages; None if not."""
    stages, decodes = report["stages"], _decodes_at_once(report)
    if decodes is None or decodes >= stages or stages == 1:
        return None
    return f"On average {decodes:.1f} sequences were decoding, fewer than the {stages} stages that they pass."


def _slow_stage(report: Report) -> Iterator[_Proposal]:
    computed_s = [stage["compute_s"] for stage in report["per_stage"]]
    slow, mean_s = computed_s.index(max(computed_s)), sum(computed_s) / len(computed_s)
    seen = f"Stage {slow} computed for {_told(report, computed_s[slow])} s, the mean stage {_told(report, mean_s)} s."
    yield _Proposal("slow_stage", seen, even_layers(report))


def _few_sequences(report: Report) -> Iterator[_Proposal]:
    """Yield remedies for few sequences at once. A pass reads every weight once, so few decodes per pass cost time."""
    decodes = _decodes_at_once(report)
    most = min(report["completed"], report.get("max_num_seqs") or report["completed"])
    if decodes is None:
        return
    if most < _FEW_SEQUENCES:
        counted = "1 sequence" if most == 1 else f"{most} sequences"
        seen = f"At most {counted} ran at once: too few to share the passes that decodes need."
        yield _Proposal("few_sequences", seen, [*more_seats(report), *run_whole(report)])
    elif decodes < _FEW_SEQUENCES and pages_ran_out(report):
        seen = f"KV pages ran out, and on average {decodes:.1f} sequences were decoding: too few to share a pass."
        yield _Proposal("few_sequences", seen, more_pages(report))


def _shared_pages(report: Report) -> Iterator[_Proposal]:
    """Yield more seats if requests share pages, so that seats are the limit and not pages.

    Then tokens that were found save little time, because the decodes of the running requests take as long as before.
    """
    cache, kv, seats = report.get("prefix_cache"), report["kv"], report.get("max_num_seqs")
    if not cache or not cache["cached_tokens"] or not seats or report["preemptions"]:
        return
    remedies = [one for one in more_seats(report) if _room_for(one, report)]
    if remedies and _unfinished(report) >= _QUEUED * seats:
        free = formats.share(1 - kv["peak_used"] / kv["pages"], 0)
        seen = (
            f"All {seats} seats were in use while requests waited, and {free} of the KV pages stayed free, because "
            f"requests shared pages."
        )
        yield _Proposal("shared_pages", seen, remedies)


def _room_for(remedy: Remedy, report: Report) -> bool:
    """Return whether the KV pages suffice for the seats of a remedy because requests share pages.

    A seat needs what it needed in the run. Without sharing, it would need the pages of the tokens found too.
    """
    kv, seats, wanted = report["kv"], report["max_num_seqs"], remedy.change.max_num_seqs or 0
    found = report["prefix_cache"]["cached_tokens"] / report["completed"] / kv["page_size"]
    needed, needed_alone = kv["peak_used"] * wanted / seats, (kv["peak_used"] + found * seats) * wanted / seats
    return bool(needed <= _ROOMY * kv["pages"] < needed_alone)


def _short_prompts(report: Report) -> Iterator[_Proposal]:
    size, cached = report["chunk_size"], (report.get("prefix_cache") or {}).get("cached_tokens", 0)
    mean = (report["prompt_tokens"] - cached) / report["completed"]
    if fills_chunks(report) and mean <= size:
        seen = (
            f"Prompts have {mean:.0f} {'uncached ' if cached else ''}tokens on average and fit into one chunk of "
            f"{size}, so chunking does not make microbatches more equal."
        )
        remedies = [*smaller_chunks(report, mean / 2), *run_whole(report), *balance(report)]
        yield _Proposal("short_prompts", seen, remedies)


def _one_request(report: Report, trial: Trial) -> Advice | None:
    """Return the advice to run prompts whole if requests run one at a time.

    Chunks fill the stages of a pipeline. With one stage, or few chunks, they only add passes.
    """
    first_s, chunks = _first_token_s(report), num_chunks(report) / report["completed"]
    alone = 1 in (report["completed"], report.get("max_num_seqs"))
    remedy = next(run_whole(report), None)
    if remedy is None or not alone or chunks <= 1 or first_s is None or first_s <= _QUICK_S:
        return None
    share = trial.sooner(remedy.change)
    if share < _WORTHWHILE:
        return None
    seen = f"Requests ran one at a time. A first token took {first_s:.2f} s, in {chunks:.1f} chunks on average."
    gain = f"In the simulator the first token comes after {(1 - share) * first_s:.2f} s"
    return Advice("one_request", f"{seen} {remedy.request}. {gain}.", remedy.option, None)


def _kv_fragmentation(report: Report) -> Advice | None:
    wasted, page_size = report["kv"]["fragmentation"], report["kv"]["page_size"]
    if wasted is None or wasted <= _FRAGMENTED or page_size == 1 or not pages_ran_out(report):
        return None
    if report.get("attention") == "emulated":
        return None  # the profile sets the number of pages, whatever their size
    option, freed = f"--page-size {page_size // 2}", wasted / 2
    text = (
        f"KV pages ran out, and {wasted:.0%} of the room in used pages was empty. Use {option}: it frees about "
        f"{freed:.0%} of the used room, which is enough for {freed / (1 - freed):.0%} more sequences."
    )
    return Advice("kv_fragmentation", text, option, None)


def _flat_chunks(fewer: ComparedRun, more: ComparedRun) -> _Proposal | None:
    before, after = fewer.report["chunk_throughput"], more.report["chunk_throughput"]
    inflight = _requests_inflight(fewer.report), _requests_inflight(more.report)
    if not before or inflight[1] < _MORE_INFLIGHT * inflight[0] or after > _FLAT * before:
        return None
    seen = (
        f"From {fewer.label} to {more.label}, requests in flight grew from {inflight[0]:.0f} to {inflight[1]:.0f}, and "
        f"chunk throughput only went from {before:.1f} to {after:.1f} per second. Change the second run."
    )
    return _Proposal("flat_chunks", seen, larger_chunks(more.report))


# The remedies that may help against each cause.
_REMEDIES: dict[str, Callable[[Report], Iterator[Remedy]]] = {
    "prefill_variance_s": even_prefills,
    "prefill_decode_s": even_prefills,
    "decode_context_s": even_decodes,
    "stage_imbalance_s": even_layers,
    "communication_s": hide_transfers,
    "host_s": larger_chunks,
    "starvation_s": keep_busy,
    "ramp_s": fill_longer,
}

_RULES: tuple[Callable[[Report], Iterator[_Proposal]], ...] = (
    _slow_stage,
    _few_decodes,
    _few_sequences,
    _shared_pages,
    _short_prompts,
    _starvation,
    _bubble,
)


def _decodes_at_once(report: Report) -> float | None:
    """Return the mean number of sequences that decode at once; None if no request had a second token.

    Little's law: it is the time that all requests spend decoding, divided by the time of the run.
    """
    gaps = report["output_tokens"] - report["completed"]
    mean_s = report["itl_s"]["mean"]
    return None if mean_s is None or gaps <= 0 else float(gaps * mean_s / report["wall_s"])


def _first_token_s(report: Report) -> float | None:
    """Return the seconds per prompt without the wait for earlier ones, if requests run one at a time."""
    mean_s, decodes = report["ttft_s"]["mean"], _decodes_at_once(report)
    if mean_s is None:
        return None
    prompts_s = report["wall_s"] * (1 - (decodes or 0.0))
    return float(max(0.0, min(mean_s, prompts_s / report["completed"])))


def _requests_inflight(report: Report) -> float:
    """Return the mean number of requests that run at once: the unfinished ones, by Little's law, up to max_num_seqs."""
    return min(_unfinished(report), report.get("max_num_seqs") or math.inf)


def _unfinished(report: Report) -> float:
    """Return the mean number of requests that have arrived and are unfinished, by Little's law."""
    return float(report["completed"] * report["e2el_s"]["mean"] / report["wall_s"])
