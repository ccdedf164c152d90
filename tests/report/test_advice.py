from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.report.advice import Advice, advise, advise_comparison
from sarathi_pp.report.remedies import even_split
from sarathi_pp.trace.summary import summarise
from tests.trace.schedules import Schedule, constant, start

CAUSES = dict.fromkeys(
    (
        "ramp_s",
        "prefill_variance_s",
        "prefill_decode_s",
        "decode_context_s",
        "stage_imbalance_s",
        "communication_s",
        "host_s",
        "starvation_s",
        "unexplained_s",
    ),
    0.0,
)


def waits(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(("full", "held", "no_arrivals", "no_kv", "tokens_in_flight"), 0.0) | seconds


def report(**changes: Any) -> dict[str, Any]:
    """A run of 100 s on two stages that needs no advice: 64 requests of 1000 and 100 tokens, 44.8 decodes at a time."""
    base: dict[str, Any] = {
        "policy": "sarathi",
        "stages": 2,
        "chunk_size": 256,
        "layer_split": [8, 8],
        "inflight": 2,
        "microbatches": 256,
        "wall_s": 100.0,
        "requests": 64,
        "completed": 64,
        "prompt_tokens": 64_000,
        "output_tokens": 6_400,
        "chunk_throughput": 2.56,
        "bubble_ratio": 0.1,
        "per_stage": [{"compute_s": 90.0, "no_work_s": 10.0}, {"compute_s": 90.0, "no_work_s": 0.0}],
        "causes": CAUSES,
        "issue_waits_s": waits(full=10.0),
        "issue_limited_s": 10.0,
        "ttft_s": {"mean": 10.0},
        "e2el_s": {"mean": 80.0},
        "itl_s": {"p50": 0.1},
        "kv": {"pages": 1000, "peak_used": 500, "fragmentation": 0.1, "page_size": 16},
        "preemptions": 0,
        "max_num_seqs": 128,
    }
    assert changes.keys() <= base.keys() | {"attention", "peak_running", "paced_until_s"}, changes
    return base | changes


def causes(**seconds: float) -> dict[str, float]:
    assert seconds.keys() <= CAUSES.keys()
    return CAUSES | seconds


def computed(*seconds: float) -> list[dict[str, float]]:
    return [{"compute_s": one, "no_work_s": 10.0} for one in seconds]


def given_by(rule: str, found: list[Advice]) -> Advice | None:
    return next((advice for advice in found if advice.rule == rule), None)


def only(found: list[Advice]) -> Advice:
    (advice,) = found
    return advice


def test_a_good_run_needs_no_advice() -> None:
    assert advise(report()) == []
    assert advise(report(causes=None, bubble_ratio=0.9)) == []


def test_a_run_without_a_result_gets_none() -> None:
    assert advise(summarise([[start(0, 1)]])) == []
    assert advise_comparison([summarise([[start(0, 1)]])] * 2) == []


def test_a_bubble_above_15_percent_is_named_with_its_cause_and_gain() -> None:
    seconds = causes(prefill_decode_s=20.0, host_s=4.0, unexplained_s=9.0)
    assert advise(report(bubble_ratio=0.15, causes=seconds)) == []
    advice = only(advise(report(bubble_ratio=0.16, causes=seconds)))
    assert advice == Advice(
        "bubble",
        "The bubble is 16.0%; 20.0 of its 32.0 stage seconds are prefills beside shorter decodes. --chunk-size 128 "
        "halves what a chunk costs, estimated to save at most 5.0 of 100.0 s (5%).",
        "--chunk-size 128",
        5.0,
    )


@pytest.mark.parametrize(
    ("cause", "settings", "option", "gain_s"),
    [
        ("prefill_variance_s", {"policy": "orca"}, "--policy sarathi", 10.0),
        ("prefill_variance_s", {"policy": "sarathi:even=1"}, "--chunk-size 128", 5.0),
        ("prefill_variance_s", {"chunk_size": 100}, "--chunk-size 64", 5.0),
        ("prefill_decode_s", {"policy": "orca"}, "--policy sarathi", 10.0),
        ("decode_context_s", {}, "--policy balanced", 10.0),
        ("decode_context_s", {"policy": "balanced", "max_num_seqs": 32}, "--max-num-seqs 64", 10 * (1 - 0.5**0.5)),
        ("stage_imbalance_s", {"per_stage": computed(90.0, 60.0)}, "--layer-split 6,10", 10.0),
        ("communication_s", {}, "--inflight 3", 10.0),
        ("communication_s", {"inflight": 4}, "--chunk-size 512", 5.0),
        ("host_s", {}, "--chunk-size 512", 5.0),
        ("ramp_s", {}, "--input", 5.0),
        ("ramp_s", {"inflight": 1}, "--inflight 2", 10.0),
    ],
)
def test_each_cause_has_its_option(cause: str, settings: dict[str, Any], option: str, gain_s: float) -> None:
    found = advise(report(bubble_ratio=0.2, causes=causes(**{cause: 20.0}), **settings))
    assert [advice.option for advice in found] == [option]
    assert found[0].gain_s == pytest.approx(gain_s)


@pytest.mark.parametrize(
    ("cause", "settings"),
    [
        ("prefill_decode_s", {"chunk_size": 16}),
        ("decode_context_s", {"policy": "balanced", "max_num_seqs": 64}),
        ("prefill_variance_s", {"policy": "balanced"}),
        ("host_s", {"policy": "balanced"}),
        ("stage_imbalance_s", {}),
        ("host_s", {"policy": "orca"}),
        ("ramp_s", {"stages": 1, "inflight": 1}),
    ],
)
def test_a_cause_that_no_option_changes_gives_way_to_the_next(cause: str, settings: dict[str, Any]) -> None:
    seconds = causes(**{cause: 20.0}, communication_s=8.0)
    advice = only(advise(report(bubble_ratio=0.2, causes=seconds, **settings)))
    assert (advice.rule, advice.option.split()[0]) == ("bubble", "--inflight")
    assert "8.0 of its" in advice.text
    assert advise(report(bubble_ratio=0.2, causes=causes(**{cause: 20.0}), **settings)) == []


def test_one_more_in_flight_helps_where_their_number_was_waited_for() -> None:
    slow = report(bubble_ratio=0.2, causes=causes(communication_s=20.0), policy="orca")
    both = {"issue_waits_s": waits(full=8.0, tokens_in_flight=3.0)}
    assert only(advise(slow | both | {"issue_limited_s": 6.0})).option == "--inflight 3"
    assert advise(slow | both | {"issue_limited_s": 5.0}) == []
    assert only(advise(slow | both | {"issue_limited_s": 5.0, "max_num_seqs": 20})).option == "--max-num-seqs 40"
    assert advise(slow | {"issue_waits_s": waits(), "issue_limited_s": 0.0}) == []
    assert advise({name: value for name, value in slow.items() if name != "issue_limited_s"}) == []


def test_more_seats_help_where_they_ran_out() -> None:
    starved = {"causes": causes(starvation_s=20.0), "max_num_seqs": 20}
    assert only(advise(report(**starved, peak_running=20))).option == "--max-num-seqs 40"
    assert only(advise(report(**starved, peak_running=19))).option == "--input"
    uneven = {"causes": causes(decode_context_s=20.0), "policy": "balanced", "max_num_seqs": 32, "bubble_ratio": 0.2}
    assert only(advise(report(**uneven, peak_running=32))).option == "--max-num-seqs 64"
    assert advise(report(**uneven, peak_running=31)) == []
    few = {"max_num_seqs": 16, "ttft_s": {"mean": 1.0}, "e2el_s": {"mean": 4.0}}
    assert given_by("few_sequences", advise(report(**few, peak_running=3))) is None, "they came one after the other"
    assert given_by("few_sequences", advise(report(**{**few, "max_num_seqs": 3}, peak_running=3))) is not None


def test_what_is_paced_by_its_arrivals_cannot_be_made_shorter() -> None:
    slow = report(bubble_ratio=0.4, causes=causes(starvation_s=40.0, communication_s=30.0))
    assert [advice.gain_s for advice in advise(slow)] == [15.0, 10.0]
    assert [advice.gain_s for advice in advise(slow | {"paced_until_s": 92.0})] == [8.0, 4.0]
    assert advise(slow | {"paced_until_s": 99.5}) == []


def test_larger_chunks_help_where_prompts_fill_the_chunks_there_are() -> None:
    busy = report(bubble_ratio=0.2, causes=causes(host_s=20.0))
    assert only(advise(busy | {"microbatches": 512})).gain_s == pytest.approx(2.5)  # half of them hold no prompt
    assert only(advise(busy | {"prompt_tokens": 46_000})).option == "--chunk-size 512"
    assert advise(busy | {"prompt_tokens": 45_000}) == []  # 176 in chunks of 256


def test_the_seconds_of_a_short_run_are_told_to_the_hundredth() -> None:
    short = report(bubble_ratio=0.2, causes=causes(communication_s=0.1), wall_s=1.8)
    assert "save at most 0.05 of 1.80 s (3%)" in only(advise(short)).text


def test_the_causes_of_a_bubble_come_by_gain() -> None:
    seconds = causes(ramp_s=30.0, prefill_decode_s=40.0, communication_s=18.0, starvation_s=9.0, host_s=50.0)
    found = advise(report(bubble_ratio=0.8, causes=seconds, policy="orca"))
    assert [(advice.option, advice.gain_s) for advice in found] == [
        ("--policy sarathi", 20.0),
        ("--inflight 3", 9.0),
        ("--input", 7.5),
    ]


def test_a_cause_that_shortens_the_bubble_is_no_cause() -> None:
    assert advise(report(bubble_ratio=0.5, causes={name: -5.0 for name in CAUSES})) == []


def test_starvation_above_5_percent() -> None:
    assert advise(report(causes=causes(starvation_s=10.0))) == []
    advice = only(advise(report(causes=causes(starvation_s=12.0))))
    assert (advice.rule, advice.option, advice.gain_s) == ("starvation", "--input", 3.0)
    assert "idle for 6.0 s on average" in advice.text


@pytest.mark.parametrize(
    ("settings", "option", "gain_s"),
    [
        ({"preemptions": 1}, "--kv-cache-memory", 10.0),
        ({"kv": {"pages": 1000, "peak_used": 950, "fragmentation": None}}, "--kv-cache-memory", 10.0),
        ({"kv": {"pages": 1000, "peak_used": 949, "fragmentation": None}, "max_num_seqs": 63}, "--max-num-seqs 64", 10),
        ({"max_num_seqs": 20}, "--max-num-seqs 40", 10.0),
        ({"max_num_seqs": None}, "--input", 5.0),
        ({"requests": 1}, "--input", 5.0),
    ],
)
def test_starvation_is_cured_by_what_ran_out(settings: dict[str, Any], option: str, gain_s: float) -> None:
    advice = given_by("starvation", advise(report(causes=causes(starvation_s=20.0), **settings)))
    assert advice is not None and (advice.option, advice.gain_s) == (option, gain_s)


def test_fewer_decodes_than_stages() -> None:
    """64 requests that decode for 3.125 s each are 2 at a time."""
    assert advise(report(causes=None, e2el_s={"mean": 13.125})) == []
    advice = only(advise(report(causes=None, e2el_s={"mean": 13.0})))
    assert (advice.rule, advice.option, advice.gain_s) == ("few_decodes", "--input", 5.0)
    assert advice.text.startswith("On average 1.9 sequences were decoding, and 2 stages need at least 2.")
    assert advise(report(causes=None, e2el_s={"mean": 11.0}, stages=1)) == []


def test_few_decodes_cost_no_more_than_starvation_did() -> None:
    few = {"e2el_s": {"mean": 13.0}, "preemptions": 1}
    assert advise(report(causes=causes(starvation_s=1.9), **few)) == []
    assert only(advise(report(causes=causes(starvation_s=2.0), **few))).gain_s == 1.0


def test_more_stages_than_requests_are_stages_to_spare() -> None:
    settings = {"stages": 4, "requests": 2, "completed": 2, "prompt_tokens": 2000, "chunk_throughput": 0.08}
    advice = only(advise(report(causes=None, **settings)))
    assert (advice.rule, advice.option, advice.gain_s) == ("few_decodes", "--stages 2", None)
    assert "on 2 fewer" in advice.text
    busy = [{"compute_s": 90.0, "no_work_s": 0.9}] * 2
    assert advise(report(causes=None, per_stage=busy, **settings)) == []


def test_one_slow_stage_is_evened_out() -> None:
    advice = only(advise(report(causes=None, per_stage=computed(90.0, 60.0))))
    assert (advice.rule, advice.option, advice.gain_s) == ("slow_stage", "--layer-split 6,10", 15.0)
    assert "Stage 0 computed for 90.0 s, the mean stage for 75.0 s." in advice.text
    assert "brings the slowest stage to 75.0 s" in advice.text


def test_a_split_is_worth_no_more_than_the_imbalance_cost() -> None:
    slow = computed(90.0, 60.0)
    assert advise(report(per_stage=slow, causes=causes(stage_imbalance_s=1.9))) == []
    assert only(advise(report(per_stage=slow, causes=causes(stage_imbalance_s=2.0)))).gain_s == 1.0
    # Of 8 layers none is small enough to move: 9 of the quicker kind would be slower than 8 of the others.
    assert advise(report(causes=None, per_stage=computed(90.0, 81.0))) == []


def test_a_recorded_run_with_a_slow_stage() -> None:
    found = summarise(Schedule(40, 4, lambda m, stage: 2.0 if stage == 1 else 1.0).events())
    advice = given_by("slow_stage", advise(found))
    assert advice is not None and advice.option == "--layer-split 5,2,5,4"
    assert advice.gain_s == pytest.approx(40 * (2.0 - 1.25))
    assert given_by("slow_stage", advise(summarise(Schedule(40, 4, constant(1.0)).events()))) is None


def test_the_head_stays_where_it_is() -> None:
    """A last stage with 8 layers of 1 s and a head of 8 s: layers move until both take 12 s."""
    assert even_split([8, 8], [8.0, 16.0]) == ([12, 4], 12.0)
    assert even_split([1, 1], [1.0, 9.0]) is None


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20)), min_size=2, max_size=4))
def test_no_other_split_is_faster(stages: list[tuple[int, int]]) -> None:
    """Against every composition, for a last stage that is not the dearest a layer."""
    split = [layers for layers, _ in stages]
    per_layer_s = [float(seconds) for _, seconds in stages]
    per_layer_s[-1] = min(per_layer_s)
    computed_s = [layers * seconds for layers, seconds in zip(split, per_layer_s, strict=True)]
    most = sum(split) - len(split) + 1
    fastest_s = min(
        max(layers * seconds for layers, seconds in zip(one, per_layer_s, strict=True))
        for one in product(range(1, most + 1), repeat=len(split))
        if sum(one) == sum(split)
    )
    found = even_split(split, computed_s)
    assert (found is None) == (fastest_s >= max(computed_s))
    if found is not None:
        layers, slowest_s = found
        assert (sum(layers), min(layers) >= 1) == (sum(split), True)
        assert slowest_s == pytest.approx(fastest_s)


