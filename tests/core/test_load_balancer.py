"""Requests shared out over replicas."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sarathi_pp.core.load_balancer import LoadBalancer
from sarathi_pp.core.request import Request
from sarathi_pp.sampling_params import SamplingParams


def request(index: int, num_tokens: int = 10) -> Request:
    return Request(index, (1,) * num_tokens, SamplingParams(seed=0))


def test_the_one_with_least_to_do_gets_the_next():
    balancer = LoadBalancer(3, most=10, most_tokens=10**9)
    given_to = [balancer.give(request(index, size)) for index, size in enumerate([100, 10, 60, 30, 30, 20, 1])]
    #                                100 | 10 | 60 -> 10 + 30 -> 40 + 30 -> 60 + 20 -> 70 + 1
    assert given_to == [0, 1, 2, 1, 1, 2, 1]


def test_outputs_count_as_long_as_those_that_have_ended():
    balancer = LoadBalancer(2, most=10, most_tokens=10**9)
    assert [balancer.give(request(index, size)) for index, size in enumerate([5, 100, 90, 10])] == [0, 1, 0, 0]
    assert balancer.give(request(4, 150)) == 1  # 105 prompt tokens against 100
    balancer.end(0, 0, num_output_tokens=1000)
    balancer.end(1, 1, num_output_tokens=1000)
    # Replica 0 has two requests of 100 prompt tokens, 1 has one of 150: with their outputs 2100 against 1150.
    assert balancer.give(request(5)) == 1


def test_a_slow_replica_is_given_no_more_than_it_may_hold():
    balancer = LoadBalancer(2, most=2, most_tokens=10**9)
    assert [balancer.give(request(index)) for index in range(4)] == [0, 1, 0, 1] and balancer.room == 0
    balancer.end(1, 1, 5)
    assert balancer.room == 1 and balancer.give(request(4)) == 1


def test_who_may_hold_no_more_gets_nothing_even_with_least_to_do():
    balancer = LoadBalancer(2, most=2, most_tokens=10**9)
    assert [balancer.give(request(index, size)) for index, size in enumerate([900, 1, 1])] == [0, 1, 1]
    assert balancer.room == 1 and balancer.give(request(3)) == 0


def test_a_replica_that_holds_its_tokens_gets_nothing_more():
    balancer = LoadBalancer(2, most=10, most_tokens=100)
    assert [balancer.give(request(index, size)) for index, size in enumerate([90, 60, 60])] == [0, 1, 1]
    assert balancer.room == 9 and balancer.give(request(3, 20)) == 0 and balancer.room == 0
    balancer.end(1, 2, 5)
    assert balancer.room == 9 and balancer.give(request(4, 1)) == 1


def test_what_a_lost_one_held_comes_back_in_order_and_it_gets_nothing_more():
    balancer = LoadBalancer(2, most=4, most_tokens=10**9)
    for index in range(6):
        balancer.give(request(index))
    assert [back.index for back in balancer.lose(0)] == [0, 2, 4]
    assert balancer.present == [1] and balancer.room == 1 and not balancer.holds(0, 0)
    assert balancer.give(request(6)) == 1 and balancer.room == 0
    balancer.lose(1)
    assert balancer.present == [] and balancer.room == 0


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 5))
def test_loads_differ_by_no_more_than_the_largest_request(sizes, num_replicas):
    """This bound holds for every greedy assignment."""
    balancer = LoadBalancer(num_replicas, most=len(sizes), most_tokens=10**9)
    loads = [0] * num_replicas
    for index, size in enumerate(sizes):
        loads[balancer.give(request(index, size))] += size
    assert max(loads) - min(loads) <= max(sizes)


class LoadBalancerMachine(RuleBasedStateMachine):
    """A machine that checks that every request is in one place: waiting, with one replica, or ended."""

    def __init__(self) -> None:
        super().__init__()
        self.balancer = LoadBalancer(3, most=3, most_tokens=10**9)
        self.waiting: list[Request] = []
        self.held: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
        self.ended: set[int] = set()
        self.count = 0

    @rule(size=st.integers(1, 50))
    def submit(self, size):
        self.waiting.append(request(self.count, size))
        self.count += 1

    @precondition(lambda self: self.waiting and self.balancer.room)
    @rule()
    def give(self):
        one = self.waiting.pop(0)
        replica = self.balancer.give(one)
        assert replica in self.balancer.present
        self.held[replica].add(one.index)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), tokens=st.integers(0, 30))
    def end(self, data, tokens):
        replica, index = data.draw(st.sampled_from([(r, i) for r, some in self.held.items() for i in sorted(some)]))
        self.balancer.end(replica, index, tokens)
        self.held[replica].remove(index)
        self.ended.add(index)

    @precondition(lambda self: len(self.balancer.present) > 1)
    @rule(data=st.data())
    def lose(self, data):
        replica = data.draw(st.sampled_from(self.balancer.present))
        back = self.balancer.lose(replica)
        assert {one.index for one in back} == self.held[replica]
        self.held[replica] = set()
        self.waiting[:0] = back

    @invariant()
    def each_is_in_one_place(self):
        held = [index for some in self.held.values() for index in some]
        places = [*(one.index for one in self.waiting), *held, *self.ended]
        assert sorted(places) == list(range(self.count))
        for replica, some in self.held.items():
            assert self.balancer.num_held(replica) == len(some) <= 3
        assert self.balancer.room == sum(3 - len(self.held[replica]) for replica in self.balancer.present)


TestLoadBalancer = LoadBalancerMachine.TestCase
