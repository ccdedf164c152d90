from __future__ import annotations

from functools import partial
from itertools import product
from operator import mul
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sarathi_pp.analysis.summary import summarise
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.report.advice import Advice, ComparedRun, advise, advise_comparison
from sarathi_pp.sim.rerun import Change
from tests.analysis.schedules import start

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

# Keys of a run whose layers keep states.
STATES = ("state_bytes_per_sequence", "state_pages_per_sequence")


def report(**changes: Any) -> dict[str, Any]:
    """Make a run of 100 s on two stages in which no rule applies: 64 requests of 1000 and 100 tokens."""
    base: dict[str, Any] = {
        "policy": "sarathi",
        "stages": 2,
        "device": "cpu",
        "chunk_size": 256,
        "layer_split": [8, 8],
        "inflight": 2,
        "wall_s": 100.0,
        "requests": 64,
        "completed": 64,
        "prompt_tokens": 64_000,
        "output_tokens": 6_400,
        "chunk_throughput": 2.56,
        "bubble_ratio": 0.1,
        "per_stage": [{"compute_s": 90.0}, {"compute_s": 90.0}],
        "causes": CAUSES,
        "ttft_s": {"mean": 10.0},
        "e2el_s": {"mean": 80.0},
        "itl_s": {"mean": 0.7},
        "kv": {"pages": 1000, "peak_used": 500, "fragmentation": 0.1, "page_size": 16},
        "preemptions": 0,
        "max_num_seqs": 128,
        "max_model_len": 2000,
        "kv_cache_bytes": 2**30,
    }
    more = {"attention", "model", "dtype", "kv_cache_dtype", "prefix_cache", "max_pages", *STATES}
    assert changes.keys() <= base.keys() | more, changes
    return base | changes


def causes(**seconds: float) -> dict[str, float]:
    assert seconds.keys() <= CAUSES.keys()
    return CAUSES | seconds


def kv(fragmentation: float | None, page_size: int = 16, peak: int = 500) -> dict[str, Any]:
    return {"pages": 1000, "peak_used": peak, "fragmentation": fragmentation, "page_size": page_size}


def computed(*seconds: float) -> list[dict[str, float]]:
    return [{"compute_s": one} for one in seconds]


class Simulator:
    """A simulator that returns a preset answer for each change, else `share`, and records its calls."""

    def __init__(
        self, told: dict[Change, float] | None = None, share: float = 0.05, first: dict[Change, float] | None = None
    ) -> None:
        self.told, self.first, self.share = told or {}, first or {}, share
        self.tried: list[Change] = []

    def saved(self, change: Change) -> float:
        self.tried.append(change)
        return self.told.get(change, self.share)

    def sooner(self, change: Change) -> float:
        self.tried.append(change)
        return self.first.get(change, 0.0)


def tried(found: dict[str, Any]) -> set[Change]:
    """Return the changes that are tried after a run."""
    simulator = Simulator()
    advise(found, simulator)
    return set(simulator.tried)


def given_by(rule: str, found: dict[str, Any], told: dict[Change, float] | None = None) -> Advice | None:
    """Return the advice of that rule. Only the changes in `told` save time, or all of them if it is None."""
    simulator = Simulator(told, 0.0 if told else 0.05)
    return next((advice for advice in advise(found, simulator) if advice.rule == rule), None)


def only(found: list[Advice]) -> Advice:
    (advice,) = found
    return advice


INPUT = Change(times=2)
BALANCED, ORCA = (Change(policy=parse_policy(policy)) for policy in ("balanced", "orca"))
SARATHI = Change(policy=parse_policy("sarathi"), chunk_size=256)


def test_a_good_run_needs_no_advice() -> None:
    assert tried(report()) == set()
    assert tried(report(causes=None, bubble_ratio=0.9)) == set()
    assert advise(report(), Simulator()) == []


def test_a_run_without_a_result_gets_none() -> None:
    empty = summarise([[start(0, 1)]])
    assert advise(empty, Simulator()) == []
    assert advise_comparison([ComparedRun("a", empty, Simulator)] * 2) == []