def test_fewer_than_four_sequences_at_once() -> None:
    """They decode for 4480 s in all, three at a time for more than the whole run, which bounds the estimate."""
    assert advise(report(max_num_seqs=4)) == []
    advice = only(advise(report(max_num_seqs=3)))
    assert (advice.rule, advice.option, advice.gain_s) == ("few_sequences", "--max-num-seqs 8", 100 * (1 - 3 / 8))
    short = report(max_num_seqs=3, e2el_s={"mean": 10.75}, per_stage=[{"compute_s": 99.0, "no_work_s": 0.0}] * 2)
    assert only(advise(short)).gain_s == pytest.approx(16 * (1 - 3 / 8))


@pytest.mark.parametrize("full", [{"preemptions": 1}, {"kv": {"pages": 100, "peak_used": 95, "fragmentation": 0.1}}])
def test_fewer_than_four_sequences_in_the_pages(full: dict[str, Any]) -> None:
    """64 requests decode for 5 s each, 3.2 at a time on average, in seats for 128."""
    few = report(e2el_s={"mean": 15.0})
    assert advise(few) == []
    advice = only(advise(few | full))
    assert (advice.rule, advice.option, advice.gain_s) == ("few_sequences", "--kv-cache-memory", 50.0)
    assert "with 3.2 sequences decoding at a time" in advice.text
    assert advise(report(e2el_s={"mean": 16.25}) | full) == [], "four at a time are enough"
    assert given_by("few_sequences", advise(report(e2el_s={"mean": 13.0}) | full)) is None, "fewer than stages"


