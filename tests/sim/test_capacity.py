from dataclasses import replace

import pytest

from sarathi_pp.core.cost import CostModel, StageCost
from sarathi_pp.core.profile import Profile
from sarathi_pp.sim.capacity import find_capacity
from sarathi_pp.sim.experiment import Experiment
from sarathi_pp.sim.workload import parse_workload

# One stage, one request at a time, 0.1 s each: at most 10 requests a second.
STAGE = StageCost((0, 1), a0=0.1, a1=0.0, a2=0.0, a3=0.0, a4=0.0)
PROFILE = Profile("m", "d", "float32", 1, 1, CostModel(1, (STAGE,)), 0.0, 1e30, 0.0, 1000, 1)
EXPERIMENT = Experiment(
    profile=PROFILE, workload=parse_workload("fixed:n=1000,prompt=4,output=1"), policy="sarathi", chunk_size=4
)


def test_the_capacity_of_a_single_server_is_just_below_its_rate():
    """Poisson arrivals at rate r wait r / (10 (10 - r)) / 2 s on average, so 2 s are reached above 9.7 a second."""
    assert 9.0 < find_capacity(EXPERIMENT, tbt_slo_s=1.0).rate < 10.6


def test_a_bound_that_nothing_keeps_gives_none():
    decoding = replace(EXPERIMENT, workload=parse_workload("fixed:n=40,prompt=4,output=3"))
    assert find_capacity(decoding, tbt_slo_s=0.09).rate == 0
    found = find_capacity(decoding, tbt_slo_s=0.11)
    assert found.rate > 0 and found.tbt_p99_s == pytest.approx(0.1)
