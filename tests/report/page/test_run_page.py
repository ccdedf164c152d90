from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape
from typing import Any

from sarathi_pp.analysis.bubbles import measure_bubbles
from sarathi_pp.analysis.summary import Report, summarise_timeline
from sarathi_pp.analysis.timeline import Timeline
from sarathi_pp.report.page.part import PagePart
from sarathi_pp.report.page.run_page import render_page
from sarathi_pp.trace.events import Event
from tests.analysis.schedules import Schedule, constant, on_hosts, start

CAUSES = {
    "ramp_s": 0.125,
    "prefill_variance_s": 0.25,
    "prefill_decode_s": 1.5,
    "decode_context_s": 0.375,
    "stage_imbalance_s": 2.5,
    "communication_s": 3.5,
    "host_s": 4.5,
    "starvation_s": 5.5,
    "unexplained_s": -0.625,
}
SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.DOTALL)


def run_of(traces: list[list[Event]], title: str = "a run", **further: Any) -> PagePart:
    timeline = Timeline.read(traces)
    bubbles = measure_bubbles(timeline)
    return PagePart(title, timeline, bubbles, summarise_timeline(timeline, bubbles) | further)


def even_run(title: str = "a run", **further: Any) -> PagePart:
    return run_of(Schedule(8, 2, constant(1.0)).events(), title, **further)


def page_of(part: PagePart) -> str:
    return render_page(part.title, part.report, [part])


def text_of(page: str) -> str:
    """Return the text that a reader sees without scripts, styles, tags and plots."""
    body = page[page.index("<body>") :]
    return " ".join(unescape(re.sub(r"<svg.*?</svg>|<[^>]*>", " ", SCRIPT.sub("", body), flags=re.DOTALL)).split())


def data_of(page: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SCRIPT.findall(page)[0])
    return found


def leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict | list):
        for member in value.values() if isinstance(value, dict) else value:
            yield from leaves(member)
    else:
        yield value


def made_unique(report: Report) -> Report:
    """Return the same report with every figure changed, none equal to any figure of the timeline."""
    counter = iter(range(1, 10_000))

    def renumber(value: object) -> object:
        match value:
            case dict():
                return {key: renumber(member) for key, member in value.items()}
            case list():
                return [renumber(member) for member in value]
            case float():
                return 700 + next(counter) * 1.001
            case int() if not isinstance(value, bool):
                return 5000 + next(counter)
        return value

    renumbered = renumber(report)
    assert isinstance(renumbered, dict)
    return renumbered


def ways_to_print(value: object) -> set[str]:
    if not isinstance(value, int | float):
        return set()
    plain = {f"{value:,}", f"{value}", f"{value - 1}"}  # a stage's last layer is one before the end
    shown = {f"{value:.2f}", f"{value:.3f}", f"{value * 100:.1f}", f"{value:,.0f}", f"{value:.1f}"}
    return plain | shown | {f"{value / 2**30:.2f}", f"{value * 1e6:,.0f}"}


def shares_of(report: Report) -> list[float]:
    """Return the shares that a page computes itself: busy time, causes of the bubble, and the savings of advice."""
    idle_s = sum(report["causes"].values())
    gains = [one["gain_s"] / report["wall_s"] for one in report["advice"]]
    return [1 - report["bubble_ratio"], *(seconds / idle_s for seconds in report["causes"].values()), *gains]


ADVICE = [{"rule": "bubble", "text": "Use --policy balanced.", "option": "--policy balanced", "gain_s": 2.5}]


def test_every_number_in_the_text_is_one_of_the_report() -> None:
    run = run_of(Schedule(8, 2, constant(1.0), host=constant(0.25)).events(), causes=CAUSES, advice=ADVICE)
    report = made_unique(dict(run.report)) | {"started_unix_s": 0}
    text = text_of(page_of(PagePart("a run", run.timeline, run.bubbles, report)))
    explained = r"\bp(50|90|99)\b|e2el|99th|and -, 0|m7\[.*?300 tokens|s3/1|0% if all"
    printed = re.findall(r"-?\d[\d,]*(?:\.\d+)?", re.sub(explained, "", text).replace("-", " "))
    allowed = set().union(*map(ways_to_print, leaves(report)), {f"{share * 100:.0f}" for share in shares_of(report)})
    allowed |= {number.removeprefix("-") for number in allowed}
    assert len(printed) > 50
    assert not [number for number in printed if number not in allowed]


def test_the_text_takes_nothing_from_the_timeline() -> None:
    one, other = even_run(), run_of(Schedule(5, 2, constant(3.0), host=constant(0.5)).events())
    swapped = PagePart(one.title, other.timeline, other.bubbles, one.report)
    assert text_of(page_of(one)) == text_of(page_of(swapped))
    assert data_of(page_of(one)) != data_of(page_of(swapped))


