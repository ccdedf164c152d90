"""Ids seen before: the line that had one earlier, in little memory."""

import random
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.inputs.ids import KeyMap, SeenIds, id_key

_KEYS = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1])


@given(st.lists(st.tuples(_KEYS, st.integers(0, 3)), max_size=60))
def test_keys_have_the_numbers_of_a_dict(changes):
    found, expected = KeyMap(), {}
    for key, number in changes:
        found.put(key, number)
        expected[key] = number
    assert [found.get(key) for key in expected] == list(expected.values())
    assert len(found) == sum(map(bool, expected.values()))


def test_many_keys_have_the_numbers_of_a_dict():
    keys = [id_key(row) for row in range(5000)]
    found, drawn = KeyMap(), random.Random("keys")
    for line, key in enumerate(keys, 1):
        found.put(key, line)
    removed = set(drawn.sample(keys, 2000))
    for key in removed:
        found.put(key, 0)
    assert [found.get(key) for key in keys] == [0 if key in removed else line for line, key in enumerate(keys, 1)]
    assert found.get(id_key("another")) == 0 and len(found) == 3000


@given(st.lists(st.none() | st.integers(1, 12).map(str) | st.sampled_from(["01", "a", 3, True, None, ["x"]])))
def test_the_earlier_line_is_that_of_a_dict(named):
    """If a row names no id, here None, its id is its line number, which another row may name."""
    seen, lines = SeenIds(), {}
    for line, name in enumerate(named, 1):
        id = str(line) if name is None else name
        earlier = lines.setdefault(id_key(id), line)
        assert seen.first_line(id, line) == (None if earlier == line else earlier), (line, id)


def memory_of(ids: list[object]) -> int:
    seen = SeenIds()
    tracemalloc.start()
    try:
        for line, id in enumerate(ids, 1):
            assert seen.first_line(id, line) is None
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_ids_that_are_line_numbers_take_no_memory():
    assert memory_of([str(line) for line in range(1, 50_001)]) < 50_000  # one byte per id


def test_an_id_takes_few_bytes():
    num_rows = 50_000
    assert memory_of([f"row {row}" for row in range(num_rows)]) < 16 * num_rows
