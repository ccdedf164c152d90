"""Synthetic runs whose bubble has one cause, known by construction."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_pp.analysis.bubbles import measure_bubbles
from sarathi_pp.analysis.causes import Causes, explain, host_seconds
from sarathi_pp.analysis.event_columns import Log
from sarathi_pp.analysis.timeline import Timeline
from sarathi_pp.core.cost.model import CostModel, Load, StageCost
from sarathi_pp.errors import InputError
from sarathi_pp.trace.events import Compute, Event, Head, Issued, RequestArrived, Returned, SendWait, Starved
from tests.analysis.schedules import start
from tests.thinning import examples

Delay = Callable[[int, int], float]

CHUNK = Load(256, 256 * 256 / 2, 0, 0)
DECODES = Load(0, 0.0, 8, 8000)


def nothing(microbatch: int, stage: int) -> float:
    return 0.0


def cost(stages: int, scale: Callable[[int], float] = lambda stage: 1.0) -> CostModel:
    """Make a cost model: 256 prompt tokens take 66 ms, and 8 decodes with 8,000 earlier tokens take 16 ms."""
    return CostModel(
        1,
        tuple(
            StageCost((stage, stage + 1), *(x * scale(stage) for x in (2e-3, 2e-4, 4e-7, 1e-6, 6e-4)))
            for stage in range(stages)
        ),
    )


@dataclass
class Run:
    """A pipeline simulated by the coordinator's rules: K in flight, the first stage on its own rank.

    Args:
        transfer: seconds into a stage (stage P: back to the coordinator).
        awaits: the earlier microbatch whose result a microbatch needs, or None.
        holds: the microbatch whose result the policy waits for.
        arrives: the time at which its request arrives.
        moved: microbatches whose head, with all of the last stage's head_s, the first stage computes. In `host` this is
            stage -1.
    """

    loads: list[Load]
    model: CostModel
    inflight: int
    transfer: Delay = nothing
    host: Delay = nothing
    issue: Delay = nothing
    blocked: Delay = nothing
    awaits: Callable[[int], int | None] = lambda microbatch: None
    holds: Callable[[int], int | None] = lambda microbatch: None
    arrives: Callable[[int], float] = lambda microbatch: 0.0
    jitter: Delay = nothing
    moved: Callable[[int], bool] = lambda microbatch: False

    def timeline(self) -> Timeline:
        return Timeline.read(self.traces())

    def traces(self) -> list[list[Event]]:
        num_stages = len(self.model.stages)
        traces: list[list[Event]] = [[replace(start(s, num_stages), inflight=self.inflight)] for s in range(num_stages)]
        free = [0.0] * num_stages
        results: list[float] = []
        rows: list[float] = []
        heads: deque[int] = deque()

        def compute_heads(until: int) -> None:
            """Compute the heads of microbatches before `until`. Return the work that is ready after them."""
            while heads and (heads[0] < until or results[heads[0]] <= free[0]):
                head = heads.popleft()
                begin = max(free[0], results[head]) + self.host(head, -1)
                end = begin + self.model.head_seconds(self.loads[head])
                traces[0].append(Head(head, rows[head], begin, end))
                free[0] = end
                results[head:] = [max(result, end) for result in results[head:]]

        for m, load in enumerate(self.loads):
            traces[0].append(RequestArrived(m, self.arrives(m), 10))
            asked = [one for one in (m - self.inflight, self.awaits(m), self.holds(m)) if one is not None]
            compute_heads(max(asked) + 1)
            could = max(free[0], results[m - self.inflight] if m >= self.inflight else 0.0)
            needed, held = self.awaits(m), self.holds(m)
            ready = max(could, self.arrives(m), 0.0 if needed is None else results[needed])
            if held is not None and results[held] > ready:
                ready = results[held]
                traces[0].append(Starved(could, "held"))
            elif ready > could:
                traces[0].append(Starved(could, "tokens_in_flight"))
            ready += self.issue(m, 0)
            fields = (load.prefill_tokens, load.decodes, load.decode_context, load.prefill_attention)
            traces[0].append(Issued(m, ready, f"m{m}[s{m}:0+10]", *fields, 1, 1))
            issued = ready
            for s in range(num_stages):
                arrived = ready + (self.transfer(m, s) if s else 0.0)
                begin = max(free[s], arrived) + self.host(m, s)
                left_s = self.model.head_seconds(load) if self.moved(m) and s == num_stages - 1 else 0.0
                end = begin + self.model.seconds(s, load) - left_s + self.jitter(m, s)
                traces[s].append(Compute(m, issued, arrived, begin, end))
                free[s] = ready = end + self.blocked(m, s)
                if self.blocked(m, s):
                    traces[s].append(SendWait(end, ready))
            rows.append(max(ready + self.transfer(m, num_stages), rows[-1] if rows else 0.0))
            results.append(max(rows[-1], results[-1] if results else 0.0))
            if self.moved(m):
                heads.append(m)
        compute_heads(len(self.loads))
        traces[0] += [Returned(m, at_s) for m, at_s in enumerate(results)]
        return traces

    def causes(self) -> Causes:
        timeline = self.timeline()
        causes = explain(timeline, self.model)
        bubbles = measure_bubbles(timeline)
        measured = sum(bubbles.wall_s - stage.compute_s for stage in bubbles.stages)
        assert causes.bubble_s == pytest.approx(measured, abs=1e-9)
        return causes


def share(causes: Causes, name: str) -> float:
    """Return the part of the bubble outside ramp that one cause has."""
    value: float = asdict(causes)[name]
    return value / (causes.bubble_s - causes.ramp_s)


every_size = pytest.mark.parametrize("stages", [2, 3, 4, 8])


@every_size
def test_equal_microbatches_leave_nothing_but_the_ramp(stages: int) -> None:
    count = 20
    causes = Run([CHUNK] * count, cost(stages), stages).causes()
    seconds = cost(stages).seconds(0, CHUNK)
    assert causes.ramp_s == pytest.approx(stages * (stages - 1) * seconds)
    assert causes.bubble_s == pytest.approx(causes.ramp_s)
    others = [value for name, value in asdict(causes).items() if name != "ramp_s"]
    assert others == pytest.approx([0.0] * len(others), abs=1e-9)


@every_size
def test_chunks_of_different_length_are_prefill_variance(stages: int) -> None:
    draw = random.Random(1)
    loads = [Load(n, n * n / 2, 0, 0) for n in (draw.randint(32, 1024) for _ in range(60))]
    assert share(Run(loads, cost(stages), stages).causes(), "prefill_variance_s") >= 0.95


@every_size
def test_chunks_between_decodes_are_prefill_and_decode(stages: int) -> None:
    loads = [CHUNK if index % 3 == 0 else DECODES for index in range(60)]
    assert share(Run(loads, cost(stages), stages).causes(), "prefill_decode_s") >= 0.95


@every_size
def test_decodes_with_different_context_are_decode_context(stages: int) -> None:
    draw = random.Random(2)
    loads = [replace(DECODES, decode_context=draw.randint(100, 60_000)) for _ in range(60)]
    assert share(Run(loads, cost(stages), stages).causes(), "decode_context_s") >= 0.95


@every_size
@pytest.mark.parametrize("slow", [0, 1, -1])
def test_a_slow_stage_is_stage_imbalance(stages: int, slow: int) -> None:
    model = cost(stages, lambda stage: 1.5 if stage == slow % stages else 1.0)
    loads = [CHUNK] * 60
    causes = Run(loads, model, stages).causes()
    assert share(causes, "stage_imbalance_s") >= 0.95


@every_size
def test_slow_edges_are_communication(stages: int) -> None:
    causes = Run([CHUNK] * 60, cost(stages), stages, transfer=lambda m, s: 5e-3).causes()
    assert share(causes, "communication_s") >= 0.95


@every_size
def test_waiting_for_a_send_buffer_is_communication(stages: int) -> None:
    causes = Run([CHUNK] * 60, cost(stages), stages, blocked=lambda m, s: 4e-3 if s == 0 else 0.0).causes()
    assert share(causes, "communication_s") >= 0.95


@every_size
@pytest.mark.parametrize("place", ["stage 0", "last stage", "coordinator"])
def test_slow_python_is_host(stages: int, place: str) -> None:
    run = Run([CHUNK] * 60, cost(stages), stages)
    late = {"stage 0": 0, "last stage": stages - 1}.get(place)
    if late is None:
        run.issue = lambda m, s: 3e-3 if m else 0.0
    else:
        run.host = lambda m, s: 3e-3 if s == late else 0.0
    assert share(run.causes(), "host_s") >= 0.95


def test_the_host_takes_its_own_time_and_the_coordinator_s_on_the_first_stage() -> None:
    """Pauses that stopped it twice in a hundred microbatches, for ten seconds each, are not included."""
    run = Run([CHUNK] * 100, cost(3), 3, issue=lambda m, s: 3e-3)
    run.host = lambda m, s: (0.0, 1e-3, 2e-3)[s] + 10.0 * (s == 2 and m in (40, 80))
    assert host_seconds(run.timeline()) == pytest.approx([3e-3, 1e-3, 2e-3], rel=0.02)


@every_size
def test_one_sequence_that_decodes_is_starvation(stages: int) -> None:
    """Its next token needs the last one: every stage waits for all others."""
    loads = [Load(0, 0.0, 1, 1000)] * 60
    run = Run(loads, cost(stages), stages, awaits=lambda m: m - 1 if m else None)
    assert share(run.causes(), "starvation_s") >= 0.95


@every_size
def test_late_requests_are_starvation(stages: int) -> None:
    run = Run([CHUNK] * 60, cost(stages), stages, arrives=lambda m: 0.2 * m)
    assert share(run.causes(), "starvation_s") >= 0.95


@every_size
@pytest.mark.parametrize("waits_for", ["result", "policy"])
@pytest.mark.parametrize("text", ["m{m}[s{m}:0+10]", "m{m}[s{new}:0+10 | d s{m}:300]"])
def test_an_arrival_that_nobody_waited_for_is_no_cause(stages: int, waits_for: str, text: str) -> None:
    """A line of the input is read between each result and the issue that it allows. Often it can run at once."""

    def earlier(m: int) -> int | None:
        return m - stages if m >= stages else None

    run = Run([CHUNK] * 60, cost(stages), stages + 1, transfer=lambda m, s: 5e-3, issue=lambda m, s: 1e-4)
    run.awaits, run.holds = (earlier, run.holds) if waits_for == "result" else (run.awaits, earlier)
    timeline = run.timeline()
    expected = explain(timeline, run.model)
    issued = list(timeline.issued)
    for m in range(stages, 60):
        timeline.arrived.append(RequestArrived(60 + m, timeline.returned[m - stages].at_s + 5e-5, 10))
        issued[m] = replace(issued[m], text=text.format(m=m, new=60 + m))
    timeline.issued = Log(Issued, issued)
    assert asdict(explain(timeline, run.model)) == pytest.approx(asdict(expected), abs=1e-9)


@every_size
def test_a_policy_that_holds_back_has_the_causes_of_a_run_with_fewer_in_flight(stages: int) -> None:
    draw = random.Random(4)
    loads = [Load(n, n * n / 2, 0, 0) for n in (draw.randint(32, 1024) for _ in range(60))]
    held = Run(loads, cost(stages), stages + 1, holds=lambda m: m - stages if m >= stages else None).causes()
    assert asdict(held) == pytest.approx(asdict(Run(loads, cost(stages), stages).causes()), abs=1e-9)


def test_what_the_model_does_not_know_stays_unexplained() -> None:
    draw = random.Random(3)
    noise = {(m, s): draw.uniform(0, 0.03) for m in range(60) for s in range(4)}
    causes = Run([CHUNK] * 60, cost(4), 4, jitter=lambda m, s: noise[m, s]).causes()
    assert share(causes, "unexplained_s") >= 0.95


loads = st.lists(
    st.builds(
        lambda prefill, decodes: Load(prefill, prefill**2 / 2.0, decodes, 700 * decodes),
        st.integers(0, 300),
        st.integers(1, 20),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=examples(100))
@given(loads=loads, stages=st.integers(1, 5), extra=st.integers(0, 2), seed=st.integers(0, 10**6))
def test_a_run_with_everything_in_it_is_explained_to_the_last_second(
    loads: list[Load], stages: int, extra: int, seed: int
) -> None:
    """With the true model nothing is unexplained: the replay is the run."""

    def some(most: float) -> Delay:
        return lambda m, s: random.Random(f"{seed} {m} {s} {most}").uniform(0, most)

    def awaits(m: int) -> int | None:
        back = random.Random(seed * 1000 + m).randint(0, 3)
        return m - back if 0 < back <= m else None

    model = cost(stages, lambda stage: 1 + stage / 3)

    def holds(m: int) -> int | None:
        return m - stages if m >= stages and random.Random(seed * 2000 + m).random() < 0.3 else None

    run = Run(loads, model, stages + extra, some(3e-3), some(2e-3), some(1e-3), some(4e-3), awaits, holds)
    causes = run.causes()
    assert causes.unexplained_s == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("returned", [1, 7, 20])
def test_the_causes_of_a_run_that_was_cut_off_add_up_too(returned: int) -> None:
    """Traces end at the same instant. Later microbatches have computed in the window and have no result."""
    run = Run([CHUNK] * 30, cost(4), 4, transfer=lambda m, s: 1e-3)
    whole = run.timeline()
    until_s = whole.returned[returned - 1].at_s
    traces: list[list[Event]] = []
    for stage in whole.stages:
        spans = zip(stage.microbatches, stage.issued, stage.arrived, stage.starts, stage.ends, strict=True)
        traces.append([stage.start, *(Compute(*span) for span in spans if span[-1] <= until_s)])
    traces[0] += [event for event in (*whole.issued, *whole.returned) if event.at_s <= until_s]
    cut = Timeline.read(traces)
    assert cut.num_returned == returned
    bubbles = measure_bubbles(cut)
    measured = sum(bubbles.wall_s - stage.compute_s for stage in bubbles.stages)
    causes = explain(cut, run.model)
    assert causes.bubble_s == pytest.approx(measured, abs=1e-9)
    assert causes.unexplained_s == pytest.approx(0.0, abs=1e-9)


def test_a_run_without_a_result_has_no_bubble_to_explain() -> None:
    timeline = Run([CHUNK], cost(2), 2).timeline()
    timeline.returned = Log(Returned)
    assert explain(timeline, cost(2)) == Causes(*[0.0] * 9)


def test_a_model_of_another_pipeline_is_refused() -> None:
    with pytest.raises(InputError, match="the cost model has 3 stages, the run 2"):
        explain(Run([CHUNK], cost(2), 2).timeline(), cost(3))


def test_a_span_that_ends_before_it_begins_is_refused() -> None:
    timeline = Run([CHUNK] * 3, cost(2), 2).timeline()
    timeline.stages[1].ends[1] = timeline.stages[1].starts[1] - 2.5
    with pytest.raises(InputError, match=r"stage 1 ended microbatch 1 2\.5 s before its start; if they were copied"):
        timeline.check_order()


def test_a_timeline_that_lacks_or_mixes_up_microbatches_is_refused() -> None:
    def refuses(timeline: Timeline, message: str) -> None:
        with pytest.raises(InputError, match=f"damaged: of the microbatches that {message}"):
            timeline.check_order()

    mixed_up, lost, unissued, unreturned = (Run([CHUNK] * 3, cost(2), 2).timeline() for _ in range(4))
    mixed_up.stages[1].microbatches[0], mixed_up.stages[1].microbatches[1] = 1, 0
    refuses(mixed_up, "stage 1 computed, 0 must come next, but microbatch 1 comes")
    del lost.stages[0].microbatches[1]
    refuses(lost, "stage 0 computed, 1 must come next, but microbatch 2 comes")
    unissued.issued = Log(Issued, unissued.issued[:-1])
    refuses(unissued, "were issued, 2 must come next, but nothing comes")
    unreturned.returned = Log(Returned, unreturned.returned[1:])
    refuses(unreturned, "came back, 0 must come next, but microbatch 1 comes")


@pytest.mark.parametrize("kept", [19, 18, 16, 14, 1])
def test_of_a_run_that_goes_on_stage_0_tells_of_heads_that_the_last_one_s_file_does_not_reach(kept: int) -> None:
    model = with_head(2, 5e-4)
    run = Run([DECODES] * 20, model, 2, awaits=lambda m: m - 2 if m >= 2 else None, moved=in_turn)
    first, last = run.traces()
    cut = [event for event in last if not isinstance(event, Compute) or event.microbatch < kept]
    timeline = Timeline.read([first, cut])
    timeline.check_order()
    assert timeline.num_returned in (kept - 1, kept), "by when the last span of its file ended"
    assert all(microbatch < timeline.num_returned for microbatch in timeline.stages[0].heads.microbatches)
    bubbles = measure_bubbles(timeline)
    assert all(stage.closing_error < 1e-9 for stage in bubbles.stages)
    assert explain(timeline, model).unexplained_s == pytest.approx(0, abs=1e-9)


def test_heads_that_no_run_had_are_refused() -> None:
    def run() -> Timeline:
        return Run([DECODES] * 6, with_head(2, 5e-4), 2, moved=in_turn).timeline()

    run().check_order()
    doubled, unknown, elsewhere, backwards = (run() for _ in range(4))
    doubled.stages[0].heads.microbatches[1] = doubled.stages[0].heads.microbatches[0]
    unknown.stages[0].heads.microbatches[-1] = 6
    elsewhere.stages[1].heads.add(Head(3, 0.0, 0.0, 1.0))
    for damaged, stage in ((doubled, 0), (unknown, 0), (elsewhere, 1)):
        with pytest.raises(InputError, match=f"heads of stage {stage} are out of order"):
            damaged.check_order()
    backwards.stages[0].heads.ends[0] = 0.0
    with pytest.raises(InputError, match="ended an LM head before its start"):
        backwards.check_order()


@pytest.mark.parametrize(
    "changes", [{"inflight": 0}, {"page_size": 0}, {"chunk_size": -1}, {"layers": (3, 3)}, {"layers": (4, 2)}]
)
def test_sizes_that_no_run_had_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match="damaged: .* of stage 0: (0|-1|-2);"):
        Timeline.read([[replace(start(0, 1), **changes)]])  # type: ignore[arg-type]


def with_head(stages: int, head_s: float) -> CostModel:
    """Make stages that are equal except for the last one's head."""
    *others, last = cost(stages).stages
    return CostModel(1, (*others, replace(last, head_s=head_s)))


