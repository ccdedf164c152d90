from __future__ import annotations

from io import StringIO

from rich.console import Console

from sarathi_pp.analysis.summary import Report, summarise
from sarathi_pp.report.table import render
from tests.analysis.schedules import Schedule, constant, on_hosts, start


def printed(report: Report, *, width: int = 80, color: bool = False) -> str:
    file = StringIO()
    Console(file=file, width=width, force_terminal=color, no_color=not color).print(render(report))
    return file.getvalue()


def test_every_figure_of_a_stage_has_its_place() -> None:
    schedule = Schedule(8, 2, constant(1.0), host=constant(0.25), transfer=constant(0.125))
    report = summarise(schedule.events())
    assert report["per_stage"][1]["host_s"] == 2.0
    lines = printed(report).splitlines()
    row = next(line.split() for line in lines if line.split()[:2] == ["1", "4-7"])
    stage = report["per_stage"][1]
    states = ("compute_s", "recv_wait_s", "send_wait_s", "host_s", "no_work_s")
    assert row[2:7] == [f"{stage[name]:.2f}" for name in states]
    assert row[7:] == [f"{stage['bubble_ratio']:.1%}", f"{stage['bubble_ratio_steady']:.1%}", "1.00"]


def test_headline_puts_the_bubble_beside_the_throughput() -> None:
    report = summarise(Schedule(8, 2, constant(0.01)).events())
    first, second, device, third = printed(report).splitlines()[:4]
    assert first == "978 tokens/s (88.9 output), bubble 11.1% (steady 0.0%), 0.09 s"
    assert second == "requests: 8 of 8 ok, 0 failed; 80 prompt and 8 output tokens"
    assert device == "device cpu"
    named = printed(report | {"model": "a/model", "dtype": "float32"}).splitlines()
    assert named[2:4] == ["model a/model, float32 on cpu", third]
    assert third == "policy sarathi, chunk size 256, 8 microbatches on 2 stages"


def test_how_even_the_work_was_and_what_became_of_the_pages_is_said() -> None:
    report = summarise(Schedule(8, 2, constant(0.01)).events())
    report |= {
        "chunk_throughput": 12.34,
        "microbatch_time_cv": 0.051,
        "microbatch_tokens_cv": None,
        "preemptions": 1234,
    }
    report |= {"clock_uncertainty_s": 4.2e-5, "closing_error": 0.001, "cost_error": 0.034}
    report["kv"] |= {"peak_used": 1500, "pages": 4000, "mean_used": 1234.5, "fragmentation": 0.042}
    report["request_bubble_s"] = {"p50": 0.125, "p90": 0.25, "p99": None}
    lines = printed(report).splitlines()
    assert "microbatches: 12.3 chunks/s; variation (cv) of time 5.1%, of tokens -" in lines
    assert "KV pages: peak 1,500 of 4,000, mean 1,234; 4.2% of their room empty; 1,234 " in lines
    assert "errors of these figures: clocks 42 us, sums of states 0.1%, fitted costs 3.4%" in lines
    assert not any("prefix cache" in line for line in lines)
    report["prefix_cache"] = {"cached_tokens": 262_144, "prompt_tokens": 312_000, "hit_rate": 262_144 / 312_000}
    shown = "prefix cache: 84.0% of prompt tokens found (262,144 of 312,000)"
    assert shown in printed(report).splitlines()
    assert ["request", "bubble", "-", "0.125", "0.250", "-"] in [line.split() for line in lines]


