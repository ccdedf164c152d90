"""One report of several replicas, whose clocks, work and ends differ."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from sarathi_pp.analysis.causes import Causes
from sarathi_pp.analysis.replicas import Replica, summarise_replicas
from sarathi_pp.analysis.summary import summarise
from sarathi_pp.analysis.timeline import Timeline
from sarathi_pp.trace.events import Event, Totals, TraceStart
from tests.analysis.schedules import Schedule, constant


def replica(index: int, microbatches: int, seconds: float, *, offset_s: float = 0.0, cpu_share: float = 1.0) -> Replica:
    """Make a pipeline of two stages whose leader's clock is `offset_s` late. It starts when that clock shows 0."""
    traces: list[list[Event]] = []
    for stage, events in enumerate(Schedule(microbatches, 2, constant(seconds), cpu_share=cpu_share).events()):
        first = events[0]
        assert isinstance(first, TraceStart)
        offset_here_s = 0.0 if stage else offset_s
        traces.append([replace(first, replica=index, num_replicas=2, replica_offset_s=offset_here_s), *events[1:]])
    timeline = Timeline.read(traces)
    timeline.check_order()
    return Replica.fold(timeline)


def test_of_one_it_is_the_report_of_that_one():
    alone = Replica.fold(Timeline.read(Schedule(8, 2, constant(1.0)).events()))
    assert summarise_replicas([alone]) == summarise(Schedule(8, 2, constant(1.0)).events())


def test_a_run_that_has_lost_all_but_one_says_so():
    report = summarise_replicas([replica(1, 8, 1.0)])
    assert (report["replicas"], report["lost_replicas"]) == (2, [0])
    assert [one["replica"] for one in report["per_stage"]] == [1, 1] and len(report["per_replica"]) == 1
    assert any("replica 0 has no part in these figures" in note for note in report["notes"])


def test_the_window_is_from_the_first_issue_anywhere_to_the_last_result():
    """Replica 0 runs from 0 to 9, replica 1 from 20 to 25 on the run's clock."""
    report = summarise_replicas([replica(0, 8, 1.0), replica(1, 4, 1.0, offset_s=20.0)])
    assert report["wall_s"] == pytest.approx(25.0)
    assert report["requests"] == report["completed"] == 12
    assert report["total_tokens_per_s"] == pytest.approx(12 * 11 / 25)
    assert report["bubble_ratio"] == pytest.approx(1 - (8 + 8 + 4 + 4) / (4 * 25))
    assert report["chunk_throughput"] == pytest.approx(12 / 25)


