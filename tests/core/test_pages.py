import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sarathi_pp.core.pages import PagePool
from tests.thinning import examples


class PoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = PagePool(12, 4)
        self.holders = []

    @rule(count=st.integers(0, 12))
    def take(self, count):
        if count <= self.pool.num_free:
            self.holders.append(self.pool.take(count))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give_back(self, data):
        self.pool.give_back(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @invariant()
    def every_page_has_one_owner(self):
        held = [page for pages in self.holders for page in pages]
        assert len(held) == len(set(held)) and all(0 <= page < 12 for page in held)
        assert len(held) + self.pool.num_free == 12


TestPool = PoolMachine.TestCase
# The twelve pages are taken and given back several times over the steps.
TestPool.settings = settings(max_examples=examples(90), stateful_step_count=25)


def test_giving_back_twice_fails_at_once():
    pool = PagePool(4, 16)
    pages = pool.take(2)
    pool.give_back(pages)
    with pytest.raises(AssertionError, match="free already"):
        pool.give_back(pages)


def test_low_pages_come_first_and_come_again():
    pool = PagePool(8, 16)
    first = pool.take(3)
    assert first == (0, 1, 2)
    pool.give_back(first)
    assert pool.take(3) == (0, 1, 2)