def test_nothing_is_said_of_time_that_nobody_can_simulate() -> None:
    slow = report(bubble_ratio=0.5, causes=causes(starvation_s=90.0), kv=kv(0.4), preemptions=1)
    assert only(advise(slow)).rule == "kv_fragmentation"


def test_without_a_trial_the_first_remedy_against_the_largest_cause_is_a_guess() -> None:
    seconds = causes(prefill_decode_s=20.0, host_s=3.9, unexplained_s=30.0)
    advice = only(advise(report(bubble_ratio=0.16, causes=seconds), untried="the simulator has a cold"))
    assert (advice.rule, advice.option, advice.gain_s) == ("untested", "--chunk-size 128", None)
    assert advice.text.endswith("Not tried: the simulator has a cold.") and "20.0 of these seconds" in advice.text
    assert advise(report(bubble_ratio=0.15, causes=seconds), untried="it has a cold") == []
    bound = report(bubble_ratio=0.16, causes=seconds, policy="balanced:tbt_slo=0.1")
    assert advise(bound, untried="it has a cold") == []


def test_a_bubble_above_15_percent_is_named_with_its_cause_and_gain() -> None:
    seconds = causes(prefill_decode_s=20.0, host_s=3.9, unexplained_s=9.0)
    assert tried(report(bubble_ratio=0.15, causes=seconds)) == set()
    told = {Change(chunk_size=128): 0.07, BALANCED: 0.06}
    advice = only(advise(report(bubble_ratio=0.16, causes=seconds), Simulator(told, 0.0)))
    assert advice == Advice(
        "bubble",
        "The bubble is 16.0%: 32.0 idle stage seconds. 20.0 of these seconds are prefill decode (microbatches with and "
        "without prompt chunks follow each other). Use --chunk-size 128: it makes microbatches smaller. In the "
        "simulator this saves 7.0 of 100.0 s (7%).",
        "--chunk-size 128",
        pytest.approx(7.0),
    )


FEW_SEATS = {"max_num_seqs": 20}
MORE_SEATS = Change(max_num_seqs=40)
MORE_PAGES = Change(num_pages=2000)
LARGER, SMALLER = Change(chunk_size=512), Change(chunk_size=128)


@pytest.mark.parametrize(
    ("cause", "settings", "expected"),
    [
        ("prefill_variance_s", {}, {SMALLER, BALANCED}),
        ("prefill_variance_s", {"policy": "orca"}, {SARATHI, BALANCED}),
        ("prefill_variance_s", {"policy": "sarathi:even=1"}, {SMALLER, BALANCED}),
        ("prefill_variance_s", {"chunk_size": 100}, {Change(chunk_size=64), BALANCED}),
        ("prefill_variance_s", {"policy": "balanced"}, set()),
        ("prefill_decode_s", {"policy": "orca"}, {SARATHI, BALANCED}),
        ("prefill_decode_s", {"chunk_size": 16}, {BALANCED}),
        ("decode_context_s", FEW_SEATS, {BALANCED, MORE_SEATS}),
        ("decode_context_s", {"policy": "balanced"}, set()),
        ("communication_s", FEW_SEATS, {Change(inflight=3), MORE_SEATS, LARGER}),
        ("communication_s", {"inflight": 4}, {LARGER}),
        ("host_s", {}, {LARGER}),
        ("host_s", {"policy": "orca"}, set()),
        ("host_s", {"policy": "balanced"}, set()),
        ("ramp_s", {}, {INPUT}),
        ("ramp_s", {"inflight": 1}, {Change(inflight=2), INPUT}),
        ("ramp_s", {"stages": 1, "inflight": 1, "layer_split": [16], "per_stage": computed(90.0)}, set()),
        ("starvation_s", {"preemptions": 1, **FEW_SEATS}, {MORE_PAGES, MORE_SEATS, INPUT}),
        ("unexplained_s", {}, set()),
    ],
)
def test_each_cause_has_what_may_help(cause: str, settings: dict[str, Any], expected: set[Change]) -> None:
    assert tried(report(bubble_ratio=0.2, causes=causes(**{cause: 20.0}), **settings)) == expected