def test_states_of_every_stage_fill_the_window():
    report = summarise_replicas([replica(0, 8, 1.0), replica(1, 4, 0.5, offset_s=3.0)])
    names = ("compute_s", "recv_wait_s", "send_wait_s", "host_s", "no_work_s")
    for stage in report["per_stage"]:
        assert sum(stage[name] for name in names) == pytest.approx(stage["wall_s"]) == pytest.approx(report["wall_s"])
        assert stage["bubble_ratio"] == pytest.approx(1 - stage["compute_s"] / stage["wall_s"])
    assert [(stage["replica"], stage["stage"]) for stage in report["per_stage"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_links_are_those_of_each_replica():
    report = summarise_replicas([replica(0, 8, 1.0), replica(1, 4, 0.5)])
    found = [(link["replica"], link["stages"]) for link in report["links"]]
    assert found == [(0, [0, 1]), (0, [1, 0]), (1, [0, 1]), (1, [1, 0])]


def test_what_a_replica_has_less_to_do_is_ramp_and_the_causes_still_add_up():
    whole = Causes(1.0, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0, 0.25)  # two stages of 9 s that compute for 8 each
    first, second = replica(0, 8, 1.0), replica(1, 8, 1.0, offset_s=5.0)
    both = [replace(one, report=one.report | {"causes": asdict(whole), "cost_error": 0.1}) for one in (first, second)]
    report = summarise_replicas(both)
    bubble_s = sum(stage["wall_s"] - stage["compute_s"] for stage in report["per_stage"])
    assert sum(report["causes"].values()) == pytest.approx(bubble_s)
    assert report["causes"]["ramp_s"] == pytest.approx(2 * 1.0 + 4 * 5.0)  # each of four stages waits 5 s for the other
    assert report["causes"]["prefill_variance_s"] == pytest.approx(1.0)
    assert summarise_replicas([first, both[1]])["causes"] is None


def test_where_one_was_cut_the_sums_are_of_all():
    first, second = replica(0, 8, 1.0), replica(1, 4, 1.0, offset_s=20.0)
    for one, microbatches in ((first, 80), (second, 4)):
        begin, end = one.timeline.window
        one.timeline.totals = Totals(
            microbatches=microbatches,
            requests=microbatches,
            completed=microbatches - 1,
            failed=1,
            prompt_tokens=10 * microbatches,
            output_tokens=microbatches,
            first_issue_s=begin,
            last_result_s=end + 3.0,
        )
    assert "whole_run" not in summarise_replicas([first, second])
    first.timeline.stages[1].cut = "size"
    whole = summarise_replicas([first, second])["whole_run"]
    assert (whole["requests"], whole["completed"], whole["failed"], whole["output_tokens"]) == (84, 82, 2, 84)
    assert whole["wall_s"] == pytest.approx(28.0)
    assert whole["total_tokens_per_s"] == pytest.approx(84 * 11 / 28)


def test_latencies_are_of_all_requests_together():
    report = summarise_replicas([replica(0, 8, 1.0), replica(1, 8, 2.0)])
    apart = [replica(0, 8, 1.0).report, replica(1, 8, 2.0).report]
    assert report["e2el_s"]["mean"] == pytest.approx(sum(one["e2el_s"]["mean"] for one in apart) / 2)
    assert report["e2el_s"]["p99"] > apart[0]["e2el_s"]["p99"]


def test_a_strip_shows_when_in_the_run_a_stage_computed():
    report = summarise_replicas([replica(0, 8, 1.0), replica(1, 8, 1.0, offset_s=9.0)])
    strips = [stage["busy_strip"] for stage in report["per_stage"]]
    half = len(strips[0]) // 2
    assert sum(strips[0][half:]) == pytest.approx(0, abs=1) and sum(strips[2][:half]) == pytest.approx(0, abs=1)
    assert sum(strips[0][:half]) > half * 0.8 and sum(strips[2][half:]) > half * 0.8


def test_notes_say_of_which_replica_they_are():
    report = summarise_replicas([replica(0, 8, 1.0, cpu_share=0.5), replica(1, 8, 1.0)])
    assert len(report["notes"]) == 1 and report["notes"][0].startswith("replica 0: cores were shared")


def test_a_replica_that_ran_nothing_changes_no_window():
    report = summarise_replicas([replica(0, 8, 1.0), replica(1, 0, 1.0)])
    assert report["wall_s"] == pytest.approx(9.0) and report["completed"] == 8


def cached(saved_s: float | None, evictions: int, prompt_tokens: int = 100) -> dict[str, object]:
    counts = {"prompt_tokens": prompt_tokens, "cached_tokens": 30, "resumed_tokens": 5, "computed_prompt_tokens": 75}
    figures = {"evictions": evictions, "idle_pages_most": evictions, "saved_compute_s": saved_s}
    return {"mode": "all", "hit_rate": 30 / prompt_tokens, **counts, **figures}


def test_prefix_caches_are_summed_and_the_idle_pages_are_the_most_of_one():
    both = [replica(0, 8, 1.0), replica(1, 4, 1.0, offset_s=20.0)]
    assert summarise_replicas(both)["prefix_cache"] is None
    assert summarise_replicas(both)["computed_tokens_per_s"] == pytest.approx(12 * 10 / 25)

    def summed(*caches: dict[str, object]) -> dict[str, object]:
        having = (
            replace(one, report=one.report | {"prefix_cache": cache}) for one, cache in zip(both, caches, strict=True)
        )
        return summarise_replicas(list(having))["prefix_cache"]

    assert summed(cached(2.0, 3), cached(1.5, 7, prompt_tokens=200)) == {
        "mode": "all",
        "prompt_tokens": 300,
        "cached_tokens": 60,
        "hit_rate": 0.2,
        "resumed_tokens": 10,
        "computed_prompt_tokens": 150,
        "evictions": 10,
        "idle_pages_most": 7,
        "saved_compute_s": 3.5,
    }
    assert summed(cached(2.0, 3), cached(None, 7))["saved_compute_s"] is None