def test_tiles_and_stage_figures() -> None:
    run = run_of(Schedule(8, 2, constant(1.0), host=constant(0.25), transfer=constant(0.125)).events())
    text, report = text_of(page_of(run)), run.report
    assert f"bubble {report['bubble_ratio']:.1%} steady {report['bubble_ratio_steady']:.1%} tokens per second" in text
    assert f"requests 8 of 8 0 failed wall time {report['wall_s']:.2f} s 8 microbatches" in text
    assert "chunk size 256 tokens most tokens in a microbatch" in text
    stage = report["per_stage"][1]
    states = ("compute_s", "recv_wait_s", "send_wait_s", "host_s", "no_work_s")
    row = ["1", "4-7", f"{stage['bubble_ratio']:.1%}", f"{stage['bubble_ratio_steady']:.1%}"]
    assert " ".join([*row, *(f"{stage[name]:.2f}" for name in states), "1.00"]) in text


def test_hosts_are_a_column_where_there_are_several_and_links_between_them_a_line() -> None:
    schedule = Schedule(8, 3, constant(1.0), transfer=constant(0.00231))
    page = page_of(run_of(on_hosts(schedule.events(), "host0", "host<0>", "host<0>")))
    text = text_of(page)
    assert "stage host layers bubble" in text and "1 host<0> 4-7" in text
    us = "\N{MICRO SIGN}s"
    assert f"Median transfer between hosts: 2,310 {us} from 0 to 1, 0 {us} from 2 to 0." in text
    assert "2 hosts: host0, host<0>" in text and "host<0>" not in page
    alone = text_of(page_of(run_of(on_hosts(schedule.events(), "host0", "host0", "host0"))))
    assert alone.count("host0") == 1 and "between hosts" not in alone


def test_nothing_on_the_page_is_fetched_from_elsewhere_and_it_is_small() -> None:
    page = page_of(even_run(causes=CAUSES))
    own = SCRIPT.sub("", page)
    assert not re.findall(r"\b(?:src|href)\s*=|@import|url\(", own)
    assert "default-src 'none'" in own
    assert own.count("<script") == 0, "a script holds what ends a script"
    assert len(SCRIPT.findall(page)) == 2
    assert len(page) < 100_000


HOSTILE = "</script><script>alert(1)</script><b onclick='x'>&amp;\""


def test_what_comes_from_a_run_is_escaped() -> None:
    advice = [{"text": HOSTILE, "gain_s": 0.1, "option": f"--x {HOSTILE}"}]
    hostile = {"policy": HOSTILE, "notes": [HOSTILE], "model": HOSTILE, "command": [HOSTILE], "sarathi_pp": HOSTILE}
    page = page_of(even_run(HOSTILE, causes=CAUSES, advice=advice, **hostile))
    assert len(SCRIPT.findall(page)) == 2
    assert "<b onclick" not in page and "alert(1)</script>" not in page
    assert data_of(page)["runs"][0]["title"] == HOSTILE
    assert text_of(page).count("alert(1)") >= 7


def test_replicas_share_a_page_in_their_order() -> None:
    parts = [even_run("replica 0"), run_of(Schedule(4, 3, constant(1.0)).events(), "replica 1")]
    page = render_page("both", parts[0].report, parts)
    runs = data_of(page)["runs"]
    assert [run["title"] for run in runs] == ["replica 0", "replica 1"]
    assert [len(run["stages"]) for run in runs] == [2, 3]
    assert runs[0]["caption"] == "replica 0: bubble 11.1%, 9.8 tokens/s, 9.00 s"


def test_causes_are_sorted_and_negative_ones_stand_apart() -> None:
    text = text_of(page_of(even_run(causes=CAUSES)))
    starvation = text.index("starvation nothing can be issued 5.500 s, 31%")
    assert (
        starvation
        < text.index("host delay inputs wait")
        < text.index("communication act")
        < text.index("ramp the pipeline")
    )
    negative = "Negative: without it, other waits would have been longer. unexplained measured beyond what"
    assert text.index("ramp the pipeline") < text.index(negative) and "accounts for -0.625 s, -4%" in text
    for unknown in (even_run(), even_run(causes=None, advice=[])):
        assert "The causes of this bubble were not computed." in text_of(page_of(unknown))


def test_a_run_without_a_result_has_a_page_of_dashes() -> None:
    page = page_of(run_of([[start(0, 1)]]))
    text = text_of(page)
    assert "No microbatch has come back in this run." in text
    assert "bubble - steady - tokens per second - output -" in text
    assert "no end in the trace of stage 0" in text and "No value in this run." in text
    assert "None" not in text


def test_what_the_prefix_cache_did_is_among_the_figures() -> None:
    cache = {"cached_tokens": 32, "prompt_tokens": 128, "hit_rate": 0.25, "evictions": 1234, "saved_compute_s": 0.5}
    assert "prefix cache" not in text_of(page_of(even_run()))
    shown = text_of(page_of(even_run(prefix_cache=cache, computed_tokens_per_s=98.7)))
    assert "prompt tokens found 25.0% of prompt tokens in the prefix cache: 32 of 128" in shown
    assert "computed tokens 98.7 per s" in shown
    assert "compute saved 0.50 s" in shown and "KV pages evicted 1,234 pages" in shown
    assert "compute saved - s" in text_of(page_of(even_run(prefix_cache=cache | {"saved_compute_s": None})))
