"""The ranks' total memory is compared with each pool that they use, before any of them loads."""

from __future__ import annotations

import json

import pytest

from sarathi_pp.errors import CapacityError
from sarathi_pp.process.host import MemoryPool
from sarathi_pp.stages.memory_demand import Demand, require_room, room_for, sharers_of

GIB = 1 << 30


def pool(id: str, free_gib: int) -> MemoryPool:
    return MemoryPool(id, f"the memory of {id}", free_gib * GIB)


def demand(need_gib: int, *pools: MemoryPool) -> Demand:
    return Demand(need_gib * GIB, pools)


def require(demands: list[Demand], hosts: str) -> None:
    require_room(demands, list(hosts), "weights", "more hosts")


def test_eight_stages_that_fit_one_by_one_and_not_together_are_refused():
    demands = [demand(10, pool("host", 64))] * 8
    said = (
        "host a: ranks 0, 1, 2, 3, 4, 5, 6, 7 need 80 GiB for weights, and 64 GiB are available in the memory of host"
        "\n  try  more hosts"
    )
    with pytest.raises(CapacityError) as refused:
        require(demands, "a" * 8)
    assert str(refused.value) == said and refused.value.exit_code == 2
    require([demand(8, pool("host", 64))] * 8, "a" * 8)


def test_each_host_has_its_own():
    """This also holds if two hosts have one name: their ids differ."""
    full, roomy = pool("localhost one", 64), pool("localhost two", 64)
    require([demand(60, full), demand(60, roomy)], "xx")
    with pytest.raises(CapacityError, match="^host y: ranks 1, 2 need 65 GiB") as refused:
        require([demand(60, full), demand(60, roomy), demand(5, roomy)], "xyy")
    assert "rank 0" not in str(refused.value)


def test_a_shared_cgroup_inside_a_roomy_host_decides():
    host, job = pool("host", 64), pool("job", 6)
    tasks = [pool("task 0", 4), pool("task 1", 4)]
    with pytest.raises(CapacityError) as refused:
        require([demand(4, host, job, tasks[0]), demand(3, host, job, tasks[1])], "aa")
    need = "host a: ranks 0, 1 need 7 GiB for weights, and 6 GiB are available in the memory of job"
    assert str(refused.value).startswith(need)
    assert str(refused.value).count("need") == 1


def test_one_cause_is_one_message_though_two_pools_are_too_small():
    host, job = pool("host", 6), pool("job", 5)
    with pytest.raises(CapacityError) as refused:
        require([demand(4, host, job)] * 2, "aa")
    assert "5 GiB" in str(refused.value) and str(refused.value).count("need") == 1


def test_a_rank_alone_compares_its_own_weights_with_what_is_there():
    require([demand(70, pool("host", 64))], "a")


def test_the_least_that_a_rank_found_free_counts():
    with pytest.raises(CapacityError, match="need 8 GiB .* 7 GiB are"):
        require([demand(4, pool("host", 9)), demand(4, pool("host", 7))], "aa")


def test_room_is_what_the_others_leave():
    host, task = pool("host", 64), pool("task", 12)
    demands = [demand(10, host, task), demand(30, host), demand(20, pool("another", 21))]
    assert [room_for(rank, demands) // GIB for rank in range(3)] == [12, 54, 21]
    assert sharers_of(0, demands) == {"host": 2, "task": 1} and sharers_of(2, demands) == {"another": 1}


def test_it_travels_as_json():
    one = demand(3, pool("host", 64), pool("task", 12))
    assert Demand.from_json(json.loads(json.dumps(one.to_json()))) == one
