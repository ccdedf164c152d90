from __future__ import annotations

import json
import math
import re
from copy import deepcopy
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sarathi_pp.analysis.summary import Report, summarise
from sarathi_pp.errors import InputError
from sarathi_pp.report.comparison import compare, differences_of, render_comparison
from tests.analysis.schedules import Schedule, constant, start

CAUSES = {
    f"{cause}_s": 0.5
    for cause in (
        *("ramp", "prefill_variance", "prefill_decode", "decode_context", "stage_imbalance"),
        *("communication", "host", "starvation", "unexplained"),
    )
}


def report(**changed: Any) -> Report:
    """Make eight microbatches of 10 ms on two stages."""
    return summarise(Schedule(8, 2, constant(0.01)).events()) | {"model": "m", "causes": dict(CAUSES)} | changed


def labels(*reports: Report, names: list[str] | None = None) -> list[str]:
    names = names or [f"run{number}" for number in range(len(reports))]
    return [run["label"] for run in compare(list(zip(names, reports, strict=True)))["runs"]]


def printed(comparison: dict[str, Any], *, width: int = 80, color: bool = False) -> str:
    file = StringIO()
    Console(file=file, width=width, force_terminal=color, no_color=not color).print(render_comparison(comparison))
    return file.getvalue()


def row(text: str, heading: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{heading} "))
    return " ".join(line.removeprefix(heading).split())


def test_values_ratios_and_the_better_one() -> None:
    """At twice the pace: half the latencies and twice the throughput, with the same bubble."""
    slow, fast = summarise(Schedule(8, 2, constant(0.5)).events()), summarise(Schedule(8, 2, constant(0.25)).events())
    comparison = compare([("slow", slow), ("fast", fast)])
    figures = comparison["figures"]
    assert comparison["schema"] == "sarathi-pp/comparison/1"
    assert comparison["runs"] == [{"label": "slow", **slow}, {"label": "fast", **fast}]
    assert figures["total_tokens_per_s"] == {
        "values": [slow["total_tokens_per_s"], fast["total_tokens_per_s"]],
        "ratios": [1.0, 2.0],
        "better": "higher",
        "best": [1],
    }
    assert figures["ttft_s.p99"]["ratios"] == [1.0, 0.5]
    assert (figures["ttft_s.p99"]["better"], figures["ttft_s.p99"]["best"]) == ("lower", [1])
    assert (figures["bubble_ratio"]["ratios"], figures["bubble_ratio"]["best"]) == ([1.0, 1.0], [])
    assert (figures["wall_s"]["ratios"], figures["wall_s"]["best"]) == ([1.0, 0.5], [])
    assert json.loads(json.dumps(comparison, allow_nan=False)) == comparison


def test_a_figure_that_no_run_has_is_left_out_and_one_that_some_have_is_not() -> None:
    without, having = report(causes=None), report(itl_s={"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": None})
    figures = compare([("a", without), ("b", having)])["figures"]
    assert "itl_s.p99" not in figures and "tpot_s.mean" not in figures
    assert (figures["itl_s.p50"]["values"], figures["itl_s.p50"]["ratios"]) == ([None, 1.0], [None, None])
    assert figures["itl_s.p50"]["best"] == []
    assert figures["causes.ramp_s"]["values"] == [None, 0.5]
    without.pop("causes")  # a report of another version
    assert compare([("a", without), ("b", having)])["figures"] == figures


@pytest.mark.parametrize(
    ("values", "ratios"),
    [
        ((2.0, 1.0), [1.0, 0.5]),
        ((0.0, 1.0), [None, None]),
        ((2.0, 0.0), [1.0, 0.0]),
        ((-1.0, 1.0), [None, None]),
        ((1.0, -1.0), [1.0, None]),
    ],
)
def test_a_ratio_across_zero_says_nothing(values: tuple[float, float], ratios: list[float | None]) -> None:
    runs = [(str(value), report(causes=CAUSES | {"host_s": value})) for value in values]
    assert compare(runs)["figures"]["causes.host_s"]["ratios"] == ratios


@given(st.lists(st.none() | st.floats(0.0, 100.0), min_size=2, max_size=6))
def test_the_best_are_within_a_percent_and_never_all(values: list[float | None]) -> None:
    compared = compare([("", BASE | {"bubble_ratio": value}) for value in values])["figures"].get("bubble_ratio")
    known = [value for value in values if value is not None]
    if compared is None:
        assert not known
        return
    near = [number for number, value in enumerate(values) if value is not None and 0.99 * value <= min(known)]
    assert compared["best"] == (near if len(near) < len(known) else []) or min(known) == 0.0
    if min(known) == 0.0:
        assert {values[number] for number in compared["best"]} <= {0.0}


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ((0.2, 0.1), [1]),
        ((0.1, 0.1005, 0.2), [0, 1]),
        ((0.1, 0.1005), []),
        ((0.0, 0.001), [0]),
        ((None, 0.1), []),
    ],
)
def test_within_a_percent_is_as_good(values: tuple[float | None, ...], best: list[int]) -> None:
    runs = [("", BASE | {"bubble_ratio": value}) for value in values]
    assert compare(runs)["figures"]["bubble_ratio"]["best"] == best