def test_stages_of_unequal_speed_are_cut_anew() -> None:
    slow = report(bubble_ratio=0.2, causes=causes(stage_imbalance_s=20.0), per_stage=computed(90.0, 60.0))
    assert tried(slow) == {Change(layers=(6, 10))}


def test_a_cause_of_less_than_3_percent_of_the_run_is_let_be() -> None:
    assert tried(report(bubble_ratio=0.2, causes=causes(host_s=5.9))) == set()
    assert tried(report(bubble_ratio=0.2, causes=causes(host_s=6.0))) == {LARGER}
    assert tried(report(bubble_ratio=0.5, causes={name: -5.0 for name in CAUSES})) == set()


def test_what_saves_less_than_3_percent_is_not_said() -> None:
    busy = report(bubble_ratio=0.2, causes=causes(host_s=20.0))
    assert advise(busy, Simulator({LARGER: 0.029})) == []
    assert advise(busy, Simulator({LARGER: -0.3})) == []
    assert only(advise(busy, Simulator({LARGER: 0.03}))).gain_s == pytest.approx(3.0)


def test_of_what_may_help_the_best_is_said() -> None:
    slow = report(bubble_ratio=0.2, causes=causes(communication_s=20.0), **FEW_SEATS)
    for best in (Change(inflight=3), MORE_SEATS, LARGER):
        advice = only(advise(slow, Simulator({best: 0.06})))
        assert advice.gain_s == pytest.approx(6.0)
        assert advice.option.split()[1] in map(str, (best.inflight, best.max_num_seqs, best.chunk_size))


def test_a_cause_that_no_option_changes_gives_way_to_the_next() -> None:
    seconds = causes(host_s=20.0, communication_s=8.0)
    advice = given_by("bubble", report(bubble_ratio=0.2, causes=seconds, policy="orca"))
    assert advice is not None and (advice.option, "8.0 of these seconds are communication" in advice.text) == (
        "--inflight 3",
        True,
    )


def test_the_seconds_of_a_short_run_are_told_to_the_hundredth() -> None:
    short = report(bubble_ratio=0.2, causes=causes(host_s=0.12), wall_s=1.8)
    assert "saves 0.09 of 1.80 s (5%)" in only(advise(short, Simulator())).text


def test_twice_the_work_saves_of_every_so_many_seconds() -> None:
    ramp = report(bubble_ratio=0.2, causes=causes(ramp_s=20.0))
    assert "keep the stages busy for longer. In the simulator this saves 5.0 of every 100.0 s" in (
        only(advise(ramp, Simulator())).text
    )


def test_starvation_above_5_percent() -> None:
    assert tried(report(causes=causes(starvation_s=10.0))) == set()
    advice = given_by("starvation", report(causes=causes(starvation_s=12.0)))
    assert advice is not None and advice.option == "--input"
    assert "idle for 6.0 s on average" in advice.text


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"preemptions": 1}, {MORE_PAGES, INPUT}),
        ({"kv": kv(None, peak=950)}, {MORE_PAGES, INPUT}),
        ({"kv": kv(None, peak=949)}, {INPUT}),
        ({"kv": kv(None, peak=950), "max_model_len": 125 * 16 // 2}, {MORE_PAGES, INPUT}),
        ({"kv": kv(None, peak=950), "max_model_len": 7 * 16}, {INPUT}),  # all that 128 seats can use
        ({"kv": kv(None, peak=950), "max_model_len": None}, {INPUT}),
        ({"preemptions": 1, "kv_cache_bytes": None}, {INPUT}),  # emulated
        ({"preemptions": 1, "device": "cuda"}, {INPUT}),
        ({"max_num_seqs": 63}, {Change(max_num_seqs=64), INPUT}),
        ({"max_num_seqs": 20}, {MORE_SEATS, INPUT}),
        ({"max_num_seqs": 64}, {INPUT}),
        ({"max_num_seqs": None}, {INPUT}),
    ],
)
def test_starvation_is_cured_by_what_ran_out(settings: dict[str, Any], expected: set[Change]) -> None:
    assert tried(report(causes=causes(starvation_s=20.0), **settings)) == expected