FEW = {"stages": 1, "layer_split": [16], "per_stage": computed(90.0), "completed": 3, "prompt_tokens": 90_000}


def test_fewer_than_four_requests_on_one_stage_need_no_chunks() -> None:
    """352 chunks where 3 would do: 349 passes of 0.1 s at most."""
    few = report(requests=3, chunk_throughput=3.52, **FEW)
    advice = only(advise(few))
    assert (advice.rule, advice.option) == ("few_sequences", "--policy orca")
    assert advice.gain_s == pytest.approx(34.9)
    assert advise(few | {"requests": 4}) == []
    assert advise(few | {"policy": "orca"}) == []
    assert advise(few | {"chunk_throughput": 0.03}) == []
    assert advise(report(requests=3, completed=3, causes=causes(), prompt_tokens=90_000)) == []


def test_prompts_that_fit_into_a_chunk_are_cut_in_two() -> None:
    uneven = causes(prefill_variance_s=8.0, prefill_decode_s=4.0)
    assert advise(report(causes=uneven, prompt_tokens=64 * 257)) == []
    advice = only(advise(report(causes=uneven, prompt_tokens=64 * 256)))
    assert (advice.rule, advice.option, advice.gain_s) == ("short_prompts", "--chunk-size 128", 3.0)
    for policy in ("orca", "balanced"):  # neither fills chunks of a size that is given
        assert advise(report(causes=uneven, prompt_tokens=64 * 256, policy=policy)) == []
    assert advise(report(causes=uneven, prompt_tokens=64 * 16, chunk_size=16)) == []
    assert advise(report(causes=causes(prefill_decode_s=3.9), prompt_tokens=64 * 256)) == []


