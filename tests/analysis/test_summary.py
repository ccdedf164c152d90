from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sarathi_pp.analysis.summary import Report, summarise
from sarathi_pp.core.cost.model import CostModel, StageCost
from sarathi_pp.errors import InputError, MissingError
from sarathi_pp.trace.events import (
    Compute,
    Cut,
    CutReason,
    Event,
    Issued,
    RequestArrived,
    RequestFinished,
    Returned,
    RowRefused,
    Totals,
    TraceEnd,
    encode,
)
from tests.analysis.schedules import Schedule, constant, start, table

SCHEDULE = Schedule(
    6, 2, compute=constant(0.5), issue=constant(0.25), transfer=constant(0.125), send_wait=constant(0.0625)
)
NULLS = {"mean": None, "p50": None, "p90": None, "p99": None}


def approximately(value: object) -> object:
    match value:
        case dict():
            return {key: approximately(member) for key, member in value.items()}
        case list():
            return [approximately(member) for member in value]
        case float():
            return pytest.approx(value)
    return value


def golden_stage(stage: int, **seconds: float) -> Report:
    states = dict.fromkeys(("compute_s", "recv_wait_s", "send_wait_s", "host_s", "no_work_s"), 0.0)
    return {
        "stage": stage,
        "host": "here",
        "layers": [4 * stage, 4 * stage + 4],
        **states,
        **seconds,
        "wall_s": 9.0,
        "bubble_ratio": 1 / 9,
        "bubble_ratio_steady": 0.0,
        "closing_error": 0.0,
        "cpu_ratio": 1.0,
        "cores_shared": False,
        "collective_s": None,
        "mask_s": None,
        "peak_rss_bytes": 1 << 30,
        "bytes_read": 1 << 20,
        "graph_hit_rate": None,
        # Busy for eight of nine seconds: 56 whole cells of 64, and 8/9 of the 57th, from the left or from the right.
        "busy_strip": [1.0] * 56 + [8 / 9] + [0.0] * 7 if stage == 0 else [0.0] * 7 + [8 / 9] + [1.0] * 56,
    }


# Eight microbatches of one second on two stages, each the prompt of a request with one output token. All arrived at 0,
# and request m is done at m + 2. Each issue sees 2 pages of 16 hold 24 tokens.
AT_ONCE = {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}
GOLDEN = {
    "schema": "sarathi-pp/report/1",
    "policy": "sarathi",
    "stages": 2,
    "chunk_size": 256,
    "layer_split": [4, 4],
    "inflight": 3,
    "device": "cpu",
    "started_unix_s": 1e9,
    "microbatches": 8,
    "wall_s": 9.0,
    "requests": 8,
    "completed": 8,
    "failed": 0,
    "prompt_tokens": 80,
    "output_tokens": 8,
    "total_tokens_per_s": 88 / 9,
    "output_tokens_per_s": 8 / 9,
    "computed_tokens_per_s": 80 / 9,
    "chunk_throughput": 8 / 9,
    "bubble_ratio": 1 / 9,
    "bubble_ratio_steady": 0.0,
    "overlap": 1.0,
    "per_stage": [
        golden_stage(0, compute_s=8.0, no_work_s=1.0),
        golden_stage(1, compute_s=8.0, recv_wait_s=1.0),
    ],
    "links": [
        {"stages": [0, 1], "hosts": ["here", "here"], "between_hosts": False, "transfer_s": AT_ONCE},
        {"stages": [1, 0], "hosts": ["here", "here"], "between_hosts": False, "transfer_s": AT_ONCE},
    ],
    "causes": None,
    "cost_error": None,
    "request_bubble_s": {"p50": 0.0, "p90": 0.0, "p99": 0.0},
    "ttft_s": {"mean": 5.5, "p50": 5.5, "p90": 8.3, "p99": 8.93},
    "tpot_s": NULLS,
    "itl_s": NULLS,
    "e2el_s": {"mean": 5.5, "p50": 5.5, "p90": 8.3, "p99": 8.93},
    "microbatch_time_cv": 0.0,
    "microbatch_tokens_cv": 0.0,
    "kv": {"pages": 100, "page_size": 16, "peak_used": 2, "mean_used": 2.0, "fragmentation": 0.25},
    "prefix_cache": None,
    "preemptions": 0,
    "clock_uncertainty_s": 0.0,
    "closing_error": 0.0,
    "notes": [],
}