def test_fewer_decodes_than_stages() -> None:
    """6,336 later tokens, of which 1.9 are in progress at a time."""
    few = {"itl_s": {"mean": 190 / 6336}}
    assert given_by("few_decodes", report(itl_s={"mean": 200.01 / 6336})) is None
    advice = given_by("few_decodes", report(**few))
    assert advice is not None and advice.option == "--input"
    assert advice.text.startswith("On average 1.9 sequences were decoding, fewer than the 2 stages that they pass.")
    assert tried(report(stages=1, layer_split=[16], per_stage=computed(90.0), **few)) == set()
    assert tried(report(itl_s={"mean": None})) == set()
    assert tried(report(output_tokens=60, **few)) == set(), "no request had a second token"


def test_more_stages_than_requests_are_stages_to_spare() -> None:
    split = {"layer_split": [4, 4, 4, 4], "per_stage": computed(9.0, 9.0, 9.0, 9.0)}
    few = report(stages=4, requests=2, completed=2, output_tokens=200, chunk_throughput=0.08, **split)
    fewer = Change(layers=(8, 8))
    advice = given_by("few_decodes", few, {fewer: -0.04})
    assert advice is not None and (advice.option, advice.gain_s) == ("--stages 2", None)
    assert (
        "Use --stages 2: in the simulator the run takes 4% more time, with 2 fewer devices, "
        "if the remaining ones can hold the model." in advice.text
    )
    advice = given_by("few_decodes", few, {fewer: 0.01})
    assert advice is not None and "takes 1% less time, with 2 fewer devices" in advice.text and advice.gain_s is None
    advice = given_by("few_decodes", few, {fewer: 0.05})
    assert advice is not None and "takes 5% less time" in advice.text and advice.gain_s == pytest.approx(5.0)
    advice = given_by("few_decodes", few, {fewer: -0.004})
    assert advice is not None and "the run takes the same time, with 2 fewer devices" in advice.text
    assert given_by("few_decodes", few, {fewer: -0.16}) is None
    assert fewer not in tried(few | {"completed": 4}) | tried(few | {"completed": 1})


def test_one_slow_stage_is_evened_out() -> None:
    slow = report(causes=None, per_stage=computed(90.0, 60.0))
    advice = only(advise(slow, Simulator({Change(layers=(6, 10)): 0.12})))
    assert (advice.rule, advice.option, advice.gain_s) == ("slow_stage", "--layer-split 6,10", pytest.approx(12.0))
    assert "Stage 0 computed for 90.0 s, the mean stage 75.0 s." in advice.text
    assert (
        "Use --layer-split 6,10: it gives the stages more equal times. In the simulator this saves 12.0 of 100.0 s"
        in advice.text
    )
    # None of 8 layers is small enough to move: 9 of the faster kind would be slower than 8 of the others.
    assert tried(report(causes=None, per_stage=computed(90.0, 81.0))) == set()


def test_a_stage_four_times_as_slow_is_left_a_fifth_of_the_layers() -> None:
    """The 8 layers take 240 s against 60: 3 at 30 s against 13 at 7.5."""
    assert tried(report(causes=None, per_stage=computed(240.0, 60.0))) == {Change(layers=(3, 13))}


def splits_of(split: list[int], computed_s: list[float]) -> set[tuple[int, ...] | None]:
    uneven = report(causes=None, stages=len(split), layer_split=split, per_stage=computed(*computed_s))
    return {change.layers for change in tried(uneven)}