def in_turn(microbatch: int) -> bool:
    return microbatch % 2 == 1


@every_size
def test_a_head_that_both_ends_compute_in_turn_leaves_stages_even(stages: int) -> None:
    """Two cohorts of decodes each need their own last token, as in a run after its last prompt."""
    model = with_head(stages, 5e-4)
    last, turns = (
        Run([DECODES] * 40, model, stages, awaits=lambda m: m - stages if m >= stages else None, moved=moved).causes()
        for moved in (lambda m: False, in_turn)
    )
    assert last.stage_imbalance_s > 0.9 * (last.bubble_s - last.ramp_s)
    assert turns.unexplained_s == pytest.approx(0, abs=1e-9)
    if stages == 2:
        assert turns.bubble_s < 0.4 * last.bubble_s and turns.stage_imbalance_s < 0.2 * last.stage_imbalance_s


def test_what_a_head_waits_for_on_a_free_stage_is_host() -> None:
    def late(microbatch: int, stage: int) -> float:
        return 0.01 if stage == -1 else 0.0

    model = with_head(2, 5e-4)
    run = Run([DECODES] * 40, model, 2, awaits=lambda m: m - 2 if m >= 2 else None, moved=in_turn)
    quiet, slow = run.causes(), replace(run, host=late).causes()
    assert slow.bubble_s > quiet.bubble_s + 0.1
    assert slow.host_s - quiet.host_s == pytest.approx(slow.bubble_s - quiet.bubble_s, rel=0.05)
    assert slow.unexplained_s == pytest.approx(0, abs=1e-9)


