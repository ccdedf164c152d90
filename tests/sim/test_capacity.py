import math
from dataclasses import replace

import pytest

from sarathi_pp.core.cost.model import CostModel, StageCost
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.sim.capacity import find_capacity
from sarathi_pp.sim.experiment import Experiment, simulate
from sarathi_pp.sim.workload import Workload, parse_workload


def one_stage(work: str, *, seats: int = 1, a0: float, a1: float = 0.0) -> Experiment:
    cost = CostModel(1, (StageCost((0, 1), a0, a1, a2=0.0, a3=0.0, a4=0.0),))
    profile = Profile("m", "d", "float32", 1, 1, cost, 0.0, 1e30, 0.0, 1000, seats)
    return Experiment(profile=profile, workload=parse_workload(work), policy=parse_policy("vllm"), chunk_size=8)


def test_the_capacity_of_a_single_server_is_where_half_wait_2_s() -> None:
    """Erlang's M/D/1 with 1 s of service: P(wait <= 2 s) = (1 - r) (e^2r - r e^r), one half at r = 0.859."""
    assert (1 - 0.859) * (math.exp(2 * 0.859) - 0.859 * math.exp(0.859)) == pytest.approx(0.5, abs=1e-3)
    found = find_capacity(one_stage("fixed:n=300,prompt=4,output=1", a0=1.0), tbt_slo_s=1.0)
    assert found.rate == pytest.approx(0.859, rel=0.08)
    assert found.queue_p50_s is not None and found.queue_p50_s <= 2


def test_a_bound_that_nothing_keeps_gives_none() -> None:
    decoding = one_stage("fixed:n=20,prompt=4,output=3", a0=0.1)
    assert find_capacity(decoding, tbt_slo_s=0.09).rate == 0
    found = find_capacity(decoding, tbt_slo_s=0.11)
    assert found.rate is not None and found.rate > 0 and found.tbt_p99_s == pytest.approx(0.1)


def test_one_gap_in_a_hundred_may_miss_the_bound_and_no_more() -> None:
    """A decode alone takes 0.1 s, two take 0.15 s, and a decode with another request's prompt takes 0.3 s."""
    decoding = one_stage("fixed:n=40,prompt=4,output=6", seats=2, a0=0.05, a1=0.05)

    def missed(rate: float) -> float:
        served = simulate(replace(decoding, workload=replace(decoding.workload, rate=rate)))
        gaps = [gap for request in served.finished for gap in request.gaps_us]
        return sum(gap > 200_000 for gap in gaps) / len(gaps)

    found = find_capacity(decoding, tbt_slo_s=0.2)
    assert found.rate and missed(found.rate) <= 0.01 < missed(found.rate / 0.97)


def test_too_few_requests_to_miss_the_bounds_say_so() -> None:
    """There are two requests, each answered within 0.1 s. Even if both come at once, the second waits no longer."""
    found = find_capacity(one_stage("fixed:n=2,prompt=4,output=1", a0=0.1), tbt_slo_s=1.0)
    assert found.rate is None and found.queue_p50_s is not None and found.queue_p50_s <= 0.1


def test_recorded_arrivals_give_way_to_the_rates_that_are_tried() -> None:
    plain = one_stage("fixed:n=100,prompt=4,output=1", a0=1.0)
    work = plain.workload
    far_apart = Workload.recorded("trace", 100, work.max_tokens, work.lengths, lambda: iter(range(0, 10_000, 100)))
    assert far_apart.has_arrivals and not work.has_arrivals
    assert find_capacity(replace(plain, workload=far_apart), 1.0) == find_capacity(plain, 1.0)