def test_what_the_last_stage_takes_longer_may_be_its_head_s_or_its_machine_s() -> None:
    """With 8 layers of 1 s and a head of 8 s, layers move until both take 12 s.

    With 8 layers of 2 s, until 11 and 10 s.
    """
    assert splits_of([8, 8], [8.0, 16.0]) == {(12, 4), (11, 5)}
    assert splits_of([1, 1], [1.0, 9.0]) == set()


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20)), min_size=2, max_size=4))
@example([(4, 7), (2, 10)])
def test_no_other_split_is_faster(stages: list[tuple[int, int]]) -> None:
    """The check is against every composition. The split for an expensive head may also be tried.

    In the example it is 3 layers each. It is faster only if 6 of the last stage's 20 s are its head's.
    """
    split = [layers for layers, _ in stages]
    per_layer_s = [float(seconds) for _, seconds in stages]
    computed_s = [layers * seconds for layers, seconds in zip(split, per_layer_s, strict=True)]
    most = sum(split) - len(split) + 1
    fastest_s = min(
        max(layers * seconds for layers, seconds in zip(one, per_layer_s, strict=True))
        for one in product(range(1, most + 1), repeat=len(split))
        if sum(one) == sum(split)
    )
    found = splits_of(split, computed_s)
    slowest_s = [max(map(mul, one, per_layer_s)) for one in found if one is not None]
    assert all(one is not None and (sum(one), min(one) >= 1) == (sum(split), True) for one in found)
    assert min([max(computed_s), *slowest_s]) == pytest.approx(fastest_s)


def test_fewer_than_four_sequences_at_once() -> None:
    assert tried(report(max_num_seqs=4)) == set()
    few = report(max_num_seqs=3)
    assert tried(few) == {Change(max_num_seqs=8), ORCA}
    assert tried(few | {"completed": 3}) == {ORCA}, "rows were refused"
    advice = given_by("few_sequences", few)
    assert advice is not None and advice.text.startswith("At most 3 sequences ran at once")
    assert tried(report(requests=4, completed=3)) == {ORCA}, "the fourth was refused"


@pytest.mark.parametrize("full", [{"preemptions": 1}, {"kv": kv(0.1, peak=950)}])
def test_fewer_than_four_sequences_in_the_pages(full: dict[str, Any]) -> None:
    """3.2 of them decode at a time, in seats for 128."""
    few = report(itl_s={"mean": 320 / 6336})
    assert tried(few) == set()
    assert tried(few | full) == {MORE_PAGES}
    advice = given_by("few_sequences", few | full)
    assert advice is not None and "on average 3.2 sequences were decoding" in advice.text
    assert advice.option == "--kv-cache-memory 2048MiB"
    assert tried(report(itl_s={"mean": 400.01 / 6336}) | full) == set(), "four at a time are enough"


def test_prompts_that_fit_into_a_chunk() -> None:
    assert tried(report(prompt_tokens=64 * 257)) == set()
    short = report(prompt_tokens=64 * 250)
    assert tried(short) == {SMALLER, ORCA, BALANCED}
    advice = given_by("short_prompts", short, {SMALLER: 0.1})
    assert advice is not None and advice.text.startswith(
        "Prompts have 250 tokens on average and fit into one chunk of 256"
    )
    for policy in ("orca", "balanced"):  # neither fills chunks of a given size
        assert tried(short | {"policy": policy}) == set()
    assert tried(report(prompt_tokens=64 * 16, chunk_size=16)) == {ORCA, BALANCED}


def one_request(**changes: Any) -> dict[str, Any]:
    """Make one prompt on one stage: its first token after 0.2 s in 4 chunks, then 100 passes of 10 ms."""
    alone = {
        "wall_s": 1.2,
        "requests": 1,
        "completed": 1,
        "prompt_tokens": 1000,
        "output_tokens": 101,
        "chunk_throughput": 4 / 1.2,
        "stages": 1,
        "layer_split": [16],
        "per_stage": computed(1.0),
        "ttft_s": {"mean": 0.2},
        "itl_s": {"mean": 0.01},
    }
    return report(**(alone | changes))


def waits(found: dict[str, Any]) -> bool:
    """Return True if the advice reports a waiting first token. That token comes earlier, in an equally long run."""
    return [advice.rule for advice in advise(found, Simulator(share=0.0, first={ORCA: 0.1}))] == ["one_request"]


