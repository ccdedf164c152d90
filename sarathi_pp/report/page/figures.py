"""The figures of a run on its page: four tiles, and all others folded, each with a unit and an explanation."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from sarathi_pp.report import formats
from sarathi_pp.report.page.document import table


def tiles(report: Mapping[str, Any]) -> str:
    """Return the HTML of four tiles: the most important figures, each with a related one below it."""
    shown = (
        ("bubble", formats.share(report["bubble_ratio"]), f"steady {formats.share(report['bubble_ratio_steady'])}"),
        (
            "tokens per second",
            formats.count(report["total_tokens_per_s"]),
            f"output {formats.count(report['output_tokens_per_s'])}",
        ),
        ("requests", f"{report['completed']:,} of {report['requests']:,}", f"{report['failed']:,} failed"),
        ("wall time", f"{formats.seconds(report['wall_s'])} s", f"{report['microbatches']:,} microbatches"),
    )
    return "".join(f"<div><dt>{name}</dt><dd>{value}<small>{more}</small></dd></div>" for name, value, more in shown)


def details(report: Mapping[str, Any]) -> str:
    """Return the HTML of all further figures, in a section that the reader can unfold."""
    rows = [(name, escape(value), unit, meaning) for name, value, unit, meaning in (*_work(report), *_trust(report))]
    folded = table(("figure", "value", "unit", "meaning"), rows, kind="details")
    return f"<details><summary>details: all figures</summary>{folded}</details>"


def _work(report: Mapping[str, Any]) -> tuple[tuple[str, str, str, str], ...]:
    kv, chunk_size = report["kv"], report["chunk_size"]
    return (
        ("policy", str(report["policy"]), "", "chooses what each microbatch holds"),
        ("chunk size", "-" if chunk_size is None else f"{chunk_size:,}", "tokens", "most tokens in a microbatch"),
        ("in flight", f"{report['inflight']}", "microbatches", "limit of microbatches between issue and result"),
        ("prompt tokens", f"{report['prompt_tokens']:,}", "tokens", "of completed requests"),
        ("output tokens", f"{report['output_tokens']:,}", "tokens", "of completed requests"),
        *_prefix_cache(report),
        ("chunks", formats.count(report["chunk_throughput"]), "per s", "prompt chunks that were computed"),
        ("all stages busy", formats.share(report["overlap"]), "of steady time", "all stages compute at once"),
        ("microbatch time cv", formats.share(report["microbatch_time_cv"]), "of the mean", "0% if all take equal time"),
        (
            "microbatch tokens cv",
            formats.share(report["microbatch_tokens_cv"]),
            "of the mean",
            "0% if all hold the same number of tokens",
        ),
        ("KV pages, peak", f"{kv['peak_used']:,} of {kv['pages']:,}", "pages", "most in use at once"),
        ("KV pages, mean", formats.count(kv["mean_used"]), "pages", "in use, over time"),
        ("KV room empty", formats.share(kv["fragmentation"]), "of used pages", "room that holds no token"),
        ("preemptions", f"{report['preemptions']:,}", "times", "a sequence lost its pages and was computed again"),
    )


def _prefix_cache(report: Mapping[str, Any]) -> tuple[tuple[str, str, str, str], ...]:
    """Return the figures of the prefix cache; none if the run had none."""
    cache = report.get("prefix_cache")
    if not cache:
        return ()
    counts = f"{cache['cached_tokens']:,} of {cache['prompt_tokens']:,}"
    saved_s = cache["saved_compute_s"]
    return (
        ("prompt tokens found", formats.share(cache["hit_rate"]), "of prompt tokens", f"in the prefix cache: {counts}"),
        ("computed tokens", formats.count(report["computed_tokens_per_s"]), "per s", "tokens of all microbatches"),
        ("compute saved", formats.seconds(saved_s), "s", "that the tokens found would take, all stages together"),
        ("KV pages evicted", f"{cache['evictions']:,}", "pages", "left the prefix cache"),
    )


def _trust(report: Mapping[str, Any]) -> tuple[tuple[str, str, str, str], ...]:
    us = "\N{MICRO SIGN}s"
    return (
        ("clocks within", formats.microseconds(report["clock_uncertainty_s"]), us, "error of the clocks of the stages"),
        (
            "states within",
            formats.share(report["closing_error"]),
            "of wall time",
            "part that no state of a stage explains",
        ),
        (
            "costs within",
            formats.share(report["cost_error"]),
            "of stage time",
            "error of the cost model that gives the causes",
        ),
    )