def one_request(**changes: Any) -> dict[str, Any]:
    """One prompt on one stage: its first token after 0.2 s in 4 chunks, then passes of 10 ms."""
    alone = {
        "wall_s": 1.2,
        "requests": 1,
        "completed": 1,
        "prompt_tokens": 1000,
        "chunk_throughput": 4 / 1.2,
        "stages": 1,
        "layer_split": [16],
        "per_stage": computed(1.0),
        "ttft_s": {"mean": 0.2},
        "e2el_s": {"mean": 1.2},
        "itl_s": {"p50": 0.01},
    }
    return report(**(alone | changes))


def test_a_single_request_that_waits_for_its_chunks_runs_whole() -> None:
    advice = only(advise(one_request()))
    assert (advice.rule, advice.option) == ("one_request", "--policy orca")
    assert advice.gain_s == pytest.approx(0.03)
    assert "less than 100 ms: 0.03 s sooner each" in advice.text
    assert given_by("one_request", advise(one_request(ttft_s={"mean": 0.1}))) is None
    assert given_by("one_request", advise(one_request(ttft_s={"mean": 0.11}))) is not None
    assert advise(one_request(chunk_throughput=1 / 1.2)) == []
    assert advise(one_request(policy="orca")) == []


def test_chunks_that_fill_several_stages_are_kept() -> None:
    """4 chunks take 5 steps on 2 stages; whole, the prompt takes 8, so that passes must cost most of a step."""
    two = {"stages": 2, "layer_split": [8, 8], "per_stage": [{"compute_s": 1.0, "no_work_s": 0.0}] * 2}
    assert given_by("one_request", advise(one_request(itl_s={"p50": 0.039}, **two))) is None
    advice = given_by("one_request", advise(one_request(itl_s={"p50": 0.05}, **two)))
    assert advice is not None and advice.gain_s == pytest.approx(0.2 - (0.2 * 8 / 5 - 3 * 0.05))