def test_a_single_request_that_waits_for_its_chunks_runs_whole() -> None:
    advice = only(advise(one_request(), Simulator(share=0.0, first={ORCA: 0.05})))
    assert (advice.rule, advice.option, advice.gain_s) == ("one_request", "--policy orca", None)
    assert "A first token took 0.20 s, in 4.0 chunks on average." in advice.text
    assert "runs prompts whole, in fewer passes. In the simulator the first token comes after 0.19 s." in advice.text
    assert advise(one_request(), Simulator(share=0.0, first={ORCA: 0.029})) == []
    assert not waits(one_request(ttft_s={"mean": 0.1}))
    assert waits(one_request(ttft_s={"mean": 0.11}))
    assert waits(one_request(requests=2)), "the other was refused"
    assert not waits(one_request(chunk_throughput=1 / 1.2))
    assert tried(one_request(policy="orca")) == set()


def test_requests_that_run_one_by_one_are_timed_without_their_queue() -> None:
    """Ten arrived at once and took 0.2 s and ten tokens each: the mean first token waited for five others."""
    queued = one_request(
        wall_s=3.0,
        requests=10,
        completed=10,
        output_tokens=110,
        max_num_seqs=1,
        chunk_throughput=40 / 3.0,
        ttft_s={"mean": 1.55},
    )
    advice = only(advise(queued, Simulator(share=0.0, first={ORCA: 0.1})))
    assert "took 0.20 s, in 4.0 chunks" in advice.text
    assert not waits(queued | {"max_num_seqs": 2})


def test_fragmentation_above_30_percent_where_pages_ran_out() -> None:
    def advised(*figures: Any, preemptions: int = 1) -> list[Advice]:
        return advise(report(kv=kv(*figures), preemptions=preemptions))

    assert [advised(0.30), advised(None), advised(0.4, 1), advised(0.4, preemptions=0)] == [[]] * 4
    assert only(advised(0.31)).rule == "kv_fragmentation"
    advice = only(advised(0.4))
    assert (advice.rule, advice.option, advice.gain_s) == ("kv_fragmentation", "--page-size 8", None)
    assert "it frees about 20% of the used room, which is enough for 25% more sequences." in advice.text
    assert advise(report(kv=kv(0.4), preemptions=1, attention="emulated")) == []


def test_who_set_a_bound_between_tokens_is_not_told_to_break_it() -> None:
    bound = {"policy": "balanced:tbt_slo=0.004", "max_num_seqs": 1, "causes": causes(starvation_s=50.0)}
    assert tried(report(bubble_ratio=0.5, **bound)) == set()
    assert tried(one_request(policy="sarathi-serve:tbt_slo=0.004")) == set()
    split = {"layer_split": [4, 4, 4, 4], "per_stage": computed(9.0, 9.0, 9.0, 9.0)}
    assert tried(report(stages=4, completed=2, output_tokens=200, **split, **bound)) == set()
    slow = report(per_stage=computed(90.0, 60.0), **bound)
    assert tried(slow) == {Change(layers=(6, 10))}


def test_another_policy_does_not_keep_the_size_that_was_given_to_this_one() -> None:
    uneven = report(policy="orca", bubble_ratio=0.3, causes=causes(prefill_variance_s=40.0))
    for size in (256, 1024):
        advice = given_by("bubble", uneven | {"chunk_size": size}, {SARATHI: 0.1})
        assert advice is not None and advice.option == "--policy sarathi --chunk-size 256"
        advice = given_by("bubble", uneven | {"chunk_size": size}, {BALANCED: 0.1})
        assert advice is not None and ("(leave out --chunk-size)" in advice.text) == (size == 1024)