BASE = report()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([{"policy": "orca"}, {}], ["orca", "sarathi"]),
        ([{"chunk_size": 128}, {}, {"chunk_size": 512}], ["chunk 128", "chunk 256", "chunk 512"]),
        ([{"stages": 1}, {}], ["1 stage", "2 stages"]),
        ([{"policy": "orca", "stages": 4}, {}], ["orca, 4 stages", "sarathi, 2 stages"]),
        ([{}, {}], ["run0", "run1"]),
        ([{"policy": "orca"}, {}, {}], ["orca", "sarathi, run1", "sarathi, run2"]),
    ],
)
def test_labels_are_what_tells_runs_apart(changes: list[Report], expected: list[str]) -> None:
    assert labels(*(BASE | changed for changed in changes)) == expected


def test_runs_of_one_name_are_numbered() -> None:
    assert labels(BASE, BASE, BASE, names=["run", "other", "run"]) == ["run #1", "other", "run #3"]
    assert labels(BASE | {"stages": 1}, BASE, BASE, names=["a", "a", "a"]) == [
        "1 stage",
        "2 stages, a #2",
        "2 stages, a #3",
    ]


def test_settings_that_differ_are_listed_with_the_work_first() -> None:
    first = report(policy="orca", notes=["cores were shared"])
    other = report(requests=1600, layer_split=[5, 3])
    third = report()
    del third["model"]
    compared = compare([("a", first), ("b", other), ("c", third)])
    assert [tuple(one.values()) for one in compared["differences"]] == [
        ("model", ["m", "m", None], False),
        ("requests", [8, 1600, 8], False),
        ("policy", ["orca", "sarathi", "sarathi"], True),
        ("layer_split", [[4, 4], [5, 3], [4, 4]], True),
    ]
    assert differences_of(compared)[-1] == ("layer split", ["4,4", "5,3", "4,4"])
    assert compared["notes"] == [
        "these runs did not do the same work: their ratios say less than they seem to",
        "orca: cores were shared",
    ]


def test_runs_that_differ_in_nothing_have_no_notes() -> None:
    compared = compare([("a", report()), ("b", report())])
    assert compared["notes"] == compared["differences"] == []


@pytest.mark.parametrize("count", [0, 1])
def test_one_run_is_no_comparison(count: int) -> None:
    with pytest.raises(InputError, match=f"{count} run given; a comparison needs two or more"):
        compare([("a", BASE)] * count)


def test_comparing_changes_no_report() -> None:
    before = deepcopy(BASE)
    compare([("a", BASE), ("b", BASE)])
    assert before == BASE


def test_table() -> None:
    orca = report(policy="orca", bubble_ratio=0.31, total_tokens_per_s=489.0, preemptions=3)
    text = printed(compare([("a", orca), ("b", report())]))
    assert text.split()[:3] == ["figure", "orca", "sarathi"]
    assert row(text, "tokens/s") == "489.0 1.00x 977.8* 2.00x"
    assert row(text, "bubble") == "31.0% 1.00x 11.1%* 0.36x"
    assert row(text, "preemptions") == "3 1.00x 0* 0.00x"
    assert row(text, "prefill variance s") == "0.500 1.00x 0.500 1.00x"
    assert row(text, "e2el p99 s") == "0.089 1.00x 0.089 1.00x"
    assert row(text, "policy") == "orca sarathi" and "note:" not in text
    assert "\x1b" not in text