def test_golden_report() -> None:
    report = summarise(Schedule(8, 2, constant(1.0)).events())
    assert list(report) == list(GOLDEN)
    assert report == approximately(GOLDEN)


@dataclass
class Fitted:
    model: CostModel
    error: float


def test_with_a_cost_model_the_bubble_has_causes() -> None:
    model = CostModel(1, tuple(StageCost((stage, stage + 1), 1.0, 0.0, 0.0, 0.0, 0.0) for stage in range(2)))
    report = summarise(Schedule(8, 2, constant(1.0)).events(), fit=Fitted(model, 0.125))
    assert report["cost_error"] == 0.125
    assert report["causes"].pop("ramp_s") == pytest.approx(2.0)
    assert list(report["causes"].values()) == pytest.approx([0.0] * 8)


def test_a_run_too_short_to_fit_has_no_causes() -> None:
    report = summarise(Schedule(8, 2, constant(1.0)).events(), fit="too short")
    assert report["causes"] is None and report["cost_error"] is None
    assert report["notes"] == [
        "the run has too few microbatches to fit a cost model: no causes and no advice about time; run more requests"
    ]
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_files_and_events_give_the_same_report_in_any_order(tmp_path: Path) -> None:
    traces = Schedule(8, 3, constant(0.125)).events()
    paths = []
    for number, trace in enumerate(traces):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(encode(event) + "\n" for event in trace) + '{"e":"torn')
        paths.append(path)
    assert summarise(paths[::-1]) == summarise(traces)


def test_facts_are_added_and_win() -> None:
    report = summarise(Schedule(8, 2, constant(1.0)).events(), {"model": "m", "policy": "sarathi:even=1"})
    assert (report["model"], report["policy"], report["stages"]) == ("m", "sarathi:even=1", 2)


def test_run_without_a_result_is_null_not_an_error() -> None:
    report = summarise([[start(0, 2)], [start(1, 2)]])
    assert (report["wall_s"], report["microbatches"], report["requests"]) == (0, 0, 0)
    for key in ("total_tokens_per_s", "bubble_ratio", "bubble_ratio_steady", "microbatch_time_cv"):
        assert report[key] is None
    assert report["kv"] == {"pages": 100, "page_size": 16, "peak_used": 0, "mean_used": None, "fragmentation": None}
    assert report["request_bubble_s"] == {"p50": None, "p90": None, "p99": None}
    assert report["per_stage"][0]["peak_rss_bytes"] is None


def test_one_microbatch() -> None:
    report = summarise(Schedule(1, 4, constant(1.0)).events())
    assert report["bubble_ratio"] == 0.75
    assert report["bubble_ratio_steady"] is report["microbatch_tokens_cv"] is None


def test_failures_count_and_their_tokens_do_not() -> None:
    events: list[Event] = [
        start(0, 1),
        RequestArrived(0, 0.0, 10),
        RequestArrived(1, 0.0, 20),
        RequestArrived(2, 0.0, 40),
        RowRefused(0.0, "invalid_json"),
        Issued(0, 0.0, "m0[s0:0+10 s1:0+20]", 30, 0, 0, 0.0, 2, 30),
        Compute(0, 0.0, 0.0, 0.0, 2.0),
        Returned(0, 2.0),
        RequestFinished(0, 0.0, 0.0, 2.0, 2.0, 10, 1, "length", preemptions=2),
        RequestFinished(1, 0.0, 0.0, None, 2.0, 20, 0, "error", preemptions=1),
    ]
    report = summarise([events])
    assert (report["requests"], report["completed"], report["failed"]) == (4, 1, 2)
    assert (report["prompt_tokens"], report["output_tokens"], report["preemptions"]) == (10, 1, 3)
    assert report["total_tokens_per_s"] == 5.5
    assert report["chunk_throughput"] == 1.0


def test_variation_is_of_the_slowest_stage_in_the_steady_window() -> None:
    """Stage 1 alternates between 1 and 3 s: mean 2, deviation 1.

    The last microbatch runs alone. Its 99 s do not count, since fewer than two requests are left by then.
    """
    rows = [[0.5, 1.0 + 2.0 * (m % 2)] for m in range(20)] + [[0.5, 99.0]]
    traces = Schedule(21, 2, table(rows)).events()
    traces[0] = [
        replace(e, prefill_tokens=10 if e.microbatch % 2 else 30) if isinstance(e, Issued) else e for e in traces[0]
    ]
    report = summarise(traces)
    assert report["microbatch_time_cv"] == pytest.approx(0.5)
    assert report["microbatch_tokens_cv"] == pytest.approx(0.5)


