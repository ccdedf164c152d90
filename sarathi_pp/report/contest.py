"""The table of `bench`: policies and engines that did the same work, one per line, with medians over the rounds.

One column compares them with the floor, the speed that the machine could reach at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from sarathi_pp.report.formats import share


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table.

    Attributes:
        figure: key of the figure in the document.
        decimals: decimals that are shown; -1 shows a percentage.
        scale: factor from the figure to the shown number.
        spread: the smallest and the largest value are shown too.
    """

    heading: str
    figure: str
    decimals: int = 0
    scale: float = 1.0
    spread: bool = False


_COLUMNS = (
    _Column("tokens/s", "total_tokens_per_s", spread=True),
    _Column("x\nfirst", "tokens_per_s_against_first", 2, spread=True),
    _Column("of\nfloor", "of_floor", -1),
    _Column("steady\nbubble", "bubble_ratio_steady", -1),
    _Column("ttft\np50 s", "ttft_p50_s", 2),
    _Column("ttft\np99 s", "ttft_p99_s", 2),
    _Column("peak\nGiB", "peak_memory_bytes", 2, 1 / 2**30),
)


def render_contest(document: Mapping[str, Any]) -> Table:
    """Return the document of `bench/contest_report.py` as a table. It fits 80 columns."""
    machine = document["machine"]
    rates = f"{machine['flops'] / 1e9:.0f} GFLOP/s ({machine['product']}) and {machine['bytes_per_s'] / 1e9:.0f} GB/s"
    title = (
        f"{document['workload']}\n{document['rounds']} rounds; the floor, {document['floor_tokens_per_s']:.0f} "
        f"tokens/s, is that of {machine['cores']} cores with {rates}"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.caption_justify = "left"
    table.caption = (
        "medians, with least and most below; x first: times the first line in the same round; peak: memory of all "
        "processes"
    )
    table.add_column("", overflow="fold")
    for column in _COLUMNS:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for name, figures in document["summary"].items():
        table.add_row(name, *(_cell(column, figures[column.figure]) for column in _COLUMNS))
    return table


def _cell(column: _Column, spread: Mapping[str, float] | None) -> Text:
    if spread is None:
        return Text("-")

    def show(value: float) -> str:
        return share(value) if column.decimals < 0 else f"{value * column.scale:.{column.decimals}f}"

    low, high = show(spread["min"]), show(spread["max"])
    between = f"\n{low}-{high}" if column.spread and low != high else ""
    return Text(show(spread["median"])) + Text(between, style="dim")