def test_requests_that_run_one_by_one_are_timed_without_their_queue() -> None:
    """Ten that arrived at once and took 0.2 s and ten tokens each: the mean first token waited for five others."""
    queued = one_request(
        wall_s=3.0,
        requests=10,
        completed=10,
        max_num_seqs=1,
        chunk_throughput=40 / 3.0,
        ttft_s={"mean": 1.55},
        e2el_s={"mean": 1.65},
    )
    advice = given_by("one_request", advise(queued))
    assert advice is not None and "took 0.20 s in 4.0 chunks" in advice.text
    assert advice.gain_s == pytest.approx(10 * 0.03)
    assert given_by("one_request", advise(queued | {"max_num_seqs": 2})) is None


def kv(fragmentation: float | None, **page_size: int) -> dict[str, Any]:
    return {"pages": 1000, "peak_used": 500, "fragmentation": fragmentation, **page_size}


def test_fragmentation_above_30_percent() -> None:
    assert advise(report(kv=kv(0.30, page_size=16))) == []
    assert only(advise(report(kv=kv(0.31, page_size=16)))).rule == "kv_fragmentation"
    assert advise(report(kv=kv(None, page_size=16))) == []
    assert advise(report(kv=kv(0.4, page_size=1))) == []
    advice = only(advise(report(kv=kv(0.4, page_size=16))))
    assert (advice.rule, advice.option, advice.gain_s) == ("kv_fragmentation", "--page-size 8", None)
    assert "free 20% of what is held, room for 25% more sequences" in advice.text
    assert only(advise(report(kv=kv(0.4)))).option == "--page-size"


