"""JSON that an input line may hold."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.inputs.json_line import is_finite, is_text, nests_deep, read_damaged_json, read_json

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(values)
def test_json_is_read_as_it_is_written(value):
    assert read_json(json.dumps(value)) == value and is_finite(value)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '[{"a": {"b": 1, "b": 2}}]', "NaN", "-Infinity", '{"a": 1'])
def test_what_other_readers_take_and_this_one_does_not(text):
    with pytest.raises(ValueError):
        read_json(text)


def test_bytes_that_are_not_utf_8_are_marked():
    record = read_damaged_json(b'{"id": "a", "prompt": "\xff"}')
    assert isinstance(record, dict) and is_text(record["id"]) and not is_text(record["prompt"])


def test_numbers_too_large_for_a_float_are_not_finite():
    assert not is_finite(read_json("[1e999]"))


@given(values, st.integers(0, 6))
def test_each_list_is_one_level(value, levels):
    nested = value
    for _ in range(levels):
        nested = [nested]
    depth = next(most for most in range(100) if not nests_deep(nested, most))
    assert depth >= levels + 1 and nests_deep(nested, depth - 1)