def test_the_best_three_with_one_for_an_option() -> None:
    seconds = causes(starvation_s=30.0, stage_imbalance_s=40.0, host_s=8.0)
    many = report(
        bubble_ratio=0.4,
        causes=seconds,
        per_stage=computed(90.0, 60.0),
        max_num_seqs=3,
        kv=kv(0.5),
        preemptions=1,
    )
    told = {Change(max_num_seqs=8): 0.3, Change(layers=(6, 10)): 0.15, MORE_PAGES: 0.2, LARGER: 0.04}
    found = advise(many, Simulator(told, 0.0))
    assert [(advice.rule, advice.option.split()[0]) for advice in found] == [
        ("few_sequences", "--max-num-seqs"),
        ("slow_stage", "--layer-split"),
        ("bubble", "--chunk-size"),
    ]
    found = advise(many, Simulator({**told, Change(max_num_seqs=8): 0.1}, 0.0))
    assert [advice.option.split()[0] for advice in found] == ["--kv-cache-memory", "--layer-split", "--max-num-seqs"]


def test_an_option_is_not_advised_in_two_directions() -> None:
    both = report(bubble_ratio=0.2, causes=causes(host_s=20.0, prefill_variance_s=12.0))
    for better, worse in ((LARGER, SMALLER), (SMALLER, LARGER)):
        advice = only(advise(both, Simulator({better: 0.1, worse: 0.09}, 0.0)))
        assert advice.option == f"--chunk-size {better.chunk_size}"


def grown(requests: float, chunks_per_s: float, **changes: Any) -> dict[str, Any]:
    return report(e2el_s={"mean": requests * 100 / 64}, chunk_throughput=chunks_per_s, **changes)


def compared(*runs: dict[str, Any], told: dict[Change, float] | None = None) -> list[Advice]:
    """Return the advice. Only the run with more in flight may be simulated."""
    simulator = Simulator(told)
    most = max(runs, key=lambda run: run["e2el_s"]["mean"])

    def trial(run: dict[str, Any]) -> Simulator:
        assert run is most
        return simulator

    labelled = zip("abcdef", runs, strict=False)
    return advise_comparison(ComparedRun(label, run, partial(trial, run)) for label, run in labelled)


def test_chunk_throughput_that_stays_while_requests_in_flight_grow() -> None:
    fewer, more = grown(20, 2.0), grown(40, 2.1)
    for pair, names in (([fewer, more], "a to b"), ([more, fewer], "b to a")):
        advice = only(compared(*pair, told={LARGER: 0.2}))
        assert advice == Advice(
            "flat_chunks",
            f"From {names}, requests in flight grew from 20 to 40, and chunk throughput only went from 2.0 to 2.1 per "
            "second. Change the second run. Use --chunk-size 512: it needs fewer microbatches. In the simulator this "
            "saves 20.0 of 100.0 s (20%).",
            "--chunk-size 512",
            pytest.approx(20.0),
        )
    assert compared(fewer, more, told={LARGER: 0.029}) == [], "the stages were full"
    assert compared(fewer, grown(40, 2.11)) == []
    assert compared(fewer, grown(29.9, 2.0)) == []
    assert len(compared(fewer, grown(30, 2.0))) == 1
    assert compared(fewer) == []
    untried = [ComparedRun(label, run, lambda: None) for label, run in (("a", fewer), ("b", more))]
    assert advise_comparison(untried) == []


def test_only_like_runs_with_chunks_are_compared() -> None:
    fewer = grown(20, 2.0)
    unlike = [{"chunk_size": 512}, {"stages": 4}, {"policy": "sarathi:even=1"}, {"model": "b"}, {"dtype": "x"}]
    unlike += [{"layer_split": [9, 7]}, {"inflight": 3}, {"attention": "flash"}, {"kv_cache_dtype": "fp8"}]
    for other in unlike:
        assert compared(fewer, grown(40, 2.0, **other)) == []
    for policy in ("orca", "balanced"):
        assert compared(fewer | {"policy": policy}, grown(40, 2.0, policy=policy)) == []
    assert compared(fewer | {"max_num_seqs": 20}, grown(64, 2.0, max_num_seqs=20)) == []