def test_the_better_one_stands_out_in_colour() -> None:
    runs = [("a", report(policy="orca", bubble_ratio=0.31)), ("b", report())]
    coloured = re.findall(r"\x1b\[1;32m *(.+?)\x1b", printed(compare(runs), color=True))
    assert coloured == ["11.1%* 0.36x"]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_any_number_of_long_runs_fits_80_columns(count: int) -> None:
    big = {"total_tokens_per_s": 987_654.3, "wall_s": 345_678.9, "microbatches": 9_999_999}
    spread = {"mean": 12_345.6, "p50": 12_345.6, "p90": 99_999.4, "p99": 99_999.4}
    runs = [
        ("a-directory-with-a-long-name", report(**big, e2el_s=spread, policy=f"balanced:parameter={n}", chunk_size=n))
        for n in range(count)
    ]
    runs[0][1].update(total_tokens_per_s=876_543.2, policy="short")
    runs[1][1]["causes"] = CAUSES | {"ramp_s": -12_345.6, "host_s": 0.5e6}
    text = printed(compare(runs))
    assert max(map(len, text.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    # Every run is shown once, and the first with each three of the others.
    lines = [line for line in text.splitlines() if line.startswith("tokens/s ")]
    assert [line.split()[1] for line in lines] == ["876,543"] * math.ceil((count - 1) / 3)
    assert sum(line.count("987,654* 1.13x") for line in lines) == count - 1
    assert row(text[: text.index("starvation")], "host delay s").startswith("0.500 1.00x 500,000 -")


def test_a_wide_terminal_has_more_runs_next_to_each_other() -> None:
    runs = [("a", report(policy=f"p{n}")) for n in range(6)]
    tables = [printed(compare(runs), width=width).count("figure ") for width in (80, 114)]
    assert tables == [2, 1]


def test_no_figure_is_a_negative_zero() -> None:
    runs = [("a", report(causes=CAUSES | {"host_s": -0.0001})), ("b", report(policy="orca"))]
    assert row(printed(compare(runs)), "host delay s").startswith("0.000 ")


def test_names_are_no_markup() -> None:
    text = printed(compare([("[red]a", report()), ("[/b]", report())]))
    assert "[red]a" in text and "[/b]" in text


def test_runs_without_any_result() -> None:
    empty = summarise([[start(0, 1)]])
    comparison = compare([("a", empty), ("b", empty)])
    assert "bubble_ratio" not in comparison["figures"]
    assert "note: a: no end in the trace of stage 0" in printed(comparison)


def test_runs_with_other_keys_and_values_did_other_work() -> None:
    comparison = compare([("a", report(dtype="float32")), ("b", report(dtype="float32", kv_cache_dtype="fp8"))])
    (difference,) = comparison["differences"]
    assert difference == {"name": "kv_cache_dtype", "values": ["float32", "fp8"], "same_work": False}
    assert comparison["notes"] == ["these runs did not do the same work: their ratios say less than they seem to"]


def test_advice_stands_below_the_table() -> None:
    comparison = compare([("a", report()), ("b", report())]) | {"advice": [{"text": "raise the chunk"}]}
    assert "advice: raise the chunk" in printed(comparison)


def test_the_prefix_cache_is_a_setting_and_its_hits_a_figure() -> None:
    without, having = report(), report(prefix_cache={"mode": "all", "hit_rate": 0.75, "evictions": 3})
    comparison = compare([("a", without), ("b", having)])
    assert comparison["figures"]["prefix_cache.hit_rate"]["values"] == [None, 0.75]
    (difference,) = comparison["differences"]
    assert difference == {"name": "prefix_cache", "values": ["off", "all"], "same_work": True}
    without.pop("prefix_cache")  # a report of another version
    assert compare([("a", without), ("b", having)])["differences"] == [difference]
    assert compare([("a", without), ("b", report())])["differences"] == []
    assert "75.0%" in row(printed(comparison), "prompt tokens found")
