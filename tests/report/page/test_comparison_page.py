from __future__ import annotations

from typing import Any

from sarathi_pp.report.comparison import compare
from sarathi_pp.report.page.comparison_page import render_comparison_page
from tests.analysis.schedules import Schedule, constant
from tests.report.page.test_run_page import CAUSES, HOSTILE, SCRIPT, data_of, run_of, text_of


def compared(*changes: dict[str, Any]) -> str:
    """Make a page of runs, each slower than the one before by one second per microbatch."""
    parts = [
        run_of(Schedule(8, 2, constant(1.0 + n)).events(), f"run{n}", causes=CAUSES, **change)
        for n, change in enumerate(changes)
    ]
    comparison = compare([(part.title, dict(part.report)) for part in parts]) | {"advice": []}
    return render_comparison_page(comparison, parts)


def test_ratios_come_first_then_timelines_then_one_table() -> None:
    page = compared({"policy": "orca", "bubble_ratio": 0.479}, {"policy": "balanced", "bubble_ratio": 0.322})
    text = text_of(page)
    headline = "balanced: 0.50x the tokens per second of orca, bubble 47.9% \N{RIGHTWARDS ARROW} 32.2%"
    assert text.index(headline) < text.index("Timelines") < text.index("figure orca balanced ratio")
    assert "wall s 9.000 18.00 2.00x" in text
    assert "setting orca balanced policy orca balanced" in text
    assert len(data_of(page)["runs"]) == 2


def test_every_run_but_the_first_has_a_headline() -> None:
    text = text_of(compared({}, {}, {"total_tokens_per_s": None}))
    assert "run1: 0.50x the tokens per second of run0" in text
    assert "run2: an unknown multiple of the tokens per second of run0" in text
    assert "The runs had the same settings." in text


def test_names_are_escaped() -> None:
    page = compared({"policy": HOSTILE}, {"model": HOSTILE, "notes": [HOSTILE]})
    assert "<b onclick" not in page and len(SCRIPT.findall(page)) == 2