def test_a_head_on_its_way_is_communication() -> None:
    model = with_head(2, 5e-4)
    run = Run([DECODES] * 40, model, 2, awaits=lambda m: m - 2 if m >= 2 else None, moved=in_turn)
    slow = replace(run, transfer=lambda m, stage: 0.01 if stage == 2 else 0.0).causes()
    assert slow.communication_s > 0.8 * (slow.bubble_s - run.causes().bubble_s) > 0.1
    assert slow.unexplained_s == pytest.approx(0, abs=1e-9)


@settings(max_examples=examples(100))
@given(
    draw=st.randoms(use_true_random=False),
    stages=st.integers(2, 4),
    extra=st.integers(0, 2),
    count=st.integers(1, 30),
)
def test_causes_add_up_with_moved_heads(draw: random.Random, stages: int, extra: int, count: int) -> None:
    loads = [draw.choice([CHUNK, DECODES, Load(40, 800.0, 3, 900)]) for _ in range(count)]
    moves = [load.decodes > 0 and draw.random() < 0.5 for load in loads]
    delays = [[draw.choice([0.0, 0.0, 0.004, 0.02]) for _ in range(stages + 2)] for _ in loads]
    run = Run(
        loads,
        with_head(stages, 5e-4),
        stages + extra,
        transfer=lambda m, stage: delays[m][stage],
        host=lambda m, stage: delays[m][-1] if stage == -1 else delays[m][stage] / 2,
        awaits=lambda m: m - 2 if m >= 2 and delays[m][0] else None,
        moved=lambda m: moves[m],
    )
    causes = run.causes()
    assert causes.unexplained_s == pytest.approx(0, abs=1e-9), "the replay is the run where its times are the model's"