def test_a_long_run_fits_80_columns() -> None:
    """Eight stages, hours, layers in the hundreds: no column is cut or wrapped."""
    report = summarise(Schedule(40, 8, constant(249.0), host=constant(3.0), send_wait=constant(1.0)).events())
    report["wall_s"] = 123456.789
    for stage in report["per_stage"]:
        stage |= {"layers": [100, 116], "peak_rss_bytes": 123 << 30, "compute_s": 99999.0}
    text = printed(report)
    assert max(map(len, text.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert sum(line.split()[1:3] == ["100-115", "99999"] for line in text.splitlines()) == 8


def test_figures_that_do_not_exist_are_dashes() -> None:
    text = printed(summarise([[start(0, 1)]]))
    assert "- tokens/s (- output), bubble - (steady -), 0.00 s" in text
    assert "None" not in text
    assert "note: no end in the trace of stage 0" in text


def test_a_stage_without_layers_is_shown() -> None:
    report = summarise(Schedule(4, 1, constant(1.0)).events())
    report["per_stage"][0]["layers"] = [4, 4]
    assert "none" in printed(report)


def test_failures_stand_out() -> None:
    report = summarise(Schedule(4, 1, constant(1.0)).events()) | {"failed": 3}
    assert "\x1b[1;31m3 failed" in printed(report, color=True)
    assert "\x1b" not in printed(report)


def test_a_strip_shows_when_a_stage_computed() -> None:
    report = summarise(Schedule(2, 2, constant(1.0)).events())
    report["per_stage"][0]["busy_strip"] = [1.0, 0.5, 0.0, 0.06, 0.07]
    lines = printed(report).splitlines()
    assert next(line for line in lines if line.startswith("stage 0")) == "stage 0   \u2588\u2584  \u2581"


def test_causes_come_with_the_largest_first() -> None:
    report = summarise(Schedule(2, 2, constant(1.0)).events())
    assert "bubble by cause" not in printed(report)
    report["causes"] = {"ramp_s": 1.0, "prefill_variance_s": 6.5, "host_s": -2.5, "unexplained_s": -0.001}
    lines = [line.replace("\u2588", "").split() for line in printed(report).splitlines()]
    first = next(place for place, line in enumerate(lines) if line[:2] == ["bubble", "by"])
    assert lines[first + 1 : first + 5] == [
        ["prefill", "variance", "6.50", "130%"],
        ["host", "delay", "-2.50", "-50%"],
        ["ramp", "1.00", "20%"],
        ["unexplained", "0.00", "0%"],
    ]


def test_causes_from_rough_costs_are_said_to_be_rough() -> None:
    report = summarise(Schedule(2, 2, constant(1.0)).events()) | {"causes": {"ramp_s": 1.0}, "cost_error": 0.27}
    assert "These causes are rough" in printed(report) and "off by 27% on" in printed(report)
    assert "rough" not in printed(report | {"cost_error": 0.2})


def test_a_bar_shows_how_large_a_cause_is() -> None:
    report = summarise(Schedule(2, 2, constant(1.0)).events())
    report["causes"] = {"ramp_s": 1.0, "prefill_variance_s": 4.0, "host_s": -2.5}
    bars = {line.split("  ")[0]: line.count("\u2588") for line in printed(report).splitlines() if "%" in line}
    assert (bars["prefill variance"], bars["ramp"], bars["host delay"]) == (40, 10, 0)


def test_a_wide_terminal_is_used() -> None:
    report = summarise(Schedule(2, 2, constant(1.0)).events())
    report["per_stage"][0]["busy_strip"] = [1.0, 0.0]
    (strip,) = (line.rstrip() for line in printed(report, width=120).splitlines() if line.startswith("stage 0"))
    assert strip == "stage 0   " + "\u2588" * 55


def test_a_run_that_was_stopped_says_so() -> None:
    report = summarise(Schedule(2, 2, constant(1.0)).events())
    assert "stopped by" not in printed(report)
    assert "stopped by SIGTERM before all requests were answered" in printed(report | {"stopped_by": "SIGTERM"})


def over_two_hosts() -> Report:
    traces = Schedule(8, 3, constant(1.0), transfer=constant(0.00231)).events()
    return summarise(on_hosts(traces, "host0", "host0", "host1"))


def test_hosts_and_the_links_between_them_have_a_line_each() -> None:
    report = over_two_hosts()
    lines = printed(report).splitlines()
    assert "hosts: host0 stages 0-1, host1 stage 2" in lines
    assert "median transfer between hosts: 2,310 us from 1 to 2, 0 us from 2 to 0" in lines
    report["links"][1]["transfer_s"]["p50"] = None
    assert "median transfer between hosts: - us from 1 to 2, 0 us from 2 to 0" in printed(report)
    replicas = [{**stage, "replica": stage["stage"] // 2} for stage in report["per_stage"]]
    report |= {"per_stage": replicas, "links": [{**report["links"][1], "replica": 7}]}
    lines = printed(report).splitlines()
    assert "hosts: host0 stages 0.0-0.1, host1 stage 1.2" in lines
    assert "median transfer between hosts: - us from 7.1 to 7.2" in lines


def test_of_a_single_host_nothing_is_said() -> None:
    assert "host0" not in printed(summarise(on_hosts(Schedule(8, 2, constant(1.0)).events(), "host0", "host0")))


def test_sums_are_shown_only_where_their_time_is_known() -> None:
    """A GPU computes them after their launch or in a graph."""
    report = summarise(Schedule(2, 2, constant(1.0)).events())
    report["per_stage"][1]["collective_s"] = 0.5
    assert "sums over the ranks of a stage: 25.0% of its compute" in printed(report).splitlines()
    assert "sums over" not in printed(report | {"device": "cuda"})