def seats_full(**changes: Any) -> dict[str, Any]:
    """Make a run of 8 seats with 12 unfinished requests on average, that share pages and use a third of them."""
    cache = {"mode": "all", "cached_tokens": 50_000, "prompt_tokens": 64_000}
    base = {"max_num_seqs": 8, "e2el_s": {"mean": 12 * 100 / 64}, "kv": kv(0.1, peak=330), "prefix_cache": cache}
    return report(**(base | changes))


def test_more_seats_where_shared_pages_make_room_for_them() -> None:
    more = Change(max_num_seqs=16)
    advice = given_by("shared_pages", seats_full(), {more: 0.3})
    assert advice is not None and (advice.option, advice.gain_s) == ("--max-num-seqs 16", pytest.approx(30.0))
    assert advice.text.startswith(
        "All 8 seats were in use while requests waited, and 67% of the KV pages stayed free, because requests shared "
        "pages. Use --max-num-seqs 16:"
    )
    assert given_by("shared_pages", seats_full(), {more: 0.02}) is None
    (untried,) = advise(seats_full(), untried="the simulator could not repeat this run")
    assert (untried.option, untried.gain_s) == ("--max-num-seqs 16", None)


@pytest.mark.parametrize(
    "changes",
    [
        {"prefix_cache": None},
        {"prefix_cache": {"mode": "all", "cached_tokens": 0, "prompt_tokens": 64_000}},
        {"e2el_s": {"mean": 11.9 * 100 / 64}},
        {"kv": kv(0.1, peak=451)},
        # A few shared tokens. The pages are free because requests are short.
        {"prefix_cache": {"mode": "all", "cached_tokens": 64 * 16, "prompt_tokens": 64_000}},
        {"preemptions": 1},
        {"completed": 8},
        {"max_num_seqs": None},
    ],
)
def test_otherwise_seats_are_not_what_bounds_it(changes: dict[str, Any]) -> None:
    assert given_by("shared_pages", seats_full(**changes)) is None
    assert given_by("shared_pages", seats_full(kv=kv(0.1, peak=450))) is not None


def test_prompts_are_short_if_what_is_not_cached_fits_a_chunk() -> None:
    cache = {"mode": "all", "cached_tokens": 64_000 - 64 * 200, "prompt_tokens": 64_000}
    advice = given_by("short_prompts", report(prefix_cache=cache))
    assert (
        advice is not None
        and "Prompts have 200 uncached tokens on average and fit into one chunk of 256" in advice.text
    )
    assert given_by("short_prompts", report(prefix_cache=cache | {"cached_tokens": 64_000 - 64 * 257})) is None


def test_runs_with_and_without_a_prefix_cache_are_not_compared() -> None:
    cached = {"mode": "all", "cached_tokens": 1, "prompt_tokens": 64_000}
    assert compared(grown(20, 2.0), grown(40, 2.1, prefix_cache=cached)) == []
    assert compared(*(grown(n, 2.0, prefix_cache=cached | {"cached_tokens": n}) for n in (20, 40))) != []


@pytest.mark.parametrize(
    ("states", "wanted"),
    [
        ({}, 40),
        ({"state_bytes_per_sequence": 0}, 40),  # emulated
        ({"state_bytes_per_sequence": 2**20, "state_pages_per_sequence": 20.0}, 40),
        ({"state_bytes_per_sequence": 2**20, "state_pages_per_sequence": 60.0}, 28),
        ({"state_bytes_per_sequence": 2**20, "state_pages_per_sequence": 60.0, "max_pages": 1100}, 30),
        ({"state_bytes_per_sequence": 2**20, "state_pages_per_sequence": 600.0}, None),
        ({"state_bytes_per_sequence": 2**20}, None),  # no layer has pages, or the run is of an earlier version
    ],
)
def test_more_seats_are_advised_only_if_the_states_of_more_sequences_fit(
    states: dict[str, Any], wanted: int | None
) -> None:
    """500 of 1000 pages stay free. Without states, the advice is twice the seats."""
    found = report(max_num_seqs=20, causes=causes(starvation_s=20.0), **states)
    seats = {change.max_num_seqs for change in tried(found)} - {None}
    assert seats == (set() if wanted is None else {wanted})
