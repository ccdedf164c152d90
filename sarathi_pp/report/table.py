"""The table after a run: throughput first, then the use of each stage's time.

It formats report.json and computes nothing, so people and programs read the same figures. It fits 80 columns, and uses
more if the terminal has more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sarathi_pp.report import formats
from sarathi_pp.report.advice import apart
from sarathi_pp.report.vocabulary import LATENCIES, STATES, cause_name, doubt, name_of, setup_of

_BARS = " " + "".join(map(chr, range(0x2581, 0x2589)))  # from one eighth of a block to a whole one
_ASCII_BARS = " .:-=+*#@"  # for a terminal or file whose encoding has no blocks
_NARROW = 80
# Cells of the bar next to a cause, in 80 columns.
_BAR_CELLS = 40
_HIGH_BUBBLE = 0.15


def render(report: Mapping[str, Any]) -> RenderableType:
    """Return a report of summary.summarise for a console. A figure that does not exist is a dash."""
    parts: list[RenderableType] = [
        _headline(report),
        "",
        _stages(report),
        *_hosts(report),
        "",
        *_strips(report),
        _latencies(report),
        "",
    ]
    parts.append(_work(report))
    if report["causes"] is not None:
        parts += ["", _Causes(report["causes"])]
        parts += [Text(sentence, style="yellow") for sentence in [doubt(report)] if sentence]
    advice = report.get("advice", [])
    parts += [Text(f"advice: {one['text']}", style="cyan") for one in advice]
    parts += [Text(sentence, style="cyan") for sentence in [apart(advice)] if sentence]
    parts += [Text(f"note: {note}", style="yellow") for note in report["notes"]]
    return Group(*parts)


def _headline(report: Mapping[str, Any]) -> Text:
    throughput = Text.assemble(
        (f"{formats.count(report['total_tokens_per_s'])} tokens/s", "bold"),
        f" ({formats.count(report['output_tokens_per_s'])} output), bubble ",
        (formats.share(report["bubble_ratio"]), f"bold {_bubble_color(report['bubble_ratio'])}"),
        f" (steady {formats.share(report['bubble_ratio_steady'])}), {formats.seconds(report['wall_s'])} s",
    )
    requests = Text.assemble(
        f"requests: {report['completed']:,} of {report['requests']:,} ok, ",
        (f"{report['failed']:,} failed", "bold red" if report["failed"] else ""),
        f"; {report['prompt_tokens']:,} prompt and {report['output_tokens']:,} output tokens",
    )
    if (resumed := report.get("resumed")) and resumed["rows"]:
        requests.append(f"\nand {resumed['rows']:,} of earlier starts, {resumed['failed']:,} of them failed")
    schedule = Text(
        f"policy {report['policy']}, chunk size {report['chunk_size']}, "
        f"{report['microbatches']:,} microbatches on {_shape(report)}",
        style="dim",
    )
    return Text("\n").join([throughput, requests, *_stopped(report), Text(setup_of(report), style="dim"), schedule])


def _bubble_color(ratio: float | None) -> str:
    return "default" if ratio is None else "yellow" if ratio > _HIGH_BUBBLE else "green"


def _stopped(report: Mapping[str, Any]) -> list[Text]:
    signal = report.get("stopped_by")
    return [Text(f"stopped by {signal} before all requests were answered", style="yellow")] if signal else []


def _shape(report: Mapping[str, Any]) -> str:
    replicas, shards = report.get("replicas", 1), report.get("tensor_parallel_size", 1)
    pipelines = f"{replicas} replicas of " if replicas > 1 else ""
    return f"{pipelines}{report['stages']} stages{f' of {shards} ranks each' if shards > 1 else ''}"


def _name(stage: Mapping[str, Any]) -> str:
    """Return the number of a stage, after that of its replica if there are several."""
    return f"{stage['replica']}.{stage['stage']}" if "replica" in stage else str(stage["stage"])


def _work(report: Mapping[str, Any]) -> Text:
    """Return figures about the variation of microbatches, the use of KV pages, and the errors of all figures."""
    kv = report["kv"]
    # A GPU computes sums after their launch or in a graph, so their time is unknown.
    of_each = [
        one["collective_s"] / one["compute_s"]
        for one in report["per_stage"]
        if one.get("collective_s") and report["device"] != "cuda"
    ]
    sums = f"sums over the ranks of a stage: {formats.share(max(of_each))} of its compute\n" if of_each else ""
    mask_s = sum(one.get("mask_s") or 0.0 for one in report["per_stage"])
    masks = f"waits for masks of grammars: {formats.seconds(mask_s)} s\n" if mask_s else ""
    return Text(
        sums
        + masks
        + _prefix_cache(report)
        + f"microbatches: {formats.count(report['chunk_throughput'])} chunks/s; variation (cv) of time "
        f"{formats.share(report['microbatch_time_cv'])}, of tokens {formats.share(report['microbatch_tokens_cv'])}\n"
        f"KV pages: peak {kv['peak_used']:,} of {kv['pages']:,}, mean {formats.count(kv['mean_used'])}; "
        f"{formats.share(kv['fragmentation'])} of their room empty; {report['preemptions']:,} preemptions\n"
        f"errors of these figures: clocks {formats.microseconds(report['clock_uncertainty_s'])} us, sums of states "
        f"{formats.share(report['closing_error'])}, fitted costs {formats.share(report['cost_error'])}",
        style="dim",
    )


def _prefix_cache(report: Mapping[str, Any]) -> str:
    """Return the line about the prefix cache; an empty text if the run had none."""
    cache = report.get("prefix_cache")
    if not cache:
        return ""
    counts = f"{cache['cached_tokens']:,} of {cache['prompt_tokens']:,}"
    return f"prefix cache: {formats.share(cache['hit_rate'])} of prompt tokens found ({counts})\n"


def _stages(report: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("layers", justify="right", no_wrap=True)
    for heading in ("compute\ns", "recv\nwait s", "send\nwait s", "host\ns", "no work\ns"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bubble", justify="right", style="bold", no_wrap=True)
    table.add_column("steady\nbubble", justify="right", no_wrap=True)
    table.add_column("peak\nGiB", justify="right", no_wrap=True)
    for stage in report["per_stage"]:
        first, end = stage["layers"]
        table.add_row(
            _name(stage),
            f"{first}-{end - 1}" if end > first else "none",
            *(formats.seconds(stage[name]) for name in STATES),
            formats.share(stage["bubble_ratio"]),
            formats.share(stage["bubble_ratio_steady"]),
            formats.gib(stage["peak_rss_bytes"]),
        )
    return table


def _hosts(report: Mapping[str, Any]) -> list[Text]:
    """Return the stages of each host and the transfers between hosts; nothing if all stages are on one host."""
    found = [(host, list(map(_name, of_one))) for host, of_one in groupby(report["per_stage"], itemgetter("host"))]
    if len({host for host, _ in found}) == 1:
        return []
    hosts = (f"{host} {_stage_range(names)}" for host, names in found)
    lines = [Text(f"hosts: {', '.join(hosts)}", style="dim")]
    links = [link for link in report["links"] if link["between_hosts"]]
    if links:  # without links between hosts, each replica is on its own host
        lines.append(Text(f"median transfer between hosts: {', '.join(map(_transfer, links))}", style="dim"))
    return lines


def _stage_range(names: Sequence[str]) -> str:
    return f"stages {names[0]}-{names[-1]}" if len(names) > 1 else f"stage {names[0]}"


def _transfer(link: Mapping[str, Any]) -> str:
    here, there = (_name({**link, "stage": stage}) for stage in link["stages"])
    return f"{formats.microseconds(link['transfer_s']['p50'])} us from {here} to {there}"


def _strips(report: Mapping[str, Any]) -> list[RenderableType]:
    """Return one line per stage, the run from left to right. A bar is high if the stage computed at that moment."""
    strips: list[RenderableType] = [
        _Strip(_name(stage), stage["busy_strip"]) for stage in report["per_stage"] if stage["busy_strip"]
    ]
    return [*strips, ""] if strips else []


@dataclass(frozen=True, slots=True)
class _Strip:
    """The line of one stage. Its characters depend on the encoding and width of the console that prints it."""

    stage: str
    busy: Sequence[float]  # for each moment, the share of it in which the stage computed

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        bars = _ASCII_BARS if options.ascii_only else _BARS
        label = f"stage {self.stage:<3} "
        cells = max(len(self.busy), options.max_width - len(label)) if options.max_width > _NARROW else len(self.busy)
        stretched = (self.busy[cell * len(self.busy) // cells] for cell in range(cells))
        shown = "".join(bars[round(share * (len(bars) - 1))] for share in stretched)
        yield Text.assemble((label, "dim"), (shown, "cyan"))


@dataclass(frozen=True, slots=True)
class _Causes:
    """The causes, the largest first. Shares are of the whole bubble. A negative cause made other waits shorter."""

    seconds: Mapping[str, float]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        bubble_s, largest = sum(self.seconds.values()), max(map(abs, self.seconds.values()))
        cells = _BAR_CELLS + max(0, options.max_width - _NARROW)
        block = "#" if options.ascii_only else _BARS[-1]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("bubble by cause", style="dim", no_wrap=True)
        table.add_column("s", justify="right")
        table.add_column("share", justify="right")
        table.add_column("", style="cyan", no_wrap=True)
        for name, seconds in sorted(self.seconds.items(), key=lambda item: -abs(item[1])):
            share = "-" if bubble_s <= 0 else formats.share(seconds / bubble_s, 0)
            bar = block * round(cells * max(0.0, seconds) / largest) if largest > 0 else ""
            table.add_row(cause_name(name), formats.seconds(seconds), share, bar)
        yield table


def _latencies(report: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("latency s", style="dim")
    for name in ("mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for name in (*LATENCIES, "request_bubble_s"):
        cells = (formats.milliseconds_kept(report[name].get(key)) for key in ("mean", "p50", "p90", "p99"))
        table.add_row(name_of(name), *cells)
    return table