def test_kv_use_and_fragmentation_are_time_means() -> None:
    events: list[Event] = [
        start(0, 1),
        Issued(0, 0.0, "m0[s0:0+8]", 8, 0, 0, 0.0, 1, 8),  # half of a page of 16 for 3 s
        Issued(1, 3.0, "m1[s0:8+8]", 8, 0, 0, 0.0, 2, 32),  # all of two for 1 s
        Compute(0, 0.0, 0.0, 0.0, 2.0),
        Compute(1, 3.0, 3.0, 3.0, 4.0),
        Returned(0, 2.0),
        Returned(1, 4.0),
    ]
    kv = summarise([events])["kv"]
    assert (kv["fragmentation"], kv["mean_used"], kv["peak_used"]) == (pytest.approx(0.375), pytest.approx(1.25), 2)
    cut_short = [*events[:4], *events[5:6]]  # as read during the run: the second has no result yet
    assert summarise([cut_short])["kv"]["mean_used"] == pytest.approx(1.0)


def test_notes_name_what_the_figures_do_not_show() -> None:
    report = summarise(Schedule(8, 2, constant(1.0), cpu_share=0.5).events(complete=False))
    assert report["per_stage"][1]["cores_shared"] is True
    assert report["notes"] == [
        "cores were shared (stage 0: 50%, stage 1: 50% CPU time in compute spans): the bubble is understated",
        "no end in the trace of stage 0, 1: the run goes on or was killed",
    ]
    overlapping = [Compute(0, 0.0, 0.0, 0.0, 6.0), Compute(1, 0.0, 0.0, 4.0, 10.0)]
    issued = Issued(0, 0.0, "m0[s0:0+1]", 1, 0, 0, 0.5, 1, 1)
    doubtful = summarise([[start(0, 1), issued, *overlapping, Returned(0, 10.0)]])
    assert doubtful["closing_error"] == pytest.approx(0.2)
    assert "states do not add up to the wall time (off by stage 0: 20%)" in doubtful["notes"][0]


TOTALS = Totals(
    microbatches=6,
    requests=6,
    completed=6,
    failed=0,
    prompt_tokens=60,
    output_tokens=6,
    first_issue_s=0.25,
    last_result_s=8.25,
)


@pytest.mark.parametrize("reason", ["size", "queue"])
def test_a_trace_that_was_cut_gives_the_figures_of_its_first_part(reason: CutReason) -> None:
    """Each rank cuts its own trace at any point. The sums of the whole run are kept with the figures."""
    whole = SCHEDULE.events(complete=False)
    for kept in itertools.product(*(range(1, len(trace) + 1) for trace in whole)):
        parts = [trace[:count] for trace, count in zip(whole, kept, strict=True)]
        last: tuple[list[Event], ...] = [TOTALS, TraceEnd(at_s=9.0)], [TraceEnd(at_s=9.0)]
        cut = [[*part, Cut(reason), *end] for part, end in zip(parts, last, strict=True)]
        killed, found = summarise(parts), summarise(cut)
        assert found.pop("whole_run") == {
            **{name: getattr(TOTALS, name) for name in ("microbatches", "requests", "completed", "failed")},
            **{"prompt_tokens": 60, "output_tokens": 6, "wall_s": 8.0},
            **{"total_tokens_per_s": 8.25, "output_tokens_per_s": 0.75},
        }
        (note,) = found.pop("notes")
        assert f"the first {found['microbatches']} of 6 microbatches; of the whole run 6 of 6 requests are ok" in note
        assert ("a trace has its largest size" in note) == (reason == "size")
        assert killed.pop("notes")
        assert found == killed


def test_where_nothing_was_cut_the_sums_are_not_shown() -> None:
    traces = SCHEDULE.events()
    traces[0].insert(-1, TOTALS)
    assert summarise(traces) == summarise(SCHEDULE.events())


def test_clock_uncertainty_is_the_worst() -> None:
    traces = Schedule(2, 2, constant(1.0)).events()
    traces[1][0] = start(1, 2, uncertainty_s=3e-4)
    assert summarise(traces)["clock_uncertainty_s"] == 3e-4