def test_flash_pages_cannot_be_smaller_so_another_backend_is_named() -> None:
    flash = report(kv=kv(0.4, page_size=256), attention="flash")
    assert only(advise(flash)).option == "--attention sdpa --page-size 16"
    assert only(advise(flash | {"attention": "sdpa"})).option == "--page-size 128"


def test_the_best_three_with_one_for_an_option() -> None:
    seconds = causes(starvation_s=30.0, stage_imbalance_s=40.0, host_s=8.0)
    many = report(
        bubble_ratio=0.4,
        causes=seconds,
        per_stage=computed(90.0, 60.0),
        max_num_seqs=3,
        kv=kv(0.5, page_size=16),
        preemptions=1,
    )
    found = advise(many)
    assert [(advice.rule, advice.option.split()[0]) for advice in found] == [
        ("few_sequences", "--max-num-seqs"),
        ("slow_stage", "--layer-split"),
        ("starvation", "--kv-cache-memory"),
    ]
    assert [advice.gain_s for advice in found] == [62.5, 15.0, 15.0]


def test_an_option_is_not_advised_in_two_directions() -> None:
    seconds = causes(host_s=20.0, prefill_variance_s=12.0)
    short = {"prompt_tokens": 64 * 256, "chunk_throughput": 0.64, "microbatches": 64}
    found = advise(report(bubble_ratio=0.2, causes=seconds, **short))
    assert [(advice.rule, advice.option, advice.gain_s) for advice in found] == [("bubble", "--chunk-size 512", 5.0)]


def grown(inflight: float, chunks_per_s: float, **changes: Any) -> dict[str, Any]:
    return report(e2el_s={"mean": inflight * 100 / 64}, chunk_throughput=chunks_per_s, **changes)


def test_chunk_throughput_that_stays_while_requests_in_flight_grow() -> None:
    fewer, more = grown(20, 2.0), grown(40, 2.1)
    for pair in ([fewer, more], [more, fewer]):
        advice = only(advise_comparison(pair))
        assert (advice.rule, advice.option, advice.gain_s) == ("flat_chunks", "--chunk-size 512", None)
        assert "from 20 to 40" in advice.text and "at most 1,280 prompt tokens/s instead of 640" in advice.text
    assert advise_comparison([fewer, grown(40, 2.11)]) == []
    assert advise_comparison([fewer, grown(29.9, 2.0)]) == []
    assert len(advise_comparison([fewer, grown(30, 2.0)])) == 1
    assert advise_comparison([fewer]) == []


def test_only_like_runs_with_chunks_are_compared() -> None:
    fewer = grown(20, 2.0)
    for other in ({"chunk_size": 512}, {"stages": 4}, {"policy": "sarathi:even=1"}):
        assert advise_comparison([fewer, grown(40, 2.0, **other)]) == []
    for policy in ("orca", "balanced"):
        assert advise_comparison([fewer | {"policy": policy}, grown(40, 2.0, policy=policy)]) == []
    assert advise_comparison([fewer | {"max_num_seqs": 20}, grown(64, 2.0, max_num_seqs=20)]) == []