@pytest.mark.parametrize(
    ("traces", "message"),
    [
        ([], "no traces"),
        ([[]], "a trace is empty"),
        ([[Returned(0, 1.0)]], "must begin with the event start; this one begins with Returned"),
        ([[start(0, 2)]], r"of stages \[0\]; a report needs one per stage, 0 to 1"),
        ([[start(0, 10**15)]], "one per stage, 0 to 999999999999999"),
        ([[start(0, 2)], [start(0, 2)]], r"of stages \[0, 0\]"),
    ],
)
def test_traces_that_cannot_be_used(traces: list[list[Event]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        summarise(traces)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MissingError):
        summarise([tmp_path / "none.jsonl"])


def cached_run() -> list[Event]:
    """Return the trace of four requests. One finds 32 of its 40 tokens, and another 16 when it starts again."""
    return [
        replace(start(0, 1), prefix_cache="prompts"),
        *(RequestArrived(index, 0.0, 40) for index in range(4)),
        Issued(0, 0.0, "m0[s0:0+40]", 40, 0, 0, 800.0, 3, 40),
        Issued(1, 1.0, "m1[s1:32+8 | d s0:40]", 8, 1, 41, 288.0, 4, 49, idle_pages=7, cached_tokens=32),
        Issued(2, 2.0, "m2[s0.1:16+25]", 25, 0, 0, 712.5, 4, 49, idle_pages=5, resumed_tokens=16, evictions=3),
        Issued(3, 3.0, "m3[s2:32+8]", 8, 0, 0, 288.0, 4, 49, idle_pages=9, cached_tokens=32, evictions=4),
        *(Compute(m, float(m), float(m), float(m), m + 1.0) for m in range(3)),
        *(Returned(m, m + 1.0) for m in range(3)),
        RequestFinished(0, 0.0, 0.0, 1.0, 3.0, 40, 3, "length", preemptions=1),
        RequestFinished(1, 0.0, 1.0, 2.0, 2.0, 40, 1, "length", cached_tokens=32),
        RequestFinished(2, 0.0, 2.0, None, 2.0, 40, 0, "error", cached_tokens=32),
        RequestFinished(3, 0.0, None, None, 2.0, 40, 0, "length"),
    ]


def test_prefix_cache_figures_are_of_requests_that_ran_and_microbatches_with_results() -> None:
    """The microbatch without a result, the failed request and the one that never ran do not count."""
    report = summarise([cached_run()])
    assert report["prefix_cache"] == {
        "mode": "prompts",
        "prompt_tokens": 80,
        "cached_tokens": 32,
        "hit_rate": 0.4,
        "resumed_tokens": 16,
        "computed_prompt_tokens": 73,
        "evictions": 3,
        "idle_pages_most": 7,
        "saved_compute_s": None,
    }
    assert report["prompt_tokens"] == 120 and report["total_tokens_per_s"] == pytest.approx(124 / 3)
    assert report["computed_tokens_per_s"] == pytest.approx(74 / 3)


def test_computed_and_cached_tokens_add_up() -> None:
    """Request 0 knew 41 tokens when it started again. It found 16 of these, and 25 were computed."""
    cache = summarise([cached_run()])["prefix_cache"]
    again = 41 - cache["resumed_tokens"]
    assert cache["computed_prompt_tokens"] == cache["prompt_tokens"] - cache["cached_tokens"] + again


def test_the_compute_saved_is_that_of_the_tokens_found_on_all_stages() -> None:
    stages = tuple(StageCost((0, 1), 9.0, a1, a2, 9.0, 9.0) for a1, a2 in ((0.5, 0.25), (0.125, 0.0)))
    report = summarise([cached_run()], fit=Fitted(CostModel(4, stages[:1]), 0.0))
    assert report["prefix_cache"]["saved_compute_s"] == 0.5 * 32 / 4 + 0.25 * 32**2 / 2
    assert CostModel(4, stages).prefix_seconds(32) == (0.5 + 0.125) * 32 / 4 + 0.25 * 32**2 / 2
    assert CostModel(4, stages).prefix_seconds(0) == 0.0


def test_a_cache_that_no_request_has_used_has_no_hit_rate() -> None:
    cache = summarise([[replace(start(0, 1), prefix_cache="all")]])["prefix_cache"]
    assert (cache["mode"], cache["hit_rate"], cache["idle_pages_most"]) == ("all", None, 0)
